#!/usr/bin/env bash
# ScalingInter-RL on WebArena: GRPO with 8, then 12, then 15 turns, each for 80 steps.
#
#   bash examples/train/ScalingInter-RL/webarena_train.sh [key=value ...]
#
# It needs the environment's server: agentgym-rl serve webarena. HARDWARE is a preset and key=value any key, both of
# docs/configuration.md. SMOKE=1 tries the script out on a CPU: a random model, 2 steps, a server of its own.
# The item list that comes with this project is for its small sites and has 14 items: too few for a batch of 32. Name
# that of the sites that you serve, or take data.train_batch_size=8.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../lib.sh" webarena

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
DATA=${DATA:-AgentItemId/webarena_train.json}
ENV_ADDR=${ENV_ADDR:-http://127.0.0.1:36005}
OUT=${OUT:-saves/ScalingInter-RL/webarena}
HARDWARE=${HARDWARE:-node_8}

run main_ppo \
    task=webarena algorithm=scaling_inter_rl hardware="$HARDWARE" \
    algorithm.rounds_ctrl.type=scaling_inter_stepwise \
    algorithm.rounds_ctrl.rounds=[8,12,15] algorithm.rounds_ctrl.steps_scaling_inter=80 \
    data.train_file="$DATA" \
    actor_rollout_ref.agentgym.env_addr="$ENV_ADDR" actor_rollout_ref.agentgym.timeout=600 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.max_tokens=512 actor_rollout_ref.rollout.max_model_len=32768 \
    trainer.default_local_dir="$OUT" trainer.project_name=ScalingInter-RL trainer.experiment_name=webarena \
    trainer.total_training_steps=240 trainer.save_freq=25 \
    -- "$@"
