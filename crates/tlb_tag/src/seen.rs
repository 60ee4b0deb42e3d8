//! The epoch that a vCPU's TLB entries are from: one word, compared at each entry.

/// An epoch of a VM, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl Seen {
    /// No epoch: all entries must be flushed.
    pub(crate) const VOID: Self = Self(0);
    /// Marks an epoch that was seen, so that none equals [`Seen::VOID`].
    const MARK: u64 = 1 << 63;

    /// This epoch, which is below 2^63.
    #[inline]
    pub(crate) const fn epoch(epoch: u64) -> Self {
        Self(epoch | Self::MARK)
    }

    /// The number of the epoch; zero if there is none.
    pub(crate) const fn number(self) -> u64 {
        self.0 & !Self::MARK
    }

    /// Zero if it is `other`, to be combined with further comparisons.
    #[inline]
    pub(crate) const fn difference(self, other: Self) -> u64 {
        self.0 ^ other.0
    }
}
