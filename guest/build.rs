//! Passes the linker script to the linker, for the bare-metal targets only: the library half is also built on the host.
//! Sets `cfg(machine)` to the kind of machine, which selects the experiments.

use std::env;

fn main() {
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let script = format!("src/arch/{architecture}/link.ld");
    println!("cargo::rerun-if-changed={script}");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(machine, values(\"pc\", \"virt\"))");
    println!("cargo::rustc-cfg=machine=\"{}\"", if architecture == "x86_64" { "pc" } else { "virt" });

    let bare = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none");
    if bare {
        let here = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for every build script");
        println!("cargo::rustc-link-arg-bins=-T{here}/{script}");
        // The image is loaded where it is linked, and is not relocated.
        println!("cargo::rustc-link-arg-bins=--no-pie");
        println!("cargo::rustc-link-arg-bins=-zmax-page-size=4096");
    }
}
