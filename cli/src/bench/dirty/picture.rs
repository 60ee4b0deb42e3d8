//! Speed over time as a picture: a line of text, and a drawing with one panel per setting.

use std::fmt::Write;

use super::curve::Curve;
use super::measure::{Moments, Outcome};

/// Columns of the line of text.
const COLUMNS: usize = 72;
const HEIGHTS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Of the drawing, in pixels.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 20.0;
const ROW: f64 = 96.0;
const GRAPH: f64 = 64.0;
const TOP: f64 = 64.0;
/// The axis ends at this multiple of the speed before the log.
const ROOM: f64 = 1.5;

/// Two lines: the speed, full height being that before the log, and below it when the log was started (s), harvested
/// (r) and stopped (e).
pub(super) fn text(outcome: &Outcome) -> String {
    let Outcome { curve, moments, shape, .. } = outcome;
    let height = |speed: f64| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 8")]
        let eighths = (speed / shape.before * 8.0).round().clamp(0.0, 8.0) as usize;
        HEIGHTS[eighths]
    };
    let line: String = curve.columns(COLUMNS).into_iter().map(height).collect();
    let mut marks = vec![' '; COLUMNS];
    for (at, mark) in marked(moments) {
        if let Some(place) = column(curve, at).and_then(|column| marks.get_mut(column)) {
            *place = mark;
        }
    }
    let marks: String = marks.into_iter().collect();
    format!("    |{line}|\n     {}", marks.trim_end())
}

fn marked(moments: &Moments) -> impl Iterator<Item = (u64, char)> + '_ {
    let rounds = moments.rounds_ns.iter().map(|&at| (at, 'r'));
    rounds.chain([(moments.started_ns, 's'), (moments.stopped_ns, 'e')])
}

fn column(curve: &Curve, at: u64) -> Option<usize> {
    let whole = curve.window_ns * curve.accesses.len() as u64;
    let since = at.checked_sub(curve.begin_ns)?;
    usize::try_from((since * COLUMNS as u64).checked_div(whole)?).ok()
}

/// Draws runs with their names, as SVG.
pub(super) fn svg(runs: &[(String, &Outcome)]) -> String {
    let mut rows = String::new();
    let mut top = TOP;
    for (name, outcome) in runs {
        row(&mut rows, top, name, outcome);
        top += ROW;
    }
    let (width, height) = (WIDTH + 2.0 * LEFT, top);
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<title>Writes of a guest while they are logged</title>
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="{LEFT}" y="24" font-size="16" font-weight="bold" fill="#222">Writes of a guest while they are logged</text>
<text x="{LEFT}" y="44" fill="#555">pages written per second; dashed: the speed before. Grey: the log runs; lines: rounds. Emulated.</text>
{rows}</svg>
"##
    )
}

fn row(out: &mut String, top: f64, name: &str, outcome: &Outcome) {
    let Outcome { curve, moments, shape, .. } = outcome;
    let whole = (curve.window_ns * curve.accesses.len() as u64) as f64;
    let x = |at: u64| LEFT + WIDTH * at.saturating_sub(curve.begin_ns) as f64 / whole.max(1.0);
    let bottom = top + 20.0 + GRAPH;
    let y = |speed: f64| bottom - GRAPH * (speed / shape.before / ROOM).clamp(0.0, 1.0);

    let name = name.replace('&', "&amp;").replace('<', "&lt;");
    let (worst, mean) = (shape.worst * 100.0, shape.mean * 100.0);
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        r##"<text x="{LEFT}" y="{:.0}" fill="#222">{name}: worst 100 ms {worst:.0} %, mean {mean:.0} %</text>"##,
        top + 12.0
    );
    let (start, stop) = (x(moments.started_ns), x(moments.stopped_ns));
    let _ = writeln!(
        out,
        r##"<rect x="{start:.1}" y="{:.1}" width="{:.1}" height="{GRAPH}" fill="#eee"/>"##,
        bottom - GRAPH,
        (stop - start).max(0.0)
    );
    for &round in &moments.rounds_ns {
        let at = x(round);
        let _ = writeln!(
            out,
            r##"<line x1="{at:.1}" y1="{:.1}" x2="{at:.1}" y2="{bottom}" stroke="#bbb"/>"##,
            bottom - GRAPH
        );
    }
    let full = y(shape.before);
    let _ = writeln!(
        out,
        r##"<line x1="{LEFT}" y1="{full:.1}" x2="{}" y2="{full:.1}" stroke="#999" stroke-dasharray="4 4"/>"##,
        LEFT + WIDTH
    );
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a width in pixels")]
    let columns = WIDTH as usize / 2;
    let points: Vec<String> = (curve.columns(columns).into_iter().enumerate())
        .map(|(column, speed)| format!("{:.1},{:.1}", LEFT + column as f64 * 2.0 + 1.0, y(speed)))
        .collect();
    let _ =
        writeln!(out, r##"<polyline points="{}" fill="none" stroke="#1f6f43" stroke-width="1.5"/>"##, points.join(" "));
    let _ = writeln!(out, r##"<line x1="{LEFT}" y1="{bottom}" x2="{}" y2="{bottom}" stroke="#222"/>"##, LEFT + WIDTH);
}

#[cfg(test)]
mod tests {
    use abi::counters::VcpuCounters;
    use serde_json::Value;

    use super::*;

    fn outcome() -> Outcome {
        let accesses = [vec![100; 100], vec![0; 50], vec![100; 150]].concat();
        let curve = Curve { begin_ns: 1_000_000_000, window_ns: 10_000_000, accesses };
        let moments = Moments { started_ns: 2_000_000_000, rounds_ns: vec![2_500_000_000], stopped_ns: 3_000_000_000 };
        let shape = curve.shape(&moments).expect("is long enough");
        Outcome {
            curve,
            moments,
            shape,
            rounds: Vec::new(),
            counters: VcpuCounters::default(),
            splits_ahead: 0,
            flushes: 0,
            tables: 0,
            tables_before: 0,
            collapses: 0,
            clock_hz: 0,
            others: None,
            run: Value::Null,
        }
    }

    #[test]
    fn text_shows_where_it_is_slow_and_what_happened_then() {
        let text = text(&outcome());
        let (line, marks) = text.split_once('\n').expect("has two lines");
        let expected = format!("    |{}{}{}|", "█".repeat(24), " ".repeat(12), "█".repeat(36));
        assert_eq!(line, expected);
        assert_eq!(marks, format!("     {}s{}r{}e", " ".repeat(24), " ".repeat(11), " ".repeat(11)));
    }

    #[test]
    fn drawing_has_a_row_for_each_run_and_escapes_its_name() {
        let outcome = outcome();
        let svg = svg(&[("a < b".to_string(), &outcome), ("c".to_string(), &outcome)]);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("a &lt; b: worst 100 ms 0 %").count()), (2, 1));
        assert!(svg.ends_with("</svg>\n"));
    }
}
