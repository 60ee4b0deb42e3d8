//! Vector and floating-point state of guests.
//!
//! The hypervisor uses no vector registers. So a guest's values stay in the registers across its exits, and across a
//! wait after which the vCPU returns to the same pCPU, unless another vCPU's state was loaded in between. For a vCPU
//! from another pCPU the registers are closed (CPTR_EL2.TFP). Its state is loaded at the guest's first use, which may
//! never come, and state that was not loaded need not be saved. SVE and SME are hidden from guests.

#![expect(unsafe_code, reason = "vector registers are accessed behind the compiler's back")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::arch::aarch64::el2::{self, HostContext};
use crate::arch::aarch64::register::{isb, write_register};

/// One vCPU's state while it is not in the registers.
#[repr(C, align(16))]
pub(in crate::arch::aarch64) struct FpuState {
    /// Q0 to Q31.
    q: [[u64; 2]; 32],
    fpsr: u64,
    fpcr: u64,
    /// Identifies this state among all ever made.
    identity: u64,
    /// The registers hold the state, and the guest may use them.
    is_open: bool,
}

/// What a file keeps of it.
#[derive(Serialize, Deserialize)]
pub(in crate::arch::aarch64) struct State {
    q: [[u64; 2]; 32],
    fpsr: u64,
    fpcr: u64,
}

/// No state's identity.
pub(in crate::arch::aarch64) const NOBODY: u64 = 0;
static IDENTITIES: AtomicU64 = AtomicU64::new(NOBODY + 1);

impl FpuState {
    /// The state at reset: all zero.
    pub(in crate::arch::aarch64) fn new() -> Self {
        Self { q: [[0; 2]; 32], fpsr: 0, fpcr: 0, identity: IDENTITIES.fetch_add(1, Ordering::Relaxed), is_open: false }
    }

    /// Its state while the vCPU is on no pCPU.
    pub(in crate::arch::aarch64) fn state(&self) -> State {
        State { q: self.q, fpsr: self.fpsr, fpcr: self.fpcr }
    }

    /// Takes over a state. The vCPU has been on no pCPU.
    pub(in crate::arch::aarch64) fn set_state(&mut self, state: &State) {
        (self.q, self.fpsr, self.fpcr) = (state.q, state.fpsr, state.fpcr);
    }

    /// The vCPU comes to this pCPU. Its registers are open if they still hold its state: it ran here last
    /// (`came_back`), and no other state was loaded since. Takes effect at the next entry.
    pub(in crate::arch::aarch64) fn arrive(&mut self, cpu: &HostContext, came_back: bool) {
        let were_held = cpu.fp_holder.load(Ordering::Relaxed) == self.identity;
        self.is_open = came_back && were_held;
        if were_held && !came_back {
            // They hold its old state from an earlier run here. It may leave again without using them, and the next
            // time it will have been here last.
            cpu.fp_holder.store(NOBODY, Ordering::Relaxed);
        }
        set_open(self.is_open);
    }

    /// The guest wants the registers. False when they are open already.
    #[must_use]
    pub(in crate::arch::aarch64) fn open(&mut self, cpu: &HostContext) -> bool {
        if self.is_open {
            return false;
        }
        self.is_open = true;
        set_open(true);
        isb();
        self.load();
        cpu.fp_holder.store(self.identity, Ordering::Relaxed);
        true
    }

    /// The vCPU leaves this pCPU: saves the state that it may have changed. The registers keep it.
    pub(in crate::arch::aarch64) fn depart(&mut self) {
        if self.is_open {
            self.save();
        }
    }

    fn load(&self) {
        // SAFETY: reads the 512 bytes of the array. CPTR_EL2 lets EL2 use the registers, which it does nowhere else.
        unsafe {
            asm!(
                ".arch_extension fp",
                ".arch_extension simd",
                "ldp q0, q1, [{at}]",
                "ldp q2, q3, [{at}, #32]",
                "ldp q4, q5, [{at}, #64]",
                "ldp q6, q7, [{at}, #96]",
                "ldp q8, q9, [{at}, #128]",
                "ldp q10, q11, [{at}, #160]",
                "ldp q12, q13, [{at}, #192]",
                "ldp q14, q15, [{at}, #224]",
                "ldp q16, q17, [{at}, #256]",
                "ldp q18, q19, [{at}, #288]",
                "ldp q20, q21, [{at}, #320]",
                "ldp q22, q23, [{at}, #352]",
                "ldp q24, q25, [{at}, #384]",
                "ldp q26, q27, [{at}, #416]",
                "ldp q28, q29, [{at}, #448]",
                "ldp q30, q31, [{at}, #480]",
                "msr fpsr, {fpsr}",
                "msr fpcr, {fpcr}",
                at = in(reg) self.q.as_ptr(),
                fpsr = in(reg) self.fpsr,
                fpcr = in(reg) self.fpcr,
                options(nostack, preserves_flags),
            );
        }
    }

    fn save(&mut self) {
        // SAFETY: writes the 512 bytes of the array; this code has the only reference to it.
        unsafe {
            asm!(
                ".arch_extension fp",
                ".arch_extension simd",
                "stp q0, q1, [{at}]",
                "stp q2, q3, [{at}, #32]",
                "stp q4, q5, [{at}, #64]",
                "stp q6, q7, [{at}, #96]",
                "stp q8, q9, [{at}, #128]",
                "stp q10, q11, [{at}, #160]",
                "stp q12, q13, [{at}, #192]",
                "stp q14, q15, [{at}, #224]",
                "stp q16, q17, [{at}, #256]",
                "stp q18, q19, [{at}, #288]",
                "stp q20, q21, [{at}, #320]",
                "stp q22, q23, [{at}, #352]",
                "stp q24, q25, [{at}, #384]",
                "stp q26, q27, [{at}, #416]",
                "stp q28, q29, [{at}, #448]",
                "stp q30, q31, [{at}, #480]",
                "mrs {fpsr}, fpsr",
                "mrs {fpcr}, fpcr",
                at = in(reg) self.q.as_mut_ptr(),
                fpsr = out(reg) self.fpsr,
                fpcr = out(reg) self.fpcr,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Lets the guest, and us, use vector and floating-point registers, or does not.
fn set_open(open: bool) {
    // SAFETY: guests have no other traps than before; EL2 uses the registers only after it has opened them.
    unsafe { write_register!("cptr_el2", el2::cptr(open)) };
}
