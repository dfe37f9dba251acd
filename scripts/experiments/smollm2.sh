#!/usr/bin/env bash
# SmolLM2-135M-Instruct on TextCraft: the runs that are missing, then the figures and tables of docs/results.md.
#
#   bash scripts/experiments/smollm2.sh
#
# Runs are kept in saves/experiments/smollm2. The same command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bash scripts/setup.sh train envs smollm2 experiments
source .venv/bin/activate
python scripts/experiments/run.py smollm2 "$@"
python scripts/experiments/report.py smollm2
