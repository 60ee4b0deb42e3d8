//! The keys about TLBs: the interface by which a guest flushes them, and the tags that separate guests in them.

use abi::payload::{HyperV, RemoteFlush, TagScheme};

use super::reader::Table;
use super::{Place, Placed};
use crate::failure::Failure;

/// How TLBs are flushed, and tagged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Translation {
    /// The parts of the Hyper-V interface that the guest sees.
    pub(crate) hyperv: HyperV,
    /// How the guest flushes TLBs of other vCPUs.
    pub(crate) flush: RemoteFlush,
    /// How tags are handed out.
    pub(crate) tags: TagScheme,
    /// Maximum number of tags.
    pub(crate) tag_limit: Option<u32>,
}

/// The largest number of tags that a file may ask for: hardware has up to 2^15, one of them the host's.
const MOST_TAGS: u32 = 32_767;

impl Translation {
    /// Reads the keys of a VM's table.
    pub(super) fn read(table: &mut Table<'_>) -> Result<Self, Failure> {
        let hyperv = table.setting("hyperv")?.value;
        let flush = flush(table.setting("flush")?, hyperv)?;
        let tags = table.setting("tags")?.value;
        let tag_limit = match table.integer("tag_limit", 0)? {
            (_, Place::Absent { .. }) => None,
            (count, place) => Some(tag_limit(count, &place)?),
        };
        Ok(Self { hyperv, flush, tags, tag_limit })
    }
}

fn flush(flush: Placed<RemoteFlush>, hyperv: HyperV) -> Result<RemoteFlush, Failure> {
    let is_written = matches!(flush.place, Place::Key { .. });
    if is_written && flush.value == RemoteFlush::Hypercall && hyperv == HyperV::Off {
        return Err(flush
            .place
            .bad("the guest has no hypercalls, because 'hyperv' is \"off\"")
            .help("omit 'flush', or write hyperv = \"flush\""));
    }
    Ok(flush.value)
}

fn tag_limit(count: i64, place: &Place) -> Result<u32, Failure> {
    match u32::try_from(count) {
        Ok(count @ 1..=MOST_TAGS) => Ok(count),
        _ => Err(place
            .bad(format!("{count} tags; a VM needs 1 to {MOST_TAGS}"))
            .help("omit it to use all tags of the machine")),
    }
}
