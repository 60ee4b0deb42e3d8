//! The output of a measurement: text for users or a line of JSON per result, records, and the exit status.

use serde_json::{Value, json};

use super::circumstances::{emulator, machine};
use super::target::Target;
use crate::failure::Failure;
use crate::records::{Content, Course, Figure, Ground, Log};

/// The results of one `dunlin bench`.
pub(super) struct Report<'a> {
    bench: &'static str,
    json: bool,
    log: &'a Log,
    machine: Value,
    /// The description of QEMU in the last run.
    run: Value,
    /// Whether something could not be measured, or was found wrong.
    pub(super) failed: bool,
}

impl<'a> Report<'a> {
    /// The report of benchmark `bench`; its records go to `log`.
    pub(super) fn new(bench: &'static str, json: bool, log: &'a Log) -> Self {
        // The default until a run has reported more.
        Self { bench, json, log, machine: machine(&Value::Null), run: Value::Null, failed: false }
    }

    /// Text for people.
    pub(super) fn say(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    /// Prints the failure of a measurement, and returns the result of a success. The benchmark continues in both cases.
    pub(super) fn of<T>(&mut self, what: &str, measured: Result<(T, Value), Failure>) -> Option<T> {
        match measured {
            Ok((figures, run)) => {
                self.machine = machine(&run);
                self.run = emulator(&run);
                Some(figures)
            }
            Err(failure) => {
                self.failed = true;
                self.say(&format!("{what}: FAILED, see standard error"));
                self.json(json!({ "part": "failure", "what": what, "why": failure.to_string() }));
                self.log.failure(what, &failure.to_string());
                eprintln!("{what}: {failure}");
                None
            }
        }
    }

    /// A record of something that could not be measured, although nothing failed.
    pub(super) fn unmeasured(&self, what: &str, why: &str) {
        let content = Content::Unmeasured { what: what.to_string(), why: why.to_string() };
        self.log.write(Ground::Native, None, content);
    }

    /// Records a figure of the last run.
    pub(super) fn emulated(&self, figure: Figure) {
        self.log.emulated(&self.run, figure);
    }

    /// A record of how something went over the time of the last run.
    pub(super) fn course(&self, course: Course) {
        self.log.course(&self.run, course);
    }

    /// Records a figure of this computer itself.
    pub(super) fn native(&self, figure: Figure) {
        self.log.native(figure);
    }

    /// With --json, prints a line with the figures and their circumstances.
    pub(super) fn json(&self, mut figures: Value) {
        if !self.json {
            return;
        }
        if let Some(object) = figures.as_object_mut() {
            object.insert("bench".to_string(), json!(self.bench));
            object.entry("emulated").or_insert(json!(true));
            object.insert("machine".to_string(), self.machine.clone());
            object.insert("commit".to_string(), json!(env!("DUNLIN_COMMIT")));
        }
        println!("{figures}");
    }

    /// Judges the targets. Returns the exit status.
    pub(super) fn judge(&self, targets: &[Target]) -> u8 {
        if !targets.is_empty() {
            self.say("\nTargets:");
        }
        for target in targets {
            self.say(&target.to_string());
            self.json(target.json());
            target.record(self.log);
        }
        u8::from(self.failed || targets.iter().any(Target::is_missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_tells_of_a_failure_and_of_a_target_that_was_missed_alone() {
        let log = Log::nowhere();
        let mut report = Report::new("x", true, &log);
        let target = |met| Target::new("x", String::new(), met);
        assert_eq!(report.judge(&[]), 0);
        assert_eq!(report.judge(&[target(true), Target::not_judged("x", "")]), 0);
        assert_eq!(report.judge(&[target(true), target(false)]), 1);
        report.failed = true;
        assert_eq!(report.judge(&[target(true)]), 1);
    }
}
