//! Flushes by scheme and number of tags.

use abi::payload::TagScheme;
use maud::{Markup, html};

use super::super::data::Data;
use super::super::plot::{Line, Lines};
use super::{cell, table};
use crate::bench::Spread;

const OWN: &str = "flushes of the own tag";
const ALL: &str = "flushes of all tags";
const SCHEMES: [(TagScheme, &str); 3] =
    [(TagScheme::Epoch, "epochs"), (TagScheme::Generation, "generations"), (TagScheme::FlushAlways, "flush always")];

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @if let Some(plot) = plot(data) { (plot) }
        @for load in data.values("tags", OWN, "load") { (shares(data, &load)) }
        (instructions(data))
        (native(data))
    }
}

/// Entries that flush anything, by the number of tags.
fn plot(data: &Data) -> Option<Markup> {
    let mut x: Vec<String> =
        data.values("tags", OWN, "tag_limit").into_iter().filter(|limit| !limit.is_empty()).collect();
    x.reverse();
    let mut lines = Vec::new();
    for (colour, (scheme, name)) in SCHEMES.into_iter().enumerate() {
        let point = |limit: &String| {
            // The scheme `flush-always` uses one tag, whatever the limit.
            let limit = if scheme == TagScheme::FlushAlways { "" } else { limit.as_str() };
            let settings = [("tags", scheme.name()), ("tag_limit", limit), ("load", "mixed")];
            let (own, all) = (data.one("tags", OWN, &settings)?, data.one("tags", ALL, &settings)?);
            let sums: Vec<f64> = own.samples.iter().zip(&all.samples).map(|(own, all)| own + all).collect();
            Spread::of(&sums)
        };
        lines.push(Line { name: name.to_string(), colour, dash: colour, points: x.iter().map(point).collect() });
    }
    let title = "Entries that flush TLB entries, mixed load of 8 vCPUs on 2 pCPUs (counted in the emulator)";
    Lines {
        title: title.to_string(),
        x_label: "tags of a pCPU",
        y_label: "% of entries",
        x,
        is_logarithmic: false,
        lines,
    }
    .draw()
}

fn shares(data: &Data, load: &str) -> Markup {
    let mut rows = Vec::new();
    for (scheme, name) in SCHEMES {
        let mut limits = data.values("tags", OWN, "tag_limit");
        limits.reverse();
        for limit in limits {
            let settings = [("tags", scheme.name()), ("tag_limit", limit.as_str()), ("load", load)];
            if data.one("tags", OWN, &settings).is_none() {
                continue;
            }
            let shown = |quantity: &str| cell(data, "tags", quantity, &settings, 1.0);
            let limit = if limit.is_empty() { "–".to_string() } else { limit.clone() };
            let quantities = ["entries", "assignments of a tag", "new generations", OWN, ALL, "changes of pCPU"];
            rows.push([vec![name.to_string(), limit], quantities.map(shown).to_vec()].concat());
        }
    }
    table(
        &format!("Load “{load}”: per cent of entries, counted in the emulator. Each entry is one check."),
        &[
            "scheme",
            "tags",
            "entries",
            "assignments %",
            "new generations %",
            "own tag flushed %",
            "all flushed %",
            "changes of pCPU",
        ],
        &rows,
    )
}

fn instructions(data: &Data) -> Markup {
    const QUANTITY: &str = "instructions of one exit";
    let rows: Vec<_> = data
        .series("tags", QUANTITY)
        .map(|(key, _)| {
            let [tags, limit] = ["tags", "tag_limit"].map(|name| key.setting(name));
            let name = if limit.is_empty() { tags.to_string() } else { format!("{tags}, {limit} tag(s)") };
            vec![name, cell(data, "tags", QUANTITY, &[("tags", tags), ("tag_limit", limit)], 1.0)]
        })
        .collect();
    table(
        "Instructions of the shortest exit as a whole (CPUID; HVC on AArch64), emulated, exact.",
        &["scheme", "instructions"],
        &rows,
    )
}

fn native(data: &Data) -> Markup {
    const QUANTITY: &str = "tag code";
    let rows: Vec<_> = data
        .series("tags", QUANTITY)
        .map(|(key, _)| {
            let operation = key.setting("operation");
            vec![operation.to_string(), cell(data, "tags", QUANTITY, &[("operation", operation)], 1.0)]
        })
        .collect();
    table(
        "The code for tags on this computer, natively: cycles above an empty loop, median (least–greatest) of all rounds.",
        &["operation", "cycles"],
        &rows,
    )
}
