//! The keys about stage 2: when memory is mapped, and how writes to it are logged.

use abi::payload::{DirtyLogging, DirtySource, Populate, Split};

use super::reader::Table;
use super::{Place, no_such};
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
        let (text, place) = table.text_or("populate", "at-start")?;
        let populate = populate(&text, &place)?;
        let (text, place) = table.text_or("split", "adaptive")?;
        let split = split(&text).map_err(|names| no_such(&text, "time to split large pages", names, &place))?;
        let splits_per_second = match table.integer("split_rate", 1)? {
            (_, Place::Absent { .. }) => None,
            (count, place) => Some(rate(count, &place)?),
        };
        let source = match table.text("dirty_source")? {
            None => None,
            Some((text, place)) => {
                Some(source(&text).map_err(|names| no_such(&text, "recorder of writes", names, &place))?)
            }
        };
        Ok(Self { populate, dirty: DirtyLogging { split, source, splits_per_second } })
    }
}

fn populate(text: &str, place: &Place) -> Result<Populate, Failure> {
    match text {
        "at-start" => Ok(Populate::AtStart),
        "touch-2M" => Ok(Populate::Touch2M),
        "touch-4K" => Ok(Populate::Touch4K),
        _ => Err(no_such(text, "time to map memory", &["at-start", "touch-2M", "touch-4K"], place)),
    }
}

/// When large pages are split, by its name here and on the command line.
///
/// # Errors
/// The names that there are.
pub(crate) fn split(text: &str) -> Result<Split, &'static [&'static str]> {
    match text {
        "adaptive" => Ok(Split::Adaptive),
        "eager" => Ok(Split::Eager),
        "lazy" => Ok(Split::Lazy),
        _ => Err(&["adaptive", "eager", "lazy"]),
    }
}

/// What records writes, by its name here and on the command line.
///
/// # Errors
/// The valid names.
pub(crate) fn source(text: &str) -> Result<DirtySource, &'static [&'static str]> {
    match text {
        "hardware" => Ok(DirtySource::Hardware),
        "write-protect" => Ok(DirtySource::WriteProtect),
        _ => Err(&["hardware", "write-protect"]),
    }
}

fn rate(count: i64, place: &Place) -> Result<u32, Failure> {
    match u32::try_from(count) {
        Ok(count @ 1..) => Ok(count),
        _ => Err(place
            .bad(format!("{count} large pages split in a second; at least 1 is possible"))
            .help("leave it out to split as fast as it goes")),
    }
}
