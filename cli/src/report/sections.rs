//! One section for each mechanism: all its settings, as tables and plots.

mod decode;
mod dirty;
mod exits;
mod layout;
mod moves;
mod tags;
mod tlb;

use maud::{Markup, html};

use super::data::Data;
use super::number::{scaled, spread};

/// A section of the page.
pub(super) struct Section {
    /// The experiment that it is of.
    pub(super) experiment: &'static str,
    /// Its heading.
    pub(super) title: &'static str,
    /// The question of the section, in a sentence or two.
    pub(super) lead: &'static str,
    /// How to measure it alone.
    pub(super) command: &'static str,
    /// Tables and plots of the results.
    pub(super) body: fn(&Data) -> Markup,
}

/// All sections, in order.
pub(super) const ALL: [Section; 9] = [
    Section {
        experiment: "tlb",
        title: "Remote TLB flush",
        lead: "A guest that flushes the TLBs of its other CPUs by interrupts waits for vCPUs that may not be running. With a hypercall, only vCPUs in their guests are kicked; the others flush before their next entry.",
        command: "dunlin bench tlb",
        body: tlb::body,
    },
    Section {
        experiment: "tags",
        title: "TLB tags",
        lead: "Without tags, every entry into a guest flushes the TLB. This section compares two schemes for tags, also with fewer tags than vCPUs.",
        command: "dunlin bench tags",
        body: tags::body,
    },
    Section {
        experiment: "layout",
        title: "State of neighbouring vCPUs",
        lead: "If two CPUs write to one cache line, the line moves between their caches at every write. “Packed” is a vCPU's data without a plan; “laid out” is the same data, ordered by writer.",
        command: "dunlin bench layout",
        body: layout::body,
    },
    Section {
        experiment: "decode",
        title: "Emulated accesses to devices",
        lead: "An access to an emulated device reports its address, but not its operation: the hypervisor must fetch the instruction through the guest's page tables, and decode it. The designs cache different parts of this.",
        command: "dunlin bench decode",
        body: decode::body,
    },
    Section {
        experiment: "dirty",
        title: "Dirty logs",
        lead: "A hypervisor that logs writes write-protects pages, and gets a fault at each first write. Large pages must be split for this, and a guest that writes everywhere can almost stop. Here every vCPU writes to all pages in turn, without a pause, while a log is started, harvested and stopped.",
        command: "dunlin bench dirty",
        body: dirty::body,
    },
    Section {
        experiment: "move",
        title: "Moves between two hosts",
        lead: "A guest of QEMU writes to its memory and moves to another host meanwhile: on Dunlin with guest-move, on KVM by QEMU alone. QEMU copies all of the memory, then in rounds what was written since; at the end the guest stands still.",
        command: "dunlin bench move",
        body: moves::body,
    },
    Section {
        experiment: "exits",
        title: "Instructions per exit",
        lead: "The whole round trip from the guest's view: its instruction, world switch, handling, world switch. The counts are exact (QEMU -icount).",
        command: "dunlin bench exits",
        body: exits::exits,
    },
    Section {
        experiment: "budget",
        title: "Exits of a boot",
        lead: "Debian's kernel with two vCPUs on two pCPUs, up to user space.",
        command: "dunlin bench budget",
        body: exits::budget,
    },
    Section {
        experiment: "boot",
        title: "Boot",
        lead: "The same kernel under Dunlin and directly on QEMU, in turn.",
        command: "dunlin bench boot",
        body: exits::boot,
    },
];

/// The mark of a figure that was put together from several builds or computers.
pub(super) const MIXED: &str = "†";

/// A table. The first column is text, the others are numbers. The caption is outside of the scrolling part, so it wraps
/// at the width of the page.
fn table(caption: &str, head: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        @if !rows.is_empty() {
            figure class="table" {
                figcaption { (caption) }
                div class="scroll" tabindex="0" {
                    table {
                        thead { tr { @for name in head { th scope="col" { (name) } } } }
                        tbody {
                            @for row in rows {
                                tr {
                                    @for (at, cell) in row.iter().enumerate() {
                                        @if at == 0 { th scope="row" { (cell) } } @else { td { (with_spread(cell)) } }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The spread below its median, and smaller.
fn with_spread(cell: &str) -> Markup {
    html! {
        @match cell.split_once(" (") {
            Some((median, rest)) => { (median) " " span class="spread-of" { "(" (rest) } }
            None => (cell),
        }
    }
}

/// A figure as a cell: median (minimum–maximum), multiplied by `by`; a dash if there is none.
fn cell(data: &Data, experiment: &str, quantity: &str, settings: &[(&str, &str)], by: f64) -> String {
    let Some(series) = data.one(experiment, quantity, settings) else { return "–".to_string() };
    let shown = series.spread().map_or("–".to_string(), |of| spread(scaled(of, by)));
    if series.is_mixed() { format!("{shown} {MIXED}") } else { shown }
}
