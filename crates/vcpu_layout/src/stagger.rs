//! Where in its pages a block begins.
//!
//! If all blocks began with a page, their first lines would all be in the same few sets of each core's cache: those of
//! more vCPUs than a set has ways would throw each other out. So each begins one line later than the one before.

use crate::LINE;

/// Bytes of a page, after which the sets of the innermost caches repeat.
pub const PAGE: usize = 4096;

/// Bytes from the start of its pages to the block of vCPU or pCPU `index`.
#[must_use]
pub const fn stagger(index: usize) -> usize {
    index % (PAGE / LINE) * LINE
}

/// Pages to be had for a block of `size` bytes, wherever it begins.
#[must_use]
pub const fn pages(size: usize) -> usize {
    (size + PAGE - LINE).div_ceil(PAGE)
}
