#!/usr/bin/env bash
# Train on WebArena by ScalingInter-RL: see ScalingInter-RL/webarena_train.sh, which this hands everything to.
exec bash "$(dirname "${BASH_SOURCE[0]}")/ScalingInter-RL/webarena_train.sh" "$@"
