//! A child's guest physical address space, as its parent has described it.
//!
//! ```text
//!  page number, 36 bits:  [ 9 bits | 9 bits | 9 bits | 9 bits ]
//!                            level 3  level 2  level 1  level 0
//!
//!  word of a table:   63       52 51              12 11         2 1  0
//!    absent          |                    0                       | 0 |
//!    no access       |                    0                       | 1 |
//!    page            |     0     | page of the parent | c x w     | 2 |     level 0 or 1
//!    table           |  entries  | deposited page     | no access | 3 |     not at level 0
//! ```
//!
//! The tree resembles a page table, but no processor walks it. It does not change when stage 2 is split,
//! write-protected for a dirty log, or filled late. Unlike a list of intervals it never needs more than one page for
//! each 2 MiB, and each change affects at most three tables.
//!
//! "No access" means: memory, but not accessible now. Parents first describe all memory so, in pages of 4 KiB. So a
//! table full of such words becomes one word of the table above, and an empty table is removed. The word that points to
//! a table counts both kinds.

use alloc::vec::Vec;
use core::ops::Range;

use hyperv_defs::Status;
use hyperv_defs::memory::{GpaAccess, LARGE_PAGES};

use crate::deposits::{Deposits, Store, Use};
use crate::ledger::Ledger;

/// Pages of a child have numbers below this: 48 bits of address.
pub const PAGE_LIMIT: u64 = 1 << 36;

const LEVELS: usize = 4;
const BITS: usize = 9;
const ENTRIES: usize = 1 << BITS;

/// The state of a page of the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No memory: an access goes to a device.
    Absent,
    /// Memory that is not there now.
    NoAccess,
    /// A page of the parent.
    Page {
        /// Its number.
        source: u64,
        /// The child's rights.
        access: GpaAccess,
    },
}

/// The size of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// 4 KiB.
    Small,
    /// 2 MiB.
    Large,
}

impl Leaf {
    /// Pages in it.
    #[must_use]
    pub const fn pages(self) -> u64 {
        match self {
            Self::Small => 1,
            Self::Large => LARGE_PAGES,
        }
    }

    const fn level(self) -> usize {
        match self {
            Self::Small => 0,
            Self::Large => 1,
        }
    }
}

/// The replaced entries, which the ledger still counts as in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "pages that nobody releases are never the parent's again"]
pub enum Old {
    /// No page.
    Nothing,
    /// Consecutive pages of the parent.
    Pages {
        /// The first.
        first: u64,
        /// Number of pages: 1 or 512.
        count: u64,
    },
    /// Those in a table of level 0, which is not in the tree any more.
    Table(u64),
}

/// The map.
#[derive(Debug, Default)]
pub struct GpaMap {
    root: Option<u64>,
}

/// A word of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Absent,
    NoAccess,
    Page { source: u64, access: GpaAccess },
    Table { page: u64, count: Count },
}

/// Number of words of a table that are not absent, and the number of "no access" words among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    entries: u16,
    no_access: u16,
}

impl Word {
    const ABSENT: u64 = 0;
    const NO_ACCESS: u64 = 1;
    const PAGE: u64 = 2;
    const TABLE: u64 = 3;
    const TAG: u64 = 3;
    const NUMBER: u64 = ((1 << 40) - 1) << 12;
    const COUNT: u64 = 0x3ff;
    const NO_ACCESS_SHIFT: u32 = 2;
    const ENTRIES_SHIFT: u32 = 52;
    const WRITE: u64 = 1 << 2;
    const EXECUTE: u64 = 1 << 3;
    const CACHED: u64 = 1 << 4;

    fn decode(word: u64) -> Self {
        let number = (word & Self::NUMBER) >> 12;
        let count = |shift: u32| (word >> shift & Self::COUNT) as u16;
        match word & Self::TAG {
            Self::ABSENT => Self::Absent,
            Self::NO_ACCESS => Self::NoAccess,
            Self::PAGE => {
                let bit = |bit| word & bit != 0;
                let access =
                    GpaAccess { write: bit(Self::WRITE), execute: bit(Self::EXECUTE), cached: bit(Self::CACHED) };
                Self::Page { source: number, access }
            }
            _ => Self::Table {
                page: number,
                count: Count { entries: count(Self::ENTRIES_SHIFT), no_access: count(Self::NO_ACCESS_SHIFT) },
            },
        }
    }

    fn encode(self) -> u64 {
        match self {
            Self::Absent => Self::ABSENT,
            Self::NoAccess => Self::NO_ACCESS,
            Self::Page { source, access } => {
                let bit = |is_set, bit| if is_set { bit } else { 0 };
                Self::PAGE
                    | source << 12
                    | bit(access.write, Self::WRITE)
                    | bit(access.execute, Self::EXECUTE)
                    | bit(access.cached, Self::CACHED)
            }
            Self::Table { page, count } => {
                let (entries, no_access) = (u64::from(count.entries), u64::from(count.no_access));
                Self::TABLE | page << 12 | entries << Self::ENTRIES_SHIFT | no_access << Self::NO_ACCESS_SHIFT
            }
        }
    }

    /// Its contribution to the count of its table.
    fn weight(self) -> Count {
        Count { entries: u16::from(self != Self::Absent), no_access: u16::from(self == Self::NoAccess) }
    }

    /// The word for element `index` of a table that describes the same as this word.
    fn piece(self, index: u64) -> Self {
        match self {
            Self::Page { source, access } => Self::Page { source: source + index, access },
            same => same,
        }
    }
}

impl From<Entry> for Word {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::Absent => Self::Absent,
            Entry::NoAccess => Self::NoAccess,
            Entry::Page { source, access } => Self::Page { source, access },
        }
    }
}

/// Where a word is.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    table: u64,
    index: usize,
}

impl GpaMap {
    /// Whether the map has a root, without which it is empty and stays so.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.root.is_some()
    }

    /// Gives the map its root.
    ///
    /// # Errors
    ///
    /// [`Status::InsufficientMemory`].
    pub fn prepare(&mut self, deposits: &mut Deposits, store: &mut impl Store) -> Result<(), Status> {
        if self.root.is_none() {
            self.root = Some(deposits.take(Use::Map, store).ok_or(Status::InsufficientMemory)?);
        }
        Ok(())
    }

    /// The state of `page`.
    pub fn get(&self, page: u64, store: &impl Store) -> Entry {
        let Some(mut table) = self.root.filter(|_| page < PAGE_LIMIT) else { return Entry::Absent };
        for level in (0..LEVELS).rev() {
            match Word::decode(store.read(table, index_at(page, level))) {
                Word::Absent => return Entry::Absent,
                Word::NoAccess => return Entry::NoAccess,
                Word::Page { source, access } => {
                    let offset = page & ((1 << (BITS * level)) - 1);
                    return Entry::Page { source: source + offset, access };
                }
                Word::Table { page, .. } => table = page,
            }
        }
        Entry::Absent
    }

    /// Calls `found` for those of `pages` that are described, in ascending order, several at a time. It descends once
    /// for each table.
    pub fn described(&self, pages: Range<u64>, store: &impl Store, mut found: impl FnMut(Range<u64>)) {
        let mut page = pages.start;
        while page < pages.end {
            let end = pages.end.min((page + 1).next_multiple_of(1 << BITS));
            match self.last_table(page, store) {
                Some(table) => {
                    let is_there = |page: &u64| Word::decode(store.read(table, index_at(*page, 0))) != Word::Absent;
                    let mut run = page..page;
                    for there in (page..end).filter(is_there) {
                        if there != run.end && !run.is_empty() {
                            found(run.clone());
                        }
                        run = if there == run.end { run.start..there + 1 } else { there..there + 1 };
                    }
                    if !run.is_empty() {
                        found(run);
                    }
                }
                None if self.get(page, store) != Entry::Absent => found(page..end),
                None => {}
            }
            page = end;
        }
    }

    /// The table of the smallest pages around `page`; `None` if a larger entry says the same about all of them.
    fn last_table(&self, page: u64, store: &impl Store) -> Option<u64> {
        let root = self.root.filter(|_| page < PAGE_LIMIT)?;
        (1..LEVELS).rev().try_fold(root, |table, level| match Word::decode(store.read(table, index_at(page, level))) {
            Word::Table { page, .. } => Some(page),
            Word::Absent | Word::NoAccess | Word::Page { .. } => None,
        })
    }

    /// Changes the state of `page`, the first of a leaf. The ledger already counts the new pages, and still counts the
    /// old ones.
    ///
    /// # Errors
    ///
    /// [`Status::InsufficientMemory`]; then the map is unchanged. [`Status::InvalidParameter`] beyond the address
    /// space.
    pub fn set(
        &mut self,
        page: u64,
        leaf: Leaf,
        entry: Entry,
        deposits: &mut Deposits,
        store: &mut impl Store,
    ) -> Result<Old, Status> {
        let root = self.root.filter(|_| page < PAGE_LIMIT && page.is_multiple_of(leaf.pages()));
        let root = root.ok_or(Status::InvalidParameter)?;
        let wanted = Word::from(entry);

        // Descends to the leaf's level. A larger entry with another state is split.
        let mut path = [Place::default(); LEVELS];
        let mut table = root;
        for level in (0..LEVELS).rev() {
            let place = Place { table, index: index_at(page, level) };
            path[level] = place;
            if level == leaf.level() {
                break;
            }
            let word = Word::decode(store.read(place.table, place.index));
            table = match word {
                Word::Table { page, .. } => page,
                // A larger entry that has this state already.
                Word::Absent | Word::NoAccess if word == wanted => return Ok(Old::Nothing),
                // From here on all is split: there are pages for it, or nothing is changed.
                word if deposits.free() >= (level - leaf.level()) as u64 => {
                    split(word, &path, level, deposits, store).ok_or(Status::InsufficientMemory)?
                }
                _ => return Err(Status::InsufficientMemory),
            };
        }

        let place = path[leaf.level()];
        let old = Word::decode(store.read(place.table, place.index));
        let old_pages = match old {
            Word::Absent | Word::NoAccess => Old::Nothing,
            Word::Page { source, .. } => Old::Pages { first: source, count: leaf.pages() },
            Word::Table { page, count } if count.entries == count.no_access => {
                deposits.put(page, Use::Map, store);
                Old::Nothing
            }
            Word::Table { page, .. } => Old::Table(page),
        };
        replace(&path, leaf.level(), wanted, deposits, store);
        Ok(old_pages)
    }

    /// Changes pages of 4 KiB from `first` on, at most to the end of their table, with one walk for all of them. `next`
    /// gives the state of each, and no more of them when it likes; `same` gets those that a page has already. The
    /// ledger already counts the new pages, and still counts the old ones, which go to `old`, where there is room.
    /// Returns how many pages have the wanted state now.
    ///
    /// # Errors
    ///
    /// Those of `next`, and as [`Self::set`] if not even the first page can be changed.
    pub fn set_run(
        &mut self,
        first: u64,
        next: &mut dyn FnMut() -> Option<Result<Entry, Status>>,
        same: &mut dyn FnMut(Entry),
        old: &mut Vec<Old>,
        deposits: &mut Deposits,
        store: &mut impl Store,
    ) -> (u64, Result<(), Status>) {
        let mut entry = match next() {
            None => return (0, Ok(())),
            Some(Err(status)) => return (0, Err(status)),
            Some(Ok(entry)) => entry,
        };
        let Some(root) = self.root.filter(|_| first < PAGE_LIMIT) else {
            same(entry);
            return if entry == Entry::Absent { (1, Ok(())) } else { (0, Err(Status::InvalidParameter)) };
        };

        // The end of the table of level 0 that `first` has, or would have.
        let end = (first | (ENTRIES as u64 - 1)) + 1;
        let mut page = first;
        let mut path = [Place::default(); LEVELS];
        let mut table = root;
        for level in (1..LEVELS).rev() {
            let place = Place { table, index: index_at(first, level) };
            path[level] = place;
            let word = Word::decode(store.read(place.table, place.index));
            if let Word::Table { page, .. } = word {
                table = page;
                continue;
            }
            // A larger entry is split for the first page that has another state.
            let below = (1 << (BITS * level)) - 1;
            while word.piece(page & below) == Word::from(entry) {
                same(entry);
                page += 1;
                if page == end {
                    return (page - first, Ok(()));
                }
                entry = match next() {
                    None => return (page - first, Ok(())),
                    Some(Err(status)) => return (page - first, Err(status)),
                    Some(Ok(entry)) => entry,
                };
            }
            // All levels below are split: there are pages for it, or nothing is changed.
            let there = if deposits.free() >= level as u64 { split(word, &path, level, deposits, store) } else { None };
            let Some(there) = there else {
                same(entry);
                return (page - first, Err(Status::InsufficientMemory));
            };
            table = there;
        }

        let above = path[1];
        let Word::Table { page: _, mut count } = Word::decode(store.read(above.table, above.index)) else {
            same(entry);
            return (page - first, Err(Status::InvalidParameter));
        };
        let result = loop {
            let (index, wanted) = (index_at(page, 0), Word::from(entry));
            let replaced = Word::decode(store.read(table, index));
            if replaced == wanted {
                same(entry);
            } else {
                store.write(table, index, wanted.encode());
                count = count.changed(replaced, wanted);
                if let Word::Page { source, .. } = replaced {
                    old.push(Old::Pages { first: source, count: 1 });
                }
            }
            page += 1;
            if page == end {
                break Ok(());
            }
            entry = match next() {
                None => break Ok(()),
                Some(Err(status)) => break Err(status),
                Some(Ok(entry)) => entry,
            };
        };
        let word = match count.word_of_all() {
            Some(word) => {
                deposits.put(table, Use::Map, store);
                word
            }
            None => Word::Table { page: table, count },
        };
        replace(&path, 1, word, deposits, store);
        (page - first, result)
    }

    /// Ends the uses that a change has left over, after no TLB has the pages any more.
    pub fn settle(old: Old, ledger: &Ledger, deposits: &mut Deposits, store: &mut impl Store) {
        match old {
            Old::Nothing => {}
            Old::Pages { first, count } => (first..first + count).for_each(|page| ledger.release(page)),
            Old::Table(table) => {
                release_all(table, ledger, store);
                deposits.put(table, Use::Map, store);
            }
        }
    }

    /// Removes the map, a part at a time: at most some 1 000 pages. Returns whether nothing is left. No TLB holds any
    /// of its pages.
    pub fn take_down(&mut self, ledger: &Ledger, deposits: &mut Deposits, store: &mut impl Store) -> bool {
        let Some(root) = self.root else { return true };

        // Down to the last table on the left that is not empty.
        let (mut table, mut level, mut above) = (root, LEVELS - 1, None);
        loop {
            let used = (0..ENTRIES).find(|index| {
                !matches!(Word::decode(store.read(table, *index)), Word::Absent | Word::NoAccess) && level > 0
            });
            let Some(index) = used else { break };
            let place = Place { table, index };
            match Word::decode(store.read(table, index)) {
                Word::Table { page, .. } => {
                    above = Some(place);
                    (table, level) = (page, level - 1);
                }
                Word::Page { source, .. } => {
                    (source..source + LARGE_PAGES).for_each(|page| ledger.release(page));
                    store.write(table, index, Word::ABSENT);
                    return false;
                }
                Word::Absent | Word::NoAccess => break,
            }
        }

        if level == 0 {
            release_all(table, ledger, store);
        }
        match above {
            Some(place) => store.write(place.table, place.index, Word::ABSENT),
            None => self.root = None,
        }
        deposits.put(table, Use::Map, store);
        self.root.is_none()
    }

    /// All entries of the map, for checks: first page, number of pages, entry of the first. Also checks the counts and
    /// the number of all tables.
    ///
    /// # Panics
    ///
    /// If a table's count is wrong.
    pub fn describe(&self, store: &impl Store) -> (Vec<(u64, u64, Entry)>, u64) {
        let mut found = Vec::new();
        let mut tables = 0;
        if let Some(root) = self.root {
            walk(root, LEVELS - 1, 0, store, &mut found, &mut tables);
        }
        (found, tables)
    }
}

/// The index of `page` in its table of `level`.
fn index_at(page: u64, level: usize) -> usize {
    let index = page >> (BITS * level) & (ENTRIES as u64 - 1);
    // Nine bits.
    usize::try_from(index).unwrap_or_default()
}

/// Replaces a word by a table that describes the same.
fn split(
    word: Word,
    path: &[Place; LEVELS],
    level: usize,
    deposits: &mut Deposits,
    store: &mut impl Store,
) -> Option<u64> {
    let page = deposits.take(Use::Map, store)?;
    let mut count = Count::default();
    if word != Word::Absent {
        for index in 0..ENTRIES {
            let piece = word.piece(index as u64);
            count = count.changed(Word::Absent, piece);
            store.write(page, index, piece.encode());
        }
    }
    replace(path, level, Word::Table { page, count }, deposits, store);
    Some(page)
}

/// Writes a word at `level` of the path, and corrects the counts above. A table that is empty, or has no access
/// anywhere, becomes a word of the table above.
fn replace(path: &[Place; LEVELS], level: usize, word: Word, deposits: &mut Deposits, store: &mut impl Store) {
    let mut word = word;
    for level in level..LEVELS {
        let place = path[level];
        let old = Word::decode(store.read(place.table, place.index));
        store.write(place.table, place.index, word.encode());

        // The root has no word that counts it.
        let Some(above) = path.get(level + 1) else { return };
        let Word::Table { page, count } = Word::decode(store.read(above.table, above.index)) else { return };
        let count = count.changed(old, word);
        let Some(of_all) = count.word_of_all() else {
            store.write(above.table, above.index, Word::Table { page, count }.encode());
            return;
        };
        word = of_all;
        deposits.put(page, Use::Map, store);
    }
}

impl Count {
    /// The word that describes the same as a table with this count, if there is one.
    fn word_of_all(self) -> Option<Word> {
        if self.entries == 0 {
            Some(Word::Absent)
        } else if usize::from(self.no_access) == ENTRIES {
            Some(Word::NoAccess)
        } else {
            None
        }
    }

    /// The count after a word has become another.
    fn changed(self, old: Word, new: Word) -> Self {
        let (old, new) = (old.weight(), new.weight());
        Self {
            entries: self.entries + new.entries - old.entries,
            no_access: self.no_access + new.no_access - old.no_access,
        }
    }
}

/// Ends the use of all pages in a table of level 0.
fn release_all(table: u64, ledger: &Ledger, store: &impl Store) {
    for index in 0..ENTRIES {
        if let Word::Page { source, .. } = Word::decode(store.read(table, index)) {
            ledger.release(source);
        }
    }
}

/// See [`GpaMap::describe`]. Returns the table's count.
fn walk(
    table: u64,
    level: usize,
    base: u64,
    store: &impl Store,
    found: &mut Vec<(u64, u64, Entry)>,
    tables: &mut u64,
) -> Count {
    *tables += 1;
    let span = 1_u64 << (BITS * level);
    let mut sum = Count::default();
    for index in 0..ENTRIES {
        let word = Word::decode(store.read(table, index));
        let first = base + index as u64 * span;
        sum = sum.changed(Word::Absent, word);
        match word {
            Word::Absent => {}
            Word::NoAccess => found.push((first, span, Entry::NoAccess)),
            Word::Page { source, access } => found.push((first, span, Entry::Page { source, access })),
            Word::Table { page, count } => {
                assert!(level > 0, "a table in a table of level 0");
                let counted = walk(page, level - 1, first, store, found, tables);
                assert_eq!(counted, count, "count of the table at {first:#x}");
                assert!(counted.entries != 0, "an empty table at {first:#x}");
                assert!(usize::from(counted.no_access) != ENTRIES, "a table without access at {first:#x}");
            }
        }
    }
    sum
}
