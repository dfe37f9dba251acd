#!/usr/bin/env bash
# Preference training: a model plays, what succeeded is preferred to what failed at the same item, and it is trained on.
#
#   bash examples/dpo/dpo.sh TASK [key=value ...]
#
# TASK is textcraft, babyai, sciworld, searchqa or webarena. MODEL is the model to begin with, best one that supervised
# training made (../sft): it plays each item of DATA SAMPLES times, which needs the task's server. With EXPERTS, a file
# of conversations, these are preferred to failures, too. PAIRS is a file of pairs of your own: nothing is played then.
# The model is OUT/huggingface in the end. HARDWARE is a preset and key=value any key of main_dpo, both of
# docs/configuration.md. The same command goes on where it was stopped. SMOKE=1 tries the script out on a CPU: a random
# model, 4 items, 2 steps, a server of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" "${1:?which task? textcraft, babyai, sciworld, searchqa or webarena}"
shift

MODEL=${MODEL:-saves/sft/$TASK/huggingface}
DATA=${DATA:-AgentItemId/${TASK}_train.json}
SAMPLES=${SAMPLES:-8}
OUT=${OUT:-saves/dpo/$TASK}
HARDWARE=${HARDWARE:-node_8}

if [[ -z ${PAIRS:-} ]]; then
    PAIRS=$OUT/pairs.jsonl
    if [[ ! -f $PAIRS ]]; then
        run main_generation \
            task="$TASK" hardware="$HARDWARE" ${ENV_ADDR:+agentgym.env_addr="$ENV_ADDR"} \
            data.path="$DATA" data.n_samples="$SAMPLES" model.path="$MODEL" \
            rollout.temperature=1 rollout.max_tokens=512 rollout.rollout_log_dir="$OUT/samples" --
        if [[ $SMOKE == 1 && -z ${EXPERTS:-} ]]; then
            EXPERTS=$OUT/experts.jsonl # what else would be preferred to a random model's failures?
            agentgym-rl demonstrate "$TASK" --items "$DATA" --out "$EXPERTS"
        fi
        agentgym-rl make-pairs "$OUT/samples" ${EXPERTS:+--experts "$EXPERTS"} --per-item 4 --out "$PAIRS"
    fi
fi

run main_dpo \
    task="$TASK" hardware="$HARDWARE" ${ENV_ADDR:+agentgym.env_addr="$ENV_ADDR"} \
    data.train_file="$PAIRS" data.train_batch_size=32 data.max_length=8192 data.truncation=right \
    algorithm.loss_type=sigmoid algorithm.beta=0.1 \
    model.path="$MODEL" optim.lr=5e-7 optim.lr_schedule=cosine optim.lr_warmup_steps=10 \
    trainer.total_epochs=1 trainer.save_freq=100 trainer.default_local_dir="$OUT" trainer.experiment_name="dpo-$TASK" \
    -- "$@"
