//! A target for a measured figure, and whether it is met.

use std::fmt;

use serde_json::{Value, json};

use crate::records::{Content, Ground, Log};

/// A target, judged.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    what: String,
    /// The worst figure, or the reason why the target was not judged.
    figures: String,
    /// Whether it is met; `None` if the circumstances allow no verdict.
    pub(super) met: Option<bool>,
}

impl Target {
    pub(super) fn new(what: impl Into<String>, figures: String, met: bool) -> Self {
        Self { what: what.into(), figures, met: Some(met) }
    }

    /// A target that cannot be judged, with the reason.
    pub(super) fn not_judged(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), figures: why.into(), met: None }
    }

    pub(super) fn is_missed(&self) -> bool {
        self.met == Some(false)
    }

    pub(super) fn json(&self) -> Value {
        json!({ "part": "target", "what": self.what, "met": self.met, "figures": self.figures })
    }
}

impl Target {
    /// A record of it.
    pub(super) fn record(&self, log: &Log) {
        let Self { what, figures, met } = self;
        let content = Content::Promise { what: what.clone(), figures: figures.clone(), met: *met };
        log.write(Ground::Emulated, None, content);
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "not judged",
        };
        write!(f, "  {verdict:10} {}: {}", self.what, self.figures)
    }
}

/// A bound for the ratio of the medians, Dunlin's to what it is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

impl Goal {
    pub(super) fn is_met_by(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(bound) => ratio <= bound,
            Self::AtLeast(bound) => ratio >= bound,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bound) => write!(f, "at most {bound}"),
            Self::AtLeast(bound) => write!(f, "at least {bound}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_judged_is_neither_met_nor_missed() {
        let target = Target::not_judged("x at most 1", "no second core");
        assert!(!target.is_missed());
        assert_eq!(target.to_string(), "  not judged x at most 1: no second core");
        assert_eq!(target.json()["met"], Value::Null);
        assert!(Target::new("x", String::new(), false).is_missed());
        assert!(!Target::new("x", String::new(), true).is_missed());
    }
}
