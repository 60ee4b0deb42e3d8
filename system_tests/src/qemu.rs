//! QEMU without the tool: the arguments that all tests give it who start it themselves.

use std::process::Command;

use crate::Machine;

/// The device by which the hypervisor, or a guest without one, ends a PC with a status:
/// [`abi::exit_code::qemu_status`].
pub const DEBUG_EXIT: [&str; 2] = ["-device", "isa-debug-exit,iobase=0xf4,iosize=4"];

/// QEMU for this architecture, for at most `seconds`, because one that hangs must not hang the tests. Nothing is in the
/// machine but what further arguments put there, and it ends when it is reset or turned off.
#[must_use]
pub fn of(machine: Machine, seconds: u32) -> Command {
    with_threads("multi", machine, seconds)
}

fn with_threads(thread: &str, machine: Machine, seconds: u32) -> Command {
    let mut command = Command::new("timeout");
    command.args([&seconds.to_string(), &format!("qemu-system-{}", machine.name())]).args([
        "-accel",
        &format!("tcg,thread={thread}"),
        "-display",
        "none",
        "-nodefaults",
        "-no-reboot",
    ]);
    command
}

/// A PC or an Arm machine on which the hypervisor can run, as [`of`] otherwise.
#[must_use]
pub fn able(machine: Machine, seconds: u32) -> Command {
    let mut command = of(machine, seconds);
    command.args(machine.able());
    command
}

/// The same for a VM that owns the machine's devices. One thread runs all CPUs: QEMU 7.2 crashes now and then if one
/// CPU moves the registers of a device while another uses those of its local APIC.
#[must_use]
pub fn for_owner(machine: Machine, seconds: u32) -> Command {
    let mut command = with_threads("single", machine, seconds);
    command.args(machine.able());
    command
}
