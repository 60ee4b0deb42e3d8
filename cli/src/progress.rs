//! Progress messages: a line each on standard error, with the time since the start.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Lines of progress.
#[derive(Debug)]
pub(crate) struct Progress {
    start: Instant,
    raw: bool,
}

impl Progress {
    /// Time counts from here.
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), raw: false }
    }

    /// Time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether the terminal is raw, so that a line feed does not return to the left.
    pub(crate) fn set_raw(&mut self, raw: bool) {
        self.raw = raw;
    }

    /// One line with the time.
    pub(crate) fn say(&self, what: &str) {
        self.print(&format!("{:5.1} s  {what}", self.elapsed().as_secs_f64()));
    }

    /// Lines as they are.
    pub(crate) fn print(&self, text: &str) {
        let end = if self.raw { "\r\n" } else { "\n" };
        let mut out = String::with_capacity(text.len() + 2);
        for line in text.lines() {
            out.push_str(line.trim_end_matches('\r'));
            out.push_str(end);
        }
        // A closed standard error is no reason to stop.
        let _ = std::io::stderr().lock().write_all(out.as_bytes());
    }
}

/// A file that grows, read as it does.
#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    file: Option<File>,
    partial: Vec<u8>,
}

impl Follower {
    /// Follows the file at `path`, which need not exist yet.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), file: None, partial: Vec::new() }
    }

    /// The complete lines that have arrived since the last call.
    pub(crate) fn lines(&mut self) -> Option<String> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        self.file.as_mut()?.read_to_end(&mut self.partial).ok()?;
        let end = self.partial.iter().rposition(|&byte| byte == b'\n')? + 1;
        let lines = self.partial.drain(..end).collect::<Vec<_>>();
        Some(readable(&lines))
    }
}

/// The last `count` lines of a file. Bytes that are not text are made visible.
pub(crate) fn last_lines(path: &Path, count: usize) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap_or_default();
    last_lines_of(&bytes, count)
}

/// The last `count` lines that are not empty.
pub(crate) fn last_lines_of(bytes: &[u8], count: usize) -> Vec<String> {
    let text = readable(bytes);
    let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].iter().map(ToString::to_string).collect()
}

/// The text without characters that could move a terminal's cursor.
fn readable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|&c| c == '\n' || c == '\t' || !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_readable_and_not_empty() {
        let lines = last_lines_of(b"one\r\n\r\ntwo\x1b[2J\n\xff\n\n", 2);
        assert_eq!(lines, ["two[2J", "\u{fffd}"]);
        assert!(last_lines_of(b"", 3).is_empty());
    }

    #[test]
    fn follower_gives_whole_lines_once() {
        let directory = tempfile::tempdir().expect("can be made");
        let path = directory.path().join("log");
        let mut follower = Follower::new(&path);
        assert_eq!(follower.lines(), None);
        let mut file = File::create(&path).expect("can be made");
        file.write_all(b"one\ntw").expect("is written");
        assert_eq!(follower.lines().as_deref(), Some("one\n"));
        assert_eq!(follower.lines(), None);
        file.write_all(b"o\n").expect("is written");
        assert_eq!(follower.lines().as_deref(), Some("two\n"));
    }
}
