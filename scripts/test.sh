#!/usr/bin/env bash
# Everything that must hold before a change is merged. CI runs this and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh tests
with_rocksdb
step "format" cargo fmt --all --check
step "lints" cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
step "tests" cargo test --quiet --locked --workspace
echo "everything holds, after $SECONDS s"
