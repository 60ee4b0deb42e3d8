//! Maps and unmaps ranges, and changes their rights.
//!
//! An operation handles a range entry by entry: decide, change, continue behind it. It walks the range twice: the first
//! walk checks and counts, the second one changes. The right to do so is a [`Shape`], so no other processor can make
//! more tables necessary between the walks. Faults and dirty logs may continue: each change is conditional on the entry
//! that was read.

use crate::fault::Slot;
use crate::split::{AsBefore, Split};
use crate::tree::{Tree, span};
use crate::walk::{Walk, WalkMut};
use crate::{Access, Format, MapError, Memory, Pages, Source, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa};

impl<F: Format, P: Pages, T: Tlb> WalkMut<'_, F, P, T> {
    /// Maps `range` to host memory from `hpa` on, with the largest leaves that both alignments and existing tables
    /// allow. Nothing in the range may be mapped before.
    ///
    /// Needs no flush: no TLB caches empty entries.
    ///
    /// # Errors
    /// The tree is unchanged; or part of the range is mapped, if another processor [populates](Walk::populate) the same
    /// range meanwhile.
    pub fn map(&mut self, range: GpaRange, hpa: Hpa, access: Access) -> Result<(), MapError> {
        self.map_as(range, hpa, access, Memory::Normal, |_, _, leaf| leaf)
    }

    /// The same while a dirty log is active, for memory whose state is known: the new leaves count as clean.
    ///
    /// # Errors
    /// As for [`map`](Self::map).
    pub fn map_clean(&mut self, range: GpaRange, hpa: Hpa, access: Access, source: Source) -> Result<(), MapError> {
        self.map_as(range, hpa, access, Memory::Normal, |format, level, leaf| format.cleaned(level, leaf, source))
    }

    /// Maps the registers of a device as [`map`](Self::map) maps memory.
    pub fn map_device(&mut self, range: GpaRange, hpa: Hpa, access: Access) -> Result<(), MapError> {
        self.map_as(range, hpa, access, Memory::Device, |_, _, leaf| leaf)
    }

    fn map_as(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
        memory: Memory,
        dress: impl Fn(&F, u32, u64) -> u64,
    ) -> Result<(), MapError> {
        let walk = self.walk();
        let Walk { tree, pages, tlb } = walk;
        tree.check_range(range)?;
        tree.check_host(hpa, range.bytes())?;
        tree.check_access(access)?;

        // Prepare: check that nothing is mapped, and take all missing tables.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = walk.descend_and_wait(gpa);
            if slot.access().is_some() {
                return Err(MapError::Overlaps(slot.page()));
            }
            let piece = slot.piece(gpa, range.end());
            let top = tree.largest_level(piece.start, host_of(range, hpa, piece.start));
            missing += tables_below::<F>(slot.level, top, piece);
            gpa = piece.end();
        }
        let mut spare = Spare::new();
        spare.fill(pages, missing)?;

        // Commit.
        let mut result = Ok(());
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = walk.descend_and_wait(gpa);
            let target = host_of(range, hpa, gpa);
            if slot.access().is_some() {
                result = Err(MapError::Overlaps(slot.page()));
                break;
            }
            let level = tree.largest_leaf_level(gpa, target, range.end().0 - gpa.0, slot.level);
            if level == slot.level {
                let leaf = dress(&tree.format, level, tree.format.leaf(target, level, access, memory));
                if walk.exchange(&slot, leaf) {
                    gpa = Gpa(gpa.0 + span::<F>(level));
                }
            } else {
                let table = spare.take(pages).expect("the prepare step counted every table");
                if !slot.exchange(pages, tree.format.table(table, slot.level)) {
                    spare.put_back(pages, table, 0);
                }
            }
        }
        tlb.publish();
        spare.give_back(pages);
        result
    }

    /// Unmaps `range`. Unmapped parts stay so. A large leaf that crosses an end of the range is split there.
    ///
    /// The host pages behind the range may be reused only after the flush.
    ///
    /// # Errors
    /// The tree is unchanged; or part of the range is unmapped and flushed, if another processor
    /// [populates](Walk::populate) it meanwhile.
    pub fn unmap(&mut self, range: GpaRange) -> Result<Stale, MapError> {
        self.change(range, None, |_| ())
    }

    /// The same while a dirty log is active: calls `found` with each removed leaf that was written since it was last
    /// clean, or may have been. A processor that still has the leaf in its TLB cannot make it so any more, if it
    /// records writes in the leaf before it writes.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap).
    pub fn unmap_logged(
        &mut self,
        range: GpaRange,
        source: Source,
        mut found: impl FnMut(GpaRange),
    ) -> Result<Stale, MapError> {
        let format = self.format();
        self.change(range, None, |leaf| {
            if format.is_written(leaf.bits, source) {
                found(leaf.page());
            }
        })
    }

    /// Gives all mapped pages in `range` the rights `access`. Splits large leaves at its ends like
    /// [`unmap`](Self::unmap). Unmapped parts stay so.
    ///
    /// Errors are those of [`unmap`](Self::unmap). Added rights need no flush: a guest with a cached old entry
    /// [faults](Walk::fault).
    pub fn protect(&mut self, range: GpaRange, access: Access) -> Result<Stale, MapError> {
        self.walk().tree.check_access(access)?;
        self.change(range, Some(access), |_| ())
    }

    /// Gives every leaf in `range` the rights `wanted`, or removes it. Calls `changed` with each leaf as it was.
    fn change(
        &mut self,
        range: GpaRange,
        wanted: Option<Access>,
        mut changed: impl FnMut(&Slot),
    ) -> Result<Stale, MapError> {
        let walk = self.walk();
        let Walk { tree, pages, tlb } = walk;
        tree.check_range(range)?;

        // Prepare: take tables to split the leaves that cross an end of the range.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = walk.descend_and_wait(gpa);
            let piece = slot.piece(gpa, range.end());
            if slot.access().is_some_and(|now| Some(now) != wanted) {
                missing += tables_below::<F>(slot.level, slot.level, piece);
            }
            gpa = piece.end();
        }
        let mut spare = Spare::new();
        spare.fill(pages, missing)?;

        // Commit.
        let mut stale = Stale::EMPTY;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = walk.descend_and_wait(gpa);
            let piece = slot.piece(gpa, range.end());
            let Some(now) = slot.access().filter(|now| Some(*now) != wanted) else {
                gpa = piece.end();
                continue;
            };

            if piece != slot.page() {
                // Read it again, for the part in the range, or because another processor was faster.
                match walk.split(slot, &mut spare, &AsBefore) {
                    Ok(Split::Done(owed)) => stale = stale.merge(owed),
                    Ok(Split::Lost) => {}
                    // Only a leaf that was populated since the first walk is not counted.
                    Err(error) => {
                        stale.pay(tlb);
                        return Err(error);
                    }
                }
                continue;
            }
            let bits = wanted.map_or(0, |access| tree.format.with_access(slot.bits, access));
            if !walk.exchange(&slot, bits) {
                continue;
            }
            changed(&slot);
            if !wanted.is_some_and(|access| access.includes(now)) {
                stale = stale.merge(tree.owed_for(slot.page(), slot.level));
            }
            gpa = piece.end();
        }
        spare.give_back(pages);
        Ok(stale)
    }
}

impl<F: Format> Tree<F> {
    /// The level of the largest leaf, at most `level`, that maps `gpa` to `hpa` and is at most `bytes` long.
    fn largest_leaf_level(&self, gpa: Gpa, hpa: Hpa, bytes: u64, level: u32) -> u32 {
        let mut found = level.min(self.largest_level(gpa, hpa));
        while found > 0 && (gpa.0 & (span::<F>(found) - 1) != 0 || span::<F>(found) > bytes) {
            found -= 1;
        }
        found
    }

    /// The highest level whose leaves can map `gpa` to `hpa`, given the distance between the two.
    fn largest_level(&self, gpa: Gpa, hpa: Hpa) -> u32 {
        let fits = |level: &u32| (gpa.0 ^ hpa.0) & (span::<F>(*level) - 1) == 0;
        (1..=self.format.largest_leaf()).rev().find(fits).unwrap_or(0)
    }
}

/// How many tables a `piece` of one entry at `level` needs below it, if leaves are possible up to level `top`.
///
/// At each level, an entry becomes a table if the piece covers only part of it, or if its level is too high for a leaf.
fn tables_below<F: Format>(level: u32, top: u32, piece: GpaRange) -> u64 {
    (1..=level)
        .map(|at| {
            let shift = span::<F>(at).trailing_zeros();
            let touched = ((piece.end().0 - 1) >> shift) - (piece.start.0 >> shift) + 1;
            let covered = (piece.end().0 >> shift).saturating_sub(piece.start.0.div_ceil(span::<F>(at)));
            if at > top { touched } else { touched - covered }
        })
        .sum()
}

/// The host address of `gpa` if `range` starts at `hpa`.
fn host_of(range: GpaRange, hpa: Hpa, gpa: Gpa) -> Hpa {
    Hpa(hpa.0 + (gpa.0 - range.start.0))
}
