//! Accesses to devices in memory, which a hypervisor emulates one by one, and what it may cache of the instructions.
//!
//! * [`measure`]: the cost of an access, alone and while code or page tables change.
//! * [`coherence`]: the hypervisor always executes an instruction in its current form.
//! * [`variant`]: the same for two VMs with the same address and root.
//! * [`forms`]: each form does on a device what it does on memory.
//! * [`torture`]: code that tries to break the emulator.
//! * [`spread`]: code on many pages, executed and written, while a tool changes the mappings.
//!
//! All need the local APIC in memory (`apic=xapic`).

pub(super) mod coherence;
mod coherence_tables;
pub(super) mod forms;
mod forms_list;
pub(super) mod measure;
mod partner;
mod ports;
pub(super) mod spread;
pub(super) mod torture;
mod torture_known;
mod torture_wild;
pub(super) mod variant;

use core::fmt;

use crate::arch::attempt::{self, Fault};
use crate::arch::{apic, boot};
use crate::experiments::Outcome;

const NEEDS_XAPIC: Outcome = Outcome::Unsupported("the x2APIC is in use; boot with apic=xapic");
const NEEDS_TWO: Outcome = Outcome::Unsupported("needs two CPUs");

/// An unbacked address: reads return a constant, writes are lost.
const UNBACKED: u64 = 0xd000_0000;

/// The local APIC's task priority, and a value of it below that of every vector in use.
const TASK_PRIORITY: u64 = 0x80;
const PRIORITY: u32 = 0x20;

/// The I/O APIC's index register and data window, from its base.
const INDEX: u64 = 0;
const DATA: u64 = 0x10;

/// Address of the local APIC's `register`, mapped one to one.
const fn local_apic(register: u64) -> u64 {
    apic::XAPIC_PAGE + register
}

/// Lets the I/O APIC's data window show `register`; answers the window's address, if there is an I/O APIC.
fn io_apic_window(register: u32) -> Option<u64> {
    let at = boot::io_apic()?;
    attempt::store_u32(at + INDEX, register).ok()?;
    Some(at + DATA)
}

/// The result of an instruction: a value, or the exception.
struct Shown(Result<u64, Fault>);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(value) => write!(f, "{value:#x}"),
            Err(fault) => write!(f, "#{fault} error {:#x}", fault.error),
        }
    }
}
