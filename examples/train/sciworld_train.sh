#!/usr/bin/env bash
# Train on SciWorld by ScalingInter-RL: see ScalingInter-RL/sciworld_train.sh, which this hands everything to.
exec bash "$(dirname "${BASH_SOURCE[0]}")/ScalingInter-RL/sciworld_train.sh" "$@"
