//! Loops of accesses to one device register, from one or many addresses of code: the cost of an access.

use std::collections::BTreeMap;
use std::fmt;

use abi::payload::DecodeCache;
use serde_json::{Value, json};

use super::verdict::{self, gain_percent};
use super::{Report, keys, rotated};
use crate::args::DecodeArgs;
use crate::bench::circumstances::Watch;
use crate::bench::guest::{MeasuringGuest, output};
use crate::bench::record::Record;
use crate::bench::target::Target;
use crate::bench::{Spread, progress};
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure};

/// A loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Case {
    /// The register, as the guest's key `device` calls it.
    pub(super) device: &'static str,
    /// Instructions that access it, each at an address of its own.
    rips: u32,
}

impl Case {
    /// The loop that was published of bhyve.
    pub(super) const LAPIC_ID: Self = Self::single("id");

    /// One instruction, over and over.
    pub(super) const fn single(device: &'static str) -> Self {
        Self { device, rips: 1 }
    }

    /// Many instructions, of many forms, that read the version of the local APIC.
    pub(super) const fn many(rips: u32) -> Self {
        Self { device: "version", rips }
    }

    /// Whether it is one instruction, over and over.
    pub(super) const fn is_single(self) -> bool {
        self.rips == 1
    }

    /// With the settings of a record.
    fn settings(self, figure: Figure, setting: DecodeCache) -> Figure {
        let figure = figure.at("device", self.device).at("rips", self.rips).at("decode_cache", setting.name());
        figure.at("vcpus", 1).at("pcpus", 1)
    }

    /// Words of the measuring guest's command line.
    fn words(self) -> String {
        let forms = if self.is_single() { "" } else { " forms=many" };
        format!("device={} rips={}{forms}", self.device, self.rips)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.device {
            "id" => "LAPIC ID read",
            "version" => "LAPIC version read",
            "tpr" => "LAPIC TPR read",
            "eoi" => "LAPIC EOI write",
            "ioapic" => "I/O APIC read",
            other => other,
        };
        if self.is_single() { f.pad(what) } else { f.pad(&format!("{what}, {} RIPs", self.rips)) }
    }
}

const SINGLE: [Case; 5] =
    [Case::LAPIC_ID, Case::single("version"), Case::single("tpr"), Case::single("eoi"), Case::single("ioapic")];
const MANY: [Case; 3] = [Case::many(8), Case::many(64), Case::many(512)];
const QUICK: [Case; 5] =
    [Case::LAPIC_ID, Case::single("version"), Case::single("tpr"), Case::single("eoi"), Case::many(64)];
/// The timed loops.
const TIMED: [Case; 2] = [Case::LAPIC_ID, Case::many(64)];
const QUICK_TIMED: [Case; 1] = [Case::LAPIC_ID];

/// Iterations per batch of the guest. The median of the batches is the figure.
const EXACT_ITERATIONS: u32 = 1_000;
const TIMED_ITERATIONS: u32 = 5_000;

/// The cost of accesses, by loop and setting: all measured values.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Figures(BTreeMap<(Case, DecodeCache), Vec<f64>>);

impl Figures {
    pub(super) fn add(&mut self, case: Case, setting: DecodeCache, value: f64) {
        self.0.entry((case, setting)).or_default().push(value);
    }

    fn spread(&self, case: Case, setting: DecodeCache) -> Option<Spread> {
        Spread::of(self.0.get(&(case, setting))?)
    }

    /// The median.
    pub(super) fn get(&self, case: Case, setting: DecodeCache) -> Option<f64> {
        self.spread(case, setting).map(|spread| spread.median)
    }

    /// The loops with at least one value.
    pub(super) fn cases(&self) -> impl Iterator<Item = Case> + '_ {
        let mut cases: Vec<Case> = self.0.keys().map(|&(case, _)| case).collect();
        cases.dedup();
        cases.into_iter()
    }
}

pub(super) fn run(args: &DecodeArgs, report: &mut Report<'_>, targets: &mut Vec<Target>) {
    let settings = args.settings();
    let instructions = count(args, &settings, report);
    let ticks = time(args, &settings, report);
    targets.extend(verdict::of_loops(&instructions, &ticks));
}

fn count(args: &DecodeArgs, settings: &[DecodeCache], report: &mut Report<'_>) -> Figures {
    let cases = if args.quick { QUICK.to_vec() } else { [&SINGLE[..], &MANY].concat() };
    report.say(
        "Instructions of one access, guest and hypervisor, 1 vCPU on 1 pCPU, the local APIC in memory (exact; not timed)\n",
    );
    report.say(&instruction_columns(settings));
    let mut figures = Figures::default();
    for case in cases {
        for &setting in settings {
            let what = format!("instructions of {case}, {}", setting.name());
            progress(&what);
            let Some(instructions) = report.of(&what, access(case, setting, true)) else { continue };
            figures.add(case, setting, instructions);
            let figure = Figure::new("instructions of one access", Class::Exact, "instructions", [instructions]);
            report.emulated(case.settings(figure, setting));
            report.json(json!({ "part": "instructions", "device": case.device, "rips": case.rips,
                "decode_cache": setting.name(), "vcpus": 1, "pcpus": 1, "instructions": instructions,
                "kvm_instructions": verdict::kvm(case.device).filter(|_| case.is_single()) }));
        }
        report.say(&instruction_row(case, settings, &figures));
    }
    report.say(
        "\nLess than off: by how many per cent write-protect is below off. Published for bhyve's cache in 2015, in ticks: 36 %.\n\
         That is not the cache alone: off walks the page tables anew each time, all other settings remember walks.\n\
         KVM: Linux 6.1 on the same emulated machine; its TPR reads go to its user space.",
    );
    figures
}

fn instruction_columns(settings: &[DecodeCache]) -> String {
    let names: String = settings.iter().map(|setting| format!("{:>22}", setting.name())).collect();
    format!("{:30}{names}{:>15}{:>10}", "", "less than off", "KVM 6.1")
}

fn instruction_row(case: Case, settings: &[DecodeCache], figures: &Figures) -> String {
    let values: String =
        settings.iter().map(|&setting| format!("{:>22}", or_dash(figures.get(case, setting), 0))).collect();
    let gain = figures
        .get(case, DecodeCache::Off)
        .zip(figures.get(case, DecodeCache::WriteProtect))
        .map_or("-".to_string(), |(off, cached)| format!("{:.1} %", gain_percent(off, cached)));
    let kvm = verdict::kvm(case.device).filter(|_| case.is_single());
    format!("{case:30}{values}{gain:>15}{:>10}", kvm.map_or("-".to_string(), |kvm| kvm.to_string()))
}

fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_string(), |value| format!("{value:.digits$}"))
}

fn time(args: &DecodeArgs, settings: &[DecodeCache], report: &mut Report<'_>) -> Figures {
    let cases: &[Case] = if args.quick { &QUICK_TIMED } else { &TIMED };
    let rounds = args.rounds();
    report.say(&format!("\nTicks of one access, the same without counting, settings in turn: {rounds} rounds\n"));
    report.say(&tick_columns());
    let mut figures = Figures::default();
    for &case in cases {
        let watch = Watch::start();
        for round in 1..=rounds {
            let mut without = None;
            let mut of_round = Vec::new();
            for setting in rotated(settings, round) {
                let what = format!("ticks of {case}, {} (round {round} of {rounds})", setting.name());
                progress(&what);
                let Some(ticks) = report.of(&what, access(case, setting, false)) else { continue };
                figures.add(case, setting, ticks);
                report.emulated(
                    case.settings(Figure::new("ticks of one access", Class::Time, "ticks", [ticks]), setting),
                );
                match setting {
                    DecodeCache::Off => without = Some(ticks),
                    _ => of_round.push((setting, ticks)),
                }
                report.json(json!({ "part": "ticks", "device": case.device, "rips": case.rips,
                    "decode_cache": setting.name(), "vcpus": 1, "pcpus": 1, "round": round, "ticks": ticks }));
            }
            for (setting, ticks) in of_round {
                let Some(without) = without.filter(|&without| without > 0.0) else { continue };
                let figure =
                    Figure::new("ticks of one access, to those with off", Class::Ratio, "ratio", [ticks / without]);
                report.emulated(case.settings(figure, setting));
            }
        }
        for &setting in settings {
            report.say(&tick_row(case, setting, &figures));
        }
        if let Some(others) = watch.others() {
            report.json(json!({ "part": "ticks_circumstances", "device": case.device, "rips": case.rips,
                "others_share": others }));
            report.say(&format!("  (others used {:.0} % of this computer)", 100.0 * others));
        }
    }
    let [before, after] = verdict::BHYVE_TICKS;
    report.say(&format!(
        "\nbhyve, 2015 (Carabas, Natu), LAPIC ID read on hardware: {before} ticks, {after} with its cache: {:.0} % less.",
        gain_percent(f64::from(before), f64::from(after))
    ));
    figures
}

fn tick_columns() -> String {
    format!("{:30}{:22}{:>32}{:>16}", "", "setting", "median (least-greatest)", "less than off")
}

fn tick_row(case: Case, setting: DecodeCache, figures: &Figures) -> String {
    let spread = figures
        .spread(case, setting)
        .map_or("-".to_string(), |it| format!("{:.0} ({:.0}-{:.0})", it.median, it.least, it.greatest));
    let gain = figures
        .get(case, DecodeCache::Off)
        .zip(figures.get(case, setting))
        .filter(|_| setting != DecodeCache::Off)
        .map_or("-".to_string(), |(off, cached)| format!("{:.1} %", gain_percent(off, cached)));
    format!("{case:30}{:22}{spread:>32}{gain:>16}", setting.name())
}

/// Ticks of one access, which are instructions if the run is `exact`. With the run's JSON.
fn access(case: Case, setting: DecodeCache, exact: bool) -> Result<(f64, Value), Failure> {
    let iterations = if exact { EXACT_ITERATIONS } else { TIMED_ITERATIONS };
    let run = MeasuringGuest {
        arch: Arch::X86_64,
        vcpus: 1,
        pcpus: 1,
        keys: &keys(setting),
        cmdline: &format!("experiments=decode-loop {} iterations={iterations}", case.words()),
        limit: 120,
        exact,
    }
    .run()?;
    let ticks = ticks(output(&run));
    let ticks = ticks.ok_or_else(|| Failure::failed(format!("no figures in the guest's output:\n{}", output(&run))))?;
    Ok((ticks, run))
}

/// Ticks of an access, as the guest reports them.
fn ticks(output: &str) -> Option<f64> {
    let mut records = Record::all(output, "record");
    records.find(|record| record.text("experiment") == Some("decode-loop"))?.number("ticks_per_iteration")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::SETTINGS;

    fn fields(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|field| !field.is_empty()).collect()
    }

    #[test]
    fn words_choose_what_the_case_is_called() {
        assert_eq!(Case::LAPIC_ID.words(), "device=id rips=1");
        assert_eq!(Case::many(512).words(), "device=version rips=512 forms=many");
        assert_eq!(Case::many(512).to_string(), "LAPIC version read, 512 RIPs");
    }

    #[test]
    fn row_has_a_field_below_each_column_and_a_dash_for_what_failed() {
        let mut figures = Figures::default();
        let case = Case::single("version");
        figures.add(case, DecodeCache::Off, 1000.0);
        figures.add(case, DecodeCache::WriteProtect, 600.0);
        let settings = SETTINGS;
        let row = instruction_row(case, &settings, &figures);
        assert_eq!(row.len(), instruction_columns(&settings).len());
        assert_eq!(fields(&row), ["LAPIC version read", "1000", "600", "-", "-", "40.0 %", "3758"]);
        let row = instruction_row(Case::many(8), &settings, &figures);
        assert_eq!(fields(&row), ["LAPIC version read, 8 RIPs", "-", "-", "-", "-", "-", "-"]);
    }

    #[test]
    fn ticks_are_shown_with_their_spread_and_what_was_gained() {
        let mut figures = Figures::default();
        for value in [20.0, 40.0, 30.0] {
            figures.add(Case::LAPIC_ID, DecodeCache::Off, value);
        }
        figures.add(Case::LAPIC_ID, DecodeCache::Bytes, 15.0);
        let row = tick_row(Case::LAPIC_ID, DecodeCache::Off, &figures);
        assert_eq!(row.len(), tick_columns().len());
        assert_eq!(fields(&row), ["LAPIC ID read", "off", "30 (20-40)", "-"]);
        let row = tick_row(Case::LAPIC_ID, DecodeCache::Bytes, &figures);
        assert_eq!(fields(&row), ["LAPIC ID read", "bytes", "15 (15-15)", "50.0 %"]);
    }

    #[test]
    fn ticks_are_those_of_the_loop() {
        let output = "hello guest=x\nrecord experiment=empty ticks_per_iteration=2\nrecord experiment=decode-loop \
                      device=id rips=1 ticks_per_iteration=471 min=470\n";
        assert_eq!(ticks(output), Some(471.0));
        assert_eq!(ticks("record experiment=empty ticks_per_iteration=2\n"), None);
    }

    #[test]
    fn quick_loops_still_answer_what_was_promised() {
        for promised in [Case::LAPIC_ID, Case::single("version"), Case::single("tpr"), Case::single("eoi")] {
            assert!(QUICK.contains(&promised) && SINGLE.contains(&promised), "{promised}");
        }
    }
}
