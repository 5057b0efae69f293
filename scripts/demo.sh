#!/usr/bin/env bash
# Builds the product and runs its main job on a repository: REPO (default: this one). With KEEP=1 the
# cluster stays up afterwards.
set -euo pipefail
repo=$(cd "${REPO:-$(dirname "$0")/..}" && pwd)
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh
with_rocksdb
cargo build --quiet --locked -p agent-reach -p reach-demo
options=(--repo "$repo")
case ${KEEP:-} in '' | 0) ;; *) options+=(--keep) ;; esac
exec "$CARGO_TARGET_DIR/debug/reach-demo" "${options[@]}"
