//! A block as a picture: one row for each cache line, one box for each field, coloured by its writer.

use std::fmt::Write;

use abi::layout::{Content, Layout, Row};

/// Of a cache line's byte.
const BYTE: u32 = 8;
const ROW: u32 = 26;
const LEFT: u32 = 70;
const TOP: u32 = 84;
/// Lines of a field that are drawn before the rest is only counted.
const MOST_LINES_OF_A_FIELD: u32 = 3;
/// Letters are about this wide.
const LETTER: u32 = 7;

/// Classes in the order of the legend, with their colours.
const COLOURS: [(Content, &str, &str); 4] = [
    (Content::Owner, "#bfe3c0", "written by its pCPU"),
    (Content::Mailbox, "#f7c9b4", "written by any pCPU"),
    (Content::Frozen, "#cfdcf2", "not written"),
    (Content::Cold, "#ece3c2", "rarely written"),
];

/// Draws `layout` as SVG.
pub(super) fn svg(layout: &Layout) -> String {
    let mut boxes = String::new();
    let mut at = TOP;
    for line in lines(layout) {
        match line {
            Line::Drawn(number) => {
                label(&mut boxes, at, &format!("{}", number * layout.line));
                for row in fields(layout) {
                    field(&mut boxes, layout, row, number, at);
                }
            }
            Line::Left(number) => {
                let text = format!("... {number} more lines of the same field");
                let _ = writeln!(boxes, r##"<text x="{}" y="{}" fill="#555">{text}</text>"##, LEFT + 8, at + 17);
            }
        }
        at += ROW;
    }
    let (width, height) = (LEFT + layout.line * BYTE + 20, at + 14);
    let title =
        format!("{}: {} bytes, {} lines of {}", layout.name, layout.bytes, layout.bytes / layout.line, layout.line);
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<title>{title}</title>
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="20" y="28" font-size="16" font-weight="bold" fill="#222">{title}</text>
{legend}<text x="20" y="{caption}" fill="#555">offset</text>
{boxes}</svg>
"##,
        legend = legend(layout),
        caption = TOP - 8,
    )
}

/// A row of the picture.
enum Line {
    /// The line of this number.
    Drawn(u32),
    /// So many lines that hold nothing but more of the field before.
    Left(u32),
}

/// The rows of the picture: long fields are shortened.
fn lines(layout: &Layout) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut left = 0;
    for number in 0..layout.bytes.div_ceil(layout.line) {
        let (start, end) = (number * layout.line, (number + 1) * layout.line);
        let is_inside = |row: &&Row| {
            row.offset + (MOST_LINES_OF_A_FIELD - 1) * layout.line < start && row.offset + row.bytes > end + layout.line
        };
        if fields(layout).any(|row| is_inside(&row)) {
            left += 1;
            continue;
        }
        if left > 0 {
            lines.push(Line::Left(left));
            left = 0;
        }
        lines.push(Line::Drawn(number));
    }
    lines
}

fn fields(layout: &Layout) -> impl Iterator<Item = &Row> {
    layout.rows.iter().filter(|row| row.content != Content::Nested && row.content != Content::Gap)
}

/// The part of a field that is on line `number`, drawn at height `at`.
fn field(boxes: &mut String, layout: &Layout, row: &Row, number: u32, at: u32) {
    let (start, end) = (number * layout.line, (number + 1) * layout.line);
    let (from, to) = (row.offset.max(start), (row.offset + row.bytes).min(end));
    if from >= to {
        return;
    }
    let (x, width) = (LEFT + (from - start) * BYTE, (to - from) * BYTE);
    let colour = COLOURS.iter().find(|(content, ..)| *content == row.content).map_or("#fff", |(_, colour, _)| colour);
    let Row { name, kind, offset, bytes, .. } = row;
    let _ = write!(
        boxes,
        r##"<g><title>{name}: {kind}, {bytes} bytes at {offset}</title><rect x="{x}" y="{at}" width="{width}" height="{height}" fill="{colour}" stroke="#777" stroke-width="0.6"/>"##,
        kind = escaped(kind),
        height = ROW - 4,
    );
    let letters = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX).saturating_mul(LETTER);
    let whole = format!("{name}: {kind}");
    let text = if letters(&whole) < width { &whole } else { name };
    // A name that is too long for its field is squeezed, unless it would be unreadable.
    let squeezed =
        if letters(text) >= width { format!(r#" textLength="{}""#, width.saturating_sub(6)) } else { String::new() };
    if letters(text) < 3 * width {
        let text = escaped(text);
        let _ = write!(
            boxes,
            r##"<text x="{}" y="{}" fill="#222"{squeezed} lengthAdjust="spacingAndGlyphs">{text}</text>"##,
            x + 3,
            at + 15,
        );
    }
    boxes.push_str("</g>\n");
}

fn label(boxes: &mut String, at: u32, text: &str) {
    let _ = writeln!(boxes, r##"<text x="{}" y="{}" text-anchor="end" fill="#555">{text}</text>"##, LEFT - 10, at + 15);
}

/// The colours of the classes that there are.
fn legend(layout: &Layout) -> String {
    let mut legend = String::new();
    let mut x = 20;
    let is_there = |content: Content| layout.rows.iter().any(|row| row.content == content);
    for (content, colour, text) in COLOURS.into_iter().filter(|(content, ..)| is_there(*content)) {
        let text = format!("{}: {text}", content.name());
        let _ = writeln!(
            legend,
            r##"<rect x="{x}" y="40" width="14" height="14" fill="{colour}" stroke="#777" stroke-width="0.6"/><text x="{}" y="52" fill="#222">{text}</text>"##,
            x + 20,
        );
        x += 44 + u32::try_from(text.len()).unwrap_or(0) * LETTER;
    }
    legend
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(offset: u32, bytes: u32, content: Content, name: &str, kind: &str) -> Row {
        Row { depth: 0, offset, bytes, content, name: name.into(), kind: kind.into() }
    }

    fn block() -> Layout {
        Layout {
            name: "Block".into(),
            bytes: 10 * 128,
            align: 128,
            line: 128,
            rows: vec![
                row(0, 64, Content::Mailbox, "word", "Option<Word>"),
                row(64, 64, Content::Gap, "", ""),
                row(128, 1152, Content::Owner, "owner", "Owned<[u64; 144]>"),
            ],
        }
    }

    #[test]
    fn every_class_has_its_colour_where_its_field_is() {
        let picture = svg(&block());
        assert!(picture.contains(r##"<rect x="70" y="84" width="512" height="22" fill="#f7c9b4""##), "{picture}");
        assert!(picture.contains(r##"<rect x="70" y="110" width="1024" height="22" fill="#bfe3c0""##), "{picture}");
        assert!(picture.contains("word: Option&lt;Word&gt;, 64 bytes at 0"), "{picture}");
    }

    #[test]
    fn long_fields_are_shortened_and_what_is_left_out_is_counted() {
        let picture = svg(&block());
        let boxes = picture.matches("owner: Owned").count();
        assert!(picture.contains("... 4 more lines of the same field"), "{picture}");
        assert!(boxes >= 5, "{boxes} in {picture}");
    }
}
