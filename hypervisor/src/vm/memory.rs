//! A VM's memory: the frames it owns, and the stage-2 tree through which the guest reaches them.
//!
//! All memory is taken, zeroed and mapped when the VM is created, with the largest leaves that its frames allow; a
//! guest meets no stage-2 fault in its own memory. It goes back to the pool when the VM is dropped, after its last vCPU
//! has left the guest for good.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, PageSize};
use stage2::{Access, MapError, Tree};

use crate::arch::loader::stage2_format;
use crate::arch::tables::TablePool;
use crate::frames::{Exhausted, Frames};

/// A VM's memory.
pub(crate) struct Memory {
    /// In ascending order, without overlaps.
    regions: Vec<Region>,
    tables: TablePool,
    root: Hpa,
}

/// A contiguous run of the guest's memory.
struct Region {
    start: Gpa,
    frames: Frames,
}

/// Why a VM's memory could not be set up.
#[derive(Debug)]
pub(crate) enum MemoryError {
    /// The host has not enough free memory.
    Exhausted,
    /// Stage 2 could not map it.
    Map(MapError),
}

impl From<Exhausted> for MemoryError {
    fn from(_: Exhausted) -> Self {
        Self::Exhausted
    }
}

impl Memory {
    /// Takes, zeroes and maps memory for `ranges`, whose lengths are multiples of 2 MiB.
    ///
    /// # Errors
    /// When the host has too little; everything that was taken is given back.
    pub(crate) fn new(ranges: impl Iterator<Item = GpaRange>) -> Result<Self, MemoryError> {
        let tables = TablePool::new();
        let mut tree = Tree::new(stage2_format(), &tables).map_err(MemoryError::Map)?;
        let mut regions = Vec::new();

        for range in ranges {
            let mut at = range.start;
            while at < range.end() {
                let frames = Frames::allocate_at_most(range.end().0 - at.0, PageSize::Size2M.bytes())?;
                frames.zero();
                let piece = GpaRange::new(at, frames.bytes()).ok_or(MemoryError::Exhausted)?;
                // Nothing was mapped there before, so nothing can be stale.
                let stale = tree.map(&tables, piece, frames.hpa(), Access::ALL).map_err(MemoryError::Map)?;
                debug_assert!(stale.is_empty());
                regions.push(Region { start: at, frames });
                at = piece.end();
            }
        }

        Ok(Self { regions, root: tree.root(), tables })
    }

    /// HPA of the stage-2 tree's root table.
    pub(crate) fn stage2_root(&self) -> Hpa {
        self.root
    }

    /// Bytes of host memory that the stage-2 tables take.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.tables.bytes()
    }

    /// Copies guest memory from `gpa` on. False, and `into` is not to be used, when a part of it does not exist.
    #[must_use]
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.pieces(gpa, into.len(), |frames, offset, piece| frames.read(offset, &mut into[piece]))
    }

    /// Copies `from` to guest memory at `gpa`. False when a part of it does not exist; what lies before it was written.
    #[must_use]
    pub(crate) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        self.pieces(gpa, from.len(), |frames, offset, piece| frames.write(offset, &from[piece]))
    }

    /// The 64-bit word at `gpa`, a multiple of 8, for the guest's own page tables.
    pub(crate) fn word(&self, gpa: Gpa) -> Option<&core::sync::atomic::AtomicU64> {
        let (region, offset) = self.find(gpa)?;
        gpa.0.is_multiple_of(8).then(|| region.frames.atomic_u64((offset / 8) as usize))?
    }

    /// Cuts a run of guest memory at the borders of regions.
    fn pieces(
        &self,
        gpa: Gpa,
        bytes: usize,
        mut copy: impl FnMut(&Frames, u64, core::ops::Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        while done < bytes {
            let Some((region, offset)) = gpa.checked_add(done as u64).and_then(|at| self.find(at)) else {
                return false;
            };
            let left = usize::try_from(region.frames.bytes() - offset).unwrap_or(usize::MAX);
            let piece = left.min(bytes - done);
            if !copy(&region.frames, offset, done..done + piece) {
                return false;
            }
            done += piece;
        }
        true
    }

    fn find(&self, gpa: Gpa) -> Option<(&Region, u64)> {
        let after = self.regions.partition_point(|region| region.start <= gpa);
        let region = &self.regions[after.checked_sub(1)?];
        let offset = gpa.0 - region.start.0;
        (offset < region.frames.bytes()).then_some((region, offset))
    }
}
