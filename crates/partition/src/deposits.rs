//! Deposited pages of one child: the free ones, and the uses of the others.
//!
//! The free pages form a stack. Word 0 of each holds the number of the page below it, plus one; zero ends the stack.

use core::fmt;

/// Access to deposited pages, which the parent and its children cannot reach. A page has 512 words of 64 bits.
pub trait Store {
    /// Reads a word of a page.
    fn read(&self, page: u64, index: usize) -> u64;

    /// Reads words of a page, from this one on.
    fn read_words(&self, page: u64, index: usize, words: &mut [u64]) {
        words.iter_mut().zip(index..).for_each(|(word, index)| *word = self.read(page, index));
    }

    /// Writes a word of a page.
    fn write(&mut self, page: u64, index: usize, value: u64);

    /// Clears a page: the parent will read it.
    fn clear(&mut self, page: u64);
}

/// The use of a deposited page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The map of guest physical memory.
    Map,
    /// Tables of stage 2.
    Stage2,
    /// Virtual processors.
    Vp,
    /// Bits of pages that were written.
    Written,
}

/// The pages of one child.
#[derive(Default)]
pub struct Deposits {
    /// Number of the uppermost free page, plus one.
    top: u64,
    free: u64,
    /// By [`Use`].
    used: [u64; 4],
}

impl fmt::Debug for Deposits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [map, stage2, vps, written] = self.used;
        write!(f, "deposits: {} free, {map} map, {stage2} stage 2, {vps} VPs, {written} bits", self.free)
    }
}

impl Deposits {
    /// Pages that can be withdrawn.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Pages in use for this.
    #[must_use]
    pub fn used(&self, by: Use) -> u64 {
        self.used[by as usize]
    }

    /// All pages.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.free + self.used.iter().sum::<u64>()
    }

    /// Adds a page. The ledger has it as deposited, and no TLB has it any more.
    pub fn add(&mut self, page: u64, store: &mut impl Store) {
        store.write(page, 0, self.top);
        self.top = page + 1;
        self.free += 1;
    }

    /// Takes a free page back out, cleared. The caller tells the ledger.
    pub fn withdraw(&mut self, store: &mut impl Store) -> Option<u64> {
        let page = self.top.checked_sub(1)?;
        self.top = store.read(page, 0);
        self.free -= 1;
        store.clear(page);
        Some(page)
    }

    /// Takes a free page, cleared, to use it.
    pub fn take(&mut self, by: Use, store: &mut impl Store) -> Option<u64> {
        let page = self.withdraw(store)?;
        self.used[by as usize] += 1;
        Some(page)
    }

    /// Frees a used page.
    pub fn put(&mut self, page: u64, by: Use, store: &mut impl Store) {
        self.used[by as usize] -= 1;
        self.add(page, store);
    }
}
