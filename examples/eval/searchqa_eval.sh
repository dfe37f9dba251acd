#!/usr/bin/env bash
# Evaluate a model on SearchQA, with at most 10 turns.
#
#   bash examples/eval/searchqa_eval.sh [key=value ...]
#
# MODEL is a folder of weights, a checkpoint, or the folder of a run, whose latest checkpoint is taken. It needs the
# environment's server: agentgym-rl serve searchqa. The same command goes on where it was stopped. SMOKE=1 tries the
# script out on a CPU: a random model, 4 items, a server of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" searchqa

MODEL=${MODEL:-saves/ScalingInter-RL/searchqa}
DATA=${DATA:-AgentEval/searchqa}
ENV_ADDR=${ENV_ADDR:-http://127.0.0.1:36004}
OUT=${OUT:-results/searchqa}
HARDWARE=${HARDWARE:-node_8}

run main_generation \
    task=searchqa hardware="$HARDWARE" \
    data.path="$DATA" data.n_samples=1 data.batch_size=32 \
    agentgym.env_addr="$ENV_ADDR" agentgym.max_rounds=10 agentgym.timeout=500 \
    model.path="$MODEL" \
    rollout.temperature=1 rollout.max_tokens=512 rollout.max_model_len=32768 rollout.rollout_log_dir="$OUT" \
    -- "$@"
