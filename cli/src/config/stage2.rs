//! The keys about stage 2: when memory is mapped, and how writes to it are logged.

use abi::payload::{DirtyLogging, Populate};

use super::Place;
use super::reader::Table;
use crate::failure::Failure;

/// How a VM's memory is mapped and logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage2 {
    /// When memory is mapped.
    pub(crate) populate: Populate,
    /// How writes are logged.
    pub(crate) dirty: DirtyLogging,
}

impl Stage2 {
    /// Reads the keys of a VM's table.
    pub(super) fn read(table: &mut Table<'_>) -> Result<Self, Failure> {
        let populate = table.setting("populate")?.value;
        let split = table.setting("split")?.value;
        let splits_per_second = match table.integer("split_rate", 1)? {
            (_, Place::Absent { .. }) => None,
            (count, place) => Some(rate(count, &place)?),
        };
        let source = table.setting_if_any("dirty_source")?.map(|source| source.value);
        Ok(Self { populate, dirty: DirtyLogging { split, source, splits_per_second } })
    }
}

fn rate(count: i64, place: &Place) -> Result<u32, Failure> {
    match u32::try_from(count) {
        Ok(count @ 1..) => Ok(count),
        _ => Err(place
            .bad(format!("{count} large pages per second; the minimum is 1"))
            .help("omit it to split without a limit")),
    }
}
