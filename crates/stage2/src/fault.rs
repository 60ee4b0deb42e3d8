//! Handles a fault of the guest: all of it that concerns the tables is in this file.
//!
//! ```text
//!   fault     what does the entry for this address say, and does it allow the access now?
//!   descend   finds that entry: one load per level
//!   exchange  writes it, if nobody else did: one compare-exchange; wakes its table, see `quiet.rs`
//! ```
//!
//! Any number of processors may do this at the same time, on the same page too. There is no lock: each change is one
//! compare-exchange of one entry, and a processor that loses the race retries on the new value. Only the entry is
//! written. All other operations descend and exchange by the same functions.

use crate::tlbi::{Barrier, Maintenance, Tlbi};
use crate::tree::{entries, range_between, span};
use crate::{Access, Cell, Format, Leaf, PageTableEntry, Pages, Source, Tlb, Walk};
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES};

/// What the caller must do about a fault.
#[derive(Clone, Copy, Debug)]
#[must_use = "a fault may owe a flush before the guest goes on"]
pub enum Fault {
    /// Let the guest retry, after this processor has [flushed](Denial::flush) the denial. The guest may fault again if
    /// another processor was about to change the entry.
    Retry(Denial),
    /// The page is in a large leaf that a dirty log has write-protected, or that the guest can
    /// [execute](Format::is_executable) only in parts. [Split](Walk::split_at_fault) the leaf and call [`Walk::fault`]
    /// again. At a write, another way is to call it with [`Granularity::Whole`].
    Large,
    /// Nothing is mapped there.
    Unmapped,
    /// The page does not allow this access.
    Denied(Leaf),
}

/// Whether the faulting processor may have the entry in its TLB that denied the access. Then it must
/// [flush](Self::flush) it before the guest retries. Other processors may have it too: they fault once more, find
/// nothing to change, and flush their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest may fault for ever on what its processor remembers"]
pub struct Denial(bool);

impl Denial {
    /// The processor has no such entry.
    pub const NONE: Self = Self(false);

    /// Whether the processor may have one.
    #[must_use]
    #[inline]
    pub fn is_cached(self) -> bool {
        self.0
    }

    /// Flushes it from this processor's TLB, where it may have any size. `gpa` is the address that faulted. The order
    /// is that of all flushes: see [`tlbi`](crate::tlbi).
    #[inline]
    pub fn flush(self, gpa: Gpa, cpu: &impl Maintenance) {
        if !self.is_cached() {
            return;
        }
        // For all: another processor's next walk need not fault any more.
        cpu.dsb(Barrier::Stores);
        cpu.tlbi(Tlbi::Ipa { leaves: true, everywhere: false, ipa: gpa, level: None });
        cpu.dsb(Barrier::Local);
        cpu.tlbi(Tlbi::Combined { everywhere: false });
        cpu.dsb(Barrier::Local);
        cpu.isb();
    }
}

/// How to split a large leaf that a dirty log has write-protected, when the guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// Do not split: the whole leaf counts as written.
    Whole,
    /// This page counts as written. Each other page faults at its own first write.
    WriteProtected,
    /// The hardware records writes to all pages from now on, so no other page faults.
    Recorded,
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// Handles a fault of the guest at `gpa`, for the accesses in `wanted`.
    ///
    /// If a dirty log has write-protected the leaf, this makes it writable. If the leaf is large and `granularity` asks
    /// for a split, this returns [`Fault::Large`] instead.
    // Inlined everywhere, so that no result is built only to be passed on.
    #[inline(always)]
    pub fn fault(self, gpa: Gpa, wanted: Access, granularity: Granularity) -> Fault {
        if gpa >= self.tree.limit() {
            return Fault::Unmapped;
        }
        let slot = self.descend(gpa);
        let (hpa, access) = match slot.entry {
            PageTableEntry::Leaf { hpa, access } => (hpa, access),
            // The other processor finishes in a moment. The guest retries, or takes an interrupt meanwhile.
            PageTableEntry::Busy => return Fault::Retry(Denial::NONE),
            PageTableEntry::Empty | PageTableEntry::Table(_) => return Fault::Unmapped,
        };
        if !access.includes(wanted) {
            return Fault::Denied(Leaf { hpa, level: slot.level, bytes: slot.bytes, access });
        }

        let format = self.format();
        if wanted.execute && !format.is_executable(slot.bits) {
            return Fault::Large;
        }
        let is_protected = wanted.write && !format.is_writable(slot.bits);
        if is_protected && slot.level > 0 && granularity != Granularity::Whole {
            return Fault::Large;
        }
        let bits = if is_protected { format.writable(slot.bits) } else { slot.bits };
        let bits = format.touched(bits);
        if bits != slot.bits && !self.exchange(&slot, bits) {
            // Another processor was faster, with this change or another one.
            return Fault::Retry(Denial::NONE);
        }
        if is_protected && slot.level == 0 && granularity == Granularity::Recorded {
            self.without_tlb().apart(move |walk| walk.open_table(slot));
        }
        Fault::Retry(Denial(format.denials_are_cached()))
    }
}

impl<F: Format, P: Pages, T: Tlb> Walk<'_, F, P, T> {
    /// The entry that decides about `gpa`: the first entry on the descent that is not a table.
    #[inline(always)]
    pub(crate) fn descend(self, gpa: Gpa) -> Slot {
        self.descend_to(gpa, 0)
    }

    /// The same, but not below level `lowest`, where the entry may be a table.
    #[inline(always)]
    pub(crate) fn descend_to(self, gpa: Gpa, lowest: u32) -> Slot {
        // A descent of known length needs no loop.
        match self.format().levels() {
            3 => self.descend_from(2, gpa, lowest),
            4 => self.descend_from(3, gpa, lowest),
            levels => self.descend_from(levels - 1, gpa, lowest),
        }
    }

    #[inline(always)]
    fn descend_from(self, mut level: u32, gpa: Gpa, lowest: u32) -> Slot {
        let mut table = Hpa(self.tree.root().0 + (gpa.0 >> span::<F>(level + 1).trailing_zeros()) * PAGE_BYTES);
        let mut above = None;
        loop {
            let cell = Cell::new(table, index::<F>(gpa, level));
            let bits = self.pages.load(cell);
            match self.format().decode(level, bits) {
                PageTableEntry::Table(next) if level > lowest => {
                    above = Some(cell);
                    table = next;
                    level -= 1;
                }
                entry => {
                    let bytes = span::<F>(level);
                    return Slot { cell, bits, entry, level, start: Gpa(gpa.0 & !(bytes - 1)), bytes, above };
                }
            }
        }
    }

    /// Like [`descend`](Self::descend), but waits while another processor replaces the entry.
    ///
    /// A caller that itself replaces an entry must not use it: two such callers would wait for each other.
    #[inline]
    pub(crate) fn descend_and_wait(self, gpa: Gpa) -> Slot {
        self.descend_and_wait_to(gpa, 0)
    }

    /// The same, but not below level `lowest`.
    #[inline]
    pub(crate) fn descend_and_wait_to(self, gpa: Gpa, lowest: u32) -> Slot {
        loop {
            let slot = self.descend_to(gpa, lowest);
            if slot.entry != PageTableEntry::Busy {
                return slot;
            }
            self.tlb.relax();
        }
    }
}

impl<F: Format, P: Pages, T> Walk<'_, F, P, T> {
    /// What decided about `gpa` before another processor broke the entry in `slot`. If that was a table, its entries
    /// are broken as well, or will be. The table is there as long as the walk: it is not freed before.
    pub(crate) fn behind(self, mut slot: Slot, gpa: Gpa) -> Slot {
        loop {
            let bits = self.format().unbroken(slot.bits);
            let entry = self.format().decode(slot.level, bits);
            let PageTableEntry::Table(table) = entry else { return Slot { bits, entry, ..slot } };
            let level = slot.level - 1;
            let (cell, bytes) = (Cell::new(table, index::<F>(gpa, level)), span::<F>(level));
            let start = Gpa(gpa.0 & !(bytes - 1));
            slot = Slot { cell, bits: self.pages.load(cell), entry, level, start, bytes, above: Some(slot.cell) };
        }
    }

    /// Writes `new` if the leaf or the hole in `slot` is unchanged. If the page is writable now, wakes its table.
    #[inline(always)]
    pub(crate) fn exchange(self, slot: &Slot, new: u64) -> bool {
        let done = slot.exchange(self.pages, new);
        if done && slot.level == 0 && !self.is_still(new) {
            self.wake(slot);
        }
        done
    }

    /// Whether the leaf was not written, and cannot be without a fault.
    #[inline]
    pub(crate) fn is_still(self, bits: u64) -> bool {
        let format = self.format();
        let is_written = |source| format.is_written(bits, source);
        !format.is_writable(bits) && !is_written(Source::WriteProtect) && !is_written(Source::Hardware)
    }

    /// Wakes the table that holds `leaf`.
    #[inline(always)]
    fn wake(self, leaf: &Slot) {
        if let Some(cell) = leaf.above {
            self.change_table(cell, |bits| bits & !self.format().quiet());
        }
    }

    /// Changes the software bits of an entry, as long as it points to a table.
    ///
    /// It may point to another table than before. The new table was made from the same pages, so to wake it is only
    /// slow.
    #[inline(always)]
    pub(crate) fn change_table(self, cell: Cell, change: impl Fn(u64) -> u64) {
        let mut bits = self.pages.load(cell);
        loop {
            let new = change(bits);
            if new == bits || !matches!(self.format().decode(1, bits), PageTableEntry::Table(_)) {
                return;
            }
            match self.pages.compare_exchange(cell, bits, new) {
                Ok(()) => return,
                Err(now) => bits = now,
            }
        }
    }
}

/// An entry that is not a table, and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) cell: Cell,
    /// The entry when it was read, raw and decoded.
    pub(crate) bits: u64,
    pub(crate) entry: PageTableEntry,
    pub(crate) level: u32,
    /// First address that the entry decides about, and the number of bytes.
    pub(crate) start: Gpa,
    pub(crate) bytes: u64,
    /// The entry that points to this entry's table, unless that table is the root.
    pub(crate) above: Option<Cell>,
}

impl Slot {
    /// The range that the entry decides about.
    pub(crate) fn page(&self) -> GpaRange {
        range_between(self.start, Gpa(self.start.0 + self.bytes))
    }

    /// The part of that range from `gpa` to `end`.
    pub(crate) fn piece(&self, gpa: Gpa, end: Gpa) -> GpaRange {
        range_between(gpa, end.min(self.page().end()))
    }

    /// The leaf, if it is one.
    #[inline(always)]
    pub(crate) fn leaf(&self) -> Option<Leaf> {
        match self.entry {
            PageTableEntry::Leaf { hpa, access } => Some(Leaf { hpa, level: self.level, bytes: self.bytes, access }),
            PageTableEntry::Empty | PageTableEntry::Busy | PageTableEntry::Table(_) => None,
        }
    }

    /// Access rights of the leaf, if it is one.
    pub(crate) fn access(&self) -> Option<Access> {
        match self.entry {
            PageTableEntry::Leaf { access, .. } => Some(access),
            PageTableEntry::Empty | PageTableEntry::Busy | PageTableEntry::Table(_) => None,
        }
    }

    /// Writes `new` if the entry is unchanged. For leaves use [`Walk::exchange`].
    pub(crate) fn exchange(&self, pages: &impl Pages, new: u64) -> bool {
        pages.compare_exchange(self.cell, self.bits, new).is_ok()
    }
}

/// Index of the entry for `gpa` in its table at `level`.
fn index<F: Format>(gpa: Gpa, level: u32) -> usize {
    let mask = entries::<F>() as u64 - 1;
    usize::try_from((gpa.0 / span::<F>(level)) & mask).expect("masked to at most nine bits")
}
