//! What others leave for a vCPU's interrupt state, which they must not touch.

use core::sync::atomic::{AtomicU64, Ordering};

/// One word of news for a vCPU. It belongs beside the vCPU's mailbox: after each change the vCPU must be posted to,
/// which also publishes the change.
#[derive(Debug, Default)]
pub(crate) struct Posted(AtomicU64);

/// What was in a [`Posted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Taken(u64);

/// Bits below are the private INTIDs that were raised.
const SPIS: u64 = 1 << 32;

impl Posted {
    /// Nothing posted.
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Makes a private interrupt pending. A number above 31 is ignored.
    pub(crate) fn raise(&self, intid: u32) {
        if intid < 32 {
            self.0.fetch_or(1 << intid, Ordering::Relaxed);
        }
    }

    /// Tells that the distributor has news.
    pub(crate) fn announce_spis(&self) {
        self.0.fetch_or(SPIS, Ordering::Relaxed);
    }

    /// The owner takes what there is, for [`VcpuGic::accept`](super::VcpuGic::accept).
    pub(crate) fn take(&self) -> Taken {
        // Mostly empty when looked at, and a read is cheaper than a swap.
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
