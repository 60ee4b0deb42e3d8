//! The backing of a VM's memory: frames of the host's pool, owned until the VM is dropped.
//!
//! All of the hypervisor's own accesses to guest memory go through [`Backing`], as do faults that map a page.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES};

use crate::arch::guest_ram::GuestRam;
use crate::frames::Frames;

/// The frames of a VM's memory.
pub(crate) struct Backing {
    /// In ascending order, without overlaps. Each is a run of the RAM, in the same order.
    pub(crate) regions: Vec<GpaRange>,
    pub(crate) ram: GuestRam,
}

/// A byte of guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Number of its region, and of that region's run of frames.
    pub(crate) region: usize,
    /// Where it is in both.
    pub(crate) offset: u64,
}

impl Backing {
    /// Takes over the frames of all regions.
    pub(super) fn new(regions: Vec<GpaRange>, runs: Vec<Frames>) -> Self {
        Self { regions, ram: GuestRam::new(runs) }
    }

    /// Host address of the page at `level`, in this region, that holds `gpa`.
    #[inline]
    pub(super) fn host_page(&self, region: u32, gpa: Gpa, level: u32) -> Option<Hpa> {
        let (region, run) = (self.regions.get(region as usize)?, self.ram.run(region as usize)?);
        let bytes = PAGE_BYTES << (9 * level);
        Some(Hpa(run.hpa().0 + ((gpa.0 - region.start.0) & !(bytes - 1))))
    }

    /// The host address of `count` pages from this number on, if they are side by side there too.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn pages(&self, number: u64, count: u64) -> Option<Hpa> {
        let Place { region, offset } = self.find(Gpa(number.checked_mul(PAGE_BYTES)?))?;
        let run = self.ram.run(region)?;
        let end = count.checked_mul(PAGE_BYTES)?.checked_add(offset)?;
        (end <= run.bytes()).then(|| Hpa(run.hpa().0 + offset))
    }

    /// The number of the page at this host address.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn page_at(&self, hpa: Hpa) -> Option<u64> {
        (0..).zip(&self.regions).find_map(|(index, region)| {
            let run = self.ram.run(index)?;
            let offset = hpa.0.checked_sub(run.hpa().0).filter(|offset| *offset < run.bytes())?;
            Some((region.start.0 + offset) / PAGE_BYTES)
        })
    }

    /// Copies guest memory from `gpa` on. False if a part of it does not exist; then `into` must not be used.
    pub(super) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.pieces(gpa, into.len(), |frames, offset, piece| frames.read(offset, &mut into[piece]))
    }

    /// Copies `from` to guest memory at `gpa`. False if a part of it does not exist; everything before that part was
    /// written.
    pub(super) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        self.pieces(gpa, from.len(), |frames, offset, piece| frames.write(offset, &from[piece]))
    }

    /// Splits a run of guest memory at the borders of regions.
    fn pieces(
        &self,
        gpa: Gpa,
        bytes: usize,
        mut copy: impl FnMut(&Frames, u64, core::ops::Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        while done < bytes {
            let found = gpa.checked_add(done as u64).and_then(|at| self.find(at));
            let Some(Place { region, offset }) = found else { return false };
            let Some(frames) = self.ram.run(region) else { return false };
            let left = usize::try_from(frames.bytes() - offset).unwrap_or(usize::MAX);
            let piece = left.min(bytes - done);
            if !copy(frames, offset, done..done + piece) {
                return false;
            }
            done += piece;
        }
        true
    }

    /// Where `gpa` is, if there is memory.
    pub(crate) fn find(&self, gpa: Gpa) -> Option<Place> {
        let region = self.regions.partition_point(|region| region.start <= gpa).checked_sub(1)?;
        let range = self.regions.get(region)?;
        range.contains(gpa).then(|| Place { region, offset: gpa.0 - range.start.0 })
    }
}
