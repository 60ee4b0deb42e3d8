//! Tables that are taken from the pool but part of no tree yet.
//!
//! Taking a table can fail, and takes time; changing the tree must do neither. So tables are taken beforehand and handed
//! in, and what was not needed, or was built in vain because another processor was quicker, stays here for the next time.

use crate::{Cell, MapError, Pages};
use addr::Hpa;

/// Tables at hand.
///
/// A list through the tables themselves: the first entry of each holds the address of the next. To be
/// [given back](Self::give_back) in the end; tables that are dropped are lost to the pool.
#[derive(Debug, Default)]
pub struct Spare {
    head: Hpa,
    count: u64,
}

impl Spare {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { head: Hpa(0), count: 0 }
    }

    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Takes tables until there are `count`.
    ///
    /// # Errors
    /// When the pool is exhausted; what was there before still is, and no more.
    pub fn fill(&mut self, pages: &impl Pages, count: u64) -> Result<(), MapError> {
        let before = self.count;
        while self.count < count {
            let Some(table) = pages.allocate() else {
                while self.count > before {
                    let Some(table) = self.take(pages) else { break };
                    pages.free(table);
                }
                return Err(MapError::OutOfTables);
            };
            self.put(pages, table);
        }
        Ok(())
    }

    /// Returns all to the pool.
    pub fn give_back(mut self, pages: &impl Pages) {
        while let Some(table) = self.take(pages) {
            pages.free(table);
        }
    }

    /// One of the tables, all zero.
    pub(crate) fn take(&mut self, pages: &impl Pages) -> Option<Hpa> {
        self.count = self.count.checked_sub(1)?;
        let table = self.head;
        let link = Cell::new(table, 0);
        self.head = Hpa(pages.load(link));
        pages.write_private(link, 0);
        Some(table)
    }

    /// A table whose first `written` entries were written in vain: nobody else has ever seen it.
    pub(crate) fn put_back(&mut self, pages: &impl Pages, table: Hpa, written: usize) {
        (0..written).for_each(|index| pages.write_private(Cell::new(table, index), 0));
        self.put(pages, table);
    }

    /// A table that is all zero and in no tree.
    fn put(&mut self, pages: &impl Pages, table: Hpa) {
        pages.write_private(Cell::new(table, 0), self.head.0);
        self.head = table;
        self.count += 1;
    }
}
