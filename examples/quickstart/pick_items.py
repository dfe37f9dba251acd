"""Writes the quickstart's item lists: the goals of the wanted depths, from the project's TextCraft lists.

    python examples/quickstart/pick_items.py --depths 1 2 --out saves/quickstart/data

writes ``train.json`` and the evaluation folder ``eval/`` (one category file per depth). No goal stands in both. With
``--worlds N`` every training goal stands in the list N times, each time with an index that means the same goal among
other distractors in another order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.types import Item

TASK = get_spec("textcraft")
PROJECT = Path(__file__).resolve().parents[2]


def pick(source: Path, depths: Sequence[int], target: Path, *, worlds: int = 1) -> int:
    """Copy the rows of these depths from one item list to another, ``worlds`` times; the number of goals."""
    goals = [row for row in json.loads(source.read_text()) if row["depth"] in depths]
    rows = [row | {"item_id": in_world(row["item_id"], world)} for world in range(worlds) for row in goals]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return len(goals)


def in_world(item_id: str, world: int) -> str:
    """The item of the same goal in another world; world 0 is the item itself."""
    item = Item.parse(item_id, TASK.name)
    return replace(item, index=item.index + world * TASK.num_items).item_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", required=True)
    parser.add_argument("--worlds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    train_list = PROJECT / "AgentItemId" / "textcraft_train.json"
    num_train = pick(train_list, options.depths, options.out / "train.json", worlds=options.worlds)
    num_test = sum(
        pick(
            PROJECT / "AgentEval" / "textcraft" / f"depth{depth}.json",
            [depth],
            options.out / "eval" / f"depth{depth}.json",
        )
        for depth in options.depths
    )
    depths = " and ".join(map(str, options.depths))
    print(f"items of depth {depths}: {num_train} goals to train on ({options.worlds} x), {num_test} held out")


if __name__ == "__main__":
    main()
