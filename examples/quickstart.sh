#!/usr/bin/env bash
# From a fresh clone to a trained agent: bash examples/quickstart.sh [key=value ...]
#
# A small language model learns TextCraft on a CPU: warmed up on demonstrations, then trained by multi-turn GRPO with a
# horizon that grows (ScalingInter-RL), and evaluated on goals that it never saw, before and after.
# Every key=value reaches the trainer (verl/config documents them), e.g. trainer.total_training_steps=20.
#
# Variables:
#   OUT         folder of this run                                    (default: saves/quickstart/<time>)
#   SEED        seed of weights, data order and sampling              (default: 0)
#   MODEL       small, or smollm2: SmolLM2-135M-Instruct              (default: small)
#   WORKERS     worker processes                                      (default: the number of cores, at most 2)
#   SFT_DEPTHS  crafting depths of the goals in the warm-up
#   DEPTHS      crafting depths of the goals trained on by RL, and of the held-out ones
#   SFT_STEPS   optimizer steps of the warm-up: it stops early, so that there is something left to learn
#   STEPS       training steps
#   SAMPLES     trajectories per held-out goal in an evaluation
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-small}
SEED=${SEED:-0}
OUT=${OUT:-saves/quickstart/$(date +%Y%m%d-%H%M%S)}
WORKERS=${WORKERS:-$(( $(nproc) < 2 ? 1 : 2 ))}
case $MODEL in
small)
  extras=()
  SFT_DEPTHS=${SFT_DEPTHS:-1 2}; SFT_STEPS=${SFT_STEPS:-320}; DEPTHS=${DEPTHS:-1}; STEPS=${STEPS:-45}; SAMPLES=${SAMPLES:-8}
  sft=(data.train_batch_size=16 optim.lr=2e-3 optim.lr_warmup_steps=30)
  rl=(
    data.train_batch_size=24 actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=24
    actor_rollout_ref.actor.optim.lr=5e-4
  )
  ;;
smollm2)
  extras=(smollm2)
  SFT_DEPTHS=${SFT_DEPTHS:-1}; SFT_STEPS=${SFT_STEPS:-12}; DEPTHS=${DEPTHS:-1}; STEPS=${STEPS:-4}; SAMPLES=${SAMPLES:-1}
  sft=(data.train_batch_size=8 optim.lr=1e-4)
  rl=(
    data.train_batch_size=4 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.optim.lr=1e-5
  )
  ;;
*)
  echo "MODEL=$MODEL: must be small or smollm2" >&2
  exit 2
  ;;
esac

bash scripts/setup.sh train envs viewer "${extras[@]}"
source .venv/bin/activate
if [ -e "$OUT/sft" ]; then
  echo "OUT=$OUT: holds an earlier run; choose another folder or remove it" >&2
  exit 2
fi
mkdir -p "$OUT"

echo "== environment server"
agentgym-rl serve textcraft --port 0 --ready-file "$OUT/server.url" >"$OUT/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 100); do [ -s "$OUT/server.url" ] && break; sleep 0.1; done
[ -s "$OUT/server.url" ] || { echo "the server did not start: see $OUT/server.log" >&2; exit 1; }
url=$(cat "$OUT/server.url")
echo "TextCraft at $url"

echo "== data and base model"
python examples/quickstart/pick_items.py --depths $DEPTHS --worlds 4 --out "$OUT/data"
python examples/quickstart/pick_items.py --depths $SFT_DEPTHS --out "$OUT/data/warm-up"
if [ "$MODEL" = smollm2 ]; then
  agentgym-rl demonstrate textcraft --items "$OUT/data/warm-up/train.json" \
    --out "$OUT/data/demonstrations.jsonl" --agent act
  python scripts/smollm2.py --out saves/smollm2
  base=saves/smollm2
else
  python examples/quickstart/make_demonstrations.py \
    --train-file "$OUT/data/warm-up/train.json" --out "$OUT/data/demonstrations.jsonl" --seed "$SEED"
  python examples/quickstart/make_model.py \
    --train-file "$OUT/data/warm-up/train.json" --out "$OUT/base" --seed "$SEED"
  base=$OUT/base
fi

devices=(trainer.device=cpu "trainer.n_gpus_per_node=$WORKERS")
evaluate() { # model, folder
  python -m verl.agent_trainer.main_generation \
    "model.path=$1" "data.path=$OUT/data/eval" "data.n_samples=$SAMPLES" data.batch_size=64 "data.seed=$SEED" \
    data.max_prompt_length=1024 data.max_response_length=1024 \
    agentgym.task_name=textcraft "agentgym.env_addr=$url" agentgym.agent=act agentgym.max_rounds=10 \
    rollout.temperature=1 rollout.max_tokens=48 rollout.max_model_len=2048 "rollout.rollout_log_dir=$2" \
    "${devices[@]}"
}

echo "== warm-up: supervised training on demonstrations of the training goals"
python -m verl.agent_trainer.main_sft \
  "model.path=$base" "data.train_file=$OUT/data/demonstrations.jsonl" "data.seed=$SEED" "trainer.seed=$SEED" \
  "trainer.total_training_steps=$SFT_STEPS" "trainer.default_local_dir=$OUT/sft" trainer.log_freq=50 \
  "${sft[@]}" "${devices[@]}"

echo "== evaluation on held-out goals, before"
evaluate "$OUT/sft/huggingface" "$OUT/eval_before"

echo "== reinforcement learning"
python -m verl.agent_trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rounds_ctrl.type=scaling_inter_stepwise "algorithm.rounds_ctrl.rounds=[4,6,8]" \
  algorithm.rounds_ctrl.steps_scaling_inter=$(( (STEPS + 2) / 3 )) \
  "data.train_file=$OUT/data/train.json" data.max_prompt_length=1024 data.max_response_length=1024 "data.seed=$SEED" \
  actor_rollout_ref.agentgym.task_name=textcraft "actor_rollout_ref.agentgym.env_addr=$url" \
  actor_rollout_ref.agentgym.agent=act "actor_rollout_ref.model.path=$OUT/sft/huggingface" \
  actor_rollout_ref.rollout.max_tokens=48 actor_rollout_ref.rollout.max_model_len=2048 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  "trainer.total_training_steps=$STEPS" "trainer.seed=$SEED" "trainer.default_local_dir=$OUT/rl" \
  trainer.project_name=quickstart "trainer.experiment_name=$(basename "$OUT")" \
  "${rl[@]}" "${devices[@]}" "$@"

echo "== evaluation on held-out goals, after"
last=$OUT/rl/global_step_$(cat "$OUT/rl/latest_checkpointed_iteration.txt")
evaluate "$last/actor/huggingface" "$OUT/eval_after"

echo "== result"
python examples/quickstart/report.py "$OUT/eval_before" "$OUT/eval_after"
echo "look at it:   .venv/bin/agentgym-rl view $OUT"
echo "curves:       tensorboard --logdir $OUT/rl   (and $OUT/rl/metrics.jsonl)"
echo "trajectories: $OUT/rl/trajectories/step<N>/<rank>.jsonl"
echo "checkpoint:   $last   (model: $last/actor/huggingface)"
