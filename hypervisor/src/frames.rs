//! The pool of free host memory.
//!
//! The pool has all RAM except the hypervisor's image, its boot payload, the firmware's memory and the memory below 1
//! MiB. A caller owns its memory as [`Frames`], and frees it by dropping it. Memory is not zeroed: a caller that gives
//! it to a guest calls [`Frames::zero`] first.
//!
//! The heap grows from the same pool, and its allocations cannot fail. So a reserve is only for the heap: VMs may take
//! all other memory, and the hypervisor's own objects still have room. Code that makes many objects for a VM checks
//! [`is_low`] in between, and stops while there is a reserve.

use alloc::vec::Vec;

use addr::{Hpa, PAGE_BYTES};

use crate::arch::ram;
pub(crate) use crate::arch::ram::{Filled, Frames};
use crate::exhaustion;

/// The pool has no run of free frames that is long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

impl Frames {
    /// Takes `bytes` (rounded up to whole frames) at a multiple of `align`, a power of two.
    pub(crate) fn allocate(bytes: u64, align: u64) -> Result<Self, Exhausted> {
        if exhaustion::strikes() {
            return Err(Exhausted);
        }
        let block = bytes.max(align).max(PAGE_BYTES).checked_next_power_of_two().ok_or(Exhausted)?;
        let mut frames = Self::take_block(block.ilog2()).ok_or(Exhausted)?;
        frames.truncate(bytes.max(1));
        Ok(frames)
    }

    /// Takes a free run below `end`, of at most `bytes` and at least `align`, at a multiple of `align`: one block of
    /// the pool.
    pub(crate) fn allocate_below(end: Hpa, bytes: u64, align: u64) -> Result<Self, Exhausted> {
        if exhaustion::strikes() {
            return Err(Exhausted);
        }
        let least = align.max(PAGE_BYTES).ilog2();
        let most = bytes.checked_ilog2().ok_or(Exhausted)?;
        (least..=most).rev().find_map(|order| Self::take_block_below(order, end)).ok_or(Exhausted)
    }

    /// Takes the longest free run, of at most `bytes` and at least `align`, at a multiple of `align`.
    ///
    /// For callers that accept several runs: repeated calls for the missing rest collect memory that is not free in one
    /// piece. Run lengths are multiples of `align` if `bytes` is.
    pub(crate) fn allocate_at_most(bytes: u64, align: u64) -> Result<Self, Exhausted> {
        if exhaustion::strikes() {
            return Err(Exhausted);
        }
        let least = align.max(PAGE_BYTES).ilog2();
        let whole = bytes.checked_next_power_of_two().ok_or(Exhausted)?.ilog2();
        let mut frames = (least..=whole.max(least)).rev().find_map(Self::take_block).ok_or(Exhausted)?;
        frames.truncate(bytes.max(align));
        Ok(frames)
    }
}

/// Bytes of the reserve: some thousands of messages, timers and run-queue entries; eight times the heap's growth step.
const RESERVE_ORDER: u32 = 23;
/// The heap's step of growth.
pub(crate) const HEAP_CHUNK_ORDER: u32 = 20;

/// Sets the heap's reserve aside, before the first VM takes anything.
///
/// # Errors
/// When the host does not even have that.
pub(crate) fn set_reserve_aside() -> Result<(), Exhausted> {
    if ram::set_reserve_aside(RESERVE_ORDER) { Ok(()) } else { Err(Exhausted) }
}

/// Whether the heap uses its reserve: no memory is left for allocations that may fail.
pub(crate) fn is_low() -> bool {
    exhaustion::strikes() || ram::is_reserve_used() && Frames::take_block(HEAP_CHUNK_ORDER).is_none()
}

/// Reserves room for `more` objects in a list whose length depends on a VM's configuration.
///
/// # Errors
/// The heap has no room.
pub(crate) fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<(), Exhausted> {
    list.try_reserve_exact(more).map_err(|_| Exhausted)?;
    if is_low() { Err(Exhausted) } else { Ok(()) }
}

/// Bytes free now.
pub(crate) fn free_bytes() -> u64 {
    ram::free_and_total().0
}

/// Bytes that objects on the heap take.
pub(crate) fn heap_used_bytes() -> u64 {
    #[cfg(not(test))]
    let used = crate::heap::used_bytes();
    // In tests the heap is the process's.
    #[cfg(test)]
    let used = 0;
    used
}

/// Bytes that the heap has taken, of the pool and of its reserve.
pub(crate) fn heap_bytes() -> u64 {
    ram::heap_bytes()
}

/// Bytes that the pool was given at boot.
pub(crate) fn total_bytes() -> u64 {
    ram::free_and_total().1
}
