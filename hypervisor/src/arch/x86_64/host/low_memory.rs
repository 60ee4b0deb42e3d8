//! Memory below 1 MiB, which the frame pool does not have: for the VM that has the machine's devices. Its kernel starts
//! further CPUs there, as kernels do on a PC.

#![expect(unsafe_code, reason = "gives memory an owner")]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use addr::{Hpa, HpaRange};

use super::boot;
use crate::arch::ram::LOW_END;
use crate::frames::Frames;

static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// All of it that is RAM, and no boot module's. The second call gives none. All pCPUs have started: no code uses the
/// memory any more.
pub(in crate::arch::x86_64) fn take() -> Vec<Frames> {
    let Some(handover) = boot::handover().filter(|_| !IS_TAKEN.swap(true, Ordering::AcqRel)) else { return Vec::new() };
    let mut ram = handover.memory.ram();
    for module in handover.modules() {
        ram.remove(module);
    }
    let low = ram.iter().filter_map(|range| {
        let end = range.end().min(LOW_END);
        HpaRange::new(range.start, end.0.checked_sub(range.start.0)?).filter(|range| range.bytes() > 0)
    });
    // SAFETY: RAM in whole pages, below the limit, in the direct map with all RAM. It is taken once.
    low.map(|range: HpaRange| unsafe { Frames::low(Hpa(range.start.0), range.bytes()) }).collect()
}
