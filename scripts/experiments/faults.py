"""Trains under random faults and proves what came of it.

    bash scripts/experiments/faults.sh --out saves/faults                       30 minutes of training
    bash scripts/experiments/faults.sh --out saves/faults --minutes 5 --seed 1

A small model is trained by main_ppo with two Ray workers on TextCraft and BabyAI, each on two real servers, while
servers, network, training processes and disk are struck at random from a seed; whenever training ends, the same command
is run again. Then everything that it wrote is held against what the servers did and against the tasks' rules. Exits
with 0 only when no trajectory is lost or wrongly rewarded and nothing else is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from fault_run.conduct import Conductor
from fault_run.plan import RunPlan
from fault_run.report import as_json, as_markdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; must not exist")
    parser.add_argument("--minutes", type=float, default=30.0, help="of training, all starts together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends all that was started
    plan = RunPlan(seed=options.seed, training_s=60 * options.minutes, least_steps=1)
    report = as_json(Conductor(plan, options.out.resolve()).run())
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "report.md").write_text(as_markdown(report))
    print(as_markdown(report))
    return 0 if report["is_clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
