//! Dirty logs: speed over time, cost of a fault, split pages.

use std::collections::BTreeMap;

use abi::payload::Split;
use abi::setting::Setting as _;
use maud::{Markup, html};

use super::super::data::{Data, Settings};
use super::super::plot::over_time::{OverTime, Panel, Trace};
use super::{cell, table};
use crate::bench::Spread;
use crate::records::Course;

const WORST: &str = "worst 100 ms while the log runs";
const SPLITS: &[&str] = Split::NAMES;

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @if let Some(plot) = plot(data) { (plot) }
        (shapes(data))
        (instructions(data))
        (counts(data))
    }
}

/// Speed over time, a panel for each setting.
fn plot(data: &Data) -> Option<Markup> {
    let mut courses: Vec<(Settings, Vec<&Course>)> =
        data.courses("dirty", "speed").into_iter().filter(|(settings, _)| is_dense(settings)).collect();
    courses.sort_by_key(|(settings, _)| (number_of(settings, "vcpus"), split_of(settings)));
    let panels = courses.iter().filter_map(|(settings, courses)| panel(settings, courses)).collect();
    OverTime {
        title: "Writes of a guest in per cent of its speed before the log, emulated: median of the runs, and from least to greatest (tinted). Grey: the log runs; dashed: its rounds.".to_string(),
        x_label: "seconds from the start of the log",
        y_label: "% of before",
        most: 150.0,
        ticks: &[0.0, 50.0, 100.0],
        wanted: None,
        height: 62.0,
        legend: Vec::new(),
        panels,
    }
    .draw()
}

/// Whether all of the memory is written.
fn is_dense(settings: &Settings) -> bool {
    settings.get("regions_percent").is_none_or(|share| share == "100")
}

fn number_of(settings: &Settings, name: &str) -> u32 {
    settings.get(name).and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn split_of(settings: &Settings) -> usize {
    let split = settings.get("split").map_or("", String::as_str);
    SPLITS.iter().position(|&it| it == split).unwrap_or(SPLITS.len())
}

/// Which setting it is, in words.
fn name(settings: &Settings) -> String {
    let of = |name: &str| settings.get(name).map_or("?", String::as_str);
    let more = |name: &str, unit: &str| settings.get(name).map_or(String::new(), |value| format!(", {value}{unit}"));
    let (rate, cpu) = (more("splits_per_second", " splits/s"), more("cpu", ""));
    format!("{}, {}{rate}, {} vCPUs{cpu}", of("split"), of("source"), of("vcpus"))
}

/// All runs of a setting together, where all of them have a sample.
fn panel(settings: &Settings, courses: &[&Course]) -> Option<Panel> {
    let step = courses.first()?.step;
    let from = courses.iter().map(|course| course.from).reduce(f64::max)?;
    let end = |course: &&Course| course.from + course.step * course.samples.len() as f64;
    let to = courses.iter().map(end).reduce(f64::min)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of samples; less than zero is none"
    )]
    let index = |seconds: f64, step: f64| (seconds / step) as usize;
    let points = (0..index(to - from, step)).map_while(|place| {
        let at = from + step * (place as f64 + 0.5);
        let sample = |course: &&Course| course.samples.get(index(at - course.from, course.step)).copied();
        Some((at, Spread::of(&courses.iter().filter_map(sample).collect::<Vec<_>>())?))
    });
    let moment = |name: &str, number: usize| {
        let times = courses.iter().filter_map(|course| course.moments.get(name)?.get(number).copied());
        Spread::of(&times.collect::<Vec<_>>()).map(|spread| spread.median)
    };
    Some(Panel {
        name: name(settings),
        colour: split_of(settings),
        trace: Trace { points: points.collect(), still: None },
        on: (moment("started", 0).unwrap_or(0.0), moment("stopped", 0).unwrap_or(0.0)),
        marks: (0..).map_while(|number| moment("round", number)).collect(),
        ..Panel::default()
    })
}

/// The settings of a quantity, in order.
fn settings_of(data: &Data, quantity: &str) -> Vec<Settings> {
    let mut all: Vec<Settings> = data.series("dirty", quantity).map(|(key, _)| key.settings.clone()).collect();
    all.sort_by_key(|settings| (number_of(settings, "vcpus"), split_of(settings)));
    all
}

/// Exactly these settings: a setting that only other figures have must be empty here.
fn exactly(settings: &Settings) -> Vec<(&str, &str)> {
    let absent = ["cpu", "splits_per_second"].into_iter().filter(|name| !settings.contains_key(*name));
    let present = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    present.chain(absent.map(|name| (name, ""))).collect()
}

/// A row of these quantities.
fn row(data: &Data, settings: &Settings, quantities: &[(&str, f64)]) -> Vec<String> {
    let settings = exactly(settings);
    quantities.iter().map(|(quantity, by)| cell(data, "dirty", quantity, &settings, *by)).collect()
}

fn shapes(data: &Data) -> Markup {
    const QUANTITIES: [(&str, f64); 4] = [
        ("worst 100 ms without a log", 1.0),
        (WORST, 1.0),
        ("speed while the log runs", 1.0),
        ("speed after the log", 1.0),
    ];
    let rows: Vec<_> = settings_of(data, WORST)
        .iter()
        .filter(|settings| is_dense(settings))
        .map(|settings| {
            let share = settings_share(data, settings);
            [vec![name(settings)], row(data, settings, &QUANTITIES), vec![share]].concat()
        })
        .collect();
    table(
        "Writes in per cent of the speed before the log, emulated: median (least–greatest) of the runs. The slowest 100 ms without a log are caused by the emulator and the computer; if they are slow, the log is not the cause. Others: share of the computer that other programs used at most.",
        &[
            "split, recorded by",
            "worst 100 ms without",
            "worst 100 ms with a log",
            "mean with a log",
            "after",
            "others",
        ],
        &rows,
    )
}

fn settings_share(data: &Data, settings: &Settings) -> String {
    let share = data.one("dirty", WORST, &exactly(settings)).and_then(|series| series.others_share);
    share.map_or("–".to_string(), |share| format!("{:.0} %", 100.0 * share))
}

fn counts(data: &Data) -> Markup {
    const MIB: f64 = 1.0 / 1_048_576.0;
    const QUANTITIES: [(&str, f64); 7] = [
        ("faults of the log", 1.0),
        ("large pages split in faults", 1.0),
        ("large pages split ahead", 1.0),
        ("broadcasts by vCPUs", 1.0),
        ("flushes of all vCPUs by the host", 1.0),
        ("most memory in tables", MIB),
        ("pages harvested", 1.0),
    ];
    let rows: Vec<_> = settings_of(data, "faults of the log")
        .iter()
        .map(|settings| {
            let memory = format!("{} MiB", number_of(settings, "memory_mib"));
            let part = if is_dense(settings) { String::new() } else { ", a tenth written".to_string() };
            [vec![format!("{}; {memory}{part}", name(settings))], row(data, settings, &QUANTITIES)].concat()
        })
        .collect();
    table(
        "Counts during the log; they are real although the machine is emulated. A slower guest writes less, and has fewer pages to harvest.",
        &[
            "split, recorded by",
            "faults",
            "split in faults",
            "split ahead",
            "broadcasts by vCPUs",
            "flushes by the host",
            "tables MiB",
            "pages harvested",
        ],
        &rows,
    )
}

fn instructions(data: &Data) -> Markup {
    let mut passes: BTreeMap<String, Settings> = BTreeMap::new();
    for settings in settings_of(data, "faults of a pass") {
        let cpu = settings.get("cpu").map_or(String::new(), |cpu| format!(", {cpu}"));
        passes.insert(format!("{}{cpu}", settings.get("pass").map_or("?", String::as_str)), settings);
    }
    let rows: Vec<_> = passes
        .iter()
        .map(|(name, settings)| {
            let quantities = [
                ("faults of a pass", 1.0),
                ("instructions of one fault", 1.0),
                ("instructions of a write without a fault", 1.0),
            ];
            let pages = settings.get("pages").cloned().unwrap_or_default();
            [vec![name.clone(), pages], row(data, settings, &quantities)].concat()
        })
        .collect();
    table(
        "Instructions of guest and hypervisor minus those of a pass over writable pages, 1 vCPU, emulated, exact.",
        &["pass", "pages", "faults", "instructions of a fault", "instructions without a fault"],
        &rows,
    )
}
