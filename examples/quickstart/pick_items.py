"""Writes the quickstart's item lists: the goals of the wanted depths, from the project's TextCraft lists.

    python examples/quickstart/pick_items.py --depths 1 2 --out saves/quickstart/data

writes ``train.json`` and the evaluation folder ``eval/`` (one category file per depth). No goal stands in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def pick(source: Path, depths: Sequence[int], target: Path) -> int:
    """Copy the rows of these depths from one item list to another; their number."""
    rows = [row for row in json.loads(source.read_text()) if row["depth"] in depths]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    num_train = pick(PROJECT / "AgentItemId" / "textcraft_train.json", options.depths, options.out / "train.json")
    num_test = sum(
        pick(
            PROJECT / "AgentEval" / "textcraft" / f"depth{depth}.json",
            [depth],
            options.out / "eval" / f"depth{depth}.json",
        )
        for depth in options.depths
    )
    print(f"items: {num_train} goals to train on, {num_test} held out")


if __name__ == "__main__":
    main()
