//! The processor's instructions for TLB maintenance, one by one, by the manual's names (Arm ARM, C5.5 and C6.2).
//!
//! `stage2` chooses the instructions and their order. Debug builds record each one ([`trace`]).

#![expect(unsafe_code, reason = "TLB maintenance")]

use core::arch::asm;

use stage2::tlbi::{Barrier, Maintenance, Tlbi};

use crate::arch::trace::{self, TraceEvent};

/// The processor that runs this.
pub(super) struct ThisCpu;

macro_rules! operation {
    ($text:literal) => {
        // SAFETY: entries of the TLB are copies of tables; to lose one costs a walk.
        unsafe { asm!($text, options(nostack, preserves_flags)) }
    };
    ($text:literal, $operand:expr) => {
        // SAFETY: as above.
        unsafe { asm!($text, in(reg) $operand, options(nostack, preserves_flags)) }
    };
}

impl Maintenance for ThisCpu {
    #[inline]
    fn dsb(&self, barrier: Barrier) {
        match barrier {
            Barrier::LocalStores => operation!("dsb nshst"),
            Barrier::Stores => operation!("dsb ishst"),
            Barrier::Local => operation!("dsb nsh"),
            Barrier::Full => operation!("dsb ish"),
        }
        trace::note(|| TraceEvent::Barrier {
            name: match barrier {
                Barrier::LocalStores => "nshst",
                Barrier::Stores => "ishst",
                Barrier::Local => "nsh",
                Barrier::Full => "ish",
            },
        });
    }

    #[inline]
    fn isb(&self) {
        operation!("isb");
    }

    #[inline]
    fn tlbi(&self, operation: Tlbi) {
        trace::note(|| noted(operation));
        let operand = operation.operand();
        match operation {
            Tlbi::Ipa { leaves: false, everywhere: false, .. } => operation!("tlbi ipas2e1, {}", operand),
            Tlbi::Ipa { leaves: true, everywhere: false, .. } => operation!("tlbi ipas2le1, {}", operand),
            Tlbi::Ipa { leaves: false, everywhere: true, .. } => operation!("tlbi ipas2e1is, {}", operand),
            Tlbi::Ipa { leaves: true, everywhere: true, .. } => operation!("tlbi ipas2le1is, {}", operand),
            // RIPAS2E1IS and RIPAS2LE1IS by their encodings, which are only used where they exist.
            Tlbi::Range { leaves: false, .. } => operation!("sys #4, c8, c0, #2, {}", operand),
            Tlbi::Range { leaves: true, .. } => operation!("sys #4, c8, c0, #6, {}", operand),
            Tlbi::Combined { everywhere: false } => operation!("tlbi vmalle1"),
            Tlbi::Combined { everywhere: true } => operation!("tlbi vmalle1is"),
            Tlbi::All { everywhere: false } => operation!("tlbi vmalls12e1"),
            Tlbi::All { everywhere: true } => operation!("tlbi vmalls12e1is"),
        }
    }
}

/// A TLBI as the trace has it.
fn noted(operation: Tlbi) -> TraceEvent {
    let bytes = operation.bytes();
    match operation {
        Tlbi::Ipa { leaves, everywhere, ipa, level } => {
            let name = match (leaves, everywhere) {
                (false, false) => "ipas2e1",
                (true, false) => "ipas2le1",
                (false, true) => "ipas2e1is",
                (true, true) => "ipas2le1is",
            };
            TraceEvent::Tlbi { name, start: ipa, bytes, level }
        }
        Tlbi::Range { leaves, ipa, .. } => {
            TraceEvent::Tlbi { name: if leaves { "ripas2le1is" } else { "ripas2e1is" }, start: ipa, bytes, level: None }
        }
        Tlbi::Combined { everywhere } => TraceEvent::TlbiAll { name: if everywhere { "vmalle1is" } else { "vmalle1" } },
        Tlbi::All { everywhere } => {
            TraceEvent::TlbiAll { name: if everywhere { "vmalls12e1is" } else { "vmalls12e1" } }
        }
    }
}
