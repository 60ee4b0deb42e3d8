//! One cached instruction, with many readers and one writer at a time: a sequence lock.
//!
//! The version is odd during a write. A reader accepts what it has read only if the version was even and is unchanged.
//! A writer that finds another writer gives up. So no vCPU waits.

use crate::rivals::registry::Ticket;
use crate::rivals::sync::{AtomicU64, Ordering, fence};

/// Pages that an instruction can depend on: its code page, and the page tables on the walk to it.
pub(crate) const MAX_TICKETS: usize = 6;

/// Two cache lines, shared with no other slot.
#[repr(C, align(128))]
pub(crate) struct Slot {
    version: AtomicU64,
    key: [AtomicU64; 3],
    decoded: [AtomicU64; 4],
    tickets: [AtomicU64; MAX_TICKETS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 128);

/// What a slot holds.
#[derive(Clone, Copy)]
pub(crate) struct Contents {
    pub(crate) key: [u64; 3],
    pub(crate) decoded: [u64; 4],
    pub(crate) tickets: [Ticket; MAX_TICKETS],
}

impl Slot {
    pub(crate) fn new() -> Self {
        Self {
            version: AtomicU64::new(0),
            key: core::array::from_fn(|_| AtomicU64::new(0)),
            decoded: core::array::from_fn(|_| AtomicU64::new(0)),
            // Void tickets mark the slot as empty: a key of zeros is a valid key.
            tickets: core::array::from_fn(|_| AtomicU64::new(Ticket::VOID.0)),
        }
    }

    /// The packed instruction under this key, if its first `tickets` tickets are all current.
    #[inline]
    pub(crate) fn find(&self, key: [u64; 3], tickets: usize, current: impl Fn(Ticket) -> bool) -> Option<[u64; 4]> {
        let version = self.version.load(Ordering::Acquire);
        let same = |(here, wanted): (&AtomicU64, u64)| here.load(Ordering::Relaxed) == wanted;
        if !version.is_multiple_of(2) || !self.key.iter().zip(key).all(same) {
            return None;
        }
        let decoded = self.decoded.each_ref().map(|word| word.load(Ordering::Relaxed));
        let current = |word: &AtomicU64| current(Ticket(word.load(Ordering::Relaxed)));
        if !self.tickets.iter().take(tickets).all(current) {
            return None;
        }

        // A writer of any word that was read above has changed the version before, and that is visible now.
        fence(Ordering::Acquire);
        (self.version.load(Ordering::Relaxed) == version).then_some(decoded)
    }

    /// The right to write, or `None` if another vCPU has it.
    pub(crate) fn try_write(&self) -> Option<Writing<'_>> {
        let version = self.version.load(Ordering::Relaxed);
        if !version.is_multiple_of(2) {
            return None;
        }
        self.version.compare_exchange(version, version + 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // A reader that sees a word written from now on must see the odd version too.
        fence(Ordering::Release);
        Some(Writing { slot: self, version })
    }
}

/// The right to write to a slot. Lookups miss while it exists.
pub(crate) struct Writing<'a> {
    slot: &'a Slot,
    version: u64,
}

impl Writing<'_> {
    /// What is in the slot.
    pub(crate) fn contents(&self) -> Contents {
        let Slot { key, decoded, tickets, .. } = self.slot;
        Contents {
            key: key.each_ref().map(|word| word.load(Ordering::Relaxed)),
            decoded: decoded.each_ref().map(|word| word.load(Ordering::Relaxed)),
            tickets: tickets.each_ref().map(|word| Ticket(word.load(Ordering::Relaxed))),
        }
    }

    pub(crate) fn write(&mut self, contents: &Contents) {
        let to = self.slot.key.iter().chain(&self.slot.decoded).chain(&self.slot.tickets);
        let tickets = contents.tickets.map(|ticket| ticket.0);
        for (to, from) in to.zip(contents.key.iter().chain(&contents.decoded).chain(&tickets)) {
            to.store(*from, Ordering::Relaxed);
        }
    }
}

impl Drop for Writing<'_> {
    /// From here on lookups find the slot's content.
    fn drop(&mut self) {
        self.slot.version.store(self.version + 2, Ordering::Release);
    }
}
