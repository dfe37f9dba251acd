#!/usr/bin/env bash
# Supervised training on an expert's demonstrations, or on conversations of your own.
#
#   bash examples/sft/sft.sh TASK [key=value ...]
#
# TASK is textcraft, babyai, sciworld, searchqa or webarena. CONVERSATIONS is a file of them; without it the task's
# expert, where there is one, plays the items of DATA into OUT/demonstrations.jsonl. The model is OUT/huggingface in the
# end. With trainer.test_freq=100 it plays held-out items every 100 steps, which needs the task's server. HARDWARE is a
# preset and key=value any key, both of docs/configuration.md. The same command goes on where it was stopped. SMOKE=1
# tries the script out on a CPU: a random model, 4 items, 2 steps.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "${1:?which task? textcraft, babyai, sciworld, searchqa or webarena}"
shift

MODEL=${MODEL:-models/Qwen2.5-7B-Instruct}
DATA=${DATA:-AgentItemId/${TASK}_train.json}
OUT=${OUT:-saves/sft/$TASK}
HARDWARE=${HARDWARE:-node_8}

if [[ -z ${CONVERSATIONS:-} ]]; then
    CONVERSATIONS=$OUT/demonstrations.jsonl
    [[ -f $CONVERSATIONS ]] || agentgym-rl demonstrate "$TASK" --items "$DATA" --out "$CONVERSATIONS"
fi

run main_sft \
    task="$TASK" hardware="$HARDWARE" ${ENV_ADDR:+agentgym.env_addr="$ENV_ADDR"} \
    data.train_file="$CONVERSATIONS" data.train_batch_size=32 data.max_length=8192 \
    model.path="$MODEL" optim.lr=1e-5 optim.lr_schedule=cosine optim.lr_warmup_steps=20 \
    trainer.total_epochs=3 trainer.save_freq=100 trainer.default_local_dir="$OUT" trainer.experiment_name="sft-$TASK" \
    -- "$@"
