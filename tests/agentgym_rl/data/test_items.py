"""Reading item lists, and the lists that come with TextCraft."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.data.items import load_items, load_task_items, overlap
from agentgym_rl.envs.textcraft.environment import recipe_book
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "AgentItemId" / "textcraft_train.json"
EVAL = ROOT / "AgentEval" / "textcraft"


def write(path: Path, rows: object) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_json_rows_and_bare_ids_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "items.json", [{"item_id": "textcraft_3", "else": 1}, {"item_id": 4}, "textcraft_5", 6])
    assert load_items(path, "textcraft") == [Item("textcraft", index) for index in (3, 4, 5, 6)]


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"item_id": "textcraft_3"}, {"item_id": "textcraft_9"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "items.parquet")
    expected = [Item("textcraft", 3), Item("textcraft", 9)]
    assert load_items(tmp_path / "items.jsonl", "textcraft") == expected
    assert load_items(tmp_path / "items.parquet", "textcraft") == expected


def test_a_folder_gives_each_item_once_under_the_category_of_its_file(tmp_path: Path) -> None:
    write(tmp_path / "textcraft_test.json", ["textcraft_1", "textcraft_2", "textcraft_3"])
    write(tmp_path / "easy.json", ["textcraft_2"])
    write(tmp_path / "hard.json", ["textcraft_3", "textcraft_4"])
    assert [(item.index, item.category) for item in load_items(tmp_path, "textcraft")] == [
        (1, ""),
        (2, "easy"),
        (3, "hard"),
        (4, "hard"),
    ]


def test_a_folder_of_categories_alone_will_do(tmp_path: Path) -> None:
    write(tmp_path / "easy.json", [2])
    assert load_items(tmp_path, "textcraft") == [Item("textcraft", 2, "easy")]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("items.json", "[1, 2, 1]", r"items.json row 3: textcraft_1 is listed twice"),
        ("items.json", "[]", "holds no items"),
        ("items.json", "{}", "must be a JSON list of rows, is dict"),
        ("items.json", "[1", "not valid JSON"),
        ("items.jsonl", "1\n\n{", r"items.jsonl line 3: not valid JSON"),
        ("items.json", b"[\xff]", "items.json: not UTF-8"),
        ("items.jsonl", b"\xff", "items.jsonl: not UTF-8"),
        ("items.parquet", "x", "not valid parquet"),
        ("items.json", '[{"id": 1}]', "row 1: has no item_id, only id"),
        ("items.json", '["babyai_1"]', "row 1: item_id 'babyai_1' belongs to task 'babyai'"),
        ("items.json", "[-1]", "row 1: item_id -1 is neither"),
        ("items.csv", "1", r"must end in \.json, \.jsonl, \.parquet"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_where(
    tmp_path: Path, name: str, text: str | bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=problem) as caught:
        load_items(tmp_path / name, "textcraft")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_list(tmp_path: Path) -> None:
    for name, text in (("items.json", "[3, 1]"), ("items.jsonl", "3\r\n1\r\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig", newline="")
        assert [item.index for item in load_items(tmp_path / name, "textcraft")] == [3, 1]


def test_a_path_that_does_not_exist_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_items(tmp_path / "nowhere.json", "textcraft")
    with pytest.raises(ConfigError, match="holds no items"):
        load_items(tmp_path, "textcraft")


def test_an_item_in_two_categories_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "easy.json", [2])
    write(tmp_path / "hard.json", [2])
    with pytest.raises(ConfigError, match="textcraft_2 stands in two categories, easy and hard"):
        load_items(tmp_path, "textcraft")


def test_overlap_names_the_common_items() -> None:
    def items(*indices: int) -> list[Item]:
        return [Item("textcraft", index, "some category") for index in indices]

    assert overlap(items(5, 1, 2), [Item("textcraft", 1), Item("textcraft", 5)]) == ["textcraft_5", "textcraft_1"]


def test_textcraft_test_goals_are_a_fifth_of_every_depth_and_never_trained_on() -> None:
    book = recipe_book()
    train, test = load_items(TRAIN, "textcraft"), load_items(EVAL, "textcraft")
    assert overlap(train, test) == []
    assert sorted(item.index for item in train + test) == list(range(544))
    assert Counter(item.category for item in test) == {"depth1": 25, "depth2": 58, "depth3": 23, "depth4": 2}
    assert all(item.category == f"depth{book.depth[book.goals[item.index]]}" for item in test)
    assert load_items(EVAL / "textcraft_test.json", "textcraft") == [Item("textcraft", item.index) for item in test]


def test_the_script_that_makes_the_lists_gives_the_ones_that_are_kept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_textcraft_items.py", tmp_path], check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert len(made) == 6
    assert all((tmp_path / path).read_text() == (ROOT / path).read_text() for path in made)


def test_the_files_of_agentgym_rl_data_id_are_read_game_paths_included(tmp_path: Path) -> None:
    """Rows as the published training lists have them; ALFWorld's name games by their paths."""
    game = "pick_and_place_simple-Mug-None-Desk-308/trial_T20190908_125200_737896"
    path = write(tmp_path / "alfworld_train.json", [{"item_id": game, "conversations": []}, {"item_id": "alfworld_7"}])
    first, second = load_items(path, "alfworld")
    assert (first.item_id, first.reset_key, first.task) == (game, game, "alfworld")
    assert (second.item_id, second.reset_key) == ("alfworld_7", 7)
    with pytest.raises(ConfigError, match=f"item_id '{game}' is no item of textcraft, whose items are numbered"):
        load_items(write(tmp_path / "textcraft_train.json", [game]), "textcraft")


def test_items_of_several_tasks_come_from_a_file_each_or_from_one_that_names_them(tmp_path: Path) -> None:
    tasks = ("textcraft", "babyai")
    numbers, named = write(tmp_path / "a.json", [3]), write(tmp_path / "b.json", ["babyai_1"])
    both = write(tmp_path / "both.json", ["babyai_1", "textcraft_3"])
    expected = [Item("textcraft", 3), Item("babyai", 1)]
    assert load_task_items("data.train_file", [str(numbers), str(named)], tasks) == expected
    assert load_task_items("data.train_file", str(both), tasks) == expected[::-1]
    assert load_task_items("data.val_file", [None, str(named)], tasks) == expected[1:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["a.json"],
            r"data.train_file=\['a.json'\]: must be a path, or a list with one for each of textcraft, babyai",
        ),
        ([3, None], r"data.train_file=\[3, None\]: must be a path, or a list with one for each of textcraft, babyai"),
        ("a.json", "item_id 3 does not say its task, one of textcraft, babyai"),
        ("textcraft.json", r"data.train_file='.*textcraft.json': holds no items of babyai"),
        ("maze.json", "item_id 'maze_3' belongs to task 'maze', this run is for one of textcraft, babyai"),
    ],
)
def test_items_of_several_tasks_that_do_not_fit_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    for name, rows in (("a", [3]), ("textcraft", ["textcraft_3"]), ("maze", ["maze_3"])):
        write(tmp_path / f"{name}.json", rows)
    paths: Any = str(tmp_path / given) if isinstance(given, str) else given
    with pytest.raises(ConfigError, match=message):
        load_task_items("data.train_file", paths, ("textcraft", "babyai"))
