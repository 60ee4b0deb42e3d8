//! Interrupts and news that other pCPUs leave for a vCPU, because they must not touch its interrupt state.

use core::sync::atomic::{AtomicU64, Ordering};

/// One word of news for a vCPU. It belongs next to the vCPU's mailbox: after each change the caller posts to the vCPU,
/// which also publishes the change.
#[derive(Debug, Default)]
pub struct Posted(AtomicU64);

/// The content of a [`Posted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Taken(u64);

/// Bits below are the private INTIDs that were raised.
const SPIS: u64 = 1 << 32;

impl Posted {
    /// Nothing posted.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Makes a private interrupt pending. A number above 31 is ignored.
    pub fn raise(&self, intid: u32) {
        if intid < 32 {
            self.0.fetch_or(1 << intid, Ordering::Relaxed);
        }
    }

    /// Announces news of the distributor.
    pub fn announce_spis(&self) {
        self.0.fetch_or(SPIS, Ordering::Relaxed);
    }

    /// The owner takes the content, for [`VcpuGic::accept`](super::VcpuGic::accept).
    pub fn take(&self) -> Taken {
        // It is mostly empty, and a read is cheaper than a swap.
        Taken(match self.0.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.0.swap(0, Ordering::Relaxed),
        })
    }
}

impl Taken {
    /// Private interrupts that were raised.
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
    pub(super) const fn raised(self) -> u32 {
        self.0 as u32
    }

    /// Whether the distributor has news.
    pub(super) const fn has_spis(self) -> bool {
        self.0 & SPIS != 0
    }
}
