//! Conformance cases. Each writes one record, `case name=.. about=".." outcome=pass|fail|skipped why=".."`. A failed
//! case also writes a `violation`, and counts.

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

    /// A case that ran.
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
