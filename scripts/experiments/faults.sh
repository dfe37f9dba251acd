#!/usr/bin/env bash
# A training run of 30 minutes under random faults, and the proof that nothing was lost or wrongly rewarded:
#
#   bash scripts/experiments/faults.sh [--out saves/faults] [--minutes 30] [--seed 0]
#
# See docs/faults.md. As root the run gets a disk of its own (tmpfs), which is made full at times.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=(--out "saves/faults/$(date +%Y%m%d-%H%M%S)")
[[ " $* " == *" --out "* ]] && out=()
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=$PWD
exec "${PYTHON:-.venv/bin/python}" scripts/experiments/faults.py "${out[@]}" "$@"
