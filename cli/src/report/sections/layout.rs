//! False sharing of cache lines between vCPUs.

use maud::{Markup, html};

use super::super::data::Data;
use super::super::plot::{Line, Lines};
use super::{cell, table};

const PACKED: &str = "packed, beside another vCPU";
const LAID_OUT: &str = "laid out, beside another vCPU";
const DISTANCE: &str = "addition, by distance of the words";
const PRESENCE: &str = "presence on a line of its owner, to beside the mailbox";
const COUNTS: &str = "exits more with more iterations";

pub(super) fn body(data: &Data) -> Markup {
    html! {
        @if let Some(plot) = plot(data) { (plot) }
        (neighbours(data))
        (presence(data))
        (counts(data))
    }
}

/// Cycles by distance in bytes.
fn plot(data: &Data) -> Option<Markup> {
    let x = data.values("layout", DISTANCE, "bytes");
    let points = x.iter().map(|bytes| data.spread("layout", DISTANCE, &[("bytes", bytes)])).collect();
    let lines = vec![Line { name: "locked addition by two CPUs at once".to_string(), colour: 0, dash: 0, points }];
    let title =
        "Cycles of an addition while another CPU adds to a word at this distance in bytes, natively on this computer";
    Lines { title: title.to_string(), x_label: "bytes apart", y_label: "cycles", x, is_logarithmic: false, lines }
        .draw()
}

fn neighbours(data: &Data) -> Markup {
    let rows: Vec<_> = data
        .series("layout", PACKED)
        .map(|(key, _)| {
            let [kernel, structure, judged] = ["kernel", "structure", "judged"].map(|name| key.setting(name));
            let settings = [("kernel", kernel), ("structure", structure), ("judged", judged)];
            let mark = if judged == "false" { "; cores were not free" } else { "" };
            let of = |quantity: &str| cell(data, "layout", quantity, &settings, 1.0);
            vec![
                format!("{kernel}, {structure}{mark}"),
                of(PACKED),
                of(LAID_OUT),
                of("packed to laid out"),
                of("laid out, beside to alone"),
                of("arithmetic, beside to alone"),
                of("laid out, beside to alone, net of arithmetic"),
            ]
        })
        .collect();
    table(
        "Two vCPUs on two cores, natively: cycles of one operation, median (least–greatest) of the turns. Arithmetic in registers, measured in the same turns, shares nothing: if it is slower next to another thread, the cores are not independent.",
        &[
            "what, on what",
            "packed",
            "laid out",
            "packed / laid out",
            "laid out, next to another / alone",
            "arithmetic, next to another / alone",
            "net of that",
        ],
        &rows,
    )
}

fn presence(data: &Data) -> Markup {
    let rows: Vec<_> = data
        .series("layout", PRESENCE)
        .map(|(key, _)| {
            let [posts, judged] = ["posts", "judged"].map(|name| key.setting(name));
            let mark = if judged == "false" { "; cores were not free" } else { "" };
            vec![format!("{posts}{mark}"), cell(data, "layout", PRESENCE, &[("posts", posts), ("judged", judged)], 1.0)]
        })
        .collect();
    table(
        "The word that says that a vCPU is in its guest: how much longer both vCPUs take if it is on a line of its owner instead of next to the mailbox, natively.",
        &["posts per pass", "ratio"],
        &rows,
    )
}

fn counts(data: &Data) -> Markup {
    let rows: Vec<_> = data
        .series("layout", COUNTS)
        .map(|(key, _)| {
            let reason = key.setting("reason");
            vec![reason.to_string(), cell(data, "layout", COUNTS, &[("reason", reason)], 1.0)]
        })
        .collect();
    table(
        "Counters that only their owners write, on the emulated host: the increase of exits when a guest makes more of them, exact.",
        &["counter", "more"],
        &rows,
    )
}
