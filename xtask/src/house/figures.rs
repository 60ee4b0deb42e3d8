//! Instructions per exit in prose are those of `docs/exits*.toml`, or have a date.
//!
//! A current figure is a link to its file, and the link's title is its name there:
//!
//! ```text
//! An EOI takes [191](docs/exits.toml "x2apic-eoi") instructions.
//! ```
//!
//! [`find`] compares it with the file, and [`renewed`] updates it (`cargo xtask figures`). A figure that will not
//! change any more (an old measurement, another hypervisor's cost) has its date or commit in the same paragraph or
//! heading, or the version of KVM in the same sentence. Any other figure that looks like a number of instructions is a
//! mistake, because nothing updates it. This means a figure before the word "instructions", and one in a table's row or
//! column about instructions. Only numbers from 100 to 9 999 count as the cost of an exit.

use std::collections::BTreeMap;

use super::{Broken, Tree, broken};

/// Where figures are, by the name of the file, which a link ends with.
const FILES: [&str; 2] = ["exits.toml", "exits-aarch64.toml"];
/// Possible cost of an exit.
const COSTS: std::ops::Range<u64> = 100..10_000;

/// The instructions per exit of all of [`FILES`], by the file's name and the figure's.
#[derive(Default)]
struct Figures(BTreeMap<(String, String), u64>);

impl Figures {
    fn of(tree: &Tree) -> Self {
        let mut all = BTreeMap::new();
        for file in FILES {
            let table = tree.files.get(&format!("docs/{file}")).and_then(|text| text.parse::<toml::Table>().ok());
            let figures = table.as_ref().and_then(|table| table.get("instructions")).and_then(toml::Value::as_table);
            for (key, figure) in figures.into_iter().flatten() {
                if let Some(figure) = figure.as_integer().and_then(|figure| u64::try_from(figure).ok()) {
                    all.insert((file.to_owned(), key.clone()), figure);
                }
            }
        }
        Self(all)
    }

    fn of_mark(&self, mark: &Mark<'_>) -> Option<u64> {
        self.0.get(&(mark.file.to_owned(), mark.key?.to_owned())).copied()
    }
}

/// Errors in the figures of documents and comments.
pub(super) fn find(tree: &Tree) -> Vec<Broken> {
    let figures = Figures::of(tree);
    let mut found = Vec::new();
    for (path, text) in tree.with_extension("md") {
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, Some(line)));
        found.extend(judged(path, lines, &figures));
    }
    for (path, text) in tree.rust() {
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, comment(line)));
        found.extend(judged(path, lines, &figures));
    }
    found
}

/// `text` with each marked figure as the files of `tree` have it, if that makes a difference.
pub(super) fn renewed(tree: &Tree, text: &str) -> Option<String> {
    let figures = Figures::of(tree);
    let mut renewed = text.to_owned();
    // From the last to the first, so that places before are still right.
    for mark in marks(text).into_iter().rev() {
        if let Some(figure) = figures.of_mark(&mark) {
            renewed.replace_range(mark.figure_at..mark.figure_at + mark.figure.len(), &shown(figure));
        }
    }
    (renewed != text).then_some(renewed)
}

/// The text of a line that is only a comment.
fn comment(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']))
}

/// Lines that belong together, joined by line breaks.
#[derive(Default)]
struct Paragraph {
    text: String,
    /// The number of its first line.
    first: usize,
    /// Whether the heading above gives the day of its figures, or the paragraph before a table does.
    is_dated: bool,
}

/// Checks the paragraphs of a file; empty lines separate them.
fn judged<'a>(path: &str, lines: impl Iterator<Item = (usize, Option<&'a str>)>, figures: &Figures) -> Vec<Broken> {
    let mut found = Vec::new();
    let mut paragraph = Paragraph::default();
    let (mut heading_is_dated, mut last_is_dated) = (false, false);
    for (number, line) in lines.chain([(0, None)]) {
        let line = line.filter(|line| !line.trim().is_empty());
        let is_heading = line.is_some_and(|line| line.starts_with('#'));
        if (line.is_none() || is_heading) && !paragraph.text.is_empty() {
            found.extend(paragraph.judge(path, figures));
            last_is_dated = gives_time(&paragraph.text);
            paragraph = Paragraph::default();
        }
        let Some(line) = line else { continue };
        if is_heading {
            heading_is_dated = gives_time(line);
            last_is_dated = false;
        }
        if paragraph.text.is_empty() {
            paragraph.first = number;
            paragraph.is_dated = heading_is_dated || (line.trim_start().starts_with('|') && last_is_dated);
        } else {
            paragraph.text.push('\n');
        }
        paragraph.text.push_str(line);
    }
    found
}

impl Paragraph {
    fn judge(&self, path: &str, figures: &Figures) -> Vec<Broken> {
        let line = |at: usize| self.first + self.text[..at].matches('\n').count();
        let mut found = Vec::new();
        let mut rest = self.text.clone();
        for mark in marks(&self.text) {
            if let Some(what) = mark.mistake(figures) {
                found.push(broken(path, line(mark.at), what));
            }
            // Neither a figure nor a word.
            rest.replace_range(mark.at..mark.end, &"#".repeat(mark.end - mark.at));
        }
        if !self.is_dated && !gives_time(&rest) {
            let unmarked = before_the_word(&rest).into_iter().chain(in_tables(&rest));
            found.extend(unmarked.map(|(at, figure)| {
                let what = format!(
                    "`{}` instructions: from where? Give a link, [{0}](docs/exits.toml \"its name there\"), or the day or commit of the measurement",
                    shown(figure)
                );
                broken(path, line(at), what)
            }));
        }
        found
    }
}

/// A link to one of [`FILES`] with a number as its text.
struct Mark<'a> {
    /// The whole link.
    at: usize,
    end: usize,
    figure: &'a str,
    figure_at: usize,
    file: &'static str,
    key: Option<&'a str>,
}

impl Mark<'_> {
    fn mistake(&self, figures: &Figures) -> Option<String> {
        let (file, says) = (self.file, self.figure);
        let Some(key) = self.key else {
            return Some(format!("`{says}`: the link's title has to name the figure in docs/{file}"));
        };
        match figures.of_mark(self) {
            None => Some(format!("docs/{file} has no `{key}`")),
            Some(figure) if shown(figure) != self.figure => Some(format!(
                "says {says}, docs/{file} says {} for `{key}` (`cargo xtask figures` mends it)",
                shown(figure)
            )),
            Some(_) => None,
        }
    }
}

fn marks(text: &str) -> Vec<Mark<'_>> {
    let mut found = Vec::new();
    for (middle, _) in text.match_indices("](") {
        let Some(at) = text[..middle].rfind('[') else { continue };
        let Some(end) = text[middle..].find(')').map(|length| middle + length + 1) else { continue };
        let figure = &text[at + 1..middle];
        let target = &text[middle + 2..end - 1];
        let (link, title) = target.split_once(' ').map_or((target, None), |(link, title)| (link, Some(title)));
        let name = link.rsplit('/').next().unwrap_or_default();
        let is_figure = !figure.is_empty() && figure.bytes().all(|byte| byte.is_ascii_digit() || byte == b' ');
        if let Some(file) = FILES.into_iter().find(|file| *file == name)
            && is_figure
        {
            let key = title.map(|title| title.trim().trim_matches('"'));
            found.push(Mark { at, end, figure, figure_at: at + 1, file, key });
        }
    }
    found
}

/// As documents write it: in groups of three digits.
fn shown(figure: u64) -> String {
    let digits = figure.to_string();
    let mut shown = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(' ');
        }
        shown.push(digit);
    }
    shown
}

/// Whether it names a day (2026-11-21) or a commit (`a69958e`).
fn gives_time(text: &str) -> bool {
    let is_day = |word: &str| {
        let parts: Vec<&str> = word.split('-').collect();
        parts.iter().map(|part| part.len()).eq([4, 2, 2]) && parts.concat().bytes().all(|byte| byte.is_ascii_digit())
    };
    let is_commit = |code: &str| {
        let digits = code.bytes().filter(u8::is_ascii_digit).count();
        (7..=40).contains(&code.len())
            && code.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
            && (1..code.len()).contains(&digits)
    };
    text.split(|letter: char| !letter.is_ascii_digit() && letter != '-').any(is_day)
        || text.split('`').skip(1).step_by(2).any(is_commit)
}

/// Figures before the word "instructions", perhaps with one word in between, in sentences that name no version of KVM.
fn before_the_word(text: &str) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    for (word, _) in text.match_indices("instructions") {
        let before = text[..word].trim_end();
        let adjective = before.trim_end_matches(char::is_alphabetic).trim_end();
        let number = last_number(before).or_else(|| (adjective != before).then(|| last_number(adjective)).flatten());
        if let Some((at, figure)) = number
            && COSTS.contains(&figure)
            && !names_kvm(sentence_before(text, at))
        {
            found.push((at, figure));
        }
    }
    found
}

/// The number at the end of `text`, and its start.
fn last_number(text: &str) -> Option<(usize, u64)> {
    let mut at = text.len();
    let start_of = |end: usize| end - text[..end].bytes().rev().take_while(u8::is_ascii_digit).count();
    let mut start = start_of(at);
    // Groups of three digits.
    while at - start == 3 && text[..start].ends_with(' ') && (1..=3).contains(&(start - 1 - start_of(start - 1))) {
        at = start - 1;
        start = start_of(at);
    }
    // Part of a name or of a longer number does not count.
    let is_part = text[..start].ends_with(|letter: char| letter.is_alphanumeric() || ".-_".contains(letter));
    let digits: String = text[start..].split(' ').collect();
    digits.parse().ok().filter(|_| !is_part).map(|figure| (start, figure))
}

fn sentence_before(text: &str, at: usize) -> &str {
    let start = [". ", ".\n", "; ", "|"].into_iter().filter_map(|end| text[..at].rfind(end)).max().unwrap_or(0);
    &text[start..at]
}

/// Whether it names a version of KVM, as in "KVM 6.1" and "KVM/arm64 6.12".
fn names_kvm(text: &str) -> bool {
    let mut words = text.split_whitespace().skip_while(|word| !word.trim_start_matches(['(', '|']).starts_with("KVM"));
    words.next().is_some() && words.next().is_some_and(|next| next.starts_with(|letter: char| letter.is_ascii_digit()))
}

/// Figures that cells begin with, in rows and columns that speak of instructions, but not of KVM.
fn in_tables(text: &str) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    let mut headers: Vec<&str> = Vec::new();
    let mut at = 0;
    for line in text.split('\n') {
        let start = at;
        at += line.len() + 1;
        if !line.trim_start().starts_with('|') {
            headers.clear();
            continue;
        }
        let cells: Vec<&str> = line.split('|').collect();
        if headers.is_empty() {
            headers = cells;
            continue;
        }
        let row_speaks = cells.iter().any(|cell| cell.contains("instructions"));
        let mut cell_at = start;
        for (column, cell) in cells.iter().enumerate() {
            let header = headers.get(column).copied().unwrap_or_default();
            let speaks = row_speaks || header.contains("instructions");
            let digits = cell.trim_start();
            let length = digits.find(|letter: char| !letter.is_ascii_digit() && letter != ' ').unwrap_or(digits.len());
            let figure = digits[..length].split(' ').collect::<String>().parse::<u64>().ok();
            if let Some(figure) = figure.filter(|figure| COSTS.contains(figure))
                && speaks
                && !header.contains("KVM")
                && !digits[length..].starts_with(['.', '-', '%'])
            {
                found.push((cell_at + cell.len() - digits.len(), figure));
            }
            cell_at += cell.len() + 1;
        }
    }
    found
}
