//! The RAM of one VM, and words of it that are found once and read often.
//!
//! To find a word of guest memory takes a search through the VM's runs of frames. The instruction emulator reads the
//! same few words (entries of the guest's page tables, its code) at each device access. So it keeps [`Word`]s: an
//! address, and the `GuestRam` that holds it. A `GuestRam` owns its runs until it is dropped, so a caller with a
//! reference to it may read the word.

#![expect(unsafe_code, reason = "reads words whose place was found before")]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::PAGE_BYTES;

use super::ram::Frames;

/// Runs of frames that stay at their addresses as long as this value lives.
pub(crate) struct GuestRam {
    /// Differs from that of every other value, live or dropped; never zero.
    identity: u64,
    runs: Vec<Frames>,
}

/// An aligned 64-bit word of guest RAM. The default belongs to no VM.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// In the direct map.
    address: usize,
    ram: u64,
}

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

impl GuestRam {
    /// Takes the runs over, for good.
    pub(crate) fn new(runs: Vec<Frames>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { identity: NEXT.fetch_add(1, Ordering::Relaxed), runs }
    }

    /// A run, by its index.
    #[inline]
    pub(crate) fn run(&self, run: usize) -> Option<&Frames> {
        self.runs.get(run)
    }

    /// The word of this number in a run.
    pub(crate) fn find(&self, run: usize, number: usize) -> Option<Word> {
        let word: *const AtomicU64 = self.run(run)?.words().get(number)?;
        Some(Word { address: word as usize, ram: self.identity })
    }

    /// Reads the word that is `ahead` words behind one of this RAM, on the same page. Zero for any other.
    #[inline]
    pub(crate) fn load(&self, word: Word, ahead: usize) -> u64 {
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
    pub(crate) fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        if word.ram != self.identity {
            return false;
        }
        let pointer = word.address as *const AtomicU64;
        // SAFETY: as in `load`.
        let word = unsafe { &*pointer };
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The run that a word of this RAM is in, and the word's byte there.
    pub(crate) fn place_of(&self, word: Word) -> Option<(usize, u64)> {
        self.runs.iter().enumerate().find_map(|(run, frames)| {
            let offset = (word.address as u64).checked_sub(frames.pointer() as u64)?;
            (offset < frames.bytes()).then_some((run, offset))
        })
    }
}
