//! The exact number of instructions of a fault: QEMU's clock counts them. A pass over writable pages costs only the
//! guest's own instructions, which are subtracted.

use std::time::{Duration, Instant};

use abi::control::{Answer, Command, Refusal};
use abi::payload::{DirtySource, Split};
use serde_json::{Value, json};

use super::host::Host;
use super::measure::Setting;
use crate::bench::guest::exact_arguments;
use crate::bench::record::Record;
use crate::config::Arch;
use crate::failure::Failure;
use crate::stats;

/// The result of a pass over all pages.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pass {
    /// A description.
    pub(super) what: String,
    pub(super) kind: Kind,
    pub(super) pages: u64,
    /// Exits for faults on memory in it.
    pub(super) faults: u64,
    /// Additional instructions per fault, compared with a pass without faults; per page if there was no fault.
    pub(super) each: f64,
    /// The same for each page, the median of batches of 64.
    pub(super) median_per_page: u64,
    /// KVM's instructions for the same.
    pub(super) kvm: Option<u32>,
}

/// The reason for the faults of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    FirstTouch,
    /// The first pass after the log was started.
    AfterStart,
    /// Passes after a round, with all pages split already.
    AfterRound,
}

/// MiB that a pass touches: 4096 pages.
const MEMORY: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(120);

/// KVM/arm64 6.12 on an emulated machine, counted in the same way.
const KVM_FIRST_TOUCH: u32 = 3_697;
const KVM_WRITE_PROTECT: u32 = 3_276;

/// Counts for one architecture and CPU. Passes that the machine does not support are omitted.
pub(super) fn count(arch: Arch, cpu: Option<&String>) -> Result<(Vec<Pass>, Value), Failure> {
    let setting = |split, source| Setting {
        arch,
        cpu: cpu.cloned(),
        vcpus: 1,
        memory: MEMORY,
        regions: 100,
        split,
        source,
        rate: None,
    };
    let (mut all, run) = first_touch(&setting(Split::Lazy, DirtySource::WriteProtect))?;
    for (split, source) in [
        (Split::Lazy, DirtySource::WriteProtect),
        (Split::Adaptive, DirtySource::WriteProtect),
        (Split::Eager, DirtySource::WriteProtect),
        (Split::Adaptive, DirtySource::Hardware),
        (Split::Eager, DirtySource::Hardware),
    ] {
        all.extend(logged(&setting(split, source))?);
    }
    Ok((all, run))
}

fn guest(setting: &Setting, keys: &str) -> Result<Host, Failure> {
    setting.host(&format!("experiments=faults memory={MEMORY}"), keys, &exact_arguments())
}

fn first_touch(setting: &Setting) -> Result<(Vec<Pass>, Value), Failure> {
    let mut host = guest(setting, "populate = \"touch-4K\"\n")?;
    let first = pass(&mut host)?;
    let touched = host.counters()?.pages_populated;
    let open = next(&mut host)?;
    let found = Pass {
        what: "first touch, 4 KiB at a time".to_string(),
        kind: Kind::FirstTouch,
        pages: first.pages,
        // Faults of the kernel's start do not belong to the pass.
        faults: touched.min(first.pages),
        each: first.beyond(&open) / first.pages as f64,
        median_per_page: first.median.saturating_sub(open.median),
        kvm: Some(KVM_FIRST_TOUCH),
    };
    let run = host.run();
    host.end();
    Ok((vec![found], run))
}

fn logged(setting: &Setting) -> Result<Vec<Pass>, Failure> {
    let name = format!("{}, {}", setting.split.name(), setting.source.name());
    let mut host = guest(setting, "")?;
    pass(&mut host)?;
    let open = next(&mut host)?;
    match host.ask(Command::DirtyStart { vm: 0, how: Some(setting.logging()), mirror: false })? {
        Ok(Answer::Done) => {}
        Err(Refusal::NoHardwareLog) => {
            host.end();
            return Ok(Vec::new());
        }
        other => return Err(host.unexpected(other)),
    }
    let deadline = Instant::now() + PATIENCE;
    while host.dirty_info()?.is_splitting && Instant::now() < deadline {
        host.wait(Duration::from_millis(50))?;
    }

    let mut found = Vec::new();
    for (kind, what) in [(Kind::AfterStart, "first pass"), (Kind::AfterRound, "after a round")] {
        round(&mut host)?;
        let before = host.counters()?;
        let seen = next(&mut host)?;
        let faults = stats::difference(&before, &host.counters()?).dirty_faults;
        let kvm = match (setting.split, setting.source, kind) {
            (Split::Lazy, DirtySource::WriteProtect, Kind::AfterStart) => Some(KVM_FIRST_TOUCH),
            (_, DirtySource::WriteProtect, Kind::AfterRound) => Some(KVM_WRITE_PROTECT),
            _ => None,
        };
        found.push(Pass {
            what: format!("{name}: {what}"),
            kind,
            pages: seen.pages,
            faults,
            each: seen.beyond(&open) / if faults == 0 { seen.pages } else { faults } as f64,
            median_per_page: seen.median.saturating_sub(open.median),
            kvm,
        });
    }
    host.done(Command::DirtyStop { vm: 0 })?;
    host.end();
    Ok(found)
}

fn round(host: &mut Host) -> Result<(), Failure> {
    match host.ask(Command::DirtyRound { vm: 0, lose: false })? {
        Ok(Answer::Round(_)) => Ok(()),
        other => Err(host.unexpected(other)),
    }
}

/// The guest's report of a pass.
struct Seen {
    pages: u64,
    ticks: u64,
    median: u64,
}

impl Seen {
    fn of(record: &Record) -> Option<Self> {
        let number = |key| record.number(key);
        Some(Self {
            pages: number("pages").filter(|&pages| pages > 0)?,
            ticks: number("ticks")?,
            median: number("median_per_page")?,
        })
    }

    fn beyond(&self, open: &Self) -> f64 {
        self.ticks.saturating_sub(open.ticks) as f64
    }
}

fn pass(host: &mut Host) -> Result<Seen, Failure> {
    let (_, record) = host.record("record", PATIENCE)?;
    Seen::of(&record).ok_or_else(|| Failure::failed(format!("the guest's record has no figures: {record:?}")))
}

fn next(host: &mut Host) -> Result<Seen, Failure> {
    host.type_byte(b'n')?;
    pass(host)
}

impl Pass {
    pub(super) const HEAD: &str =
        "                                              pages   faults  instructions each  median per page      KVM";

    pub(super) fn line(&self) -> String {
        let kvm = self.kvm.map_or("-".to_string(), |kvm| kvm.to_string());
        format!(
            "{:44}{:>7}{:>9}{:>19.1}{:>17}{kvm:>9}",
            self.what, self.pages, self.faults, self.each, self.median_per_page
        )
    }

    pub(super) fn json(&self, arch: Arch, cpu: Option<&String>) -> Value {
        json!({ "part": "instructions", "arch": arch.name(), "cpu": cpu, "what": self.what, "pages": self.pages,
            "faults": self.faults, "instructions_each": self.each, "median_per_page": self.median_per_page,
            "kvm": self.kvm })
    }
}
