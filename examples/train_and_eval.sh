#!/usr/bin/env bash
# Server, training, and evaluation of what was trained, by one command; all ends with it, however it ends.
#
#   bash examples/train_and_eval.sh TASK [key=value ...]
#
# TASK is textcraft, babyai, sciworld, searchqa or webarena; key=value goes to the trainer. METHOD is ScalingInter-RL
# (default) or AgentGym-RL; MODEL, DATA and HARDWARE are as in train/$METHOD/${TASK}_train.sh, EVAL_DATA is what DATA is
# in eval/${TASK}_eval.sh. Everything is written to OUT. Ctrl-C has the trainer save its last finished step; the same
# command goes on from it. SMOKE=1 tries it out on a CPU.
set -euo pipefail
TASK=${1:?which task? textcraft, babyai, sciworld, searchqa or webarena}
shift
METHOD=${METHOD:-ScalingInter-RL}
examples=$(dirname "${BASH_SOURCE[0]}")
[[ -f $examples/train/$METHOD/${TASK}_train.sh ]] ||
    { echo "no script $examples/train/$METHOD/${TASK}_train.sh: is TASK=$TASK or METHOD=$METHOD misspelled?" >&2; exit 2; }
source "$examples/lib.sh" "$TASK"

OUT=${OUT:-saves/$METHOD/$TASK}
[[ -n ${ENV_ADDR:-} ]] || serve "$OUT"
export SMOKE ENV_ADDR OUT
[[ -z ${MODEL:-} ]] || export MODEL
[[ -z ${DATA:-} ]] || export DATA

echo "== training"
supervise bash "examples/train/$METHOD/${TASK}_train.sh" "$@"

echo "== evaluation"
if [[ $SMOKE == 1 ]]; then EVAL_DATA=${EVAL_DATA:-$DATA}; fi
supervise env MODEL="$OUT" DATA="${EVAL_DATA:-AgentEval/$TASK}" OUT="$OUT/evaluation" bash "examples/eval/${TASK}_eval.sh"
