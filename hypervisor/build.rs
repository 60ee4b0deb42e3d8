//! Links the bare-metal image by its own script: physical addresses for the loader, high virtual ones for the code.
//! Sets `cfg(machine)` to the kind of machine that guests see, which selects the devices.

use std::env;
use std::path::PathBuf;

fn main() {
    let target_os = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let target_arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(machine, values(\"pc\", \"virt\"))");
    if target_os != "none" {
        return;
    }

    println!("cargo::rustc-cfg=machine=\"{}\"", if target_arch == "x86_64" { "pc" } else { "virt" });

    let script = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default())
        .join("src/arch")
        .join(&target_arch)
        .join("host/link.ld");
    println!("cargo::rerun-if-changed={}", script.display());
    println!("cargo::rustc-link-arg-bins=-T{}", script.display());
    if target_arch == "x86_64" {
        // The image has fixed addresses; nothing relocates it.
        println!("cargo::rustc-link-arg-bins=-no-pie");
    } else {
        // Linked for fixed addresses too, but UEFI loads it elsewhere, and it relocates itself
        // (arch/aarch64/host/efi.rs).
        for argument in ["-pie", "--no-dynamic-linker", "--pack-dyn-relocs=relr", "-znotext"] {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
    println!("cargo::rustc-link-arg-bins=-zmax-page-size=4096");
    println!("cargo::rustc-link-arg-bins=--build-id=none");
}
