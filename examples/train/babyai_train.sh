#!/usr/bin/env bash
# Train on BabyAI by ScalingInter-RL: see ScalingInter-RL/babyai_train.sh, which this hands everything to.
exec bash "$(dirname "${BASH_SOURCE[0]}")/ScalingInter-RL/babyai_train.sh" "$@"
