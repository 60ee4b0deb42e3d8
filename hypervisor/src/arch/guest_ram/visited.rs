//! Accesses to the pages that a [`Visit`] finds.

#![expect(unsafe_code, reason = "a visit finds pages by their host addresses")]

#[cfg(any(test, target_arch = "x86_64"))]
use core::sync::atomic::AtomicU64;

use addr::{Gpa, Hpa, PAGE_BYTES, PageSize};

use crate::arch::ram::Borrowed;
use crate::mutants::{self, Mutant};
use crate::sync::point;
#[cfg(any(test, target_arch = "x86_64"))]
use crate::vm::backing::Place;
#[cfg(any(test, target_arch = "x86_64"))]
use crate::vm::memory::Memory;
use crate::vm::visits::Visit;

/// Calls `copy` for each page of `bytes` bytes from `gpa` on: with the page, the offset in it, and the part of the
/// bytes. False if one of them is not there now.
fn pieces(
    visit: &Visit<'_>,
    gpa: Gpa,
    bytes: usize,
    writes: bool,
    mut copy: impl FnMut(&Borrowed<'_>, u64, core::ops::Range<usize>) -> bool,
) -> bool {
    let mut done = 0;
    while done < bytes {
        let Some(at) = gpa.checked_add(done as u64) else { return false };
        if writes && !visit.record_write(at) {
            return false;
        }
        let found = visit.find(at).filter(|(_, is_writable)| !writes || *is_writable);
        let Some((hpa, _)) = found else { return false };
        let offset = hpa.offset_in(PageSize::Size4K);
        let left = usize::try_from(PAGE_BYTES - offset).unwrap_or(usize::MAX);
        let piece = done..bytes.min(done.saturating_add(left));
        done = piece.end;
        if !copy(&page_of(visit, hpa), offset, piece) {
            return false;
        }
    }
    true
}

/// The page at this host address, which the visit has just found.
fn page_of<'a>(_: &'a Visit<'_>, hpa: Hpa) -> Borrowed<'a> {
    point();
    if mutants::is(Mutant::VisitorsNotWaitedFor) {
        // A visitor that was interrupted here for long.
        (0..200).for_each(|_| point());
    }
    // SAFETY: stage 2 maps only frames that a VM owns: its own, or its parent's, which it keeps alive. The page is not
    // used for anything else before the visit ends.
    unsafe { Borrowed::new(hpa.page(PageSize::Size4K)) }
}

impl Visit<'_> {
    /// Copies guest memory from `gpa` on. False if a part of it is not there now; then `into` must not be used.
    pub(crate) fn read(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        pieces(self, gpa, into.len(), false, |page, offset, piece| page.read(offset, &mut into[piece]))
    }

    /// Copies `from` to guest memory at `gpa`. False if a part of it is not there now, or must not be written to;
    /// everything before that part was written.
    pub(crate) fn write(&self, gpa: Gpa, from: &[u8]) -> bool {
        pieces(self, gpa, from.len(), true, |page, offset, piece| page.write(offset, &from[piece]))
    }

    /// The aligned word that holds `gpa`, and whether it may be written to.
    #[cfg(any(test, target_arch = "x86_64"))]
    pub(super) fn word(&self, gpa: Gpa) -> Option<(*const AtomicU64, bool)> {
        // It may be written to as long as it is valid, and whoever clears the record ends that.
        if !self.record_write(gpa) {
            return None;
        }
        let (hpa, is_writable) = self.find(gpa)?;
        let index = usize::try_from(hpa.offset_in(PageSize::Size4K) / 8).ok()?;
        let word: *const _ = page_of(self, hpa).words().get(index)?;
        Some((word, is_writable))
    }

    /// Calls `work` with the words of the page at `gpa`. `None` if it is not there now, or must not be written to.
    #[cfg(any(test, target_arch = "x86_64"))]
    pub(crate) fn with_page<R>(&self, gpa: Gpa, work: impl FnOnce(&[AtomicU64]) -> R) -> Option<R> {
        if !self.record_write(gpa) {
            return None;
        }
        let (hpa, is_writable) = self.find(gpa)?;
        is_writable.then(|| work(page_of(self, hpa).words()))
    }
}

#[cfg(any(test, target_arch = "x86_64"))]
impl Memory {
    /// Calls `work` with the words of the page at `gpa`, for as long as they stay there. `None` if it does not exist,
    /// or is not there now, or is a page of a child that must not be written to.
    pub(crate) fn with_page<R>(&self, gpa: Gpa, work: impl FnOnce(&[AtomicU64]) -> R) -> Option<R> {
        const WORDS: usize = 512;
        const _: () = assert!((WORDS * size_of::<u64>()) as u64 == PAGE_BYTES);
        if let Some(visit) = self.visit() {
            return visit.with_page(gpa, work);
        }
        let Place { region, offset } = self.backing.find(gpa.page(PageSize::Size4K))?;
        let first = usize::try_from(offset).ok()? / size_of::<u64>();
        let page = self.backing.ram.run(region)?.words().get(first..)?.get(..WORDS)?;
        Some(work(page))
    }
}
