"""Writes the item lists of BabyAI: which worlds are trained on, and which are kept for evaluation.

Of every level, the first seeds whose goal the expert reaches, in worlds that differ from all others (levels can share
some); a fixed seed draws which of them are kept for evaluation.

    python scripts/make_babyai_items.py [ROOT]

writes ``AgentItemId/babyai_train.json``, ``AgentEval/babyai/babyai_test.json`` and one
``AgentEval/babyai/<family>.json`` per family of levels (its share of the test items) under ROOT (default: this
repository). It takes minutes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.expert import plan
from agentgym_rl.envs.babyai.levels import FAMILIES, NUM_LEVELS, place_of

TRAIN_PER_LEVEL = 20
TEST_PER_LEVEL = 4
SEED = 20250901


World = tuple[str, str]
"""Mission, and a digest of the grid and the agent's place in it."""


def solved_items(level: int, seen: set[World]) -> Iterator[int]:
    """Indices of a level (1 ..) whose goal the expert reaches, in worlds not yet ``seen``, to which they are added."""
    environment = BabyAI()
    for seed in count():
        index = seed * NUM_LEVELS + level - 1
        environment.reset(index)
        world = (environment.level.mission, environment.level.hash(64))
        if world not in seen and plan(environment):
            seen.add(world)
            yield index


def split(level: int, seen: set[World]) -> tuple[list[int], list[int]]:
    """The items of a level to train on, and those for evaluation."""
    items = list(islice(solved_items(level, seen), TRAIN_PER_LEVEL + TEST_PER_LEVEL))
    test = set(random.Random(SEED + level).sample(items, TEST_PER_LEVEL))
    return [item for item in items if item not in test], sorted(test)


def write_items(path: Path, indices: Iterable[int]) -> None:
    """One row per line; the level is for human readers."""
    rows = (json.dumps({"item_id": f"babyai_{index}", "level": place_of(index).name}) for index in sorted(indices))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def main(root: Path) -> None:
    train, test, seen = [], [], set[World]()
    for level in range(1, NUM_LEVELS + 1):
        own_train, own_test = split(level, seen)
        train += own_train
        test += own_test
    write_items(root / "AgentItemId" / "babyai_train.json", train)
    write_items(root / "AgentEval" / "babyai" / "babyai_test.json", test)
    for family in FAMILIES:
        own = [index for index in test if place_of(index).family == family]
        write_items(root / "AgentEval" / "babyai" / f"{family}.json", own)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
