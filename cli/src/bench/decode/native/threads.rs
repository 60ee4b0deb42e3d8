//! One vCPU alone, and next to another one that does the same on another core.
//!
//! Each has its own vCPU. They share the VM with its memory and its write-protect cache; for comparison they also run
//! with a VM each.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use abi::payload::DecodeCache;
use crossbeam_utils::CachePadded;
use serde_json::{Value, json};

use super::emulator::{Emulator, Vm};
use super::machine::FORMS;
use crate::args::SETTINGS;
use crate::bench::cycle::nanos_per_cycle;
use crate::bench::pair::{alone, beside, in_turns, judge_on_free_cores};
use crate::bench::{Spread, progress};
use crate::records::{Class, Figure};

/// Operations of a batch.
const OPERATIONS: u32 = 100;

/// Cycles of one thread, alone and next to another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scaling {
    pub(super) name: String,
    /// Whether the two threads share a VM with a cache, so that there is a target.
    pub(super) is_promised: bool,
    /// Whether two cores were free while it was measured.
    pub(super) is_judged: bool,
    pub(super) alone: Spread,
    pub(super) together: Spread,
    pub(super) ratio: Spread,
    /// Cycles alone and next to the other, turn by turn.
    pub(super) turns: Vec<(f64, f64)>,
}

/// A comparison.
struct Subject {
    name: String,
    is_promised: bool,
    vms: [Arc<Vm>; 2],
    setting: DecodeCache,
}

/// Measures all settings; `None` where two threads rarely ran at the same time.
pub(super) fn all() -> Vec<Option<Scaling>> {
    let subjects = || {
        let shared = SETTINGS.map(|setting| {
            let vm = Arc::new(Vm::new(setting));
            // Without a cache, two vCPUs share nothing that both write.
            let is_promised = setting != DecodeCache::Off;
            Subject { name: setting.name().to_string(), is_promised, vms: [Arc::clone(&vm), vm], setting }
        });
        let apart = Subject {
            name: "off, a VM for each thread (nothing shared)".to_string(),
            is_promised: false,
            vms: [DecodeCache::Off; 2].map(|setting| Arc::new(Vm::new(setting))),
            setting: DecodeCache::Off,
        };
        shared.into_iter().chain([apart])
    };
    let measured = subjects().map(|subject| {
        progress(&subject.name);
        let (scaling, is_judged) = judge_on_free_cores(&subject.name, || subject.measure());
        scaling.map(|scaling| Scaling { is_judged, ..scaling })
    });
    measured.collect()
}

impl Subject {
    fn measure(&self) -> Option<Scaling> {
        let Self { name, is_promised, vms, setting } = self;
        let [mut first, mut second] = vms.clone().map(|vm| {
            // On separate cache lines: on the stack the two might share lines by chance, which two vCPUs never do.
            let mut emulator = CachePadded::new(Emulator::new(*setting, vm));
            move |times: u32| {
                for _ in 0..times {
                    black_box(emulator.emulate(FORMS[0].rip()));
                }
            }
        });
        let turns = in_turns(|_| {
            let cycle = nanos_per_cycle();
            let alone = alone(&mut first, OPERATIONS)?;
            let [one, other] = beside(&mut first, &mut second, OPERATIONS)?;
            Some((alone / cycle, f64::midpoint(one, other) / cycle))
        })?;
        let spread = |value: fn(&(f64, f64)) -> f64| Spread::of(&turns.iter().map(value).collect::<Vec<_>>());
        Some(Scaling {
            name: name.clone(),
            is_promised: *is_promised,
            is_judged: false,
            alone: spread(|(alone, _)| *alone)?,
            together: spread(|(_, together)| *together)?,
            ratio: spread(|(alone, together)| together / alone)?,
            turns,
        })
    }
}

impl Scaling {
    pub(super) fn columns() -> String {
        format!("{:46}{:>9}{:>12}{:>9}   least-greatest", "setting", "alone", "beside one", "ratio")
    }

    pub(super) fn figures(&self) -> [Figure; 3] {
        let figure = |quantity: &str, class, unit, value: fn(&(f64, f64)) -> f64| {
            let samples: Vec<f64> = self.turns.iter().map(value).collect();
            Figure::new(quantity, class, unit, samples).at("setting", self.name.as_str()).at("judged", self.is_judged)
        };
        [
            figure("emulation, alone", Class::Time, "cycles", |(alone, _)| *alone),
            figure("emulation, beside another vCPU", Class::Time, "cycles", |(_, together)| *together),
            figure("emulation, beside to alone", Class::Ratio, "ratio", |(alone, together)| together / alone),
        ]
    }

    pub(super) fn json(&self) -> Value {
        json!({ "part": "native_threads", "emulated": false, "name": self.name, "shared": self.is_promised,
            "judged": self.is_judged, "alone_cycles": self.alone.median, "together_cycles": self.together.median,
            "ratio": self.ratio.median, "ratio_min": self.ratio.least, "ratio_max": self.ratio.greatest })
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, is_judged, alone, together, ratio, .. } = self;
        let mark = if *is_judged { "" } else { "   cores were not free" };
        write!(
            f,
            "{name:46}{:>9.1}{:>12.1}{:>9.2}   {:.2}-{:.2}{mark}",
            alone.median, together.median, ratio.median, ratio.least, ratio.greatest
        )
    }
}
