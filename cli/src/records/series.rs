//! Figures of the same quantity, combined.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

use super::{Class, Content, Ground, Record, Settings};
use crate::bench::Spread;

/// Figures with the same key are figures of the same quantity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The experiment.
    pub(crate) experiment: String,
    /// The measured quantity.
    pub(crate) quantity: String,
    /// Settings as text, by name.
    pub(crate) settings: BTreeMap<String, String>,
    /// The unit.
    pub(crate) unit: String,
    /// What the measured code ran on.
    pub(crate) ground: Ground,
    /// The architecture of the measurement.
    pub(crate) arch: String,
    /// How far it can be believed.
    pub(crate) class: Class,
}

/// All samples of one thing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Series {
    /// In the order of the records.
    pub(crate) samples: Vec<f64>,
    /// Number of records. The samples of one record come from one process. They share everything that differs between
    /// processes, such as the addresses of its memory.
    pub(crate) runs: usize,
    /// Observations behind them, if each is a sum of some.
    pub(crate) observations: Option<u64>,
    /// The largest share of the computer that others used in that time.
    pub(crate) others_share: Option<f64>,
    /// The builds that were measured.
    pub(crate) commits: BTreeSet<String>,
    /// The computers, each with its QEMU if there was one.
    pub(crate) machines: BTreeSet<String>,
}

impl Key {
    /// A setting as text; empty if there is none with this name.
    pub(crate) fn setting(&self, name: &str) -> &str {
        self.settings.get(name).map_or("", String::as_str)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.experiment, self.quantity)?;
        for (at, (name, value)) in self.settings.iter().enumerate() {
            write!(f, "{}{name}={value}", if at == 0 { "; " } else { " " })?;
        }
        Ok(())
    }
}

impl Series {
    /// Whether its samples are of several builds or computers.
    pub(crate) fn is_mixed(&self) -> bool {
        self.commits.len() > 1 || self.machines.len() > 1
    }

    /// Median, minimum and maximum. A series has at least one sample.
    pub(crate) fn spread(&self) -> Option<Spread> {
        Spread::of(&self.samples)
    }
}

/// All figures among `records`, each thing once.
pub(crate) fn pool<'a>(records: impl IntoIterator<Item = &'a Record>) -> BTreeMap<Key, Series> {
    let mut all: BTreeMap<Key, Series> = BTreeMap::new();
    for record in records {
        let circumstances = &record.circumstances;
        let Content::Figure { quantity, settings, unit, class, samples, observations, others_share } = &record.content
        else {
            continue;
        };
        let key = Key {
            experiment: record.experiment.clone(),
            quantity: quantity.clone(),
            settings: texts(settings),
            unit: unit.clone(),
            ground: circumstances.ground,
            arch: circumstances.arch().to_string(),
            class: *class,
        };
        let series = all.entry(key).or_default();
        series.samples.extend(samples);
        series.runs += 1;
        series.commits.insert(circumstances.commit.clone());
        series.machines.insert(circumstances.place());
        if let Some(more) = observations {
            series.observations = Some(series.observations.unwrap_or(0).saturating_add(*more));
        }
        if let Some(share) = others_share {
            series.others_share = Some(series.others_share.map_or(*share, |most| most.max(*share)));
        }
    }
    all
}

/// Settings as text, by name.
pub(crate) fn texts(settings: &Settings) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    settings.iter().map(|(name, value)| (name.clone(), text(value))).collect()
}
