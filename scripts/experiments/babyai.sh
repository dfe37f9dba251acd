#!/usr/bin/env bash
# The experiments on BabyAI: every run that is missing, then the figures and tables of docs/results.md.
#
#   bash scripts/experiments/babyai.sh
#   bash scripts/experiments/babyai.sh --only grpo gae --seeds 0     a part; arguments go to scripts/experiments/run.py
#
# Runs are kept in saves/experiments/babyai. The same command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bash scripts/setup.sh train envs experiments
source .venv/bin/activate
python scripts/experiments/run.py babyai "$@"
python scripts/experiments/report.py babyai
