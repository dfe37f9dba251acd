#!/usr/bin/env bash
# Make this machine part of a Ray cluster that runs train on:
#
#   bash scripts/ray_cluster.sh head                     start a cluster here; prints its address
#   bash scripts/ray_cluster.sh join HOST:PORT           join the cluster of that head, for which it waits if need be
#   bash scripts/ray_cluster.sh wait HOST:PORT NODES     return once the cluster has so many nodes
#   bash scripts/ray_cluster.sh stop                     end what this script started here, and nothing else
#
# Further arguments of head and join go to `ray start`, e.g. --port 6380, --num-cpus 8, --num-gpus 8. With --block they
# stay in the foreground until they are ended, as a step of a batch system must. Then, on any machine of the cluster:
#
#   RAY_AUTH_MODE=token python -m verl.agent_trainer.main_ppo \
#       ray_init.address=HOST:PORT trainer.nnodes=2 trainer.n_gpus_per_node=8 ...
#
# All nodes need this project and its data under the same paths, and the same token, without which Ray lets nobody in:
# head makes ~/.ray/auth_token where there is none; copy it to machines that do not share that folder. RAY_AUTH_TOKEN, and
# RAY_AUTH_MODE=disabled for all commands, work as Ray has them.
#
#   RAY_CLUSTER_DIR     folder for process id and log (default: /tmp/agentgym-ray-<user id>); one Ray node per folder
#   RAY_CLUSTER_WAIT_S  longest wait for a head, a start or nodes, in seconds (default: 120)
set -euo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly DIR=${RAY_CLUSTER_DIR:-/tmp/agentgym-ray-$UID}
readonly WAIT_S=${RAY_CLUSTER_WAIT_S:-120}
readonly PROCESS=$DIR/process LOG=$DIR/ray.log
# The project's own environment if there is one, else whatever is active.
[[ -x $HERE/.venv/bin/ray ]] && PATH=$HERE/.venv/bin:$PATH
# Ray starts its workers at niceness 15, where anything else on the machine starves them; and it reports to nobody.
export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
# Else whoever reaches the ports may run programs here.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

say() { printf 'ray_cluster: %s\n' "$*"; }
fail() { printf 'ray_cluster: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '/^# Make/,/^#   bash .* stop/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

# When process $1 was started, which with its id tells it from a later one of the same id; nothing if there is none.
started() { ps -o lstart= -p "$1" 2>/dev/null || true; }

# The id of the node's process that this script started here; fails when it does not run any more.
own_process() {
    local pid since
    [[ -f $PROCESS ]] && { read -r pid && read -r since; } <"$PROCESS" && [[ -n $since && $(started "$pid") == "$since" ]] && echo "$pid"
}

reachable() { timeout 2 bash -c ": </dev/tcp/$1/$2" 2>/dev/null; }

# Run a node: `ray start --block` with the arguments, in the background unless --block is one of them.
start() {
    local pid
    if pid=$(own_process); then fail "a node runs here already (process $pid, $DIR); end it with: $0 stop"; fi
    mkdir -p "$DIR"
    [[ " $* " != *" --block "* ]] || exec ray start "$@"
    # A session of its own: a terminal that closes, or its Ctrl-C, does not end the node.
    setsid ray start --block "$@" >"$LOG" 2>&1 </dev/null &
    pid=$!
    printf '%s\n%s\n' "$pid" "$(started "$pid")" >"$PROCESS"
    local end=$((SECONDS + WAIT_S))
    until grep -q 'Ray runtime started' "$LOG"; do
        if [[ -z $(started "$pid") ]]; then tail -n 20 "$LOG" >&2; fail "ray start failed; its output is in $LOG"; fi
        if ((SECONDS >= end)); then stop; tail -n 20 "$LOG" >&2; fail "ray start took longer than $WAIT_S s; see $LOG"; fi
        sleep 0.2
    done
}

head() {
    local address
    [[ $RAY_AUTH_MODE != token || -n ${RAY_AUTH_TOKEN:-} ]] || ray get-auth-token --generate >/dev/null
    start --head --include-dashboard=false "$@"
    address=$(grep -o "address='[^']*'" "$LOG" | sed -n "1s/address='\(.*\)'/\1/p")
    say "the cluster's address is $address"
    say "on other machines: bash scripts/ray_cluster.sh join $address"
    say "train with: RAY_AUTH_MODE=$RAY_AUTH_MODE python -m verl.agent_trainer.main_ppo ray_init.address=$address ..."
}

join() {
    local address=$1 host=${1%:*} port=${1##*:} end=$((SECONDS + WAIT_S))
    [[ $host != "$address" && $port =~ ^[0-9]+$ ]] || fail "join $address: must be HOST:PORT"
    until reachable "$host" "$port"; do
        ((SECONDS < end)) || fail "no Ray head at $address within $WAIT_S s; start one there with: $0 head"
        sleep 0.5
    done
    start --address "$@"
    say "this machine is part of the cluster $address"
}

wait_for_nodes() {
    python - "$1" "$2" "$WAIT_S" <<'PY'
import logging, sys, time
import ray
address, wanted, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
end = time.monotonic() + wait_s
while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() >= end:
        sys.exit(f"ray_cluster: {address} has {found} of {wanted} nodes after {wait_s:g} s")
    time.sleep(0.5)
print(f"ray_cluster: {address} has {found} nodes")
PY
}

stop() {
    local pid end=$((SECONDS + 30))
    pid=$(own_process) || { say "nothing to stop"; return; }
    kill -TERM "$pid"
    while [[ -n $(started "$pid") ]]; do
        if ((SECONDS >= end)); then kill -KILL -- "-$pid" 2>/dev/null || true; fi
        sleep 0.1
    done
    rm -f "$PROCESS"
    say "stopped"
}

case "${1:-}" in
    head) shift; head "$@" ;;
    join) (($# >= 2)) || usage; shift; join "$@" ;;
    wait) (($# == 3)) || usage; wait_for_nodes "$2" "$3" ;;
    stop) (($# == 1)) || usage; stop ;;
    *) usage ;;
esac
