//! The design of 2015: caches decoded instructions by address, kept correct by write protection.
//!
//! A cached instruction depends on the page of its code and, if page tables are protected, on the tables of the walk to
//! it. All these pages are registered ([`registry`](super::registry)) and read-only for the guest. A write faults; the
//! fault drops all entries of the page in one step, and then allows the write.
//!
//! **Why a hit is correct.** An insertion has these steps:
//!
//! 1. Register each page, make it read-only, and note its generation.
//! 2. If this vCPU, or another one that has not flushed yet, has taken a right to write away, flush. Until then a vCPU
//!    may write without a fault, with a right in its TLB.
//! 3. Read the bytes, and walk the tables, *once more*. From step 2 on they cannot change without a fault, and the
//!    fault changes the generation before it allows the write. So this content is valid as long as the generations are
//!    the noted ones, and lookups compare just these. If the instruction was decoded from other bytes, it is not
//!    cached.
//!
//! If a page is evicted at any point in between, its generation differs from the noted one for ever. The entry is then
//! void from the start.
//!
//! **The hypervisor's own writes** do not fault. It must report them ([`written`](WriteProtect::written)) before it
//! writes, and check again afterwards ([`WriteProtect::write_as_host`]). A page that was not registered at the first
//! check may be registered by the second, with the old bytes read in step 3.
//!
//! **Bounds.** Memory is fixed at creation. A lookup never waits. No lock is held during a flush, a read, a walk, or a
//! wait for another processor that changes stage 2. So [`written`](WriteProtect::written) and
//! [`write_as_host`](WriteProtect::write_as_host) wait only for changes of single leaves, and a vCPU that a flush waits
//! for may call them.

#[cfg(test)]
pub(crate) mod tests;

use alloc::boxed::Box;
use core::marker::PhantomData;

use addr::{Gpa, PAGE_BYTES};

use crate::bytes::MULTIPLIER;
use crate::rivals::registry::{MAX_PAGES, Registry, Role, Ticket};
use crate::rivals::slot::{Contents, MAX_TICKETS, Slot};
use crate::rivals::sync::{Ordering, fence};
use crate::{Bytes, Decoded, DropCause, InsertOutcome, Lost, MAX_LENGTH, Place, Protect, Refusal};

/// Maximum number of page tables on the walk to an instruction.
pub const MAX_TABLES: usize = MAX_TICKETS - 1;

/// What proves that the guest's page tables still lead to the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vouching {
    /// The caller walks them each time: [`Place::gpa`] is part of the key. Only code pages are protected.
    Walk,
    /// The tables are protected too: the caller does not walk, and lookups ignore [`Place::gpa`].
    Tables,
}

/// Memory of the cache, fixed at creation. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Maximum number of cached instructions, 128 bytes each.
    pub slots: usize,
    /// Maximum number of protected pages, at most 2048, 80 bytes each.
    pub pages: usize,
}

impl Default for Size {
    fn default() -> Self {
        Self { slots: 1024, pages: 512 }
    }
}

/// Decoded instructions by place, for all vCPUs of a VM.
pub struct WriteProtect<D> {
    slots: Box<[Slot]>,
    registry: Registry,
    vouching: Vouching,
    decoded: PhantomData<fn(D) -> D>,
}

/// Result of an insertion, and its effect on other entries.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insertion {
    /// Whether it is cached.
    pub outcome: InsertOutcome,
    /// Entries that were dropped because a page had to leave for one of this instruction's.
    pub lost: Lost,
    /// Whether it had to flush.
    pub flushed: bool,
}

impl<D: Decoded> WriteProtect<D> {
    /// An empty cache.
    ///
    /// # Panics
    ///
    /// A size is no power of two, or there are more than 2048 pages.
    #[must_use]
    pub fn new(size: Size, vouching: Vouching) -> Self {
        assert!(size.slots.is_power_of_two() && size.pages.is_power_of_two(), "an index is some bits of a hash");
        assert!(size.pages < MAX_PAGES, "a ticket has bits for no more pages");
        Self {
            slots: (0..size.slots).map(|_| Slot::new()).collect(),
            registry: Registry::new(size.pages),
            vouching,
            decoded: PhantomData,
        }
    }

    /// What proves that the page tables still lead to the code.
    #[must_use]
    pub const fn vouching(&self) -> Vouching {
        self.vouching
    }

    /// The instruction at this place, if it is cached.
    #[inline]
    #[must_use]
    pub fn find(&self, place: &Place) -> Option<D> {
        let key = self.key(place)?;
        let tickets = match self.vouching {
            Vouching::Walk => 1,
            Vouching::Tables => MAX_TICKETS,
        };
        let packed = self.slot(place).find(key, tickets, |ticket| self.registry.is_current(ticket))?;
        D::unpack(packed)
    }

    /// Caches the instruction at this place, with these bytes. Call it after the instruction was executed.
    ///
    /// If page tables are protected, `tables` are the pages of the walk. `rewalk` walks once more, without any effect
    /// on the guest, and returns whether it used the same tables and found the same GPA. Otherwise both are ignored.
    pub fn insert(
        &self,
        place: &Place,
        bytes: &Bytes,
        decoded: D,
        tables: &[Gpa],
        protect: &impl Protect,
        rewalk: impl FnOnce() -> bool,
    ) -> Insertion {
        let mut insertion =
            Insertion { outcome: InsertOutcome::Refused(Refusal::Changed), lost: Lost::default(), flushed: false };
        let tables = if self.vouching == Vouching::Tables { tables } else { &[] };
        insertion.outcome = self
            .try_insert(place, bytes, decoded, tables, protect, rewalk, &mut insertion)
            .unwrap_or_else(InsertOutcome::Refused);
        insertion
    }

    #[expect(clippy::too_many_arguments, reason = "those of insert, and where to say what happened on the way")]
    fn try_insert(
        &self,
        place: &Place,
        bytes: &Bytes,
        decoded: D,
        tables: &[Gpa],
        protect: &impl Protect,
        rewalk: impl FnOnce() -> bool,
        insertion: &mut Insertion,
    ) -> Result<InsertOutcome, Refusal> {
        let gpa = place.gpa.ok_or(Refusal::Unplaced)?;
        let key = self.key(place).ok_or(Refusal::Unplaced)?;
        let length = decoded.length();
        if length == 0 || length > bytes.length() || gpa.0 % PAGE_BYTES + u64::from(length) > PAGE_BYTES {
            return Err(Refusal::Crosses);
        }

        let (tickets, owed) = self.register(gpa, tables, protect, &mut insertion.lost)?;

        if owed {
            protect.flush();
            insertion.flushed = true;
            for ticket in tickets {
                self.registry.settle(ticket);
            }
        }

        // The hypervisor's own writes are not flushed. They look for a registered page after the write; this code reads
        // memory after the registration is visible. One of the two sees the other.
        fence(Ordering::SeqCst);
        if !still_there(gpa, &bytes.prefix(length), protect) || (self.vouching == Vouching::Tables && !rewalk()) {
            return Err(Refusal::Changed);
        }

        self.store(place, &Contents { key, decoded: decoded.pack(), tickets })
    }

    /// Registers and protects all pages. Also returns whether a flush is needed.
    fn register(
        &self,
        code: Gpa,
        tables: &[Gpa],
        protect: &impl Protect,
        lost: &mut Lost,
    ) -> Result<([Ticket; MAX_TICKETS], bool), Refusal> {
        if tables.len() > MAX_TABLES {
            return Err(Refusal::Pages);
        }
        let mut pages = [code; MAX_TICKETS];
        for (page, table) in pages[1..].iter_mut().zip(tables) {
            *page = *table;
        }
        let collides = |(at, page): (usize, &Gpa)| pages[..at].iter().any(|other| self.registry.collide(*page, *other));
        if pages.iter().enumerate().any(collides) {
            return Err(Refusal::Pages);
        }

        // Unused tickets repeat the code's: lookups compare all of them.
        let (ticket, mut owed) = self.registry.register(code, protect, lost)?;
        let mut tickets = [ticket; MAX_TICKETS];
        for (ticket, table) in tickets[1..].iter_mut().zip(tables) {
            let registered = self.registry.register(*table, protect, lost)?;
            *ticket = registered.0;
            owed |= registered.1;
        }
        Ok((tickets, owed))
    }

    /// Makes the entry visible to lookups.
    fn store(&self, place: &Place, contents: &Contents) -> Result<InsertOutcome, Refusal> {
        let mut slot = self.slot(place).try_write().ok_or(Refusal::Busy)?;
        for (counted, (ticket, role)) in distinct(&contents.tickets).enumerate() {
            if !self.registry.count(ticket, role) {
                for (ticket, role) in distinct(&contents.tickets).take(counted) {
                    self.registry.uncount(ticket, role);
                }
                return Err(Refusal::Changed);
            }
        }

        let old = slot.contents();
        let was_valid = old.tickets.iter().all(|ticket| self.registry.is_current(*ticket));
        for (ticket, role) in distinct(&old.tickets) {
            self.registry.uncount(ticket, role);
        }
        slot.write(contents);
        Ok(if was_valid && old.key != contents.key { InsertOutcome::Replaced } else { InsertOutcome::Stored })
    }

    /// Call this before a write to the page, before a walk of it as a table, or before it is taken away. It drops all
    /// entries that depend on the page, and then makes it writable, unless another processor changes stage 2 there now.
    /// Returns the number of dropped entries; `None` if the page is not registered.
    ///
    /// For a guest's write, call it at the stage-2 fault, before the check whether the guest may write at all. The
    /// guest retries in any case, and faults again while the page is read-only. `None` may also mean that another vCPU
    /// was faster.
    pub fn written(&self, gpa: Gpa, cause: DropCause, protect: &impl Protect) -> Option<Lost> {
        self.registry.forget(gpa, cause, protect)
    }

    /// Whether the page is registered, so that a write must be reported first. One load in a VM that has no such page.
    #[inline]
    #[must_use]
    pub fn covers(&self, gpa: Gpa) -> bool {
        self.registry.covers(gpa)
    }

    /// Does a write by the hypervisor to one page of the guest, and drops the entries that depend on it. After it
    /// returns, no lookup finds an entry from before the write.
    pub fn write_as_host<R>(&self, gpa: Gpa, protect: &impl Protect, write: impl FnOnce() -> R) -> (R, Lost) {
        let forget = || {
            let covered = self.covers(gpa);
            let lost = if covered { self.written(gpa, DropCause::Host, protect) } else { None };
            lost.unwrap_or_default()
        };

        let before = forget();
        let result = write();
        // A vCPU that registered the page in between may have read the old content. See `try_insert`.
        fence(Ordering::SeqCst);
        let after = forget();
        (result, Lost { code: before.code + after.code, tables: before.tables + after.tables })
    }

    /// The key, besides the tickets. `None` if nothing can be cached.
    #[inline]
    fn key(&self, place: &Place) -> Option<[u64; 3]> {
        let gpa = match self.vouching {
            Vouching::Walk => place.gpa?.0,
            Vouching::Tables => 0,
        };
        // A physical address has at most 52 bits (APM vol. 2, 5.1); the mode is below them.
        (gpa >> 52 == 0).then_some([place.rip, place.space, gpa << 12 | u64::from(place.mode.0)])
    }

    #[inline]
    fn slot(&self, place: &Place) -> &Slot {
        let hash = (place.rip ^ place.space ^ u64::from(place.mode.0) << 56).wrapping_mul(MULTIPLIER);
        let index = (hash >> 32) as usize & (self.slots.len() - 1);
        &self.slots[index]
    }
}

/// Whether memory holds these bytes.
fn still_there(gpa: Gpa, bytes: &Bytes, protect: &impl Protect) -> bool {
    let mut now = [0; MAX_LENGTH];
    let now = &mut now[..usize::from(bytes.length())];
    protect.read(gpa, now) && Bytes::new(now) == *bytes
}

/// Each page once, with its role for the instruction.
fn distinct(tickets: &[Ticket; MAX_TICKETS]) -> impl Iterator<Item = (Ticket, Role)> + '_ {
    let first = |(at, ticket): &(usize, &Ticket)| !tickets[..*at].contains(ticket);
    tickets
        .iter()
        .enumerate()
        .filter(first)
        .map(|(at, ticket)| (*ticket, if at == 0 { Role::Code } else { Role::Table }))
}
