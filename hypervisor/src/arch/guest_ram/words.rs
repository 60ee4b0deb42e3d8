//! Words of a VM's RAM that are found once and read often.
//!
//! To find a word of guest memory takes a search through the VM's runs of frames. The instruction emulator reads the
//! same few words (entries of the guest's page tables, its code) at each device access. So it keeps [`Word`]s: an
//! address, and the [`GuestRam`] that holds it. A caller with a reference to that `GuestRam` may read the word.
//! Only machines whose guests' instructions are emulated have this.

#![expect(unsafe_code, reason = "reads words whose place was found before")]

use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, PAGE_BYTES};

use super::GuestRam;
use crate::vm::backing::Place;
use crate::vm::memory::Memory;

/// Differs from that of every other [`GuestRam`], live or dropped; never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity(u64);

impl Identity {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// An aligned 64-bit word of guest RAM. The default belongs to no VM.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// In the direct map.
    address: usize,
    ram: Identity,
}

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

impl Memory {
    /// The aligned 64-bit word that holds `gpa`, for repeated accesses.
    pub(crate) fn find_word(&self, gpa: Gpa) -> Option<Word> {
        let Place { region, offset } = self.backing.find(gpa)?;
        self.backing.ram.find(region, usize::try_from(offset / 8).ok()?)
    }

    /// Reads the word that is `ahead` words after one that was found, on the same page.
    #[inline]
    pub(crate) fn load(&self, word: Word, ahead: usize) -> u64 {
        self.backing.ram.load(word, ahead)
    }

    /// Atomically replaces a word if it is still `current`; returns whether it was.
    pub(crate) fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        let ram = &self.backing.ram;
        let Some((run, offset)) = ram.place_of(word) else { return false };
        let Some(region) = self.backing.regions.get(run) else { return false };
        let gpa = Gpa(region.start.0 + offset);
        self.as_host(gpa, size_of::<u64>(), || ram.compare_exchange(word, current, new))
    }
}

impl GuestRam {
    /// The word of this number in a run.
    fn find(&self, run: usize, number: usize) -> Option<Word> {
        let word: *const AtomicU64 = self.run(run)?.words().get(number)?;
        Some(Word { address: word as usize, ram: self.identity })
    }

    /// Reads the word that is `ahead` words behind one of this RAM, on the same page. Zero for any other.
    #[inline]
    fn load(&self, word: Word, ahead: usize) -> u64 {
        let on_page = word.address % PAGE / 8 + ahead < PAGE / 8;
        if word.ram != self.identity || !on_page {
            return 0;
        }
        let pointer = word.address as *const AtomicU64;
        // SAFETY: `find` made the address from a word of one of our runs, whose identity is unique. Runs are whole
        // frames, so all of its page is ours, and they stay as long as `self`. Rust code accesses them only through
        // atomics and volatile accesses.
        unsafe { (*pointer.wrapping_add(ahead)).load(Ordering::Relaxed) }
    }

    /// Atomically replaces a word of this RAM if it is still `current`; returns whether it was.
    fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        if word.ram != self.identity {
            return false;
        }
        let pointer = word.address as *const AtomicU64;
        // SAFETY: as in `load`.
        let word = unsafe { &*pointer };
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The run that a word of this RAM is in, and the word's byte there.
    fn place_of(&self, word: Word) -> Option<(usize, u64)> {
        self.runs.iter().enumerate().find_map(|(run, frames)| {
            let offset = (word.address as u64).checked_sub(frames.pointer() as u64)?;
            (offset < frames.bytes()).then_some((run, offset))
        })
    }
}
