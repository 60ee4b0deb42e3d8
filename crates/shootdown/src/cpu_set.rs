//! A set of pCPUs.

/// Up to 64 pCPUs, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(u64);

impl CpuSet {
    /// Number of pCPUs that a set can hold: 0 to `CAPACITY - 1`.
    pub const CAPACITY: u32 = 64;

    /// An empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self(0)
    }

    /// Adds a pCPU. A number of [`CpuSet::CAPACITY`] or above is not added.
    pub fn insert(&mut self, cpu: u32) {
        self.0 |= 1_u64.checked_shl(cpu).unwrap_or(0);
    }

    /// Removes a pCPU.
    pub fn remove(&mut self, cpu: u32) {
        self.0 &= !1_u64.checked_shl(cpu).unwrap_or(0);
    }

    /// Whether the pCPU is in the set.
    #[must_use]
    pub fn contains(self, cpu: u32) -> bool {
        self.0 & 1_u64.checked_shl(cpu).unwrap_or(0) != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of pCPUs.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The lowest number.
    #[must_use]
    pub fn first(self) -> Option<u32> {
        (self.0 != 0).then(|| self.0.trailing_zeros())
    }

    /// The numbers, ascending.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        let mut rest = self;
        core::iter::from_fn(move || {
            let next = rest.first()?;
            rest.remove(next);
            Some(next)
        })
    }
}
