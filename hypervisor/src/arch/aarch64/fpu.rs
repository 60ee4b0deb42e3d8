//! Vector and floating-point state of guests.
//!
//! The hypervisor uses no vector registers, so a guest's stay where they are across its exits, and across a wait from
//! which the vCPU comes back to the same pCPU. They are saved when the vCPU leaves the pCPU and loaded again only if
//! somebody else's state is in the registers by then. SVE and SME are hidden from guests.

#![expect(unsafe_code, reason = "vector registers are accessed behind the compiler's back")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::virtualization::HostContext;

/// One vCPU's state while it is not in the registers.
#[repr(C, align(16))]
pub(super) struct FpuState {
    /// Q0 to Q31.
    q: [[u64; 2]; 32],
    fpsr: u64,
    fpcr: u64,
    /// Tells this state from all others ever made; 0 is nobody's.
    identity: u64,
}

static IDENTITIES: AtomicU64 = AtomicU64::new(1);

impl FpuState {
    /// The state at reset: all zero.
    pub(super) fn new() -> Self {
        Self { q: [[0; 2]; 32], fpsr: 0, fpcr: 0, identity: IDENTITIES.fetch_add(1, Ordering::Relaxed) }
    }

    /// Brings the state into this pCPU's registers, unless it is still there: the vCPU ran here last (`came_back`), and
    /// nobody else's state has been loaded since.
    pub(super) fn load(&mut self, cpu: &HostContext, came_back: bool) {
        if came_back && cpu.fp_holder.load(Ordering::Relaxed) == self.identity {
            return;
        }
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
        cpu.fp_holder.store(self.identity, Ordering::Relaxed);
    }

    /// Saves the state from this pCPU's registers; they go on holding it.
    pub(super) fn save(&mut self) {
        // SAFETY: writes the 512 bytes of the array; nobody else refers to it while we hold it exclusively.
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
