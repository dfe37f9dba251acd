"""Writes the item lists of TextCraft: which goals are trained on, and which are kept for evaluation.

In every depth a fifth of the goals, drawn with a fixed seed, is kept for evaluation and never trained on.

    python scripts/make_textcraft_items.py [ROOT]

writes ``AgentItemId/textcraft_train.json``, ``AgentEval/textcraft/textcraft_test.json`` and one
``AgentEval/textcraft/depth<N>.json`` per depth (its share of the test goals) under ROOT (default: this repository).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from agentgym_rl.envs.textcraft.environment import RecipeBook, recipe_book

TEST_SHARE = 0.2
SEED = 20250901


def split_by_depth(book: RecipeBook) -> dict[int, list[int]]:
    """Depth -> the indices of its test goals, sorted."""
    dice = random.Random(SEED)
    by_depth: dict[int, list[int]] = {}
    for index, goal in enumerate(book.goals):
        by_depth.setdefault(book.depth[goal], []).append(index)
    return {
        depth: sorted(dice.sample(indices, round(TEST_SHARE * len(indices)))) for depth, indices in by_depth.items()
    }


def write_items(path: Path, indices: Iterable[int], book: RecipeBook) -> None:
    """One row per line; goal and depth are for human readers."""
    rows = (
        json.dumps({"item_id": f"textcraft_{index}", "goal": book.goals[index], "depth": book.depth[book.goals[index]]})
        for index in indices
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def main(root: Path) -> None:
    book = recipe_book()
    test_by_depth = split_by_depth(book)
    test = sorted(index for indices in test_by_depth.values() for index in indices)
    train = [index for index in range(len(book.goals)) if index not in set(test)]
    write_items(root / "AgentItemId" / "textcraft_train.json", train, book)
    write_items(root / "AgentEval" / "textcraft" / "textcraft_test.json", test, book)
    for depth, indices in test_by_depth.items():
        write_items(root / "AgentEval" / "textcraft" / f"depth{depth}.json", indices, book)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
