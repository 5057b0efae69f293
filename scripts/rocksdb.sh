#!/usr/bin/env bash
# Builds RocksDB's static library once and prints the folder it is kept in. Later builds, whatever
# their profile, link that library instead of compiling 300 C++ files again.
set -euo pipefail
cd "$(dirname "$0")/rocksdb"

version=$(sed -n 's/^librocksdb-sys = .*"=\([0-9.]*\)".*/\1/p' Cargo.toml)
cache=${AGENT_REACH_CACHE:-$HOME/.cache/agent-reach}
kept=$cache/rocksdb-$version
expected="about 12 minutes on two idle cores"

say() {
    echo "RocksDB $version: $*" >&2
}

# The workspace's bindings are made from its own copy of the headers: another version's library
# would link and then misbehave.
wanted=$(grep -A1 '^name = "librocksdb-sys"$' ../../Cargo.lock | sed -n 's/^version = "\([0-9.]*\).*"/\1/p')
if [ -n "$wanted" ] && [ "$wanted" != "$version" ]; then
    say "Cargo.lock wants $wanted: give scripts/rocksdb/Cargo.toml the same version"
    exit 1
fi

if [ ! -f "$kept/librocksdb.a" ]; then
    mkdir -p "$cache"
    # One build a machine: whoever comes second waits and finds it done.
    exec 9>"$cache/rocksdb.lock"
    if ! flock --nonblock 9; then
        say "another run is compiling it ($expected); waiting for that ..."
        flock 9
    fi
fi

if [ ! -f "$kept/librocksdb.a" ]; then
    say "compiling its C++, once for this machine ($expected) ..."
    started=$SECONDS
    export CARGO_TARGET_DIR=$cache/rocksdb-build
    # In a process group of its own, so that stopping this script stops the compilers too, whether
    # Ctrl-C or a signal to this process alone says so. The lock is not theirs to keep.
    set -m
    cargo build --quiet --locked </dev/null 9>&- &
    build=$!
    set +m
    stop() {
        trap - EXIT INT TERM
        kill -TERM -- "-$build" 2>/dev/null || true
        say "stopped after $((SECONDS - started)) s; the next run starts again"
        exit "$1"
    }
    trap 'stop 130' INT
    trap 'stop 143' TERM
    trap 'stop 1' EXIT
    next=60
    while kill -0 "$build" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS - started)) -ge $next ]; then
            say "$((next / 60)) min elapsed, expected $expected"
            next=$((next + 60))
        fi
    done
    status=0
    wait "$build" || status=$?
    trap - EXIT INT TERM
    if [ $status -ne 0 ]; then
        say "the build failed after $((SECONDS - started)) s; cargo's messages stand above"
        exit $status
    fi

    out=$(find "$CARGO_TARGET_DIR/debug/build" -name librocksdb.a -printf '%T@ %h\n' | sort -n | tail -1 | cut -d' ' -f2-)
    # LZ4 itself is lz4-sys's, which the bindings link; here only the calls to it can be missing, and
    # then every compressed block would be unreadable.
    if ! nm "$out/librocksdb.a" 2>/dev/null | grep ' U LZ4_decompress' >/dev/null; then
        say "the library in $out was built without LZ4: see features in scripts/rocksdb/Cargo.toml"
        exit 1
    fi
    rm -rf "$kept.new"
    mkdir "$kept.new"
    cp "$out/librocksdb.a" "$kept.new/"
    rm -rf "$kept"
    mv "$kept.new" "$kept"
    rm -rf "$CARGO_TARGET_DIR"
    say "kept in $kept after $((SECONDS - started)) s"
fi
echo "$kept"
