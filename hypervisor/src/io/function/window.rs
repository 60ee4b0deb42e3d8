//! Where a guest has the memory of its functions, and which accesses reach it.
//!
//! Each BAR has a home in the guest's window for PCI devices, for good. Its pages are mapped there, except those that
//! hold the table of messages: accesses to them are carried out one by one.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES, PageSize};

use super::{Bar, Description, Messages, Part};

/// Finds homes for BARs of these lengths, in their order, in `window`. Those that are shorter than a page have one
/// alone. `None`: there is no room.
#[must_use]
pub fn homes(window: GpaRange, bars: &[HpaRange]) -> Option<Vec<Gpa>> {
    let mut order: Vec<usize> = (0..bars.len()).collect();
    order.sort_by_key(|index| core::cmp::Reverse(bars[*index].bytes()));
    let mut homes = Vec::from_iter(bars.iter().map(|_| window.start));
    let mut next = window.start.0;
    for index in order {
        let bar = &bars[index];
        let bytes = bar.bytes().max(PAGE_BYTES);
        let start = next.checked_next_multiple_of(bytes)?;
        next = start.checked_add(bytes).filter(|end| *end <= window.end().0)?;
        homes[index] = Gpa(start + bar.start.offset_in(PageSize::Size4K));
    }
    Some(homes)
}

/// A BAR at its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The BAR.
    pub bar: Bar,
    /// Where the guest has it.
    pub home: Gpa,
}

/// Whole pages of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where the guest has them.
    pub gpa: GpaRange,
    /// Where the machine has them.
    pub hpa: Hpa,
    /// The guest reaches them by itself. Otherwise each access is looked at.
    pub is_mapped: bool,
}

/// What an access to a page that is not mapped reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The table of messages, at this offset.
    Table(u64),
    /// The function's own register, in this BAR at this offset.
    Register(Part),
    /// The function's bits of messages that wait, which are not written.
    Pending(Part),
    /// Nothing: reads are ones, writes are dropped.
    Nothing,
}

impl Placed {
    /// Its pages. Those next to each other that are of one kind are one piece.
    pub fn pieces(&self, messages: &Messages) -> impl Iterator<Item = Piece> + use<> {
        let closed = closed(messages, self.bar.index);
        let first = self.bar.range.start.page(PageSize::Size4K).0;
        let end = self.bar.range.end().0.next_multiple_of(PAGE_BYTES);
        let bar = self.bar.range.start.0;
        let (home, mut next) = (self.home.page(PageSize::Size4K).0, first);
        // Where closed pages begin and end.
        let closed = closed.map(|part| {
            part.map(|part| {
                let from = (bar + part.offset) & !(PAGE_BYTES - 1);
                (from, (bar + part.offset + part.bytes).next_multiple_of(PAGE_BYTES))
            })
        });
        core::iter::from_fn(move || {
            let from = next;
            let within = closed.iter().flatten().filter(|(start, end)| (*start..*end).contains(&from));
            let (is_mapped, until) = match within.map(|(_, end)| *end).max() {
                Some(end) => (false, end),
                None => (
                    true,
                    closed.iter().flatten().map(|(start, _)| *start).filter(|start| *start > from).min().unwrap_or(end),
                ),
            };
            next = until.min(end);
            let gpa = GpaRange::new(Gpa(home + (from - first)), next - from).filter(|gpa| gpa.bytes() > 0)?;
            Some(Piece { gpa, hpa: Hpa(from), is_mapped })
        })
    }

    /// What an access of `bytes` at `gpa` reaches, in a page of this BAR that is not mapped.
    #[must_use]
    pub fn reached(&self, messages: &Messages, gpa: Gpa, bytes: u64) -> Reached {
        let Some(offset) = gpa.0.checked_sub(self.home.0) else { return Reached::Nothing };
        let end = offset.saturating_add(bytes);
        if end > self.bar.range.bytes() || !offset.is_multiple_of(bytes.max(1)) {
            return Reached::Nothing;
        }
        let access = Part { bar: self.bar.index, offset, bytes };
        let [table, pending] = closed(messages, self.bar.index);
        let holds = |part: &Part| part.offset <= offset && end <= part.offset + part.bytes;
        let touches = |part: &Part| part.offset < end && offset < part.offset + part.bytes;
        match (table, pending) {
            (Some(table), _) if holds(&table) => Reached::Table(offset - table.offset),
            (_, Some(pending)) if holds(&pending) => Reached::Pending(access),
            (table, pending) if table.iter().chain(&pending).any(touches) => Reached::Nothing,
            _ => Reached::Register(access),
        }
    }
}

/// The parts of a BAR that a guest must not reach by itself: the table, and the bits of messages that wait.
fn closed(messages: &Messages, bar: usize) -> [Option<Part>; 2] {
    match messages {
        Messages::MsiX { table, pending, .. } => {
            [table, pending].map(|part| Some(*part).filter(|part| part.bar == bar))
        }
        Messages::Msi { .. } => [None; 2],
    }
}

impl Description {
    /// The pages of its memory that no other function may have registers in.
    pub fn pages(&self) -> impl Iterator<Item = HpaRange> {
        self.bars.iter().filter_map(|bar| {
            let start = bar.range.start.page(PageSize::Size4K);
            HpaRange::new(start, bar.range.end().0.next_multiple_of(PAGE_BYTES) - start.0)
        })
    }
}
