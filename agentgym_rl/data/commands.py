"""Subcommands that make training data: ``make-pairs``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError


def add_make_pairs(subcommands: Any) -> None:
    parser = subcommands.add_parser("make-pairs", help="build preference pairs from results of one or more evaluations")
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="RESULTS",
        help="trajectory files, or folders that hold them; samples of an item are paired within and across them",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="pairs, .json or .jsonl")
    parser.add_argument(
        "--min-gap", type=float, default=0.0, metavar="SCORE", help="the chosen one's score is higher by at least this"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="SCORE",
        help="the chosen one has at least this score (default: it is a success of its task)",
    )
    parser.add_argument(
        "--experts",
        type=Path,
        metavar="PATH",
        help="conversations, as demonstrate writes them, to prefer to samples that are not good enough to be chosen",
    )
    parser.add_argument("--per-item", type=int, default=1, metavar="N", help="pairs of one item, at most (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="chance between pairs that are as good (default: 0)")
    parser.set_defaults(run=_make_pairs)


def _make_pairs(options: argparse.Namespace) -> None:
    from agentgym_rl.data.conversations import check_suffix, read_conversations
    from agentgym_rl.data.pairs import PairRules, make_pairs, write_pairs
    from agentgym_rl.rollout.log import read_trajectories
    from agentgym_rl.types import Trajectory

    check_suffix(options.out)
    rules = PairRules(
        min_gap=options.min_gap, threshold=options.threshold, per_item=options.per_item, seed=options.seed
    )
    trajectories: list[Trajectory] = []
    for path in options.results:
        found = read_trajectories(path).trajectories
        if not found:
            raise ConfigError(f"{path}: holds no trajectories")
        trajectories += found
    experts = read_conversations(options.experts) if options.experts else ()
    made = make_pairs(trajectories, rules, experts=experts)
    print("\n".join(made.lines()))
    if not made.pairs:
        raise ConfigError(f"no pairs among {len(trajectories)} trajectories")
    write_pairs(options.out, made.pairs)
    print(f"pairs in {options.out}")
