//! The cost of an emulated access, by kind of cache.

use abi::payload::DecodeCache;
use maud::{Markup, html};

use super::super::data::Data;
use super::super::plot::{Bar, Bars};
use super::{cell, table};
use crate::args::SETTINGS;

const INSTRUCTIONS: &str = "instructions of one access";
const TICKS: &str = "ticks of one access";
const RATIO: &str = "ticks of one access, to those with off";
const NATIVE: &str = "emulator's code";

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @if let Some(plot) = plot(data) { (plot) }
        (by_loop(data, INSTRUCTIONS, "Instructions of one access, guest and hypervisor; emulated, exact."))
        (by_loop(data, TICKS, "Ticks of one access, emulated, settings in turn: median (least–greatest). Compare within a row only."))
        (by_loop(data, RATIO, "Ticks of one access, emulated, as a multiple of those with “off” in the same round."))
        (changes(data))
        (native(data))
    }
}

/// Register and number of places, in words.
fn in_words(device: &str, rips: &str) -> String {
    let what = match device {
        "id" => "LAPIC ID read",
        "version" => "LAPIC version read",
        "tpr" => "LAPIC TPR read",
        "eoi" => "LAPIC EOI write",
        "ioapic" => "I/O APIC read",
        other => other,
    };
    if rips == "1" { what.to_string() } else { format!("{what}, {rips} places") }
}

/// All loops of a quantity, by register and number of places.
fn loops(data: &Data, quantity: &str) -> Vec<(String, String)> {
    let mut loops: Vec<(String, String)> = data
        .series("decode", quantity)
        .map(|(key, _)| (key.setting("device").to_string(), key.setting("rips").to_string()))
        .collect();
    loops.sort_by_key(|(device, rips)| (rips.parse::<u32>().unwrap_or(0), device.clone()));
    loops.dedup();
    loops
}

fn plot(data: &Data) -> Option<Markup> {
    let groups = loops(data, INSTRUCTIONS).into_iter().map(|(device, rips)| {
        let bars = SETTINGS.into_iter().enumerate().filter_map(|(colour, setting)| {
            let settings = [("device", device.as_str()), ("rips", &rips), ("decode_cache", setting.name())];
            let value = data.spread("decode", INSTRUCTIONS, &settings)?;
            Some(Bar { name: setting.name().to_string(), colour, value })
        });
        (in_words(&device, &rips), bars.collect())
    });
    let title = "One emulated access by design of the decode cache (emulated, exact)".to_string();
    Bars { title, unit: "instructions", groups: groups.collect() }.draw()
}

fn by_loop(data: &Data, quantity: &str, caption: &str) -> Markup {
    let rows: Vec<_> = loops(data, quantity)
        .into_iter()
        .map(|(device, rips)| {
            let of = |setting: DecodeCache| {
                let settings = [("device", device.as_str()), ("rips", &rips), ("decode_cache", setting.name())];
                cell(data, "decode", quantity, &settings, 1.0)
            };
            [vec![in_words(&device, &rips)], SETTINGS.map(of).to_vec()].concat()
        })
        .collect();
    let columns = [vec!["access"], SETTINGS.map(DecodeCache::name).to_vec()].concat();
    table(caption, &columns, &rows)
}

fn changes(data: &Data) -> Markup {
    let mut rows = Vec::new();
    for change in data.values("decode", "lookups", "change").into_iter().filter(|change| !change.is_empty()) {
        for setting in SETTINGS {
            let settings = [("change", change.as_str()), ("decode_cache", setting.name())];
            let of = |quantity: &str| cell(data, "decode", quantity, &settings, 1.0);
            if data.one("decode", "lookups", &settings).is_some() {
                let quantities = ["lookups", "hits", "evictions", "write faults", "walks done"].map(of);
                rows.push([vec![format!("{change}, {}", setting.name())], quantities.to_vec()].concat());
            }
        }
    }
    table(
        "A guest that changes nothing, its code, data next to its code, or its page tables: counts of a whole run, 2 vCPUs on 2 pCPUs, emulated.",
        &["what changes, setting", "lookups", "hits %", "forgotten", "write faults", "walks"],
        &rows,
    )
}

fn native(data: &Data) -> Markup {
    let rows: Vec<_> = data
        .series("decode", NATIVE)
        .map(|(key, _)| {
            let operation = key.setting("operation");
            vec![operation.to_string(), cell(data, "decode", NATIVE, &[("operation", operation)], 1.0)]
        })
        .collect();
    table(
        "The emulator's code on this computer, natively: cycles above an empty loop, median (least–greatest) of all rounds.",
        &["operation", "cycles"],
        &rows,
    )
}
