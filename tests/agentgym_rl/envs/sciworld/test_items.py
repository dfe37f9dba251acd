"""Which task an index means, and that the lists hold what they say; none of this needs Java."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.data.items import load_items
from agentgym_rl.envs.sciworld import items
from agentgym_rl.envs.sciworld.items import NUM_ITEMS, ItemTable, indexed_tasks
from agentgym_rl.errors import ConfigError

ROOT = Path(__file__).parents[4]
VARIATIONS = {
    "1-1": 30, "1-2": 30, "1-3": 30, "1-4": 30, "2-1": 540, "2-2": 436, "2-3": 300, "3-1": 20, "3-2": 20, "3-3": 900,
    "3-4": 600, "4-1": 300, "4-2": 300, "4-3": 300, "4-4": 300, "6-1": 32, "6-2": 36, "6-3": 36, "7-1": 125,
    "7-2": 125, "7-3": 125, "8-1": 14, "8-2": 10,
}  # fmt: skip


def table() -> ItemTable:
    tasks = indexed_tasks()
    return ItemTable(tasks, {task.name: VARIATIONS[task.task_id] for task in tasks})


def test_an_index_is_a_variation_of_the_task_in_whose_range_it_lies() -> None:
    found = table()
    assert len(found) == NUM_ITEMS
    assert (found.find(0)[0].name, found.find(0)[1]) == ("boil", 0)
    assert (found.find(659)[0].name, found.find(659)[1]) == ("use-thermometer", 539)
    assert (found.find(660)[0].task_id, found.find(660)[1]) == ("2-2", 0)
    assert (found.find(4638)[0].task_id, found.find(4638)[1]) == ("8-2", 9)
    for task in found.tasks:
        assert [found.find(index) for index in found.indices(task)[:2]] == [(task, 0), (task, 1)]


@pytest.mark.parametrize("index", [-1, NUM_ITEMS, 2**62])
def test_an_index_outside_is_an_error_that_names_the_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"data_idx {index}: must be in 0\.\.4638"):
        table().find(index)


def test_a_simulator_with_other_variations_is_refused() -> None:
    tasks = indexed_tasks()
    with pytest.raises(ConfigError, match=r"has 23 items in 23 tasks, must be 4639: run pip install"):
        ItemTable(tasks, {task.name: 1 for task in tasks})


def test_a_package_that_is_missing_or_of_another_version_is_named_with_the_command(monkeypatch: Any) -> None:
    uncached = items.package_folder.__wrapped__
    monkeypatch.setattr(items, "version", lambda name: "1.1.0")
    with pytest.raises(ConfigError, match=r"scienceworld 1\.1\.0 is installed, must be 1\.2\.3.*run pip install"):
        uncached()
    monkeypatch.setattr(items.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the PyPI package scienceworld: run pip install"):
        uncached()


def test_the_lists_never_train_on_what_they_evaluate() -> None:
    train = load_items(ROOT / "AgentItemId" / "sciworld_train.json", "sciworld")
    folder = ROOT / "AgentEval" / "sciworld"
    test = json.loads((folder / "sciworld_test.json").read_text())
    by_category = {path.stem: json.loads(path.read_text()) for path in folder.glob("?-?-*.json")}
    assert (len(train), len(test), len(by_category)) == (2312, 201, 23)
    assert not {item.item_id for item in train} & {row["item_id"] for row in test}
    assert sorted(row["item_id"] for rows in by_category.values() for row in rows) == sorted(
        row["item_id"] for row in test
    )
    for category, rows in by_category.items():
        for row in rows:
            task, variation = table().find(int(row["item_id"].removeprefix("sciworld_")))
            assert (f"{task.task_id}-{task.name}", task.name, variation) == (category, row["task"], row["variation"])
