"""``python -m verl.agent_trainer.main_eval FOLDER...``: compute the figures of finished evaluations again, from files.

Nothing is sampled and nothing is loaded; each folder is one that ``main_generation`` or ``agentgym-rl eval`` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentgym_rl.errors import AgentGymError
from agentgym_rl.evaluation.results import report_on, write_report

EXIT_CONFIG = 2


def main(argv: Sequence[str]) -> int:
    """Print each folder's report and write its ``report.json``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.agent_trainer.main_eval", description="Figures of evaluations, computed again from files."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results folder of an evaluation")
    try:
        for folder in parser.parse_args(argv).folders:
            report = report_on(folder)
            write_report(folder, report)
            print(f"{folder}\n{report.table()}", flush=True)
    except AgentGymError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
