//! The keys about TLBs: the interface by which a guest flushes them, and the tags that separate guests in them.

use abi::payload::{HyperV, RemoteFlush, TagScheme};

use super::reader::Table;
use super::{Place, no_such};
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
        let (text, place) = table.text_or("hyperv", "flush+ipi")?;
        let hyperv = hyperv(&text, &place)?;
        let flush = match table.text("flush")? {
            None => RemoteFlush::Hypercall,
            Some((text, place)) => flush(&text, hyperv, &place)?,
        };
        let (text, place) = table.text_or("tags", "epoch")?;
        let tags = tags(&text, &place)?;
        let tag_limit = match table.integer("tag_limit", 0)? {
            (_, Place::Absent { .. }) => None,
            (count, place) => Some(tag_limit(count, &place)?),
        };
        Ok(Self { hyperv, flush, tags, tag_limit })
    }
}

fn hyperv(text: &str, place: &Place) -> Result<HyperV, Failure> {
    match text {
        "off" => Ok(HyperV::Off),
        "flush" => Ok(HyperV::Flush),
        "flush+ipi" => Ok(HyperV::FlushIpi),
        _ => Err(no_such(text, "part of the Hyper-V interface", &["off", "flush", "flush+ipi"], place)),
    }
}

fn flush(text: &str, hyperv: HyperV, place: &Place) -> Result<RemoteFlush, Failure> {
    match text {
        "hypercall" if hyperv == HyperV::Off => Err(place
            .bad("the guest is offered no hypercalls, since 'hyperv' is \"off\"")
            .help("leave 'flush' out, or write hyperv = \"flush\"")),
        "hypercall" => Ok(RemoteFlush::Hypercall),
        "ipi" => Ok(RemoteFlush::Ipi),
        _ => Err(no_such(text, "way to flush TLBs", &["hypercall", "ipi"], place)),
    }
}

fn tags(text: &str, place: &Place) -> Result<TagScheme, Failure> {
    match text {
        "epoch" => Ok(TagScheme::Epoch),
        "generation" => Ok(TagScheme::Generation),
        "flush-always" => Ok(TagScheme::FlushAlways),
        _ => Err(no_such(text, "way to manage tags", &["epoch", "generation", "flush-always"], place)),
    }
}

fn tag_limit(count: i64, place: &Place) -> Result<u32, Failure> {
    match u32::try_from(count) {
        Ok(count @ 1..=MOST_TAGS) => Ok(count),
        _ => Err(place
            .bad(format!("{count} tags; a VM needs 1 to {MOST_TAGS}"))
            .help("leave it out to use all that the machine has")),
    }
}
