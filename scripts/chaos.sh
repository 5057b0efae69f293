#!/usr/bin/env bash
# Every fault, for SECS seconds (600 unless told otherwise), from a SEED that is printed, or given to repeat a run.
# KEEP=1 keeps the folder of a run that held; that of one that failed is kept in any case.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh tests
with_rocksdb
export SECS=${SECS:-600} SEED=${SEED:-} KEEP=${KEEP:-}
cargo build --quiet --locked -p agent-reach
exec cargo test --quiet --locked -p jepsen-style-tests --test chaos -- --nocapture
