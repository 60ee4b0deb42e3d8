//! The bare-metal image: the library, whose entry points the link script names.

#![cfg_attr(target_os = "none", no_std, no_main)]

use hypervisor as _;

/// The hypervisor is not a program for an operating system.
#[cfg(not(target_os = "none"))]
fn main() {}
