//! Reads a TOML table key by key: a key that no code reads is an error.

use std::ops::Range;
use std::path::Path;

use abi::setting::Setting;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Place, Placed};
use crate::failure::Failure;
use crate::stats::printable;

/// The text of a file, to find the places of its values.
pub(super) struct Source<'a> {
    pub(super) text: &'a str,
    pub(super) name: &'a str,
    pub(super) directory: &'a Path,
}

impl Source<'_> {
    /// Line and column of a byte, counted from 1.
    pub(super) fn position(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }
}

/// The value of a key that takes both.
pub(super) enum TextOrList {
    Text(String),
    List(Vec<Placed<String>>),
}

/// A table that is being read: each key that is asked for is known, the rest is not.
pub(super) struct Table<'a> {
    pub(super) source: &'a Source<'a>,
    entries: &'a DeTable<'a>,
    start: usize,
    title: &'static str,
    known: Vec<&'static str>,
}

impl<'a> Table<'a> {
    pub(super) fn new(source: &'a Source<'a>, entries: &'a DeTable<'a>, start: usize, title: &'static str) -> Self {
        Self { source, entries, start, title, known: Vec::new() }
    }

    pub(super) fn at(&self) -> String {
        format!("{}:{}", self.source.name, self.source.position(self.start).0)
    }

    pub(super) fn place(&self, key: &'static str, span: Range<usize>) -> Place {
        Place::Key { file: self.source.name.to_string(), line: self.source.position(span.start).0, key }
    }

    fn find(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.known.push(key);
        self.entries.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value)
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<(String, Place)>, Failure> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let place = self.place(key, value.span());
        match value.get_ref() {
            DeValue::String(text) => Ok(Some((text.to_string(), place))),
            DeValue::Integer(number) if key == "memory" => Ok(Some((number.to_string(), place))),
            other => {
                Err(place.bad(format!("{} instead of text", describe(other))).help(format!("write {key} = \"...\"")))
            }
        }
    }

    /// A text, or a list of texts. Each text of a list has a place of its own.
    pub(super) fn text_or_list(&mut self, key: &'static str) -> Result<Option<(TextOrList, Place)>, Failure> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let place = self.place(key, value.span());
        let wrong = |place: Place, found: &DeValue<'_>| {
            let help = format!("write {key} = \"...\" or {key} = [\"...\", \"...\"]");
            Err(place.bad(format!("{} instead of text", describe(found))).help(help))
        };
        match value.get_ref() {
            DeValue::String(text) => Ok(Some((TextOrList::Text(text.to_string()), place))),
            DeValue::Array(array) => {
                let mut list = Vec::new();
                for value in array {
                    let place = self.place(key, value.span());
                    let DeValue::String(text) = value.get_ref() else { return wrong(place, value.get_ref()) };
                    list.push(Placed { value: text.to_string(), place });
                }
                Ok(Some((TextOrList::List(list), place)))
            }
            other => wrong(place, other),
        }
    }

    pub(super) fn boolean_or(&mut self, key: &'static str, default: bool) -> Result<bool, Failure> {
        let Some(value) = self.find(key) else { return Ok(default) };
        match value.get_ref() {
            DeValue::Boolean(value) => Ok(*value),
            other => {
                let place = self.place(key, value.span());
                let help = format!("write {key} = true or {key} = false, without quotes");
                Err(place.bad(format!("{} instead of true or false", describe(other))).help(help))
            }
        }
    }

    pub(super) fn text_or(&mut self, key: &'static str, default: &str) -> Result<(String, Place), Failure> {
        let absent = self.absent(key);
        Ok(self.text(key)?.unwrap_or_else(|| (default.to_string(), absent)))
    }

    /// The value of a setting that the file names, or its default.
    pub(super) fn setting<S: Setting>(&mut self, key: &'static str) -> Result<Placed<S>, Failure> {
        let absent = Placed { value: S::DEFAULT, place: self.absent(key) };
        Ok(self.setting_if_any(key)?.unwrap_or(absent))
    }

    /// The value of a setting that the file names.
    pub(super) fn setting_if_any<S: Setting>(&mut self, key: &'static str) -> Result<Option<Placed<S>>, Failure> {
        let Some((text, place)) = self.text(key)? else { return Ok(None) };
        let Some(value) = S::named(&text) else {
            return Err(place.bad(format!("'{text}' is not a valid {}", S::WHAT)).help(did_you_mean(
                &text,
                "one of",
                S::NAMES,
            )));
        };
        Ok(Some(Placed { value, place }))
    }

    /// The places of those of these keys that the file has, from its first line on.
    pub(super) fn places(&self, keys: &[&'static str]) -> Vec<Place> {
        let written = |key: &&'static str| {
            let (_, value) = self.entries.iter().find(|(name, _)| name.get_ref() == *key)?;
            Some((value.span(), *key))
        };
        let mut found: Vec<_> = keys.iter().filter_map(written).collect();
        found.sort_by_key(|(span, _)| span.start);
        found.into_iter().map(|(span, key)| self.place(key, span)).collect()
    }

    pub(super) fn integer(&mut self, key: &'static str, default: i64) -> Result<(i64, Place), Failure> {
        let Some(value) = self.find(key) else { return Ok((default, self.absent(key))) };
        let place = self.place(key, value.span());
        match value.get_ref() {
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => Ok((number, place)),
                Err(_) => Err(place.bad(format!("{number} is out of range"))),
            },
            other => {
                let help = format!("write {key} = {default}, without quotes");
                Err(place.bad(format!("{} instead of a number", describe(other))).help(help))
            }
        }
    }

    /// As [`Self::integer`]; `None` for the text `word`.
    pub(super) fn integer_or(
        &mut self,
        key: &'static str,
        default: i64,
        word: &str,
    ) -> Result<(Option<i64>, Place), Failure> {
        let is_word = |value: &&Spanned<DeValue<'_>>| matches!(value.get_ref(), DeValue::String(text) if *text == word);
        let named = self.entries.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value);
        let Some(value) = named.filter(is_word) else {
            return self.integer(key, default).map(|(number, place)| (Some(number), place));
        };
        self.known.push(key);
        Ok((None, self.place(key, value.span())))
    }

    pub(super) fn table(&mut self, key: &'static str) -> Result<Option<Self>, Failure> {
        let Some(value) = self.find(key) else { return Ok(None) };
        match value.get_ref() {
            DeValue::Table(table) => Ok(Some(Self::new(self.source, table, value.span().start, "[host]"))),
            other => Err(self
                .place(key, value.span())
                .bad(format!("{} instead of a table", describe(other)))
                .help(format!("write [{key}] on a line of its own, and its keys below"))),
        }
    }

    pub(super) fn tables(&mut self, key: &'static str) -> Result<Vec<Self>, Failure> {
        let Some(value) = self.find(key) else { return Ok(Vec::new()) };
        let wrong = |value: &Spanned<DeValue<'_>>| {
            self.place(key, value.span())
                .bad(format!("{} instead of a list of tables", describe(value.get_ref())))
                .help(format!("write [[{key}]] on a line of its own for each VM, and its keys below"))
        };
        let DeValue::Array(array) = value.get_ref() else { return Err(wrong(value)) };
        array
            .iter()
            .map(|value| match value.get_ref() {
                DeValue::Table(table) => Ok(Self::new(self.source, table, value.span().start, "[[vm]]")),
                _ => Err(wrong(value)),
            })
            .collect()
    }

    /// Rejects the first key that no code has read.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let unknown = self.entries.keys().filter(|key| !self.known.contains(&key.get_ref().as_ref()));
        let Some(key) = unknown.min_by_key(|key| key.span().start) else { return Ok(()) };

        let (line, column) = self.source.position(key.span().start);
        let Self { source, title, known, .. } = &self;
        let failure = Failure::bad_input(format!(
            "{}:{line}:{column}: key '{}': unknown in {}",
            source.name,
            printable(key.get_ref()),
            if *title == "file" { "a file of VMs" } else { title }
        ));
        Err(failure.help(did_you_mean(key.get_ref(), "known here:", known)))
    }

    pub(super) fn absent(&self, key: &'static str) -> Place {
        Place::Absent { file: self.source.name.to_string(), line: self.source.position(self.start).0, key }
    }
}

/// Lists `names`, which are `what`, and begins with the one that looks like `text`.
pub(super) fn did_you_mean(text: &str, what: &str, names: &[&str]) -> String {
    let all = format!("{what} {}", names.join(", "));
    let text = text.to_lowercase();
    let nearest = names
        .iter()
        .map(|name| (textdistance::nstr::damerau_levenshtein(&text, &name.to_lowercase()), name))
        .min_by(|(one, _), (other, _)| one.total_cmp(other));
    match nearest {
        Some((distance, name)) if distance <= 0.5 => format!("did you mean '{name}'? ({all})"),
        _ => all,
    }
}

fn describe(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the text {text:?}"),
        DeValue::Integer(number) => format!("the number {number}"),
        DeValue::Float(number) => format!("the number {number}"),
        DeValue::Boolean(value) => format!("{value}"),
        DeValue::Datetime(time) => format!("the time {time}"),
        DeValue::Array(_) => "a list".to_string(),
        DeValue::Table(_) => "a table".to_string(),
    }
}
