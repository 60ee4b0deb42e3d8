//! Tables that were taken from the pool and are not yet part of a tree.
//!
//! Taking a table can fail and takes time; a change of the tree must do neither. So callers take tables before and pass
//! them in. Unused tables stay here for the next time, and so do tables that another processor made unnecessary.

use crate::{Cell, MapError, Pages};
use addr::Hpa;

/// A stock of tables.
///
/// It is a list through the tables themselves: the first entry of each holds the address of the next.
/// [Return](Self::give_back) them in the end; a dropped list is lost to the pool.
#[derive(Debug, Default)]
pub struct Spare {
    head: Hpa,
    count: u64,
}

impl Spare {
    /// No tables yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { head: Hpa(0), count: 0 }
    }

    /// Number of tables.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Takes tables from the pool until there are `count`.
    ///
    /// # Errors
    /// The pool is exhausted; the tables taken so far stay.
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

    /// Takes back a table whose first `written` entries were written; no other processor has seen it.
    pub(crate) fn put_back(&mut self, pages: &impl Pages, table: Hpa, written: usize) {
        (0..written).for_each(|index| pages.write_private(Cell::new(table, index), 0));
        self.put(pages, table);
    }

    /// Adds a zeroed table that is in no tree.
    fn put(&mut self, pages: &impl Pages, table: Hpa) {
        pages.write_private(Cell::new(table, 0), self.head.0);
        self.head = table;
        self.count += 1;
    }
}
