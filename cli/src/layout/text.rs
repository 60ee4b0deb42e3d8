//! Blocks as text: a summary, then every field of each block, its position, and its writers.

use std::fmt::Write;

use abi::layout::{Content, Layout, Row};
use crossterm::style::{Color, Stylize};
use serde_json::{Value, json};

use crate::stats::printable;

/// The classes, in the order of the summary.
const CLASSES: [Content; 4] = [Content::Owner, Content::Mailbox, Content::Frozen, Content::Cold];
/// Maximum depth of nested structs that is indented.
const DEEPEST: u8 = 16;

/// The parts of a block, by writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Lines of each of [`CLASSES`].
    lines: [usize; 4],
    /// Lines on which there is nothing.
    empty: usize,
    gap_bytes: u64,
    /// Lines with fields of more than one class, which there must not be.
    pub(super) shared: Vec<u32>,
}

impl Shares {
    pub(super) fn of(layout: &Layout) -> Self {
        let mut shares = Self { lines: [0; 4], empty: 0, gap_bytes: 0, shared: Vec::new() };
        let line = layout.line.max(1);
        let mut classes: Vec<Option<Content>> = vec![None; lines(layout)];
        for row in &layout.rows {
            match row.content {
                Content::Nested => continue,
                Content::Gap => {
                    shares.gap_bytes += u64::from(row.bytes);
                    continue;
                }
                _ => {}
            }
            let Some((first, last)) = lines_of(row, line) else { continue };
            for (number, class) in (first..=last).zip(classes.iter_mut().skip(first as usize)) {
                if class.is_some_and(|class| class != row.content) && shares.shared.last() != Some(&number) {
                    shares.shared.push(number);
                }
                *class = Some(row.content);
            }
        }
        for class in classes {
            match class.and_then(|class| CLASSES.iter().position(|it| *it == class)) {
                Some(at) => shares.lines[at] += 1,
                None => shares.empty += 1,
            }
        }
        shares
    }

    /// In words, for the end of a block.
    fn sentence(&self) -> String {
        let by_class = CLASSES.iter().zip(self.lines).filter(|(_, lines)| *lines > 0);
        let mut parts: Vec<String> = by_class.map(|(class, lines)| format!("{} {lines}", class.name())).collect();
        if self.empty > 0 {
            parts.push(format!("empty {}", self.empty));
        }
        format!("lines: {}; gaps: {} bytes", parts.join(", "), self.gap_bytes)
    }
}

/// Lines of a block; not more than a host could sensibly have.
fn lines(layout: &Layout) -> usize {
    layout.bytes.div_ceil(layout.line.max(1)).min(1 << 20) as usize
}

/// First and last line of a row, if it has any bytes.
fn lines_of(row: &Row, line: u32) -> Option<(u32, u32)> {
    let last = row.offset.checked_add(row.bytes.checked_sub(1)?)?;
    Some((row.offset / line, last / line))
}

/// Lines of text, each of one colour.
pub(super) struct Text(Vec<(Option<Content>, String)>);

impl Text {
    fn add(&mut self, text: impl Into<String>) {
        self.0.push((None, text.into()));
    }

    pub(super) fn plain(&self) -> String {
        self.0.iter().map(|(_, line)| format!("{line}\n")).collect()
    }

    /// For a terminal.
    pub(super) fn coloured(&self) -> String {
        let mut text = String::new();
        for (content, line) in &self.0 {
            // Writing to a String cannot fail.
            let _ = match content.and_then(colour) {
                Some(colour) => writeln!(text, "{}", line.as_str().with(colour)),
                None => writeln!(text, "{line}"),
            };
        }
        text
    }
}

fn colour(content: Content) -> Option<Color> {
    match content {
        Content::Owner => Some(Color::Green),
        Content::Mailbox => Some(Color::Yellow),
        Content::Frozen => Some(Color::Cyan),
        Content::Cold => Some(Color::Magenta),
        Content::Gap => Some(Color::DarkGrey),
        Content::Nested => None,
    }
}

/// The whole text.
pub(super) fn blocks(layouts: &[Layout]) -> Text {
    let mut text = Text(Vec::new());
    summary(layouts, &mut text);
    for layout in layouts {
        text.add("");
        block(layout, &mut text);
    }
    text
}

fn summary(layouts: &[Layout], text: &mut Text) {
    let line = layouts.first().map_or(0, |layout| layout.line);
    text.add(format!("The hypervisor's data by writer, in cache lines of {line} bytes."));
    text.add("'dunlin layout --help' explains the classes.");
    text.add("");
    text.add(format!(
        "{:<20}{:>9}{:>7}{:>7}{:>9}{:>8}{:>6}{:>7}{:>11}",
        "block", "bytes", "lines", "owner", "mailbox", "frozen", "cold", "empty", "gap bytes"
    ));
    for layout in layouts {
        let Shares { lines: [owner, mailbox, frozen, cold], empty, gap_bytes, shared } = Shares::of(layout);
        let mark = if shared.is_empty() { "" } else { "  WRONG: lines of two classes" };
        text.add(format!(
            "{:<20}{:>9}{:>7}{owner:>7}{mailbox:>9}{frozen:>8}{cold:>6}{empty:>7}{gap_bytes:>11}{mark}",
            printable(&layout.name),
            layout.bytes,
            lines(layout)
        ));
    }
}

fn block(layout: &Layout, text: &mut Text) {
    let line = layout.line.max(1);
    let name = printable(&layout.name);
    text.add(format!("{name}: {} bytes, {} lines, aligned to {}", layout.bytes, lines(layout), layout.align));
    text.add("");
    text.add(format!(
        "{:>8}{:>8}{:>9}  {:<9}{:<17}{}",
        "offset", "bytes", "line", "class", "written by", "field: type"
    ));
    let mut group = None;
    for row in &layout.rows {
        if CLASSES.contains(&row.content) && group != Some(row.content) && row.bytes > 0 {
            group = Some(row.content);
            text.add(ruler(row, line));
        }
        text.0.push((Some(row.content), row_text(row, line)));
    }
    let Shares { shared, .. } = Shares::of(layout);
    text.add("");
    text.add(format!("{name}: {} bytes; {}", layout.bytes, Shares::of(layout).sentence()));
    for number in shared {
        text.add(format!("WRONG: line {number} holds fields of two classes"));
    }
}

/// Where lines of another class begin.
fn ruler(row: &Row, line: u32) -> String {
    format!("{:-<25}  {} from line {}", "", row.content.name(), row.offset / line)
}

fn row_text(row: &Row, line: u32) -> String {
    let lines = match lines_of(row, line) {
        None => "-".to_string(),
        Some((first, last)) if first == last => first.to_string(),
        Some((first, last)) => format!("{first}-{last}"),
    };
    let indent = "    ".repeat(row.depth.min(DEEPEST).into());
    let field = match row.content {
        Content::Gap => "(gap)".to_string(),
        _ => format!("{}: {}", printable(&row.name), printable(&row.kind)),
    };
    let (class, writer) = (row.content.name(), row.content.writer());
    format!("{:>8}{:>8}{lines:>9}  {class:<9}{writer:<17}{indent}{field}", row.offset, row.bytes)
}

/// A block as data, with the sums that the text has.
pub(super) fn json(layout: &Layout) -> Value {
    let Shares { lines: by_class, empty, gap_bytes, shared } = Shares::of(layout);
    let by_class: serde_json::Map<_, _> =
        CLASSES.iter().zip(by_class).map(|(class, lines)| (class.name().to_string(), json!(lines))).collect();
    json!({ "name": layout.name, "bytes": layout.bytes, "align": layout.align, "line_bytes": layout.line,
        "lines": lines(layout), "lines_by_class": by_class, "empty_lines": empty, "gap_bytes": gap_bytes,
        "lines_of_two_classes": shared, "rows": layout.rows })
}

#[cfg(test)]
mod tests;
