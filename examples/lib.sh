# What the scripts of this folder share; not to be run but to be sourced, with the task's name:
#
#   source "$(dirname "${BASH_SOURCE[0]}")/lib.sh" textcraft
#
# It goes to the project's root and puts its .venv first in PATH. With SMOKE=1 it also sees to a random model, four
# items and a server, unless MODEL, DATA and ENV_ADDR name others, and has `run` do little.
TASK=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv/bin:$PATH
SMOKE=${SMOKE:-0}

server=
end_server() {
    [[ -n $server ]] || return 0
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}
trap end_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# What is started goes when this shell is killed, too, where the system can see to that.
with_shell=()
if command -v setpriv >/dev/null && setpriv --pdeathsig TERM true 2>/dev/null; then with_shell=(setpriv --pdeathsig TERM); fi

# Run a command to its end. Ctrl-C and SIGTERM reach it as SIGTERM, at which a trainer saves its last finished step; at
# a second one it ends at once.
supervise() {
    local child status
    ${with_shell[@]+"${with_shell[@]}"} "$@" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null || true' INT TERM
    # A wait that a signal ended says nothing of the command yet.
    while true; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    trap 'exit 130' INT
    trap 'exit 143' TERM
    return "$status"
}

# serve FOLDER: start a server of the task, on a free port, that ends with this shell; sets ENV_ADDR.
# SERVE_OPTIONS are further options of `agentgym-rl serve`.
serve() {
    mkdir -p "$1"
    local ready=$1/server.url
    rm -f "$ready"
    ${with_shell[@]+"${with_shell[@]}"} agentgym-rl serve "$TASK" --port 0 --ready-file "$ready" ${SERVE_OPTIONS:-} >"$1/server.log" 2>&1 &
    server=$!
    while [[ ! -s $ready ]]; do
        kill -0 "$server" 2>/dev/null || { echo "the server of $TASK did not start: see $1/server.log" >&2; exit 1; }
        sleep 0.1
    done
    ENV_ADDR=$(cat "$ready")
    echo "server of $TASK at $ENV_ADDR"
}

# run PROGRAM key=value ... -- key=value ...: start a program of verl.agent_trainer, for example main_ppo. What comes
# after the -- is the user's own, and overrides also what SMOKE=1 asks for.
run() {
    local program=$1 settings=()
    shift
    while [[ $1 != -- ]]; do settings+=("$1"); shift; done
    shift
    if [[ $SMOKE == 1 ]]; then settings+=($(smoke_settings "$program")); fi
    supervise python -m "verl.agent_trainer.$program" "${settings[@]}" "$@"
}

# Little, in one process on a CPU. A random model never succeeds, so entropy is what there is to learn from.
smoke_settings() {
    local common="hardware=cpu trainer.worker_group=local trainer.num_threads=1
        data.max_prompt_length=6000 data.max_response_length=400"
    case $1 in
    main_ppo)
        echo "$common data.train_batch_size=2 data.shuffle=False trainer.total_training_steps=2
            trainer.logger=[console,jsonl] actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n=2
            actor_rollout_ref.rollout.max_tokens=12 actor_rollout_ref.actor.entropy_coeff=0.001"
        ;;
    main_generation) echo "$common data.n_samples=1 rollout.max_tokens=12" ;;
    main_sft | main_dpo)
        echo "$common data.train_batch_size=2 data.max_length=6000 data.truncation=right trainer.total_training_steps=2"
        ;;
    main_agentevol)
        echo "$common data.train_batch_size=2 data.max_length=6000 data.truncation=right trainer.total_training_steps=2
            rollout.n=1 rollout.max_tokens=12 algorithm.iterations=1"
        ;;
    esac
}

prepare_smoke() {
    local folder=${SMOKE_DIR:-saves/smoke}
    mkdir -p "$folder"
    if [[ -z ${MODEL:-} ]]; then
        MODEL=$folder/model
        [[ -f $MODEL/config.json ]] || python examples/custom_env/tiny_model.py --texts README.md --out "$MODEL"
    fi
    if [[ -z ${DATA:-} ]]; then
        DATA=$folder/${TASK}_items.json
        printf '["%s_0", "%s_1", "%s_2", "%s_3"]\n' "$TASK" "$TASK" "$TASK" "$TASK" >"$DATA"
    fi
    # Each run anew, rather than on from an earlier one.
    OUT=${OUT:-$folder/$TASK-$(date +%Y%m%d-%H%M%S)-$$}
    case $TASK in
    searchqa) SERVE_OPTIONS=${SERVE_OPTIONS:---max-answers 1} ;;
    webarena) SERVE_OPTIONS=${SERVE_OPTIONS:---started-ahead 0} ;;
    esac
    [[ -n ${ENV_ADDR:-} ]] || serve "$folder"
}
if [[ $SMOKE == 1 ]]; then prepare_smoke; fi
