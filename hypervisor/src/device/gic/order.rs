//! Chooses the interrupts for the list registers if there are more than fit: those that the guest needs first.
//!
//! * By priority, active before pending. The guest next ends the active one of highest priority, unless a pending one
//!   of higher priority preempts it; that one comes before it.
//! * But pending before active if the guest splits the end of an interrupt in two (EOImode = 1). An active interrupt
//!   after the first half of its end no longer blocks others, but it would take their place.

use super::{FIRST_SPI, MAX_LISTS};

/// Whether interrupts of a kind found no place in the list registers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unlisted {
    pub(super) private_pending: bool,
    pub(super) private_active: bool,
    pub(super) spi_pending: bool,
    pub(super) spi_active: bool,
}

/// An interrupt that wants a place, as a number: the lower, the earlier.
///
/// ```text
///  19          18       11 10       9       0
/// +-----------+-----------+--------+---------+
/// | can wait  | priority  | pending|  INTID  |
/// +-----------+-----------+--------+---------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u32);

impl Candidate {
    pub(super) fn new(intid: u32, priority: u8, active: bool, splits_end: bool) -> Self {
        let can_wait = u32::from(active && splits_end);
        Self(can_wait << 19 | u32::from(priority) << 11 | u32::from(!active) << 10 | intid & 0x3ff)
    }

    pub(super) const fn intid(self) -> u32 {
        self.0 & 0x3ff
    }

    const fn is_pending(self) -> bool {
        self.0 & 1 << 10 != 0
    }
}

/// The first few candidates, in order.
pub(super) struct First {
    candidates: [Candidate; MAX_LISTS],
    count: usize,
    places: usize,
}

impl First {
    pub(super) const fn new(places: usize) -> Self {
        Self { candidates: [Candidate(u32::MAX); MAX_LISTS], count: 0, places }
    }

    /// Adds a candidate. If one then has no place, records its kind in `unlisted`.
    pub(super) fn add(&mut self, candidate: Candidate, unlisted: &mut Unlisted) {
        let at = self.candidates[..self.count].partition_point(|earlier| *earlier < candidate);
        let dropped = if self.count < self.places {
            self.count += 1;
            None
        } else {
            Some(if at == self.count { candidate } else { self.candidates[self.count - 1] })
        };
        if at < self.count {
            self.candidates[at..self.count].rotate_right(1);
            self.candidates[at] = candidate;
        }
        let Some(dropped) = dropped else { return };
        *match (dropped.intid() < FIRST_SPI, dropped.is_pending()) {
            (true, true) => &mut unlisted.private_pending,
            (true, false) => &mut unlisted.private_active,
            (false, true) => &mut unlisted.spi_pending,
            (false, false) => &mut unlisted.spi_active,
        } = true;
    }

    pub(super) fn chosen(&self) -> impl Iterator<Item = Candidate> {
        self.candidates[..self.count].iter().copied()
    }
}
