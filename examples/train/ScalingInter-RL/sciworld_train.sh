#!/usr/bin/env bash
# ScalingInter-RL on SciWorld: GRPO with 10, then 20, then 30 turns, each for 100 steps.
#
#   bash examples/train/ScalingInter-RL/sciworld_train.sh [key=value ...]
#
# It needs the environment's server: agentgym-rl serve sciworld. HARDWARE is a preset and key=value any key, both of
# docs/configuration.md. SMOKE=1 tries the script out on a CPU: a random model, 2 steps, a server of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../lib.sh" sciworld

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
DATA=${DATA:-AgentItemId/sciworld_train.json}
ENV_ADDR=${ENV_ADDR:-http://127.0.0.1:36003}
OUT=${OUT:-saves/ScalingInter-RL/sciworld}
HARDWARE=${HARDWARE:-node_8}

run main_ppo \
    task=sciworld algorithm=scaling_inter_rl hardware="$HARDWARE" \
    algorithm.rounds_ctrl.type=scaling_inter_stepwise \
    algorithm.rounds_ctrl.rounds=[10,20,30] algorithm.rounds_ctrl.steps_scaling_inter=100 \
    data.train_file="$DATA" \
    actor_rollout_ref.agentgym.env_addr="$ENV_ADDR" actor_rollout_ref.agentgym.timeout=600 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.max_tokens=512 actor_rollout_ref.rollout.max_model_len=32768 \
    trainer.default_local_dir="$OUT" trainer.project_name=ScalingInter-RL trainer.experiment_name=sciworld \
    trainer.total_training_steps=300 trainer.save_freq=25 \
    -- "$@"
