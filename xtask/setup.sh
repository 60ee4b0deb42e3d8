#!/bin/sh
# Installs what building and testing Dunlin needs and this machine lacks, and says what it does. `make` calls it before
# cargo, so it needs nothing but a Debian system and rustup, and takes a tenth of a second when nothing is missing.
#
# Arguments name what only some want: `browser`, `prometheus` and `uefi`, for the steps of `cargo xtask test` that call
# this script for them, `image`, for those and for `make image`, `fuzz`, for `cargo xtask fuzz`, `package`, for
# `cargo xtask package`, `parent`, for `make parent`, and `libvirt`, for `make parent-libvirt`. A browser is large, and
# `make run` has no use for it.
#
# Guest kernels and BusyBox are not installed: `cargo xtask build` unpacks them below target/ (xtask/src/debian.rs).
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }

# Debian packages: PROGRAM that shows that the package is there, and the PACKAGE.
missing=
need() {
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need cc gcc                                  # links what runs on this machine
need qemu-system-x86_64 qemu-system-x86      # the machine that the hypervisor runs on
# For the other architecture only when it is asked for (`make run ARCH=aarch64`), or tested.
[ "${ARCH:-}" != aarch64 ] || need qemu-system-aarch64 qemu-system-arm
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
for wanted in "$@"; do
    case $wanted in
    browser)
        # Any of the browsers that cli/tests/cli/browser.rs knows will do. The headless one is the smallest.
        found=
        for name in chromium-headless-shell chromium google-chrome chrome; do
            ! $name --version >/dev/null 2>&1 || found=$name
        done
        [ -n "$found" ] || missing="$missing chromium-headless-shell"
        ;;
    prometheus)
        # Debian's own interpreter, because packages of Debian are for that one; the package brings it where it is missing.
        /usr/bin/python3 -c 'import prometheus_client' 2>/dev/null || missing="$missing python3-prometheus-client"
        ;;
    fuzz)
        # libFuzzer is compiled; addr2line tells which source was reached.
        need g++ g++
        need addr2line binutils
        ;;
    image)
        # GRUB for BIOS and UEFI, and what its tool writes images with. For the other architecture, `cargo xtask` unpacks GRUB below
        # target/ (xtask/src/debian.rs).
        need grub-mkrescue grub-common
        need xorriso xorriso
        need mformat mtools
        if [ "${ARCH:-}" != aarch64 ]; then
            [ -d /usr/lib/grub/i386-pc ] || missing="$missing grub-pc-bin"
            [ -d /usr/lib/grub/x86_64-efi ] || missing="$missing grub-efi-amd64-bin"
        fi
        ;;
    parent)
        # What Linux' own build needs.
        need make make
        need flex flex
        need bison bison
        need bc bc
        need perl perl
        need xz xz-utils
        need lz4 lz4
        [ -e /usr/include/gelf.h ] || missing="$missing libelf-dev"
        ;;
    package)
        # Packs a package, and makes a Debian and a disk to try it on.
        need dpkg-deb dpkg
        need strip binutils
        need mmdebstrap mmdebstrap
        PATH=$PATH:/usr/sbin:/sbin need mke2fs e2fsprogs
        ;;
    libvirt)
        # They make a root file system from Debian's packages; as a user who is not root, with a user namespace.
        need mmdebstrap mmdebstrap
        need newuidmap uidmap
        need tar2sqfs squashfs-tools-ng
        # And a disk for its guests.
        need genext2fs genext2fs
        need qemu-img qemu-utils
        need grub-mkimage grub-common
        [ -d /usr/lib/grub/i386-pc ] || missing="$missing grub-pc-bin"
        ;;
    uefi)
        [ -e /usr/share/OVMF/OVMF_CODE_4M.fd ] || missing="$missing ovmf"
        ;;
    *)
        say "no such thing as \`$wanted\`: browser, prometheus, fuzz, image, package, parent, libvirt and uefi are known"
        exit 1
        ;;
    esac
done

# As root directly, otherwise by sudo, otherwise the user has to.
as_root=
[ "$(id -u)" = 0 ] || as_root=sudo
if [ -n "$missing" ]; then
    install="apt-get install --yes --no-install-recommends$missing"
    if ! command -v apt-get >/dev/null 2>&1; then
        say "missing:$missing (names of the Debian packages), and this is not a Debian system."
        say "Please install the like of them and try again."
        exit 1
    fi
    if [ -n "$as_root" ] && ! command -v sudo >/dev/null 2>&1; then
        say "missing Debian packages. Please run as root, then try again:"
        say "    apt-get update && $install"
        exit 1
    fi
    # The lists may be empty (a fresh container) or too old to find the packages: then refresh them, once.
    say "installing Debian packages:$missing"
    say "    $as_root $install"
    $as_root env DEBIAN_FRONTEND=noninteractive $install || {
        say "    $as_root apt-get update"
        $as_root apt-get update
        $as_root env DEBIAN_FRONTEND=noninteractive $install
    }
fi

# The toolchain of rust-toolchain.toml. It is installed by name here, because rustup does so by itself only where
# RUSTUP_AUTO_INSTALL allows it.
if ! command -v rustup >/dev/null 2>&1; then
    say "rustup is missing. Please install it (Debian package rustup, or https://rustup.rs) and try again."
    exit 1
fi
list_of() { sed -n "s/^$1 *= *\[\(.*\)\].*/\1/p" rust-toolchain.toml | tr -d ' "'; }
channel=$(sed -n 's/^channel *= *"\(.*\)".*/\1/p' rust-toolchain.toml)
components=$(list_of components)
targets=$(list_of targets)

installed=$(rustup component list --toolchain "$channel" --installed 2>/dev/null || true)
complete=yes
for part in cargo $(echo "$components" | tr , ' ') $(echo "$targets" | sed 's/[^,]*/rust-std-&/g' | tr , ' '); do
    # Components are listed with the host's name behind theirs, `rust-std` with its target's.
    case "
$installed" in
    *"
$part"*) ;;
    *) complete=no ;;
    esac
done
if [ $complete = no ]; then
    say "installing the Rust toolchain $channel ($components; $targets)"
    rustup toolchain install "$channel" --profile minimal --component "$components" --target "$targets" --no-self-update
fi
