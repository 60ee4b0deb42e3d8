//! Words of a VM's RAM that are found once and read often.
//!
//! To find a word of guest memory takes a search through the VM's runs of frames. The instruction emulator reads the
//! same few words (entries of the guest's page tables, its code) at each device access. So it keeps [`Word`]s: an
//! address, and the name of the [`GuestRam`] that holds it. A caller with a reference to that `GuestRam` may read the
//! word. Memory that may go away has no such RAM, but a name that changes when a part of it goes
//! ([`visits`](crate::vm::visits)).
//! Only machines whose guests' instructions are emulated have this.

#![expect(unsafe_code, reason = "reads words whose place was found before")]

use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Gpa, PAGE_BYTES};

use super::GuestRam;
use crate::sync::point;
use crate::vm::backing::Place;
use crate::vm::memory::Memory;
use crate::vm::visits::{Visit, new_name};

/// Differs from that of every other [`GuestRam`], live or dropped; never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity(u64);

impl Identity {
    pub(super) fn new() -> Self {
        Self(new_name())
    }
}

/// An aligned 64-bit word of guest RAM. The default belongs to no VM.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// In the direct map; [`READ_ONLY`] besides, where the guest may not write.
    address: usize,
    ram: Identity,
}

/// In the address of a word, which is a multiple of 8.
const READ_ONLY: usize = 1;

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

impl Memory {
    /// The aligned 64-bit word that holds `gpa`, for repeated accesses.
    pub(crate) fn find_word(&self, gpa: Gpa) -> Option<Word> {
        if let Some(visit) = self.visit() {
            return visit.find_word(gpa);
        }
        let Place { region, offset } = self.backing.find(gpa)?;
        self.backing.ram.find(region, usize::try_from(offset / 8).ok()?)
    }

    /// Whether a word that was found, or not, is still there, or not. Always, but in memory that may go away.
    #[inline(always)]
    pub(crate) fn has_word(&self, found: Option<Word>) -> bool {
        !self.may_lack_pages() || self.has_word_on_visit(found)
    }

    #[cold]
    #[inline(never)]
    fn has_word_on_visit(&self, found: Option<Word>) -> bool {
        self.visit().is_none_or(|visit| found.is_some_and(|word| visit.valid(word).is_some()))
    }

    /// Whether each of these words still has the value beside it. Memory that stays is asked once what it is, not for
    /// each word.
    #[inline(always)]
    pub(crate) fn have_values(&self, mut words: impl Iterator<Item = (Word, u64)>) -> bool {
        if self.may_lack_pages() {
            return self.have_values_on_visit(words);
        }
        words.all(|(word, value)| self.backing.ram.load(word, 0) == Some(value))
    }

    #[cold]
    #[inline(never)]
    fn have_values_on_visit(&self, mut words: impl Iterator<Item = (Word, u64)>) -> bool {
        words.all(|(word, value)| self.load(word, 0) == value)
    }

    /// Reads the word that is `ahead` words after one that was found, on the same page.
    #[inline]
    pub(crate) fn load(&self, word: Word, ahead: usize) -> u64 {
        // Words of memory that may go away never have the name of frames, so other VMs pay nothing for it.
        self.backing.ram.load(word, ahead).unwrap_or_else(|| self.load_on_visit(word, ahead))
    }

    #[cold]
    #[inline(never)]
    fn load_on_visit(&self, word: Word, ahead: usize) -> u64 {
        self.visit().map_or(0, |visit| visit.load(word, ahead))
    }

    /// The value of the word at `gpa`. `word` is where it was found last; it is found again if it is not there now.
    #[inline]
    pub(crate) fn load_found(&self, gpa: Gpa, word: &mut Option<Word>) -> Option<u64> {
        if let Some(visit) = self.visit() {
            return visit.found(gpa, word).map(|word| visit.load(word, 0));
        }
        *word = word.or_else(|| self.find_word(gpa));
        word.map(|word| self.load(word, 0))
    }

    /// Atomically changes the word at `gpa`, found as by [`Self::load_found`]. False if it is not there now or must not
    /// be written to, or if others change it all the time.
    pub(crate) fn change_found(&self, gpa: Gpa, word: &mut Option<Word>, new: impl Fn(u64) -> u64) -> bool {
        // Another vCPU of a strange guest may write beside what is changed.
        const ATTEMPTS: u32 = 8;
        if let Some(visit) = self.visit() {
            let Some(word) = visit.found(gpa, word) else { return false };
            let is_done = (0..ATTEMPTS).any(|_| {
                let value = visit.load(word, 0);
                visit.compare_exchange(word, value, new(value))
            });
            drop(visit);
            self.as_host(gpa, size_of::<u64>(), || ());
            return is_done;
        }
        *word = word.or_else(|| self.find_word(gpa));
        let Some(word) = *word else { return false };
        (0..ATTEMPTS).any(|_| {
            let value = self.load(word, 0);
            let exchange = || self.backing.ram.compare_exchange(word, value, new(value));
            self.as_host(gpa, size_of::<u64>(), exchange)
        })
    }

    /// Atomically replaces a word if it is still `current`; returns whether it was.
    pub(crate) fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        let ram = &self.backing.ram;
        if let Some(visit) = self.visit() {
            let done = visit.compare_exchange(word, current, new);
            drop(visit);
            if let Some((run, offset)) = ram.place_of(word)
                && let Some(region) = self.backing.regions.get(run)
            {
                self.as_host(Gpa(region.start.0 + offset), size_of::<u64>(), || ());
            }
            return done;
        }
        let Some((run, offset)) = ram.place_of(word) else { return false };
        let Some(region) = self.backing.regions.get(run) else { return false };
        let gpa = Gpa(region.start.0 + offset);
        self.as_host(gpa, size_of::<u64>(), || ram.compare_exchange(word, current, new))
    }
}

impl Visit<'_> {
    fn find_word(&self, gpa: Gpa) -> Option<Word> {
        let (word, is_writable) = self.word(gpa)?;
        let address = word as usize | if is_writable { 0 } else { READ_ONLY };
        Some(Word { address, ram: Identity(self.name()) })
    }

    /// The word at `gpa`, where it was found last or where it is now.
    fn found(&self, gpa: Gpa, word: &mut Option<Word>) -> Option<Word> {
        if word.is_none_or(|word| self.valid(word).is_none()) {
            *word = self.find_word(gpa);
        }
        *word
    }

    /// The word, if it was found under this name.
    fn valid(&self, word: Word) -> Option<*const AtomicU64> {
        (word.ram == Identity(self.name())).then_some((word.address & !READ_ONLY) as *const AtomicU64)
    }

    fn load(&self, word: Word, ahead: usize) -> u64 {
        let on_page = word.address % PAGE / 8 + ahead < PAGE / 8;
        let Some(pointer) = self.valid(word).filter(|_| on_page) else { return 0 };
        // SAFETY: a visit has found the address under the name that the memory has now, so nothing was taken away
        // since. Whoever takes the page away waits for this visit. Rust code accesses it only through atomics and
        // volatile accesses.
        unsafe { (*pointer.wrapping_add(ahead)).load(Ordering::Relaxed) }
    }

    fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        let is_writable = word.address & READ_ONLY == 0;
        let Some(pointer) = self.valid(word).filter(|_| is_writable) else { return false };
        point();
        // SAFETY: as in `load`.
        let word = unsafe { &*pointer };
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}

impl GuestRam {
    /// The word of this number in a run.
    fn find(&self, run: usize, number: usize) -> Option<Word> {
        let word: *const AtomicU64 = self.run(run)?.words().get(number)?;
        Some(Word { address: word as usize, ram: self.identity })
    }

    /// Reads the word that is `ahead` words behind one of this RAM, on the same page. `None` for any other.
    #[inline]
    fn load(&self, word: Word, ahead: usize) -> Option<u64> {
        let on_page = word.address % PAGE / 8 + ahead < PAGE / 8;
        if word.ram != self.identity || !on_page {
            return None;
        }
        let pointer = word.address as *const AtomicU64;
        // SAFETY: `find` made the address from a word of one of our runs, whose identity is unique. Runs are whole
        // frames, so all of its page is ours, and they stay as long as `self`. Rust code accesses them only through
        // atomics and volatile accesses.
        Some(unsafe { (*pointer.wrapping_add(ahead)).load(Ordering::Relaxed) })
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
