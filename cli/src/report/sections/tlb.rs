//! Shootdowns: latency, exits, instructions.

use std::collections::BTreeSet;

use abi::payload::RemoteFlush::{self, Hypercall, Ipi};
use maud::{Markup, html};

use super::super::data::Data;
use super::super::number::{number, scaled};
use super::super::plot::{Line, Lines};
use super::{cell, table};

const MEAN: &str = "latency mean";
const APPROACHES: [(RemoteFlush, &str); 2] = [(Ipi, "IPI"), (Hypercall, "hypercall")];

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @if let Some(plot) = latency_plot(data) { (plot) }
        (latency_table(data))
        (exits_table(data))
        @if let Some(plot) = instructions_plot(data) { (plot) }
        (instructions_table(data))
        (debian_table(data))
    }
}

/// Mean latency by vCPUs, a line for each way and overcommit.
fn latency_plot(data: &Data) -> Option<Markup> {
    // Where pCPUs outnumber cores, they take turns, and the line would be of that.
    let is_shown = |name: &str, value: &str| name != "cramped" || value == "false";
    let shown = || {
        data.series("tlb", MEAN).filter(|(key, _)| {
            is_shown("cramped", key.setting("cramped"))
                && key.setting("pages") == "1"
                && key.setting("targets") == "busy"
        })
    };
    let x = sorted(shown().map(|(key, _)| key.setting("vcpus").to_string()));
    let overcommits = sorted(shown().map(|(key, _)| key.setting("overcommit").to_string()));
    let mut lines = Vec::new();
    for (colour, (approach, name)) in APPROACHES.into_iter().enumerate() {
        for (dash, overcommit) in overcommits.iter().enumerate() {
            let points: Vec<_> = x
                .iter()
                .map(|vcpus| {
                    let of = |key: &crate::records::Key| {
                        [("approach", approach.name()), ("overcommit", overcommit.as_str()), ("vcpus", vcpus.as_str())]
                            .iter()
                            .all(|(name, value)| key.setting(name) == *value)
                    };
                    shown().find(|(key, _)| of(key)).and_then(|(_, series)| series.spread()).map(|it| scaled(it, 1e-3))
                })
                .collect();
            if points.iter().any(Option::is_some) {
                lines.push(Line { name: format!("{name}, {overcommit} vCPU(s) per pCPU"), colour, dash, points });
            }
        }
    }
    let title = "Latency of one shootdown, mean of a run, emulated: one page, busy targets. Sizes with more pCPUs than cores are in the table only.";
    Lines { title: title.to_string(), x_label: "vCPUs", y_label: "µs", x, is_logarithmic: true, lines }.draw()
}

fn latency_table(data: &Data) -> Markup {
    let sizes: BTreeSet<_> = data
        .series("tlb", MEAN)
        .map(|(key, _)| {
            let number = |name: &str| key.setting(name).parse::<u32>().unwrap_or(0);
            let [pages, targets, cramped] = ["pages", "targets", "cramped"].map(|name| key.setting(name).to_string());
            (number("overcommit"), number("vcpus"), number("pcpus"), pages, targets, cramped)
        })
        .collect();
    let mut rows = Vec::new();
    for (overcommit, vcpus, pcpus, pages, targets, cramped) in sizes {
        let [vcpus, pcpus, overcommit] = [vcpus, pcpus, overcommit].map(|number| number.to_string());
        let size = [("vcpus", vcpus.as_str()), ("overcommit", &overcommit), ("pages", &pages), ("targets", &targets)];
        let of = |approach: RemoteFlush, quantity: &str| {
            let settings: Vec<_> = size.iter().copied().chain([("approach", approach.name())]).collect();
            cell(data, "tlb", quantity, &settings, 1e-3)
        };
        let others = data.one("tlb", MEAN, &size).and_then(|series| series.others_share);
        let mark = if cramped == "true" { " *" } else { "" };
        rows.push(vec![
            format!("{vcpus} on {pcpus}{mark}, {pages} page(s), {targets}"),
            of(Ipi, MEAN),
            of(Ipi, "latency p50"),
            of(Ipi, "latency p99"),
            of(Hypercall, MEAN),
            of(Hypercall, "latency p50"),
            of(Hypercall, "latency p99"),
            cell(data, "tlb", "latency mean, IPI to hypercall", &size, 1.0),
            others.map_or("–".to_string(), |share| format!("{:.0} %", 100.0 * share)),
        ]);
    }
    table(
        "Microseconds of one shootdown, emulated: median (least–greatest) of the runs. * more pCPUs than cores, which take turns: hard to interpret. Others: share of the computer that other programs used at most. A dash: fewer than 100 shootdowns in a run.",
        &["vCPUs on pCPUs", "IPI: mean", "p50", "p99", "hypercall: mean", "p50", "p99", "IPI / hypercall", "others"],
        &rows,
    )
}

fn exits_table(data: &Data) -> Markup {
    const EXITS: &str = "exits of one shootdown";
    let sizes: BTreeSet<_> = data
        .series("tlb", EXITS)
        .map(|(key, _)| ["vcpus", "pcpus", "overcommit"].map(|name| key.setting(name).parse::<u32>().unwrap_or(0)))
        .collect();
    let rows: Vec<_> = sizes
        .into_iter()
        .map(|[vcpus, pcpus, overcommit]| {
            let [vcpus, overcommit] = [vcpus, overcommit].map(|number| number.to_string());
            let of = |approach: RemoteFlush, quantity: &str| {
                let settings = [("vcpus", vcpus.as_str()), ("overcommit", &overcommit), ("approach", approach.name())];
                cell(data, "tlb", quantity, &settings, 1.0)
            };
            vec![
                format!("{vcpus} on {pcpus}"),
                of(Ipi, EXITS),
                of(Hypercall, EXITS),
                of(Hypercall, "kicks of one shootdown"),
            ]
        })
        .collect();
    table(
        "Exits of one shootdown of one page, busy targets, all vCPUs together (difference of two runs; ticks of the host that fall into it are counted).",
        &["vCPUs on pCPUs", "IPI", "hypercall", "of these kicks"],
        &rows,
    )
}

const WHOLE: &str = "instructions of one shootdown, whole machine";
const HYPERVISOR: &str = "instructions of one shootdown, hypervisor";

fn instructions_plot(data: &Data) -> Option<Markup> {
    let x = data.values("tlb", WHOLE, "vcpus");
    let mut lines = Vec::new();
    for (colour, (approach, name)) in APPROACHES.into_iter().enumerate() {
        for (dash, (quantity, of)) in
            [(WHOLE, "whole machine"), (HYPERVISOR, "hypervisor alone")].into_iter().enumerate()
        {
            let settings = |vcpus| [("vcpus", vcpus), ("approach", approach.name()), ("targets", "idle")];
            let points = x.iter().map(|vcpus| data.spread("tlb", quantity, &settings(vcpus))).collect();
            lines.push(Line { name: format!("{name}, {of}"), colour, dash, points });
        }
    }
    let title = "Instructions of one shootdown of one page, halted targets, all vCPUs on one pCPU; emulated, exact.";
    Lines { title: title.to_string(), x_label: "vCPUs", y_label: "instructions", x, is_logarithmic: true, lines }.draw()
}

fn instructions_table(data: &Data) -> Markup {
    let mut rows = Vec::new();
    for targets in data.values("tlb", WHOLE, "targets") {
        for vcpus in data.values("tlb", WHOLE, "vcpus") {
            let of = |approach: RemoteFlush, quantity: &str| {
                let settings = [("vcpus", vcpus.as_str()), ("targets", &targets), ("approach", approach.name())];
                cell(data, "tlb", quantity, &settings, 1.0)
            };
            let row = [(Ipi, WHOLE), (Hypercall, WHOLE), (Ipi, HYPERVISOR), (Hypercall, HYPERVISOR)]
                .map(|(approach, quantity)| of(approach, quantity));
            if row.iter().any(|cell| cell != "–") {
                rows.push([vec![format!("{vcpus}, {targets}")], row.to_vec()].concat());
            }
        }
    }
    table(
        "Instructions of one shootdown, exact: from call to return, and of the hypervisor alone.",
        &["vCPUs, targets", "IPI: machine", "hypercall: machine", "IPI: hypervisor", "hypercall: hypervisor"],
        &rows,
    )
}

/// The results of `dunlin bench tlb --macro`.
fn debian_table(data: &Data) -> Markup {
    let mut rows = Vec::new();
    for (key, series) in data.figures.iter().filter(|(key, _)| key.experiment == "tlb") {
        let Some(quantity) = key.quantity.strip_prefix("Debian: ") else { continue };
        let [workload, approach, vcpus, pcpus] =
            ["workload", "approach", "vcpus", "pcpus"].map(|name| key.setting(name).to_string());
        rows.push(vec![
            format!("{workload}, {quantity}, {vcpus} on {pcpus}"),
            approach,
            series.spread().map_or("–".to_string(), super::super::number::spread),
            key.unit.clone(),
            number(series.samples.len() as f64),
        ]);
    }
    table(
        "Debian's kernel under load, flush by IPI and by hypercall in turn; emulated.",
        &["what", "by", "median (least–greatest)", "unit", "runs"],
        &rows,
    )
}

/// Each once, numbers in their order.
fn sorted(values: impl Iterator<Item = String>) -> Vec<String> {
    let mut values: Vec<String> = values.collect();
    values.sort_by_key(|value| value.parse::<u64>().unwrap_or(u64::MAX));
    values.dedup();
    values
}
