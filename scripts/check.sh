#!/usr/bin/env bash
# The quick part of test.sh: format, lints and every test that needs no RocksDB, and so no C++. Under
# a minute when the dependencies are built.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh

packages=(-p reach-protocol -p reach-machine -p reach-config -p reach-routing -p reach-scheduler
    -p reach-transport -p reach-client)
# Apart from the others: beside a package that wants the default features it would get them too.
storage=(-p reach-storage --no-default-features)

for selection in "${packages[*]}" "${storage[*]}"; do
    # shellcheck disable=SC2086 # a list of plain words
    if cargo tree --quiet --prefix none $selection | grep -q '^librocksdb-sys '; then
        echo "check: one of $selection brings RocksDB in; it must not need a C++ build" >&2
        exit 1
    fi
done

lint=(cargo clippy --quiet --all-targets)
step "format" cargo fmt --all --check
step "lints" "${lint[@]}" "${packages[@]}" -- -D warnings
step "lints of storage" "${lint[@]}" "${storage[@]}" -- -D warnings
step "tests" cargo test --quiet "${packages[@]}"
step "tests of storage" cargo test --quiet "${storage[@]}"
echo "everything that needs no RocksDB holds, after $SECONDS s"
