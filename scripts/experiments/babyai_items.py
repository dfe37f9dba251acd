"""Writes the experiments' BabyAI items: eight levels in small worlds, four done in a few turns and four that take more.

    python scripts/experiments/babyai_items.py --out saves/experiments/babyai/data

writes ``train.json``, of it ``explore.json`` for trainings that sample all items anew several times, and ``eval/`` with
a file for either kind, of worlds that are not in the training list.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentgym_rl.envs.babyai.levels import LEVELS, NUM_LEVELS

SHORT = ("GoToLocalS8N7", "GoToObjDoor", "PickupLoc", "OpenDoorLoc")
LONG = ("PutNextLocalS6N4", "OpenRedBlueDoorsDebug", "PickupAbove", "GoToSeqS5R2")


def rows(levels: Sequence[str], worlds: range) -> Iterator[dict[str, object]]:
    """An item of every level in every world: ``babyai_<i>`` is level ``i % 40 + 1`` in world ``i // 40``."""
    for world in worlds:
        for name in levels:
            yield {"item_id": f"babyai_{world * NUM_LEVELS + LEVELS.index(name)}", "level": name}


def write(target: Path, items: Iterator[dict[str, object]]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join(map(json.dumps, items)) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=150, help="worlds of each level to train on")
    parser.add_argument("--explored", type=int, default=20, help="of these, worlds in the shorter list")
    parser.add_argument("--held-out", type=int, default=12, help="worlds of each level to evaluate on")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    held_out = range(options.worlds, options.worlds + options.held_out)
    write(options.out / "train.json", rows((*SHORT, *LONG), range(options.worlds)))
    write(options.out / "explore.json", rows((*SHORT, *LONG), range(options.explored)))
    write(options.out / "eval" / "short.json", rows(SHORT, held_out))
    write(options.out / "eval" / "long.json", rows(LONG, held_out))


if __name__ == "__main__":
    main()
