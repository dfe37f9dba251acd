"""Results side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.rollouts import make_trajectory

from agentgym_rl.cli import main
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.compare import compare, read_evaluation
from agentgym_rl.evaluation.results import Requested, claim_folder, note_requested, report_on
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, TrajectoryLog
from agentgym_rl.types import Item, StopReason


def write_evaluation(folder: Path, scores: Mapping[int, list[float | None]], **settings: object) -> Path:
    """A results folder: scores of each item's samples, None for a fault; 1 is a success."""
    items = {index: Item("toy", index, "odd" if index % 2 else "even") for index in scores}
    claim_folder(folder, {"model.path": "m", **settings}, {})
    note_requested(folder, Requested(tuple(items.values()), max(map(len, scores.values()))))
    with TrajectoryLog(folder / TRAJECTORY_FOLDER / "0.jsonl") as log:
        for index, samples in scores.items():
            for sample, score in enumerate(samples):
                fault = {"stop_reason": StopReason.ENV_ERROR, "error": "EnvError: x"} if score is None else {}
                log.write(
                    make_trajectory(items[index], score=score or 0.0, success=score == 1, sample_index=sample, **fault)
                )
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        write_evaluation(tmp_path / "a", {0: [0, 1], 1: [0, 0], 2: [1, 1], 3: [0.5, 0]}, temperature=1),
        write_evaluation(tmp_path / "b", {0: [1, 1], 1: [1, 0], 2: [1, 1], 4: [0, 0]}, temperature=0),
    ]


def test_categories_are_those_that_the_latest_run_asked_for(tmp_path: Path) -> None:
    """Results that are there already are not made again, and their rows name the categories of an earlier list."""
    folder = write_evaluation(tmp_path / "a", {0: [0, 1], 1: [0, 0]})
    assert [scores.name for scores in report_on(folder).categories] == ["even", "odd"]
    for categories in (("easy", "hard"), ("", "")):
        items = tuple(Item("toy", index, category) for index, category in enumerate(categories))
        note_requested(folder, Requested(items, 2))
        assert [scores.name for scores in report_on(folder).categories] == [name for name in categories if name]
    assert report_on(folder).overall.avg == 0.25


def test_differences_are_over_the_items_that_both_have(folders: list[Path]) -> None:
    comparison = compare([read_evaluation(folder) for folder in folders])
    [difference] = comparison.differences
    assert difference.num_items == 3  # 0, 1 and 2: gains of .5, .5 and 0
    assert difference.avg == pytest.approx(1 / 3)
    assert difference.avg_p == 0.5  # of the 4 sign patterns of two gains, two are as far
    assert (difference.only_first_passed, difference.only_this_passed, difference.pass_p) == (0, 1, 1.0)
    assert comparison.changed_settings == {"temperature": (1, 0)}


def test_items_on_which_they_differ_are_listed(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, folders)]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("toy_")}
    assert lines == {
        "toy_0": ["0.500", "pass", "1.000", "pass"],
        "toy_1": ["0.000", "0.500", "pass"],
        "toy_3": ["0.250"],
        "toy_4": ["0.000"],
    }
    assert "temperature: [1] 1, [2] 0" in printed and "[2] - [1] over 3 items: Avg +0.333" in printed
    assert main(["compare", *map(str, folders), "--items", "1"]) == 0
    assert "... and 3 more" in capsys.readouterr().out


def test_three_are_compared_with_the_first_and_json_has_everything(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = write_evaluation(tmp_path / "c", {0: [None, None], 9: [1, 1]}, temperature=1)
    assert main(["compare", *map(str, [*folders, third]), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [difference["num_items"] for difference in content["differences"]] == [3, 0]
    assert content["differences"][1]["avg"] is None
    row = next(row for row in content["item_rows"] if row["item_id"] == "toy_0")
    assert row["results"] == [{"score": 0.5, "passed": True}, {"score": 1.0, "passed": True}, None]


def test_unlike_numbers_of_samples_are_pointed_out(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = write_evaluation(tmp_path / "c", {0: [1], 1: [0]}, temperature=1)
    assert main(["compare", *map(str, folders)]) == 0
    assert "samples of an item" not in capsys.readouterr().out
    assert main(["compare", str(folders[0]), str(third)]) == 0
    assert "samples of an item: [1] 2, [2] 1; more samples alone raise Pass@k" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["settings.json", "requested.json"])
@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"settings": 3, "items": 3, "n_samples": 1}'])
def test_a_file_of_another_form_is_named(
    folders: list[Path], capsys: pytest.CaptureFixture[str], file: str, content: str
) -> None:
    (folders[1] / file).write_text(content)
    assert main(["compare", *map(str, folders)]) == 1
    assert f"{folders[1] / file}: " in capsys.readouterr().err


def test_a_folder_without_results_and_one_alone_are_refused(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(folders[0]), str(tmp_path)]) == 1
    assert "no results of an evaluation are there" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="needs two or more"):
        compare([read_evaluation(folders[0])])
