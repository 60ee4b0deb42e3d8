//! Dunlin, a type-1 hypervisor for virtual machines with many vCPUs.
//!
//! This library is the whole hypervisor; `main.rs` makes a bare-metal image of it. Bring-up runs on one pCPU in
//! `arch/*/host/boot.rs` and ends in `start`; the other pCPUs go directly to `run_cpu`. The portable modules also
//! compile on the developer's machine, where their tests run, without the code that needs the bare machine.

#![cfg(any(target_os = "none", test))]
#![cfg_attr(not(test), no_std)]
#![cfg_attr(
    test,
    allow(dead_code, reason = "tests use the core; what only a booting machine needs is there for the compiler")
)]

extern crate alloc;

mod arch;
pub mod boot;
mod check;
pub mod clock_offset;
mod control;
mod cpu;
pub mod device;
mod exhaustion;
mod frames;
#[cfg(not(test))]
mod heap;
pub mod io;
pub mod keyboard;
mod layout;
pub mod log;
pub mod memory_map;
mod mutants;
mod output;
#[cfg(not(test))]
pub mod panic;
pub mod screen;
mod selftest;
pub mod serial_port;
mod sync;
mod terminal;
#[cfg(test)]
mod tests;
mod trace;
mod vcpu;
mod vm;

use alloc::format;
use alloc::string::{String, ToString};

use arch::{Arch, Machine};

/// Where bring-up ends: all pCPUs are up, and this is the first of them.
fn start(boot: &boot::Boot, modules: boot::modules::Modules) -> ! {
    let mistakes = boot.mistakes().inspect(|mistake| ::log::error!("cannot start: {mistake}")).count();
    if mistakes != 0 {
        Machine::exit(abi::exit_code::REFUSED)
    }
    cpu::scheduler::threads::report();
    selftest::run(boot);
    if boot.has("check") {
        check::run(boot);
    }
    if let Err(why) = start_vms(boot, modules) {
        ::log::error!("cannot start: {why}");
        Machine::exit(abi::exit_code::REFUSED)
    }
    if boot.has("bounds") {
        trace::longest::arm();
    }
    run_cpu()
}

/// Creates and starts the VMs of the payload, one by one; started VMs already run on other pCPUs.
// Not inlined: the caller never returns, and would keep this function's part of the stack.
#[inline(never)]
fn start_vms(boot: &boot::Boot, mut modules: boot::modules::Modules) -> Result<(), String> {
    use abi::payload::Payload;
    use boot::modules::Files;

    Machine::check().map_err(|missing| missing.to_string())?;
    ::log::info!("{}", Machine::describe());
    let bytes = boot.payload.ok_or("no boot module; start the hypervisor with `dunlin run`")?;
    let payload = Payload::read(bytes).map_err(|error| error.to_string())?;

    io::iommu::check(payload.manifest.require_iommu)?;
    let (tags, can_flush_one) = Machine::tags();
    vm::tags::init(&payload.manifest.vms, tags, can_flush_one)?;
    frames::set_reserve_aside().map_err(|_| {
        format!("the host has {} MiB of memory left, too little for any VM", frames::free_bytes() >> 20)
    })?;
    let exits_when_idle = match boot.option("when-idle") {
        Some("poweroff") => true,
        Some("stay") => false,
        _ => payload.manifest.exit_when_idle,
    };
    vm::table::init();
    control::init(&payload.manifest.vms, exits_when_idle, boot.option("selftest") == Some("slow-log"));
    let mut waiting = payload.manifest.vms.as_slice();
    for unused in modules.keep_for(waiting) {
        ::log::warn!("the boot module '{unused}' is not used: no VM has it as kernel or initrd");
    }
    while let [config, later @ ..] = waiting {
        let mut config = config.clone();
        vm::rest::settle(&mut config, later);
        let files = modules.files_of(&config, &payload);
        control::create_from_payload(&config, files.as_ref().map(Files::spec).map_err(Clone::clone));
        drop(files);
        // Memory of modules that are not needed any more is free for the VMs that follow.
        let _used = modules.keep_for(later);
        waiting = later;
    }
    control::payload_complete();
    Ok(())
}

/// The endless loop of every pCPU.
fn run_cpu() -> ! {
    cpu::scheduler::run_vcpus(cpu::this())
}
