//! Records of measurements: one JSON line for each result, with what was measured, how, and on what.
//!
//! `dunlin bench` writes them ([`Log`]), `dunlin bench compare` and `dunlin report` read them ([`read`]). A file of
//! records only grows. The tool writes each line at once, in one write, so an interrupted measurement keeps its earlier
//! results. A repeated measurement adds another line; a reader combines the samples of all of them ([`series`]).

mod log;
mod reader;
mod series;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use log::{Figure, Log};
#[cfg(test)]
pub(crate) use reader::parse;
pub(crate) use reader::{BadLine, Records, read};
pub(crate) use series::{Key, Series, pool, texts};

/// The version of the format. A reader refuses other versions, because it must not guess what a field means.
pub(crate) const SCHEMA: u32 = 1;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// The benchmark that measured it, such as `tlb`: the word after `dunlin bench`.
    pub(crate) experiment: String,
    /// The content.
    #[serde(flatten)]
    pub(crate) content: Content,
    /// Where and when.
    #[serde(flatten)]
    pub(crate) circumstances: Circumstances,
}

/// Settings by name; values are text, numbers, or truths.
pub(crate) type Settings = BTreeMap<String, Value>;

/// The content of a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Content {
    /// Something was measured.
    Figure {
        /// The measured quantity, such as `latency p50`.
        quantity: String,
        /// Under which settings.
        settings: Settings,
        /// The unit.
        unit: String,
        /// How far it can be believed.
        class: Class,
        /// All values that were measured, in order.
        samples: Vec<f64>,
        /// Number of observations in each sample, such as 2000 shootdowns for a mean.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        observations: Option<u64>,
        /// Share of the computer that other programs used at the same time, from 0 to 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        others_share: Option<f64>,
    },
    /// Something was measured over time.
    Course(Course),
    /// Something was promised.
    Promise {
        /// The target.
        what: String,
        /// The figures that decide.
        figures: String,
        /// Whether it was met; `None` if that cannot be judged.
        met: Option<bool>,
    },
    /// Something could not be measured.
    Failure {
        /// The subject.
        what: String,
        /// The reason.
        why: String,
    },
    /// Circumstances did not allow to measure something: no second core, say.
    Unmeasured {
        /// The subject.
        what: String,
        /// Why.
        why: String,
    },
    /// A step of `dunlin bench all` has ended.
    Step {
        /// Its name.
        step: String,
        /// `short` or `full`.
        form: String,
        /// How long it took.
        seconds: f64,
        /// Whether all of it was measured.
        complete: bool,
    },
}

/// How something went over time, in pieces of equal length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Course {
    /// The measured quantity, such as `speed`.
    pub(crate) quantity: String,
    /// Under which settings.
    pub(crate) settings: Settings,
    /// The unit of the samples.
    pub(crate) unit: String,
    /// How far it can be believed.
    pub(crate) class: Class,
    /// When the first piece began, in seconds from the moment about which it is all about: usually less than zero.
    pub(crate) from: f64,
    /// Seconds of a piece.
    pub(crate) step: f64,
    /// The mean of each piece.
    pub(crate) samples: Vec<f64>,
    /// The middle of each piece, in the same seconds. Empty if each piece begins where the one before ends: not so for
    /// a guest that stands still, because its clock stands still too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) middles: Vec<f64>,
    /// Times of events, in the same seconds.
    pub(crate) moments: BTreeMap<String, Vec<f64>>,
    /// What was counted in the same run, such as `rounds`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) counts: BTreeMap<String, f64>,
    /// Share of the computer that other programs used at the same time, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) others_share: Option<f64>,
}

impl Course {
    /// All pieces: the middle of each, and its sample.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let regular = |number: usize| self.from + self.step * (number as f64 + 0.5);
        let middle = move |number: usize| self.middles.get(number).copied().unwrap_or_else(|| regular(number));
        self.samples.iter().enumerate().map(move |(number, sample)| (middle(number), *sample))
    }

    /// The first event with this name.
    pub(crate) fn moment(&self, name: &str) -> Option<f64> {
        self.moments.get(name)?.first().copied()
    }
}

/// The kind of a figure, which decides what it can be compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Class {
    /// Counted, and the same every time.
    Exact,
    /// Counted, of something that depends on time.
    Count,
    /// Timed. Of an emulated machine, comparable within one run only.
    Time,
    /// A ratio of two times of one run.
    Ratio,
}

impl Class {
    /// In words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Exact => "exact count",
            Self::Count => "count",
            Self::Time => "time",
            Self::Ratio => "ratio within a run",
        }
    }
}

/// What the measured code ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ground {
    /// A machine that QEMU emulates.
    Emulated,
    /// A virtual machine, by hardware that can do so within a virtual machine (KVM).
    Virtualized,
    /// The computer itself, without a hypervisor or a guest.
    Native,
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Emulated => "emulated",
            Self::Virtualized => "virtualized",
            Self::Native => "native",
        })
    }
}

/// Where and when something was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Circumstances {
    /// What it ran on.
    pub(crate) ground: Ground,
    /// The computer.
    pub(crate) machine: Machine,
    /// QEMU, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) qemu: Option<Qemu>,
    /// The commit that the tool was built from.
    pub(crate) commit: String,
    /// When, in UTC.
    pub(crate) date: String,
}

impl Circumstances {
    /// The architecture of the measurement: that of the emulated machine, or of the computer.
    pub(crate) fn arch(&self) -> &str {
        self.qemu.as_ref().map_or(&self.machine.arch, |qemu| &qemu.arch)
    }

    /// The computer, and its QEMU if there was one.
    pub(crate) fn place(&self) -> String {
        match &self.qemu {
            Some(qemu) => format!("{}; {qemu}", self.machine),
            None => self.machine.to_string(),
        }
    }
}

/// A computer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Its processor, as its kernel calls it.
    pub(crate) processor: String,
    /// Its architecture.
    pub(crate) arch: String,
    /// Cores that we may use.
    pub(crate) cores: u32,
}

/// A QEMU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Qemu {
    /// Its version.
    pub(crate) version: String,
    /// `tcg` or `kvm`.
    pub(crate) accel: String,
    /// The CPU that the host has there, as `-cpu` names it.
    pub(crate) cpu: String,
    /// The architecture of host and guests.
    pub(crate) arch: String,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} cores, {}", self.processor, self.cores, self.arch)
    }
}

impl fmt::Display for Qemu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QEMU {}, {}, {}, -cpu {}", self.version, self.accel, self.arch, self.cpu)
    }
}
