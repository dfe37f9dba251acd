"""The subcommands of ``agentgym-rl`` about evaluations; what they need is imported when they run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_compare(subcommands: Any) -> None:
    parser = subcommands.add_parser("compare", help="results of evaluations side by side, with paired tests")
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="results folders; the first is the base"
    )
    parser.add_argument("--items", type=int, default=20, metavar="N", help="show so many differing items (default: 20)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> None:
    from agentgym_rl.evaluation.compare import compare, read_evaluation
    from agentgym_rl.evaluation.results import as_json

    comparison = compare([read_evaluation(folder) for folder in options.folders])
    print(json.dumps(as_json(comparison), indent=1) if options.json else comparison.table(max_items=options.items))
