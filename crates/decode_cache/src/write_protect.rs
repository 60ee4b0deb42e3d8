//! The design of 2015: decoded instructions by where they are, kept true by write protection.
//!
//! A remembered instruction depends on the page of its code and, where page tables vouch for the walk to it, on these. All
//! of them are registered ([`registry`](crate::registry)) and read-only for the guest. Whoever wants to write to one faults;
//! the fault forgets what depends on the page, in one step, and then lets the write happen.
//!
//! **Why what is found is right.** Inserting is done in this order:
//!
//! 1. Each page is registered and made read-only, and the generation that it is registered under is noted.
//! 2. If any right to write was taken away, by us or by another vCPU that has not flushed yet, flush: until then a vCPU
//!    may write without a fault, with a right that its TLB remembers.
//! 3. The bytes are read, and the tables are walked, *once more*. From step 2 on they cannot change without a fault, and
//!    the fault changes the generation before it lets the write happen. So what is read now is what is there as long as
//!    the generations are the noted ones; and lookups compare just these. If the instruction was decoded from other bytes,
//!    it is not remembered.
//!
//! If a page is evicted anywhere in between, its generation differs from the noted one for good, and the entry is void
//! from the start.
//!
//! **The hypervisor's own writes** do not fault. It must say so ([`written`](WriteProtect::written)) before it writes, and
//! look again after it has ([`WriteProtect::write_as_host`]): a page that was not registered when it asked can be when it
//! writes, with the old bytes read in step 3.
//!
//! **Bounds.** Memory is fixed at creation. A lookup waits for nobody. No lock is held while anything is flushed, read or
//! walked, nor while another processor is waited for that changes stage 2. So [`written`](WriteProtect::written) and
//! [`write_as_host`](WriteProtect::write_as_host) wait for changes of single leaves at most, and may be called by whom a flush
//! waits for.

#[cfg(test)]
pub(crate) mod tests;

use alloc::boxed::Box;
use core::marker::PhantomData;

use addr::{Gpa, PAGE_BYTES};

use crate::bytes::MULTIPLIER;
use crate::registry::{MAX_PAGES, Registry, Role, Ticket};
use crate::slot::{Contents, MAX_TICKETS, Slot};
use crate::sync::{Ordering, fence};
use crate::{Bytes, Cause, Decoded, Lost, MAX_LENGTH, Outcome, Place, Protect, Refusal};

/// Most page tables on the way to an instruction.
pub const MAX_TABLES: usize = MAX_TICKETS - 1;

/// Who says that the guest's page tables still lead to the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vouching {
    /// The caller, who walks them each time: [`Place::gpa`] is part of the key. Only code pages are protected.
    Walk,
    /// The tables themselves, which are protected too: nobody walks, and lookups do not look at [`Place::gpa`].
    Tables,
}

/// How much memory is taken, once. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Instructions that can be remembered, 128 bytes each.
    pub slots: usize,
    /// Pages that can be protected at once, at most 2048, 80 bytes each.
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

/// What became of an insertion, and what it did to others.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insertion {
    /// Whether it is remembered.
    pub outcome: Outcome,
    /// What is no longer remembered because a page had to leave for one of this instruction's.
    pub lost: Lost,
    /// Whether it had to flush.
    pub flushed: bool,
}

impl<D: Decoded> WriteProtect<D> {
    /// One that remembers nothing yet.
    ///
    /// # Panics
    ///
    /// When a size is no power of two, or there are more than 2048 pages.
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

    /// Who says that the page tables still lead to the code.
    #[must_use]
    pub const fn vouching(&self) -> Vouching {
        self.vouching
    }

    /// The instruction at this place, if it is remembered.
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

    /// Remembers the instruction that was found at this place, of these bytes. To be called when it was carried out.
    ///
    /// Where tables vouch, `tables` are the pages of the walk, and `rewalk` walks once more, without any effect on the
    /// guest, and says whether the way led through the same tables to the same GPA. Elsewhere neither is looked at.
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
            Insertion { outcome: Outcome::Refused(Refusal::Changed), lost: Lost::default(), flushed: false };
        let tables = if self.vouching == Vouching::Tables { tables } else { &[] };
        insertion.outcome = self
            .try_insert(place, bytes, decoded, tables, protect, rewalk, &mut insertion)
            .unwrap_or_else(Outcome::Refused);
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
    ) -> Result<Outcome, Refusal> {
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

        // The hypervisor's own writes are not flushed: they look for a registered page after they are done, and so we
        // look at memory after the registration is told. One of the two sees the other.
        fence(Ordering::SeqCst);
        if !still_there(gpa, &bytes.prefix(length), protect) || (self.vouching == Vouching::Tables && !rewalk()) {
            return Err(Refusal::Changed);
        }

        self.store(place, &Contents { key, decoded: decoded.pack(), tickets })
    }

    /// Registers and protects all pages. Also says whether a flush is owed.
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

        // Tickets that are not needed are the code's once more: lookups compare all, whatever their number.
        let (ticket, mut owed) = self.registry.register(code, protect, lost)?;
        let mut tickets = [ticket; MAX_TICKETS];
        for (ticket, table) in tickets[1..].iter_mut().zip(tables) {
            let registered = self.registry.register(*table, protect, lost)?;
            *ticket = registered.0;
            owed |= registered.1;
        }
        Ok((tickets, owed))
    }

    /// Makes it found.
    fn store(&self, place: &Place, contents: &Contents) -> Result<Outcome, Refusal> {
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
        Ok(if was_valid && old.key != contents.key { Outcome::Replaced } else { Outcome::Stored })
    }

    /// Somebody is about to write to this page, walks it as a table, or takes it away: what depends on it is forgotten,
    /// and then it is writable, unless another processor changes stage 2 there at the moment. Says how much that was; `None` if
    /// the page is not one of ours.
    ///
    /// For the guest's writes, at the stage-2 fault: before asking whether the guest may write at all. The guest tries again in
    /// any case, and faults again while the page is read-only. `None` may also mean that another vCPU has been faster.
    pub fn written(&self, gpa: Gpa, cause: Cause, protect: &impl Protect) -> Option<Lost> {
        self.registry.forget(gpa, cause, protect)
    }

    /// Whether the page is registered, and so to be told of before it is written. One load in a VM that has no such page.
    #[inline]
    #[must_use]
    pub fn covers(&self, gpa: Gpa) -> bool {
        self.registry.covers(gpa)
    }

    /// Carries out a write by the hypervisor into one page of the guest, and forgets what depends on it. When this
    /// returns, nothing from before the write is found any more.
    pub fn write_as_host<R>(&self, gpa: Gpa, protect: &impl Protect, write: impl FnOnce() -> R) -> (R, Lost) {
        let forget = || {
            let covered = self.covers(gpa);
            let lost = if covered { self.written(gpa, Cause::Host, protect) } else { None };
            lost.unwrap_or_default()
        };

        let before = forget();
        let result = write();
        // Whoever registered the page in between may have read what was there before. See `try_insert`.
        fence(Ordering::SeqCst);
        let after = forget();
        (result, Lost { code: before.code + after.code, tables: before.tables + after.tables })
    }

    /// All that must be equal, beside the tickets. `None` where nothing can be remembered.
    #[inline]
    fn key(&self, place: &Place) -> Option<[u64; 3]> {
        let gpa = match self.vouching {
            Vouching::Walk => place.gpa?.0,
            Vouching::Tables => 0,
        };
        // 52 bits are all that a physical address has (APM vol. 2, 5.1); the mode is below them.
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

/// Each page once, with what it is to the instruction.
fn distinct(tickets: &[Ticket; MAX_TICKETS]) -> impl Iterator<Item = (Ticket, Role)> + '_ {
    let first = |(at, ticket): &(usize, &Ticket)| !tickets[..*at].contains(ticket);
    tickets
        .iter()
        .enumerate()
        .filter(first)
        .map(|(at, ticket)| (*ticket, if at == 0 { Role::Code } else { Role::Table }))
}
