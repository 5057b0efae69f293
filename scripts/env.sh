# Sourced by every script and by hand: where builds are kept, so that a new checkout, CI and the
# demo find what the last build left. Sourcing it changes the environment only.

export AGENT_REACH_CACHE=${AGENT_REACH_CACHE:-$HOME/.cache/agent-reach}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$AGENT_REACH_CACHE/target}

# A toolchain that rustup installed a moment ago is found without a new login.
if ! command -v cargo >/dev/null && [ -x "$HOME/.cargo/bin/cargo" ]; then
    export PATH=$HOME/.cargo/bin:$PATH
fi

agent_reach_scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Makes cargo link the RocksDB that is kept, which is built first where there is none.
with_rocksdb() {
    ROCKSDB_LIB_DIR=$("$agent_reach_scripts/rocksdb.sh") || return
    export ROCKSDB_LIB_DIR ROCKSDB_STATIC=1
}

# step TITLE COMMAND…: runs the command, and says how long it took.
step() {
    local title=$1 started=$SECONDS
    shift
    echo "== $title"
    "$@" || { local status=$?; echo "== $title: FAILED after $((SECONDS - started)) s" >&2; return $status; }
    echo "== $title: $((SECONDS - started)) s"
}
