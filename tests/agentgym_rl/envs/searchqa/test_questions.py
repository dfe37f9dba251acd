"""Questions keep the item numbers of the original data, whichever of its files are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from agentgym_rl.envs.searchqa.questions import SPLITS, Question, load_questions
from agentgym_rl.errors import ConfigError


def rows(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}_{number}", "question": f"{name} {number}?", "golden_answers": [f"{name}-{number}"]}
        for number in range(count)
    ]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(content), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def test_the_original_ranges() -> None:
    ends = {split.name: (split.start, split.start + split.size - 1) for split in SPLITS}
    assert ends == {
        "test nq": (0, 3609),
        "test triviaqa": (3610, 14922),
        "test popqa": (14923, 29189),
        "test hotpotqa": (29190, 36594),
        "test 2wikimultihopqa": (36595, 49170),
        "test musique": (49171, 51587),
        "test bamboogle": (51588, 51712),
        "train nq": (51713, 130880),
        "train hotpotqa": (130881, 221327),
    }


def test_all_of_the_full_files_are_where_the_original_data_has_them(tmp_path: Path) -> None:
    for split in SPLITS:
        write(tmp_path / split.dataset / f"{split.file}.jsonl", rows(split.name, split.size))
    questions = load_questions(tmp_path)
    assert (len(questions), questions.num_items) == (221_328, 221_328)
    for split in SPLITS:
        for offset in (0, split.size - 1):
            assert questions[split.start + offset].text == f"{split.name} {offset}?"


def test_a_missing_or_partial_split_moves_no_other(tmp_path: Path) -> None:
    write(tmp_path / "bamboogle" / "test.jsonl", rows("bamboogle", 3))
    write(tmp_path / "nq" / "train.parquet", rows("nq", 5))
    questions = load_questions(tmp_path)
    assert questions[51588] == Question("bamboogle 0?", ("bamboogle-0",))
    assert questions[51713].text == "nq 0?"
    assert (len(questions), questions.num_items) == (8, 51718)
    for absent in (-1, 0, 51587, 51591, 51718, 221_328):
        assert absent not in questions
    with pytest.raises(KeyError, match=r"item 0: .*test bamboogle 51588\.\.51590, train nq 51713\.\.51717.*test nq"):
        questions[0]


def test_files_of_several_datasets_are_taken_apart_by_their_source(tmp_path: Path) -> None:
    mixed = [row | {"data_source": row["id"].split("_")[0]} for row in rows("musique", 2) + rows("nq", 2)]
    write(tmp_path / "test.parquet", mixed)
    write(tmp_path / "train.jsonl", [row | {"data_source": "hotpotqa"} for row in rows("hotpotqa", 1)])
    questions = load_questions(tmp_path)
    assert [questions[item].text for item in (0, 1, 49171, 49172, 130881)] == [
        "nq 0?", "nq 1?", "musique 0?", "musique 1?", "hotpotqa 0?",
    ]  # fmt: skip


def test_a_single_file_is_numbered_from_0(tmp_path: Path) -> None:
    questions = load_questions(write(tmp_path / "mine.jsonl", rows("mine", 4)))
    assert [questions[item].text for item in range(4)] == [f"mine {number}?" for number in range(4)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "golden_answers=None"),
        ({"question": "q", "golden_answers": []}, r"golden_answers=\[\]"),
        ({"question": "q", "golden_answers": [1]}, r"golden_answers=\[1\]"),
        ({"question": " ", "golden_answers": ["a"]}, "question=' '"),
        ({"golden_answers": ["a"]}, "question=None"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "mine.jsonl", [*rows("mine", 1), row])
    with pytest.raises(ConfigError, match=f"mine.jsonl line 2: {message}"):
        load_questions(path)


def test_what_cannot_be_numbered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are none"):
        load_questions(tmp_path)
    write(tmp_path / "bamboogle" / "test.jsonl", rows("bamboogle", 126))
    with pytest.raises(ConfigError, match="has 126 questions, of the original data it has 125"):
        load_questions(tmp_path)
    write(tmp_path / "bamboogle" / "test.jsonl", rows("bamboogle", 2))
    write(tmp_path / "bamboogle" / "test.parquet", rows("bamboogle", 2))
    with pytest.raises(ConfigError, match=r"both .* exist: remove one"):
        load_questions(tmp_path)
    (tmp_path / "bamboogle" / "test.parquet").unlink()
    write(tmp_path / "test.jsonl", [rows("bamboogle", 1)[0] | {"data_source": "bamboogle"}])
    with pytest.raises(ConfigError, match="test bamboogle is both in"):
        load_questions(tmp_path)
    write(tmp_path / "test.jsonl", [rows("x", 1)[0] | {"data_source": "squad"}])
    with pytest.raises(ConfigError, match="data_source='squad': must be one of"):
        load_questions(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", "a.jsonl line 1: not valid JSON"),
        ("a.jsonl", "[1]", "line 1: must be a JSON object, is list"),
        ("a.csv", "", "must end in .jsonl or .parquet"),
        ("a.parquet", "no", "not valid parquet"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_questions(tmp_path / name)
