//! Where a block begins in its pages.
//!
//! If all blocks began at a page's start, their first lines would all be in the same few sets of each core's cache.
//! With more vCPUs than a set has ways, they would evict each other. So each block begins one line later than the one
//! before.

use crate::LINE;

/// Bytes of a page, after which the sets of the innermost caches repeat.
pub const PAGE: usize = 4096;

/// Offset of the block of vCPU or pCPU `index` in its pages, in bytes.
#[must_use]
pub const fn stagger(index: usize) -> usize {
    index % (PAGE / LINE) * LINE
}

/// Number of pages for a block of `size` bytes, wherever it begins.
#[must_use]
pub const fn pages(size: usize) -> usize {
    (size + PAGE - LINE).div_ceil(PAGE)
}
