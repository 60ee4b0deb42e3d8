//! Single-steps one instruction of the guest for the hypervisor, with TF set.
//!
//! TF raises #DB when the instruction has completed (APM vol. 2, 13.1.4). #DB exits, so the guest does not see it, if
//! the hypervisor corrects four things: TF as the guest had it, DR6.BS, the flags that the instruction itself loads or
//! saves, and the guest's own #DB at the same boundary.
//!
//! While the hypervisor's TF is set, the caller intercepts everything that would save RFLAGS: every exception and INT
//! n. It also intercepts PUSHF, POPF and IRET once, to report what the instruction does with RFLAGS ([`Flags`]).

use x86_defs::registers::{dr6, dr7, rflags};

/// What the single-stepped instruction does with RFLAGS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    /// It does not touch TF.
    Kept,
    /// PUSHF: it also saves TF to memory. The caller clears it there if [`Step::has_saved_trap_flag`].
    Saved,
    /// POPF and IRET: TF comes from memory.
    Loaded,
}

/// The guest's registers that a step changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Debug {
    /// RFLAGS.
    pub rflags: u64,
    /// DR6.
    pub dr6: u64,
    /// DR7, which a step only reads.
    pub dr7: u64,
}

/// An active step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the guest itself has set TF.
    guest_steps: bool,
    /// DR6 as the guest had it.
    dr6: u64,
    /// RIP of the instruction.
    rip: u64,
    flags: Flags,
}

impl Step {
    /// Prepares the guest's registers for an entry that ends after the next instruction.
    #[must_use]
    pub fn begin(rip: u64, guest: &mut Debug, flags: Flags) -> Self {
        let step = Self { guest_steps: guest.rflags & rflags::TF != 0, dr6: guest.dr6, rip, flags };
        guest.rflags |= rflags::TF;
        // Bits that are set afterwards come from the step.
        guest.dr6 &= !(dr6::BREAKPOINTS | dr6::SINGLE_STEP);
        step
    }

    /// RIP of the instruction.
    #[must_use]
    pub const fn rip(&self) -> u64 {
        self.rip
    }

    /// Whether the completed instruction has saved a TF that is not the guest's.
    #[must_use]
    pub fn has_saved_trap_flag(&self) -> bool {
        self.flags == Flags::Saved && !self.guest_steps
    }

    /// The guest exited by #DB. Returns whether the instruction has completed, and whether the #DB is (also) the
    /// guest's.
    #[must_use]
    pub fn end_by_debug(self, guest: &mut Debug) -> (bool, bool) {
        let hits = hits(guest);
        let has_completed = guest.dr6 & dr6::SINGLE_STEP != 0;
        if !has_completed || self.flags != Flags::Loaded {
            self.restore_trap_flag(guest);
        }
        let trap = if has_completed && self.guest_steps { dr6::SINGLE_STEP } else { 0 };
        // Other causes (general detect, task switch) belong to the guest unchanged.
        let others = guest.dr6 & (dr6::GENERAL_DETECT | dr6::TASK_SWITCH) & !self.dr6;
        guest.dr6 = self.dr6 | hits | trap | others;
        (has_completed, hits | trap | others != 0)
    }

    /// The guest exited for another reason, before the instruction completed, or by an intercept of it.
    pub fn end(self, guest: &mut Debug) {
        guest.dr6 = self.dr6 | hits(guest);
        self.restore_trap_flag(guest);
    }

    fn restore_trap_flag(self, guest: &mut Debug) {
        if !self.guest_steps {
            guest.rflags &= !rflags::TF;
        }
    }
}

/// Enabled breakpoints that were hit: a processor may also report disabled ones (APM vol. 2, 13.1.1.3).
fn hits(guest: &Debug) -> u64 {
    (0..4)
        .filter(|number| guest.dr7 & dr7::enables(*number) != 0)
        .fold(0, |hits, number| hits | guest.dr6 & 1 << number)
}
