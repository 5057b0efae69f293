#!/usr/bin/env bash
# Builds the two binaries, agent-reach and reach-demo, and says where they are.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh
with_rocksdb
cargo build --locked -p agent-reach -p reach-demo
echo "$CARGO_TARGET_DIR/debug/agent-reach"
echo "$CARGO_TARGET_DIR/debug/reach-demo"
