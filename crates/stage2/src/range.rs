//! Ranges are mapped, unmapped and given other rights.
//!
//! A range is handled entry by entry: decide, change, go on behind it. It is walked twice: the first walk checks and
//! counts, the second changes. The right to do so is a [`Shape`], so that nothing between the two walks makes more
//! tables necessary. Faults and dirty logs may go on: each change is conditional on the entry being what was looked at.

use crate::split::{AsBefore, Split};
use crate::tree::{Tree, span};
use crate::{Access, Format, MapError, Memory, Pages, Shape, Spare, Stale, Tlb};
use addr::{Gpa, GpaRange, Hpa};

impl<F: Format> Tree<F> {
    /// Maps `range` to host memory from `hpa` on, in leaves as large as both alignments and the tables already there
    /// allow. Nothing in the range may be mapped before.
    ///
    /// Owes nothing: empty entries are in no TLB.
    ///
    /// # Errors
    /// With the tree as it was; or with a part of the range mapped, when somebody [populates](Self::populate) the same
    /// range meanwhile.
    pub fn map(
        &self,
        shape: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
    ) -> Result<(), MapError> {
        self.map_as(shape, pages, tlb, range, hpa, access, Memory::Normal)
    }

    /// Maps the registers of a device as [`map`](Self::map) maps memory.
    pub fn map_device(
        &self,
        shape: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
    ) -> Result<(), MapError> {
        self.map_as(shape, pages, tlb, range, hpa, access, Memory::Device)
    }

    #[expect(clippy::too_many_arguments, reason = "one more than the two callers that it serves")]
    fn map_as(
        &self,
        _: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        hpa: Hpa,
        access: Access,
        memory: Memory,
    ) -> Result<(), MapError> {
        self.check_range(range)?;
        self.check_host(hpa, range.bytes())?;
        self.check_access(access)?;

        // Prepare: the way is free, and every table that is missing on it is at hand.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.settle(pages, tlb, gpa);
            if slot.access().is_some() {
                return Err(MapError::Overlaps(slot.page()));
            }
            let piece = slot.piece(gpa, range.end());
            let top = self.largest_level(piece.start, host_of(range, hpa, piece.start));
            missing += tables_below::<F>(slot.level, top, piece);
            gpa = piece.end();
        }
        let mut spare = Spare::new();
        spare.fill(pages, missing)?;

        // Commit.
        let mut result = Ok(());
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.settle(pages, tlb, gpa);
            let target = host_of(range, hpa, gpa);
            if slot.access().is_some() {
                result = Err(MapError::Overlaps(slot.page()));
                break;
            }
            let level = self.largest_leaf_level(gpa, target, range.end().0 - gpa.0, slot.level);
            if level == slot.level {
                if self.exchange(pages, &slot, self.format.leaf(target, level, access, memory)) {
                    gpa = Gpa(gpa.0 + span::<F>(level));
                }
            } else {
                let table = spare.take(pages).expect("the prepare step counted every table");
                if !slot.exchange(pages, self.format.table(table)) {
                    spare.put_back(pages, table, 0);
                }
            }
        }
        tlb.publish();
        spare.give_back(pages);
        result
    }

    /// Unmaps `range`. What is not mapped there stays so; a large leaf that reaches over an end is split there.
    ///
    /// The host pages behind the range may be used for something else only after the flush.
    ///
    /// # Errors
    /// With the tree as it was; or with a part of the range unmapped and flushed, when somebody [populates](Self::populate)
    /// it meanwhile.
    pub fn unmap(
        &self,
        shape: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
    ) -> Result<Stale, MapError> {
        self.change(shape, pages, tlb, range, None)
    }

    /// Gives everything that is mapped in `range` the rights `access`, splitting large leaves at its ends as
    /// [`unmap`](Self::unmap) does. Holes stay holes.
    ///
    /// Errors are those of [`unmap`](Self::unmap). Rights that grow owe no flush: a guest that does not know of them yet [faults](Self::fault) on its old entry.
    pub fn protect(
        &self,
        shape: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        access: Access,
    ) -> Result<Stale, MapError> {
        self.check_access(access)?;
        self.change(shape, pages, tlb, range, Some(access))
    }

    /// Gives every leaf in `range` the rights `wanted`, or removes it.
    fn change(
        &self,
        _: &mut Shape,
        pages: &impl Pages,
        tlb: &impl Tlb,
        range: GpaRange,
        wanted: Option<Access>,
    ) -> Result<Stale, MapError> {
        self.check_range(range)?;

        // Prepare: tables to split the leaves that reach over an end of the range.
        let mut missing = 0;
        let mut gpa = range.start;
        while gpa < range.end() {
            let slot = self.settle(pages, tlb, gpa);
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
            let slot = self.settle(pages, tlb, gpa);
            let piece = slot.piece(gpa, range.end());
            let Some(now) = slot.access().filter(|now| Some(*now) != wanted) else {
                gpa = piece.end();
                continue;
            };

            if piece != slot.page() {
                // Come back for the part that is meant, or because somebody else was quicker.
                match self.split(pages, tlb, slot, &mut spare, &AsBefore) {
                    Ok(Split::Done(owed)) => stale = stale.merge(owed),
                    Ok(Split::Lost) => {}
                    // Only a leaf that was populated since the first walk has not been counted.
                    Err(error) => {
                        stale.pay(tlb);
                        return Err(error);
                    }
                }
                continue;
            }
            let bits = wanted.map_or(0, |access| self.format.with_access(slot.bits, access));
            if !self.exchange(pages, &slot, bits) {
                continue;
            }
            if !wanted.is_some_and(|access| access.includes(now)) {
                stale = stale.merge(self.owed_for(slot.page(), slot.level));
            }
            gpa = piece.end();
        }
        spare.give_back(pages);
        Ok(stale)
    }

    /// The level of the largest leaf at `level` or below that maps `gpa` to `hpa` and is no longer than `bytes`.
    fn largest_leaf_level(&self, gpa: Gpa, hpa: Hpa, bytes: u64, level: u32) -> u32 {
        let mut found = level.min(self.largest_level(gpa, hpa));
        while found > 0 && (gpa.0 & (span::<F>(found) - 1) != 0 || span::<F>(found) > bytes) {
            found -= 1;
        }
        found
    }

    /// The highest level at which leaves can map memory with the distance of `gpa` from `hpa`.
    fn largest_level(&self, gpa: Gpa, hpa: Hpa) -> u32 {
        let fits = |level: &u32| (gpa.0 ^ hpa.0) & (span::<F>(*level) - 1) == 0;
        (1..=self.format.largest_leaf()).rev().find(fits).unwrap_or(0)
    }
}

/// How many tables a `piece` of one entry at `level` needs below it, when leaves are possible up to level `top`.
///
/// At each level, an entry becomes a table when the piece covers it in part, or when it is too high for a leaf.
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

/// Where `gpa` of `range` belongs when the range starts at `hpa`.
fn host_of(range: GpaRange, hpa: Hpa, gpa: Gpa) -> Hpa {
    Hpa(hpa.0 + (gpa.0 - range.start.0))
}
