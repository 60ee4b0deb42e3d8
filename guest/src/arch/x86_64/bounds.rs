//! MPX bound registers in the format of XSAVE: state that no guest is offered (APM vol. 2, 11.5).
//!
//! XRSTOR and XSAVE move them while MPX is off, so nothing else of the processor is involved.

use core::arch::asm;

use super::attempt::{self, Fault};

/// BNDREGS and BNDCSR in XCR0.
const COMPONENTS: u64 = 0b11000;
/// BNDREGS alone.
const BNDREGS: u32 = 0b01000;
/// Where BNDREGS is in the standard form of the area, which no processor has elsewhere.
const OFFSET: usize = 960 / 8;
/// XSTATE_BV, first word of the header.
const XSTATE_BV: usize = 512 / 8;

/// Words of the four registers.
pub(crate) const WORDS: usize = 8;

/// An XSAVE area up to BNDCSR.
#[repr(C, align(64))]
struct Area([u64; 1088 / 8]);

/// Lets XSAVE have the registers.
pub(crate) fn allow() -> Result<(), Fault> {
    attempt::xsetbv(0, attempt::xgetbv() | COMPONENTS)
}

/// Loads the registers.
pub(crate) fn load(pattern: &[u64; WORDS]) {
    let mut area = Area([0; 1088 / 8]);
    area.0[XSTATE_BV] = u64::from(BNDREGS);
    area.0[OFFSET..OFFSET + WORDS].copy_from_slice(pattern);
    // SAFETY: the area is aligned, long enough for the one component that is asked for, and its header is valid.
    unsafe {
        asm!("xrstor64 [{}]", in(reg) &raw const area, in("eax") BNDREGS, in("edx") 0, options(nostack, preserves_flags));
    }
}

/// What the registers contain.
pub(crate) fn held() -> [u64; WORDS] {
    let mut area = Area([0; 1088 / 8]);
    // SAFETY: as for `load`; XSAVE writes within the area.
    unsafe {
        asm!("xsave64 [{}]", in(reg) &raw mut area, in("eax") BNDREGS, in("edx") 0, options(nostack, preserves_flags));
    }
    let is_initial = area.0[XSTATE_BV] & u64::from(BNDREGS) == 0;
    core::array::from_fn(|word| if is_initial { 0 } else { area.0[OFFSET + word] })
}
