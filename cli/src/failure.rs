//! A failure, for the person who must fix it.
//!
//! A failure names the place (file and line, or option), the fault, and the remedy. It also has the tool's exit status,
//! so that a script can tell a mistake in its input from a failed run.

use std::fmt;

/// Exit status of a run that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit status for bad input: nothing was started.
pub(crate) const BAD_INPUT: u8 = 2;
/// Exit status when the time limit ended the run, as timeout(1) has it.
pub(crate) const TIMED_OUT: u8 = 124;

/// One failure: a line that names it, and perhaps a second one with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The status to end with.
    pub(crate) status: u8,
    what: String,
    help: Option<String>,
}

impl Failure {
    /// Something in the input cannot be used.
    pub(crate) fn bad_input(what: impl Into<String>) -> Self {
        Self { status: BAD_INPUT, what: what.into(), help: None }
    }

    /// The input was good, and yet it did not work.
    pub(crate) fn failed(what: impl Into<String>) -> Self {
        Self { status: FAILED, what: what.into(), help: None }
    }

    /// The same failure with another exit status.
    pub(crate) fn with_status(mut self, status: u8) -> Self {
        self.status = status;
        self
    }

    /// The same failure, behind what it means.
    pub(crate) fn context(mut self, what: &str) -> Self {
        self.what = format!("{what}: {}", self.what);
        self
    }

    /// Whether it names a remedy.
    pub(crate) fn has_help(&self) -> bool {
        self.help.is_some()
    }

    /// The same failure with a second line: the remedy.
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.help {
            Some(help) => write!(f, "\nhelp: {help}"),
            None => Ok(()),
        }
    }
}
