#!/usr/bin/env bash
# Builds RocksDB's static library once and prints the folder it is kept in. Later builds, whatever
# their profile, link that library instead of compiling 300 C++ files again.
set -euo pipefail
cd "$(dirname "$0")/rocksdb"

version=$(sed -n 's/^librocksdb-sys = .*"=\([0-9.]*\)".*/\1/p' Cargo.toml)
cache=${AGENT_REACH_CACHE:-$HOME/.cache/agent-reach}
kept=$cache/rocksdb-$version
expected="about 12 minutes on two idle cores"

if [ ! -f "$kept/librocksdb.a" ]; then
    echo "RocksDB $version: compiling its C++, once for this machine ($expected) ..." >&2
    started=$SECONDS
    export CARGO_TARGET_DIR=$cache/rocksdb-build
    cargo build --quiet &
    build=$!
    trap 'kill $build 2>/dev/null || true' EXIT
    while kill -0 $build 2>/dev/null; do
        sleep 1
        if [ $(((SECONDS - started) % 60)) -eq 0 ]; then
            echo "RocksDB $version: $(((SECONDS - started) / 60)) min elapsed, expected $expected" >&2
        fi
    done
    wait $build
    trap - EXIT
    out=$(find "$CARGO_TARGET_DIR/debug/build" -name librocksdb.a -printf '%T@ %h\n' | sort -n | tail -1 | cut -d' ' -f2)
    mkdir -p "$kept.new"
    cp "$out/librocksdb.a" "$kept.new/"
    rm -rf "$kept" && mv "$kept.new" "$kept"
    echo "RocksDB $version: kept in $kept after $((SECONDS - started)) s" >&2
fi
echo "$kept"
