//! Hands the linker script to the linker, for the bare-metal target only: the library half is also built on the host.

use std::env;

fn main() {
    let script = "src/arch/x86_64/link.ld";
    println!("cargo::rerun-if-changed={script}");
    println!("cargo::rerun-if-changed=build.rs");

    let bare = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none");
    if bare {
        let here = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it for every build script");
        println!("cargo::rustc-link-arg-bins=-T{here}/{script}");
        // The image is loaded where it is linked: PVH has no relocation step.
        println!("cargo::rustc-link-arg-bins=--no-pie");
        println!("cargo::rustc-link-arg-bins=-zmax-page-size=4096");
    }
}
