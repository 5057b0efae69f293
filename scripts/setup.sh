#!/usr/bin/env bash
# Sees to what a build needs from the system, installing it where that is possible. Silent, and
# quick, when everything is there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

rust_needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# bindgen needs the library and clang's own headers beside it; the runtime package has no headers.
has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return
    compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null && compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' >/dev/null
}

missing=()
command -v c++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
command -v git >/dev/null || missing+=(git)
command -v python3 >/dev/null || missing+=(python3)
command -v curl >/dev/null || missing+=(curl)
has_libclang || missing+=(libclang-dev)
# `setup.sh tests`: a node's calendar is stepped with it.
has_faketime() {
    compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || compgen -G '/usr/lib*/faketime/libfaketimeMT.so.1' >/dev/null
}
[ "${1:-}" != tests ] || has_faketime || missing+=(faketime)

if [ ${#missing[@]} -gt 0 ]; then
    as_root=none
    if [ "$(id -u)" -eq 0 ]; then
        as_root=
    elif command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        as_root=sudo
    fi
    if ! command -v apt-get >/dev/null; then
        echo "setup: missing on this system: ${missing[*]} (Debian's names). Install them with your package" >&2
        echo "setup: manager (libclang-dev is libclang with clang's headers), then run this again." >&2
        exit 1
    elif [ "$as_root" = none ]; then
        echo "setup: missing on this system: ${missing[*]}. Neither root nor sudo is at hand, so please run" >&2
        echo "setup:     apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
        echo "setup: as root, then run this again." >&2
        exit 1
    fi
    echo "setup: installing with apt-get: ${missing[*]}" >&2
    if ! { $as_root apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2; then
        echo "setup: apt-get could not install ${missing[*]}; its messages stand above." >&2
        exit 1
    fi
fi

if ! command -v cargo >/dev/null; then
    echo "setup: cargo is missing. Rust $rust_needed or later is needed; install it for this user with" >&2
    echo "setup:     curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y" >&2
    echo "setup: then run this again. (Debian's own cargo package is too old.)" >&2
    exit 1
fi
# `cargo 1.95.0 (…)`; asked in the checkout, so that a toolchain override counts.
rust_found=$(cargo --version | cut -d' ' -f2)
if [ "$(printf '%s\n' "$rust_needed" "${rust_found%%-*}" | sort -V | head -1)" != "$rust_needed" ]; then
    echo "setup: cargo $rust_found is too old: $rust_needed or later is needed." >&2
    if command -v rustup >/dev/null; then
        echo "setup: Run \`rustup update stable && rustup default stable\`, then run this again." >&2
    else
        echo "setup: Install it with \`curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y\`," >&2
        echo "setup: see to it that ~/.cargo/bin comes first in PATH, then run this again." >&2
    fi
    exit 1
fi

for component in rustfmt clippy; do
    subcommand=${component/rustfmt/fmt}
    cargo "$subcommand" --version >/dev/null 2>&1 && continue
    if ! command -v rustup >/dev/null; then
        echo "setup: $component is missing: install it from where cargo came from, then run this again." >&2
        exit 1
    fi
    echo "setup: installing with rustup: $component" >&2
    rustup component add "$component" >&2
done

# Cargo tells the crates of two checkouts apart by the age of their files alone, so in one target
# folder the one would run what was built from the other. The libraries that both use stay.
built_from=$CARGO_TARGET_DIR/built-from
if [ "$(cat "$built_from" 2>/dev/null || true)" != "$PWD" ]; then
    for profile in dev release; do
        [ -d "$CARGO_TARGET_DIR/${profile/dev/debug}" ] || continue
        echo "setup: the last $profile build was of another checkout; this one's own crates are built anew" >&2
        cargo clean --quiet --workspace --profile $profile
    done
    mkdir -p "$CARGO_TARGET_DIR"
    printf '%s\n' "$PWD" > "$built_from"
fi
