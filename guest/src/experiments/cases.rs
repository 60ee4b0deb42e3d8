//! Conformance cases: each leaves one record, `case name=.. about=".." outcome=pass|fail|skipped why=".."`. A case that fails
//! leaves a `violation` too, and counts.

use core::fmt;

use super::{Context, Outcome};
use crate::arch::tsc;
use crate::record::{Text, record};

/// Counts how the cases of one experiment end.
pub(super) struct Cases<'a, 'b> {
    pub(super) context: &'a Context<'b>,
    experiment: &'static str,
    passed: u64,
    failed: u64,
    failures: u64,
    skipped: u64,
}

impl<'a, 'b> Cases<'a, 'b> {
    pub(super) fn new(context: &'a Context<'b>, experiment: &'static str) -> Self {
        Self { context, experiment, passed: 0, failed: 0, failures: 0, skipped: 0 }
    }

    /// A case that was tried.
    pub(super) fn check(&mut self, name: &str, about: &str, expected: &str, seen: fmt::Arguments<'_>, matches: bool) {
        let outcome = if matches { "pass" } else { "fail" };
        record!("case", name = name, about = Text(about), outcome = outcome, why = format_args!("\"{seen}\""));
        if matches {
            self.passed += 1;
        } else {
            self.failed += 1;
            let (of, seen) = (format_args!("{name}"), format_args!("\"{seen}\""));
            self.failures += self.context.expect(self.experiment, of, Text(expected), seen, false);
        }
    }

    /// A case that does not apply here.
    pub(super) fn skip(&mut self, name: &str, about: &str, why: &str) {
        self.skipped += 1;
        record!("case", name = name, about = Text(about), outcome = "skipped", why = Text(why));
    }

    pub(super) fn done(self) -> Outcome {
        record!(
            "record",
            experiment = self.experiment,
            passed = self.passed,
            failed = self.failed,
            skipped = self.skipped,
        );
        Outcome::Done { failures: self.failures }
    }

    /// How long another CPU may take, in ticks.
    pub(super) fn patience(&self) -> u64 {
        tsc::seconds(self.context.settings.stall.unwrap_or(30))
    }
}

/// A short text made on the spot; what does not fit is cut.
pub(super) struct Line {
    bytes: [u8; 64],
    length: usize,
}

impl Line {
    pub(super) fn of(content: fmt::Arguments<'_>) -> Self {
        let mut line = Self { bytes: [0; 64], length: 0 };
        // `Line` never fails, it cuts.
        let _ = fmt::Write::write_fmt(&mut line, content);
        line
    }

    pub(super) fn text(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or("")
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes().filter(u8::is_ascii).take(self.bytes.len() - self.length) {
            self.bytes[self.length] = byte;
            self.length += 1;
        }
        Ok(())
    }
}
