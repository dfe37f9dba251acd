#!/usr/bin/env bash
# AgentGym-RL on BabyAI: GRPO with a fixed horizon of 20 turns.
#
#   bash examples/train/AgentGym-RL/babyai_train.sh [key=value ...]
#
# It needs the environment's server: agentgym-rl serve babyai. HARDWARE is a preset and key=value any key, both of
# docs/configuration.md. SMOKE=1 tries the script out on a CPU: a random model, 2 steps, a server of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../lib.sh" babyai

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
DATA=${DATA:-AgentItemId/babyai_train.json}
ENV_ADDR=${ENV_ADDR:-http://127.0.0.1:36002}
OUT=${OUT:-saves/AgentGym-RL/babyai}
HARDWARE=${HARDWARE:-node_8}

run main_ppo \
    task=babyai algorithm=grpo hardware="$HARDWARE" \
    algorithm.rounds_ctrl.type=fixed algorithm.rounds_ctrl.rounds=20 \
    data.train_file="$DATA" \
    actor_rollout_ref.agentgym.env_addr="$ENV_ADDR" actor_rollout_ref.agentgym.timeout=600 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.max_tokens=512 actor_rollout_ref.rollout.max_model_len=32768 \
    trainer.default_local_dir="$OUT" trainer.project_name=AgentGym-RL trainer.experiment_name=babyai \
    trainer.total_training_steps=300 trainer.save_freq=25 \
    -- "$@"
