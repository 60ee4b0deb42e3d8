//! Moves between two hosts: the guest's speed over time, and all results, for Dunlin and for KVM.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::super::data::{Data, Settings};
use super::super::number::number;
use super::super::plot::over_time::{Look, OverTime, Panel, Trace};
use super::{cell, table};
use crate::bench::{Spread, WORST_WANTED, move_quantities};
use crate::records::{Course, Series};

const HOSTS: [&str; 2] = ["Dunlin", "KVM"];
/// The settings of a move besides its host.
const SETTINGS: [&str; 4] = ["vcpus", "memory", "rate", "slow_down"];
/// Seconds before and after a move that are drawn.
const AROUND: f64 = 5.0;
/// Seconds after a guest has stood still in which it may feel it.
const AFTERMATH: f64 = 1.0;

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @for of in settings(data) {
            h3 { (name(&of)) }
            @if let Some(plot) = plot(data, &of) { (plot) }
            (results(data, &of))
        }
    }
}

/// What was measured, without the hosts, in order.
fn settings(data: &Data) -> Vec<Settings> {
    let figures = data.figures.keys().filter(|key| key.experiment == "move").map(|key| key.settings.clone());
    let all: BTreeSet<Settings> = figures.map(without_host).collect();
    let mut all: Vec<Settings> = all.into_iter().collect();
    let number = |settings: &Settings, name| settings.get(name).and_then(|text: &String| text.parse::<u32>().ok());
    all.sort_by_key(|settings| SETTINGS.map(|name| number(settings, name)));
    all
}

fn without_host(mut settings: Settings) -> Settings {
    settings.remove("host");
    settings
}

/// Which settings these are, in words. Older records do not have all of them.
fn name(settings: &Settings) -> String {
    let of = |name: &str| settings.get(name).map(String::as_str);
    let vcpus = of("vcpus").map(|vcpus| format!("{vcpus} vCPUs"));
    let memory = of("memory").unwrap_or("?");
    let writes = match of("rate") {
        Some("0") => format!("writes to {memory} MiB as fast as it can"),
        rate => format!("writes {} MiB/s, to {memory} MiB in turn", rate.unwrap_or("?")),
    };
    let slow_down = (of("slow_down") == Some("true")).then(|| "QEMU may slow it down".to_string());
    vcpus.into_iter().chain([writes]).chain(slow_down).collect::<Vec<_>>().join(", ")
}

/// The guest's speed over time, on one host above the other.
fn plot(data: &Data, of: &Settings) -> Option<Markup> {
    let mut all = data.courses("move", "speed");
    all.retain(|(settings, _)| without_host(settings.clone()) == *of);
    let courses = || all.iter().flat_map(|(_, courses)| courses);
    let end = courses().filter_map(|course| course.moment("resume")).reduce(f64::max)? + AROUND;
    let panels = (0..).zip(HOSTS).filter_map(|(colour, host)| {
        let (_, courses) = all.iter().find(|(settings, _)| settings.get("host").is_some_and(|it| it == host))?;
        panel(host, colour, courses, end)
    });
    let panels: Vec<Panel> = panels.collect();
    let has_others = panels.iter().any(|panel| !panel.behind.is_empty());
    let legend = [
        (Look::Line, "the median move, by how long the guest stands still"),
        (Look::Thin, "other moves"),
        (Look::During, "the median move copies memory while the guest runs"),
        (Look::Still, "the guest stands still"),
        (Look::Wanted, "wanted at least, in each 100 ms"),
    ];
    let legend = legend.into_iter().filter(|(look, _)| *look != Look::Thin || has_others);
    OverTime {
        title: "Speed of the guest in per cent of its mean before it moves, for each 100 ms of its time, emulated. Values above 150 % are drawn at 150 %.".to_string(),
        x_label: "seconds from the beginning of the move",
        y_label: "speed, % of that before",
        most: 150.0,
        ticks: &[0.0, 50.0, 100.0, 150.0],
        wanted: Some(100.0 * WORST_WANTED),
        height: 100.0,
        legend: legend.map(|(look, name)| (look, name.to_string())).collect(),
        panels,
    }
    .draw()
}

/// From when to when the guest stood still.
fn still(course: &Course) -> Option<(f64, f64)> {
    Some((course.moment("stop")?, course.moment("resume")?))
}

/// All moves on a host, until `end`. Of an even number the median is the longer one of the two in the middle.
fn panel(host: &str, colour: usize, courses: &[&Course], end: f64) -> Option<Panel> {
    let mut courses = courses.to_vec();
    let seconds = |course: &Course| still(course).map_or(0.0, |(stop, resume)| resume - stop);
    courses.sort_by(|one, other| seconds(one).total_cmp(&seconds(other)));
    let count = courses.len();
    let median = (count > 0).then(|| courses.remove(count / 2))?;
    let (stop, resume) = still(median).unwrap_or_default();
    let rounds = median.counts.get("rounds").map_or(String::new(), |rounds| format!(", rounds: {}", number(*rounds)));
    let of = if count == 1 { "One move".to_string() } else { format!("The median of {count} moves") };
    let least = |from: f64, to: f64| {
        let during = median.pieces().filter(|(middle, _)| (from..to).contains(middle));
        during.map(|(_, speed)| speed).reduce(f64::min).map_or("–".to_string(), number)
    };
    Some(Panel {
        name: format!("{host}: stands still for {} s{rounds}", number(resume - stop)),
        description: format!(
            "{of} copies memory for {} s while the guest runs. The guest's slowest 100 ms: {} % from the beginning until {AFTERMATH} s after it stands still, {} % in the {AROUND} s before.",
            number(stop),
            least(0.0, resume + AFTERMATH),
            least(-AROUND, 0.0),
        ),
        colour,
        trace: trace(median, end),
        behind: courses.into_iter().map(|course| trace(course, end)).collect(),
        on: (0.0, stop),
        marks: Vec::new(),
    })
}

fn trace(course: &Course, end: f64) -> Trace {
    let points = course.pieces().filter(|(middle, _)| (-AROUND..=end).contains(middle));
    let points = points.filter_map(|(middle, speed)| Some((middle, Spread::of(&[speed])?)));
    Trace { points: points.collect(), still: still(course) }
}

/// A row for each quantity, a column for each host.
fn results(data: &Data, of: &Settings) -> Markup {
    let on = |host| {
        let setting = |name| (name, of.get(name).map_or("", String::as_str));
        [vec![("host", host)], SETTINGS.map(setting).to_vec()].concat()
    };
    let row = |what: &str, unit: &str, cells: [String; 2]| {
        [vec![what.to_string(), unit.to_string()], cells.to_vec()].concat()
    };
    let mut rows: Vec<_> = move_quantities()
        .map(|(what, unit)| {
            let unit = if unit.is_empty() { "ratio" } else { unit };
            row(what, unit, HOSTS.map(|host| cell(data, "move", what, &on(host), 1.0)))
        })
        .filter(|row| row[2..].iter().any(|cell| cell != "–"))
        .collect();
    let of_all = |shown: fn(&Series) -> Option<String>| {
        HOSTS.map(|host| {
            let series = move_quantities().find_map(|(what, _)| data.one("move", what, &on(host)));
            series.and_then(shown).unwrap_or_else(|| "–".to_string())
        })
    };
    rows.push(row("moves", "", of_all(|series| Some(series.samples.len().to_string()))));
    let others = |series: &Series| series.others_share.map(|share| format!("{:.0}", 100.0 * share));
    rows.push(row("other programs' share of the computer at most", "%", of_all(others)));
    table(
        "Both hosts are emulated, and take turns: median (least–greatest) of the moves. Compare within a row only.",
        &[&["", "unit"], &HOSTS[..]].concat(),
        &rows,
    )
}
