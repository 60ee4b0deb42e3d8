//! The data of a report: combined figures, failures, and missing or doubtful results.

use std::collections::{BTreeMap, BTreeSet};

use crate::bench::{EXPERIMENTS, Form, Spread, steps};
use crate::records::{BadLine, Content, Course, Ground, Key, Record, Records, Series, pool, texts};

/// Settings as text, by name.
pub(super) type Settings = BTreeMap<String, String>;

/// Everything that was read.
pub(super) struct Data {
    /// All records, in order.
    pub(super) records: Vec<Record>,
    /// Invalid lines.
    pub(super) bad: Vec<BadLine>,
    /// All figures.
    pub(super) figures: BTreeMap<Key, Series>,
}

/// Something that could not be measured.
pub(super) struct Gap<'a> {
    /// Whether it failed; else circumstances did not allow it.
    pub(super) is_failure: bool,
    pub(super) what: &'a str,
    pub(super) why: &'a str,
    pub(super) date: &'a str,
}

impl Data {
    pub(super) fn of(files: Vec<Records>) -> Self {
        let (mut records, mut bad) = (Vec::new(), Vec::new());
        for file in files {
            records.extend(file.records);
            bad.extend(file.bad);
        }
        let figures = pool(&records);
        Self { records, bad, figures }
    }

    /// The architectures that have figures of an experiment.
    pub(super) fn archs(&self, experiment: &str) -> BTreeSet<&str> {
        self.figures.keys().filter(|key| key.experiment == experiment).map(|key| key.arch.as_str()).collect()
    }

    /// The data of one architecture.
    pub(super) fn of_arch(&self, arch: &str) -> Self {
        let figures = self.figures.iter().filter(|(key, _)| key.arch == arch);
        Self {
            records: self.records.iter().filter(|record| record.circumstances.arch() == arch).cloned().collect(),
            bad: Vec::new(),
            figures: figures.map(|(key, series)| (key.clone(), series.clone())).collect(),
        }
    }

    /// The series of this quantity.
    pub(super) fn series<'a>(
        &'a self,
        experiment: &'a str,
        quantity: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Series)> + 'a {
        self.figures.iter().filter(move |(key, _)| key.experiment == experiment && key.quantity == quantity)
    }

    /// How this quantity went over time: all runs of each setting together.
    pub(super) fn courses(&self, experiment: &str, quantity: &str) -> Vec<(Settings, Vec<&Course>)> {
        let mut all: BTreeMap<Settings, Vec<&Course>> = BTreeMap::new();
        for record in self.records.iter().filter(|record| record.experiment == experiment) {
            if let Content::Course(course) = &record.content
                && course.quantity == quantity
            {
                all.entry(texts(&course.settings)).or_default().push(course);
            }
        }
        all.into_iter().collect()
    }

    /// The only series of this quantity with these settings.
    pub(super) fn one(&self, experiment: &str, quantity: &str, settings: &[(&str, &str)]) -> Option<&Series> {
        let is_it = |key: &Key| {
            key.experiment == experiment
                && key.quantity == quantity
                && settings.iter().all(|(name, value)| key.setting(name) == *value)
        };
        self.figures.iter().find(|(key, _)| is_it(key)).map(|(_, series)| series)
    }

    /// Its median, minimum and maximum.
    pub(super) fn spread(&self, experiment: &str, quantity: &str, settings: &[(&str, &str)]) -> Option<Spread> {
        self.one(experiment, quantity, settings)?.spread()
    }

    /// The different values of a setting, numbers in their order.
    pub(super) fn values(&self, experiment: &str, quantity: &str, setting: &str) -> Vec<String> {
        let mut values: Vec<String> =
            self.series(experiment, quantity).map(|(key, _)| key.setting(setting).to_string()).collect();
        let number = |text: &String| text.parse::<f64>().unwrap_or(f64::INFINITY);
        values.sort_by(|one, other| number(one).total_cmp(&number(other)).then_with(|| one.cmp(other)));
        values.dedup();
        values
    }

    /// Whether there is any figure of an experiment.
    pub(super) fn has(&self, experiment: &str) -> bool {
        self.figures.keys().any(|key| key.experiment == experiment)
    }

    /// Whether there is any record of an experiment.
    pub(super) fn mentions(&self, experiment: &str) -> bool {
        self.records.iter().any(|record| record.experiment == experiment)
    }

    /// The measurements of an experiment that failed.
    pub(super) fn gaps<'a>(&'a self, experiment: &'a str) -> impl Iterator<Item = Gap<'a>> + 'a {
        self.records.iter().filter(move |record| record.experiment == experiment).filter_map(|record| {
            let date = record.circumstances.date.as_str();
            match &record.content {
                Content::Failure { what, why } => Some(Gap { is_failure: true, what, why, date }),
                Content::Unmeasured { what, why } => Some(Gap { is_failure: false, what, why, date }),
                _ => None,
            }
        })
    }

    /// The targets of an experiment: all judgements of each, in order.
    pub(super) fn promises(&self, experiment: &str) -> BTreeMap<&str, Vec<(&str, Option<bool>)>> {
        let mut promises: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for record in self.records.iter().filter(|record| record.experiment == experiment) {
            if let Content::Promise { what, figures, met } = &record.content {
                promises.entry(what.as_str()).or_default().push((figures.as_str(), *met));
            }
        }
        promises
    }

    /// The measured commits, and the number of records of each.
    pub(super) fn commits(&self) -> BTreeMap<&str, usize> {
        let mut commits = BTreeMap::new();
        for record in self.measured() {
            *commits.entry(record.circumstances.commit.as_str()).or_default() += 1;
        }
        commits
    }

    /// The computers, each with its QEMU if there was one.
    pub(super) fn machines(&self) -> BTreeSet<String> {
        self.measured().map(|record| record.circumstances.machine.to_string()).collect()
    }

    /// The QEMUs.
    pub(super) fn qemus(&self) -> BTreeSet<String> {
        self.measured().filter_map(|record| Some(record.circumstances.qemu.as_ref()?.to_string())).collect()
    }

    /// Their versions, and how each ran. The CPU model is part of a measurement: figures of two models are never
    /// combined.
    pub(super) fn emulators(&self) -> BTreeSet<(&str, &str)> {
        let qemus = self.measured().filter_map(|record| record.circumstances.qemu.as_ref());
        qemus.map(|qemu| (qemu.version.as_str(), qemu.accel.as_str())).collect()
    }

    /// What the measured code ran on.
    pub(super) fn grounds(&self) -> BTreeSet<Ground> {
        self.measured().map(|record| record.circumstances.ground).collect()
    }

    /// The first and the last day.
    pub(super) fn dates(&self) -> Option<(&str, &str)> {
        let dates = || self.measured().map(|record| record.circumstances.date.as_str());
        Some((dates().min()?, dates().max()?))
    }

    fn measured(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| matches!(record.content, Content::Figure { .. } | Content::Course(_)))
    }

    /// Experiments without results.
    pub(super) fn missing(&self) -> Vec<&'static str> {
        EXPERIMENTS.into_iter().filter(|experiment| !self.has(experiment)).collect()
    }

    /// If `dunlin bench all` was run: its steps that did not complete.
    pub(super) fn unfinished(&self) -> Vec<&'static str> {
        let mut ended: BTreeMap<&str, (&str, bool)> = BTreeMap::new();
        for record in &self.records {
            if let Content::Step { step, form, complete, .. } = &record.content {
                let is_complete = *complete || ended.get(step.as_str()).is_some_and(|(_, complete)| *complete);
                ended.insert(step, (form, is_complete));
            }
        }
        if ended.is_empty() {
            return Vec::new();
        }
        let is_full = ended.values().any(|(form, _)| *form == Form::Full.name());
        let form = if is_full { Form::Full } else { Form::Short };
        let steps = steps(form, &[]).unwrap_or_default().into_iter().map(|step| step.name);
        steps.filter(|name| !ended.get(name).is_some_and(|(_, complete)| *complete)).collect()
    }

    /// The greatest share of the computer that others used while something was measured.
    pub(super) fn others_share(&self) -> Option<f64> {
        self.figures.values().filter_map(|series| series.others_share).reduce(f64::max)
    }
}
