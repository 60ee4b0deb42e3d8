//! Reads records. It reports an invalid line with its place, and still reads the others.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Content, Record, SCHEMA};
use crate::failure::Failure;

/// Letters of a bad line that are shown.
const SHOWN: usize = 60;

/// A file of records.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Records {
    /// Where they were.
    pub(crate) path: PathBuf,
    /// The records of the valid lines.
    pub(crate) records: Vec<Record>,
    /// Lines that are no records.
    pub(crate) bad: Vec<BadLine>,
}

/// A line that is no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadLine {
    /// The file.
    pub(crate) path: PathBuf,
    /// The number of the line, from 1.
    pub(crate) line: usize,
    /// The fault.
    pub(crate) what: String,
    /// How the line begins.
    pub(crate) begins: String,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path.display(), self.line, self.what, self.begins)
    }
}

/// All records of a file, and its invalid lines. Fails only if there is no such file.
pub(crate) fn read(path: &Path) -> Result<Records, Failure> {
    let bytes = std::fs::read(path).map_err(|error| {
        Failure::bad_input(format!("{}: {error}", path.display()))
            .help("'dunlin bench all -o FILE' writes records, as does '--record FILE' of every 'dunlin bench'")
    })?;
    Ok(parse(path, &bytes))
}

/// The same for the contents of a file.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Records {
    let mut all = Records { path: path.to_path_buf(), ..Records::default() };
    for (number, line) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match record(line) {
            Ok(record) => all.records.push(record),
            Err(what) => {
                let text = String::from_utf8_lossy(line);
                let begins = text.chars().take(SHOWN).map(|c| if c.is_control() { '?' } else { c }).collect();
                all.bad.push(BadLine { path: path.to_path_buf(), line: number, what, begins });
            }
        }
    }
    all
}

fn record(line: &[u8]) -> Result<Record, String> {
    let text = str::from_utf8(line).map_err(|_| "no UTF-8 text".to_string())?;
    let value: Value = serde_json::from_str(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Eof => format!("cut off: {error}"),
        _ => format!("no JSON: {error}"),
    })?;
    match value.get("schema").and_then(Value::as_u64) {
        Some(schema) if schema == u64::from(SCHEMA) => {}
        Some(schema) => return Err(format!("a record with schema {schema}; this dunlin knows schema {SCHEMA}")),
        None => return Err("not a record: the number `schema` is missing".to_string()),
    }
    let record: Record = serde_json::from_value(value).map_err(|error| format!("not a complete record: {error}"))?;
    check(&record)?;
    Ok(record)
}

/// Checks conditions that the types do not express.
fn check(record: &Record) -> Result<(), String> {
    let (settings, samples, others_share) = match &record.content {
        Content::Figure { settings, samples, others_share, .. } => (settings, samples, others_share),
        Content::Course(course) if course.step <= 0.0 => return Err("`step` is not above 0".to_string()),
        Content::Course(course) if ![0, course.samples.len()].contains(&course.middles.len()) => {
            return Err("`middles` are not as many as `samples`".to_string());
        }
        Content::Course(course) => (&course.settings, &course.samples, &course.others_share),
        _ => return Ok(()),
    };
    if samples.is_empty() {
        return Err("a figure without samples".to_string());
    }
    if let Some((name, _)) = settings.iter().find(|(_, value)| value.is_array() || value.is_object()) {
        return Err(format!("setting `{name}` is neither text nor number"));
    }
    if others_share.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
        return Err("`others_share` is not between 0 and 1".to_string());
    }
    Ok(())
}
