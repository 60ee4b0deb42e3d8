//! Dunlin, a type-1 hypervisor for virtual machines with many vCPUs.
//!
//! This library is all of it; `main.rs` makes a bare-metal image of it. Bring-up runs on one pCPU in `arch/*/host/boot.rs` and
//! ends in `start`; the other pCPUs come straight to `run_cpu`.
//! The portable modules also compile on the developer's machine, where their tests run; what needs the bare machine is
//! left out there.

#![cfg_attr(target_os = "none", no_std)]
#![cfg_attr(
    not(target_os = "none"),
    allow(dead_code, unused_imports, reason = "on the host only the tests use the portable modules")
)]

#[cfg(any(target_os = "none", test))]
extern crate alloc;

#[cfg(target_os = "none")]
mod arch;
#[cfg(any(target_os = "none", test))]
mod boot;
#[cfg(target_os = "none")]
mod check;
#[cfg(any(target_os = "none", test))]
#[cfg_attr(machine = "virt", expect(dead_code, reason = "the counter of that machine is one for all CPUs"))]
mod clock_offset;
#[cfg(target_os = "none")]
mod control;
#[cfg(target_os = "none")]
mod cpu;
#[cfg(any(target_os = "none", test))]
mod device;
#[cfg(target_os = "none")]
mod exit;
#[cfg(target_os = "none")]
mod frames;
#[cfg(target_os = "none")]
mod heap;
#[cfg(any(test, machine = "pc"))]
mod keyboard;
#[cfg(target_os = "none")]
mod layout;
#[cfg(target_os = "none")]
mod log;
#[cfg(any(target_os = "none", test))]
mod memory_map;
#[cfg(any(target_os = "none", test))]
mod output;
#[cfg(target_os = "none")]
mod panic;
#[cfg(any(test, machine = "pc"))]
mod screen;
#[cfg(target_os = "none")]
mod selftest;
#[cfg(any(test, machine = "pc"))]
mod serial_port;
#[cfg(any(target_os = "none", test))]
mod terminal;
#[cfg(any(target_os = "none", test))]
mod trace;
#[cfg(target_os = "none")]
mod vcpu;
#[cfg(target_os = "none")]
mod vm;

/// Where bring-up ends: all pCPUs are up, and this is the first of them.
#[cfg(target_os = "none")]
fn start(boot: &boot::Boot) -> ! {
    let mistakes = boot.mistakes().inspect(|mistake| ::log::error!("cannot start: {mistake}")).count();
    if mistakes != 0 {
        arch::power::exit(abi::exit_code::REFUSED)
    }
    selftest::run(boot);
    if boot.has("check") {
        check::run(boot);
    }
    if let Err(why) = start_vms(boot) {
        ::log::error!("cannot start: {why}");
        arch::power::exit(abi::exit_code::REFUSED)
    }
    run_cpu()
}

/// Creates and starts the VMs of the payload, one after the other; those that are started run meanwhile on other pCPUs.
#[cfg(target_os = "none")]
fn start_vms(boot: &boot::Boot) -> Result<(), alloc::string::String> {
    use abi::payload::Payload;
    use alloc::format;
    use alloc::string::ToString;

    arch::virtualization::check().map_err(|missing| missing.to_string())?;
    ::log::info!("{}", arch::virtualization::describe());
    let bytes = boot.payload.ok_or("no boot module; start the hypervisor with `dunlin run`")?;
    let payload = Payload::read(bytes).map_err(|error| error.to_string())?;

    let virtualization = arch::virtualization::features();
    vm::tags::init(&payload.manifest.vms, virtualization.tags, virtualization.can_flush_one_tag)?;
    frames::set_reserve_aside().map_err(|_| {
        format!("the host has {} MiB of memory left, too little for any VM", frames::free_bytes() >> 20)
    })?;
    let exits_when_idle = match boot.option("when-idle") {
        Some("poweroff") => true,
        Some("stay") => false,
        _ => payload.manifest.exit_when_idle,
    };
    control::init(&payload.manifest.vms, exits_when_idle, boot.option("selftest") == Some("slow-log"));
    for (number, config) in (0..).zip(&payload.manifest.vms) {
        control::vm_creating(number);
        match vm::Vm::create(number, config.clone(), &payload) {
            Ok(vm) => {
                control::vm_started(&vm);
                vm.start();
            }
            Err(why) => control::vm_failed(number, config.clone(), why),
        }
    }
    control::payload_complete();
    Ok(())
}

/// What every pCPU does from here on.
#[cfg(target_os = "none")]
fn run_cpu() -> ! {
    cpu::scheduler::run_vcpus(cpu::this())
}
