//! The pages of a child that were written while its memory is tracked, as far as stage 2 does not say so.
//!
//! Stage 2 records writes in its leaves. A leaf goes when its page is taken away, and with it what it has recorded. So
//! that is kept here, by the page's address in the child: one bit for each page, in deposited pages of 128 MiB each. A
//! page that is away counts as written until it is cleared, and so does another page that takes its place.
//!
//! Memory that was never mapped cannot have been written, and has no bits.

use alloc::vec::Vec;
use core::ops::Range;

use hyperv_defs::Status;

use crate::deposits::{Deposits, Store, Use};
use crate::limits;

/// Pages whose bits are in one word.
pub const PAGES_OF_A_WORD: u64 = 64;
const WORDS: u64 = 512;
const PAGES: u64 = WORDS * PAGES_OF_A_WORD;

/// The bits.
#[derive(Debug, Default)]
pub struct Written {
    /// In ascending order: the number of the part of memory, and the deposited page that has its bits.
    parts: Vec<(u64, u64)>,
}

impl Written {
    /// Makes room for the bits of these pages, before they are mapped.
    ///
    /// # Errors
    ///
    /// [`Status::InsufficientMemory`], or [`Status::NoResources`] for too much memory. What there is room for now
    /// stays.
    pub fn prepare(
        &mut self,
        pages: Range<u64>,
        deposits: &mut Deposits,
        store: &mut impl Store,
    ) -> Result<(), Status> {
        if pages.is_empty() {
            return Ok(());
        }
        for part in pages.start / PAGES..pages.end.div_ceil(PAGES) {
            let Err(at) = self.position(part) else { continue };
            if self.parts.len() >= limits::TRACKED_PARTS || self.parts.try_reserve(1).is_err() {
                return Err(Status::NoResources);
            }
            let page = deposits.take(Use::Written, store).ok_or(Status::InsufficientMemory)?;
            self.parts.insert(at, (part, page));
        }
        Ok(())
    }

    /// The bits of pages from `64 * first` on, as many as there are `words`.
    pub fn words(&self, first: u64, words: &mut [u64], store: &impl Store) {
        let mut rest = words;
        let mut number = first;
        while !rest.is_empty() {
            // Those of one deposited page.
            let count = usize::try_from(WORDS - number % WORDS).map_or(rest.len(), |count| count.min(rest.len()));
            let (words, others) = rest.split_at_mut(count);
            match self.place(number) {
                Some((page, index)) => store.read_words(page, index, words),
                None => words.fill(0),
            }
            rest = others;
            number += count as u64;
        }
    }

    /// The bits of pages from `64 * number` on.
    fn word(&self, number: u64, store: &impl Store) -> u64 {
        self.place(number).map_or(0, |(page, index)| store.read(page, index))
    }

    /// Replaces them. Without room for them, nothing happens.
    pub fn set_word(&self, number: u64, bits: u64, store: &mut impl Store) {
        if let Some((page, index)) = self.place(number) {
            store.write(page, index, bits);
        }
    }

    /// These pages were written.
    pub fn add(&self, pages: Range<u64>, store: &mut impl Store) {
        for number in pages.start / PAGES_OF_A_WORD..pages.end.div_ceil(PAGES_OF_A_WORD) {
            let base = number * PAGES_OF_A_WORD;
            let (first, end) = (pages.start.max(base) - base, pages.end.min(base + PAGES_OF_A_WORD) - base);
            if first < end {
                let bits = u64::MAX >> (PAGES_OF_A_WORD - (end - first)) << first;
                self.set_word(number, self.word(number, store) | bits, store);
            }
        }
    }

    /// No page was written.
    pub fn clear(&self, store: &mut impl Store) {
        self.parts.iter().for_each(|(_, page)| store.clear(*page));
    }

    /// Frees the bits, one deposited page at a time. Returns whether nothing is left.
    pub(crate) fn take_down(&mut self, deposits: &mut Deposits, store: &mut impl Store) -> bool {
        if let Some((_, page)) = self.parts.pop() {
            deposits.put(page, Use::Written, store);
        }
        self.parts.is_empty()
    }

    fn place(&self, number: u64) -> Option<(u64, usize)> {
        let at = self.position(number / WORDS).ok()?;
        Some((self.parts[at].1, usize::try_from(number % WORDS).ok()?))
    }

    fn position(&self, part: u64) -> Result<usize, usize> {
        self.parts.binary_search_by_key(&part, |(part, _)| *part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// A deposited page has its own number in all words, and the word's.
    struct Numbered;

    impl Store for Numbered {
        fn read(&self, page: u64, index: usize) -> u64 {
            page << 16 | index as u64
        }

        fn write(&mut self, _: u64, _: usize, _: u64) {}

        fn clear(&mut self, _: u64) {}
    }

    #[test]
    fn words_of_several_parts_are_those_of_each_and_none_where_no_memory_was_mapped() {
        let written = Written { parts: vec![(0, 7), (1, 5), (3, 9)] };
        for (first, count) in [(0, 1), (0, 2048), (500, 24), (511, 1), (512, 513), (1000, 600), (1030, 8), (2047, 9)] {
            let mut words = vec![u64::MAX; count];
            written.words(first, &mut words, &Numbered);
            for (number, word) in (first..).zip(words) {
                assert_eq!(word, written.word(number, &Numbered), "word {number} from {first}");
            }
        }
        written.words(3, &mut [], &Numbered);
        assert_eq!(written.word(513, &Numbered), 5 << 16 | 1);
        assert_eq!(written.word(1024, &Numbered), 0);
    }
}
