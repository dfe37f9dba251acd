"""Writes the item lists of SciWorld, after the simulator's own split of each task's variations.

Trained on are its training variations. For evaluation up to `TEST_ITEMS` test variations of each task, drawn with a
fixed seed; its development variations and the other test variations stay unused.

    python scripts/make_sciworld_items.py [ROOT]

writes ``AgentItemId/sciworld_train.json``, ``AgentEval/sciworld/sciworld_test.json`` and one
``AgentEval/sciworld/<task id>-<task>.json`` per task under ROOT (default: this repository).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from agentgym_rl.envs.sciworld.items import ItemTable
from agentgym_rl.envs.sciworld.simulator import World, give_back_world, item_table, take_world

TEST_ITEMS = 10
SEED = 20250901


def write_items(path: Path, indices: Iterable[int], table: ItemTable) -> None:
    """One row per line; task and variation are for human readers."""
    rows = []
    for index in indices:
        task, variation = table.find(index)
        rows.append(json.dumps({"item_id": f"sciworld_{index}", "task": task.name, "variation": variation}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def write_lists(root: Path, world: World) -> None:
    table, dice = item_table(world), random.Random(SEED)
    train: list[int] = []
    test: list[int] = []
    for task in table.tasks:
        first = table.indices(task)[0]
        world.load(task.name, 0)  # the split is that of the task that is loaded
        train += [first + variation for variation in sorted(world.call("getVariationsTrain"))]
        variations = sorted(world.call("getVariationsTest"))
        drawn = sorted(dice.sample(variations, min(TEST_ITEMS, len(variations))))
        category = [first + variation for variation in drawn]
        write_items(root / "AgentEval" / "sciworld" / f"{task.task_id}-{task.name}.json", category, table)
        test += category
    write_items(root / "AgentItemId" / "sciworld_train.json", train, table)
    write_items(root / "AgentEval" / "sciworld" / "sciworld_test.json", test, table)


def main(root: Path) -> None:
    world = take_world(1)
    try:
        write_lists(root, world)
    finally:
        give_back_world(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
