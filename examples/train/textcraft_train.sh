#!/usr/bin/env bash
# Train on TextCraft by ScalingInter-RL: see ScalingInter-RL/textcraft_train.sh, which this hands everything to.
exec bash "$(dirname "${BASH_SOURCE[0]}")/ScalingInter-RL/textcraft_train.sh" "$@"
