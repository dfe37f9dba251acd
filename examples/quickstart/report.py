"""Prints the quickstart's table: the evaluation before and after reinforcement learning side by side.

python examples/quickstart/report.py saves/quickstart/eval_before saves/quickstart/eval_after
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Avg@k, Pass@k and turns by category and overall; ``before`` and ``after`` are contents of ``report.json``."""
    k = after["k"]
    columns = ("avg", "pass_rate", "turns_mean")
    titles = (f"Avg@{k}", f"Pass@{k}", "turns")
    lines = ["".join([f"{'':>10}{'items':>7}", *(f"{title:>22}" for title in titles)])]
    for old, new in zip(_rows(before), _rows(after), strict=True):
        cells = [f"{old[column]:.3f} -> {new[column]:.3f}" for column in columns]
        lines.append("".join([f"{new['name']:>10}{new['num_items']:>7}", *(f"{cell:>22}" for cell in cells)]))
    gain = 100 * (after["overall"]["avg"] - before["overall"]["avg"])
    return "\n".join([*lines, f"held-out Avg@{k} changed by {gain:+.1f} points"])


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["categories"], report["overall"]]


def main() -> None:
    before, after = (json.loads((Path(folder) / "report.json").read_text()) for folder in sys.argv[1:3])
    print(table(before, after))


if __name__ == "__main__":
    main()
