#!/usr/bin/env bash
# Train on SearchQA by ScalingInter-RL: see ScalingInter-RL/searchqa_train.sh, which this hands everything to.
exec bash "$(dirname "${BASH_SOURCE[0]}")/ScalingInter-RL/searchqa_train.sh" "$@"
