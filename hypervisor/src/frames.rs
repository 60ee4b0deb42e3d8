//! Which frames of host memory are free, and how much of them a caller gets.
//!
//! All RAM that is not the hypervisor's image, its boot payload, firmware's or below 1 MiB is in one pool. A caller
//! owns what it took as [`Frames`], and gives it back by dropping it. Nothing is zeroed on the way: who shows memory to
//! a guest calls [`Frames::zero`] first.

use addr::PAGE_BYTES;

use crate::arch::ram;
pub(crate) use crate::arch::ram::Frames;

/// The pool has no run of free frames that is long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

impl Frames {
    /// Takes `bytes` (rounded up to whole frames) at a multiple of `align`, a power of two.
    pub(crate) fn allocate(bytes: u64, align: u64) -> Result<Self, Exhausted> {
        let block = bytes.max(align).max(PAGE_BYTES).checked_next_power_of_two().ok_or(Exhausted)?;
        let mut frames = Self::take_block(block.ilog2()).ok_or(Exhausted)?;
        frames.truncate(bytes.max(1));
        Ok(frames)
    }

    /// Takes the longest run there is, but at most `bytes` and at least `align`, at a multiple of `align`.
    ///
    /// For those who can live with several runs: calling again for what is still missing gathers memory that is not
    /// free in one piece. Run lengths are multiples of `align` when `bytes` is.
    pub(crate) fn allocate_at_most(bytes: u64, align: u64) -> Result<Self, Exhausted> {
        let least = align.max(PAGE_BYTES).ilog2();
        let whole = bytes.checked_next_power_of_two().ok_or(Exhausted)?.ilog2();
        let mut frames = (least..=whole.max(least)).rev().find_map(Self::take_block).ok_or(Exhausted)?;
        frames.truncate(bytes.max(align));
        Ok(frames)
    }
}

/// Bytes free now.
pub(crate) fn free_bytes() -> u64 {
    ram::free_and_total().0
}

/// Bytes that the pool was given at boot.
pub(crate) fn total_bytes() -> u64 {
    ram::free_and_total().1
}
