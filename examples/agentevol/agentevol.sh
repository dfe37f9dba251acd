#!/usr/bin/env bash
# AgentEvol: a model explores, what succeeded is merged with base data, a model is trained on both and explores in turn.
#
#   bash examples/agentevol/agentevol.sh TASK [key=value ...]
#
# TASK is textcraft, babyai, sciworld, searchqa or webarena; its server must run. DATA are the items that are explored,
# EVAL_DATA those of the evaluation. CONVERSATIONS is the base data; without it the task's expert, where there is one,
# plays the items of DATA into OUT/demonstrations.jsonl. Everything of an iteration is in OUT/iteration_<N>, the table
# over all of them in OUT/table.txt. HARDWARE is a preset and key=value any key, both of docs/configuration.md. The same
# command goes on where it was stopped. SMOKE=1 tries the script out on a CPU: a random model, 4 items, 2 steps, a
# server of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "${1:?which task? textcraft, babyai, sciworld, searchqa or webarena}"
shift

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
if [[ $SMOKE == 1 ]]; then EVAL_DATA=${EVAL_DATA:-$DATA}; fi
DATA=${DATA:-AgentItemId/${TASK}_train.json}
EVAL_DATA=${EVAL_DATA:-AgentEval/$TASK}
OUT=${OUT:-saves/agentevol/$TASK}
HARDWARE=${HARDWARE:-node_8}

if [[ -z ${CONVERSATIONS:-} ]]; then
    CONVERSATIONS=$OUT/demonstrations.jsonl
    [[ -f $CONVERSATIONS ]] || agentgym-rl demonstrate "$TASK" --items "$DATA" --out "$CONVERSATIONS"
fi

run main_agentevol \
    task="$TASK" hardware="$HARDWARE" ${ENV_ADDR:+agentgym.env_addr="$ENV_ADDR"} \
    data.base_file="$CONVERSATIONS" data.train_file="$DATA" data.val_file="$EVAL_DATA" \
    data.train_batch_size=32 data.max_length=8192 \
    algorithm.iterations=3 algorithm.explored=one_per_item algorithm.train_from=base \
    model.path="$MODEL" optim.lr=1e-5 optim.lr_schedule=cosine optim.lr_warmup_steps=20 \
    rollout.n=4 rollout.max_tokens=512 \
    trainer.total_epochs=2 trainer.default_local_dir="$OUT" trainer.experiment_name="agentevol-$TASK" \
    -- "$@"
