//! Instructions per exit: the whole round trip from the guest's view, counted exactly.
//!
//! Under `-icount shift=0` a guest's clock counts instructions of guest and hypervisor together. With a fixed seed and
//! clock every run is the same. The measuring guest reads the clock around many repetitions of one exit, and subtracts
//! the empty loop.

use std::collections::BTreeMap;
use std::path::Path;

use abi::setting::Setting as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{dunlin_run_vms, only_vm, progress};
use crate::args::ExitsArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};

/// An exit that is measured.
struct Exit {
    /// The experiment of the measuring guest.
    experiment: &'static str,
    /// A description.
    what: &'static str,
    /// The maximum, if there is a target.
    target: Option<u64>,
    /// KVM's instructions on the same emulated machine (Linux 6.1, on AArch64 6.12; its own guest, counted in the same
    /// way).
    kvm: Option<u64>,
}

const fn exit(experiment: &'static str, what: &'static str, target: Option<u64>, kvm: Option<u64>) -> Exit {
    Exit { experiment, what, target, kvm }
}

/// Exits that are measured in one run.
struct Series {
    what: &'static str,
    /// Additional keys of the VM's description.
    keys: &'static str,
    exits: &'static [Exit],
}

/// Of x86-64: the local APIC has two shapes.
const X86_64: [Series; 3] = [
    Series { what: "x2APIC mode", keys: "apic = \"x2apic\"\n", exits: &X2APIC },
    Series { what: "xAPIC mode", keys: "apic = \"xapic\"\n", exits: &XAPIC },
    Series { what: "memory mapped when touched", keys: WHEN_TOUCHED, exits: &FRESH_ON_X86_64 },
];

/// Of AArch64.
const AARCH64: [Series; 2] = [
    Series { what: "AArch64", keys: "", exits: &AT_EL2 },
    Series { what: "memory mapped when touched", keys: WHEN_TOUCHED, exits: &FRESH_AT_EL2 },
];

/// A fault of stage 2 for each page that a guest touches for the first time.
const WHEN_TOUCHED: &str = "populate = \"touch-4K\"\n";

fn series(arch: Arch) -> &'static [Series] {
    match arch {
        Arch::X86_64 => &X86_64,
        Arch::Aarch64 => &AARCH64,
    }
}

/// Measured in x2APIC mode.
const X2APIC: [Exit; 13] = [
    exit("cpuid", "CPUID", Some(270), Some(2681)),
    exit("rdmsr", "RDMSR APIC_BASE", Some(300), Some(2766)),
    exit("wrmsr", "WRMSR TSC_DEADLINE", Some(300), None),
    exit("cr4-write", "CR4 write, PGE changed", None, None),
    exit("x2apic-read", "x2APIC version read", None, Some(2850)),
    exit("x2apic-eoi", "x2APIC EOI", Some(280), Some(2822)),
    exit("port-in", "port read, handled inside", Some(350), Some(1745)),
    exit("port-out", "port write, handled inside", Some(350), None),
    exit("self-ipi", "self IPI by its own register, whole", Some(1500), None),
    exit("self-ipi-icr", "self IPI by ICR, whole", Some(1500), Some(7609)),
    exit("hlt-wake", "HLT, woken by the timer: beyond the delay", None, None),
    exit("vmmcall", "VMMCALL, unknown call", None, Some(2826)),
    exit("page-fault", "page fault within the guest (no exit)", None, None),
];
/// Measured in xAPIC mode.
const XAPIC: [Exit; 3] = [
    exit("xapic-read", "xAPIC version read (MMIO)", Some(600), Some(3758)),
    exit("xapic-tpr-read", "xAPIC TPR read (MMIO)", Some(600), Some(81574)),
    exit("xapic-eoi", "xAPIC EOI (MMIO)", Some(600), Some(3659)),
];

/// Measured at EL2.
const AT_EL2: [Exit; 13] = [
    exit("hvc", "HVC, version of the convention", None, None),
    exit("smc", "SMC, the same", None, None),
    exit("sysreg-read", "MRS of an ID register", None, None),
    exit("sysreg-write", "MSR of ACTLR_EL1", None, None),
    exit("mmio-read", "PL011 flags read (MMIO)", None, None),
    exit("mmio-write", "PL011 divisor write (MMIO)", None, None),
    exit("gic-read", "GICD_TYPER read (MMIO)", None, None),
    exit("self-sgi", "SGI to oneself, whole", None, None),
    exit("wfi-wake", "WFI, woken by the timer: beyond the delay", None, None),
    exit("ctr-read", "MRS of CTR_EL0 (no exit)", None, None),
    exit("tlbi-page", "TLBI of a page on all CPUs (no exit)", None, None),
    exit("tlbi-all", "TLBI of everything (no exit)", None, None),
    exit("page-fault", "page fault within the guest (no exit)", None, None),
];

/// First touches on x86-64.
const FRESH_ON_X86_64: [Exit; 1] = [exit("fresh-pages", FIRST_TOUCH, None, None)];
/// First touches at EL2. While KVM logs writes, it splits its large pages one by one.
const FRESH_AT_EL2: [Exit; 1] = [exit("fresh-pages", FIRST_TOUCH, Some(369), Some(3697))];
const FIRST_TOUCH: &str = "first touch of a page, beyond the second";

/// By how much a figure may grow before `--check` fails: 2 %.
const TOLERANCE_PERCENT: u64 = 2;

/// Measured, but not held against a file: ticks of the host's own timer fall into it, and where they fall moves it by a
/// few per cent when anything at all changes.
const UNCHECKED: [&str; 2] = ["hlt-wake", "wfi-wake"];

/// The file of `--check` and `--write`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Golden {
    instructions: BTreeMap<String, u64>,
    /// With all steps against speculative execution.
    #[serde(default)]
    with_all_steps: BTreeMap<String, u64>,
}

/// Options of a hypervisor that takes all steps against speculative execution at entries and exits. No processor needs
/// all, so these figures are an upper bound.
const ALL_STEPS: &str = "log=info selftest=all-steps";

/// KVM's instructions for this exit, if they were counted.
pub(crate) fn kvm_instructions(arch: &str, experiment: &str) -> Option<u64> {
    let arch = Arch::named(arch)?;
    series(arch).iter().flat_map(|series| series.exits).find(|exit| exit.experiment == experiment)?.kvm
}

pub(crate) fn run(args: &ExitsArgs, log: &Log) -> Result<u8, Failure> {
    let (first, _) = measure(args.arch, None)?;
    let (again, last) = measure(args.arch, None)?;
    let (with_steps, _) = measure(args.arch, Some(ALL_STEPS))?;
    record(args.arch, log, &last, &first, &again);
    let differ = differing(&first, &again);
    let figures = larger(first, &again);

    if args.json {
        println!(
            "{:#}",
            json!({ "instructions": figures, "with_all_steps": with_steps, "repeatable": differ.is_empty(),
                    "differ": differ })
        );
    } else {
        table(args.arch, &figures, &with_steps);
        if differ.is_empty() {
            println!("\nTwo runs agree exactly. Emulated by QEMU; instructions are counted, not timed.");
        } else {
            println!("\nTwo runs DIFFER in {}; the larger figure is shown.", differ.join(", "));
        }
    }

    if let Some(path) = &args.write {
        write(path, &figures, &with_steps)?;
    }
    let mut complaints = Vec::new();
    if let Some(path) = &args.check {
        complaints = check(args.arch, path, &figures, &with_steps)?;
        complaints.extend(differ.iter().map(|name| format!("{name}: differs from one run to the next")));
    }
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    Ok(u8::from(!complaints.is_empty()))
}

/// Names of the figures that are not the same in both.
fn differing(a: &BTreeMap<String, u64>, b: &BTreeMap<String, u64>) -> Vec<String> {
    a.keys().filter(|&name| a.get(name) != b.get(name)).cloned().collect()
}

/// Of each figure the larger.
fn larger(mut a: BTreeMap<String, u64>, b: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    for (name, figure) in &mut a {
        *figure = b.get(name).map_or(*figure, |&other| other.max(*figure));
    }
    a
}

/// A record of each figure, as it was in both runs.
fn record(arch: Arch, log: &Log, run: &Value, first: &BTreeMap<String, u64>, again: &BTreeMap<String, u64>) {
    for exit in series(arch).iter().flat_map(|series| series.exits) {
        let samples: Vec<f64> =
            [first, again].into_iter().filter_map(|figures| Some(*figures.get(exit.experiment)? as f64)).collect();
        let class = if UNCHECKED.contains(&exit.experiment) { Class::Count } else { Class::Exact };
        let figure = Figure::new("instructions of one exit", class, "instructions", samples);
        log.emulated(run, figure.at("exit", exit.experiment).at("what", exit.what).at("vcpus", 1).at("pcpus", 1));
    }
}

/// All figures, by experiment. With the JSON of the last run.
/// `options` are the hypervisor's, if not the usual ones.
fn measure(arch: Arch, options: Option<&str>) -> Result<(BTreeMap<String, u64>, Value), Failure> {
    let (mut figures, mut last) = (BTreeMap::new(), Value::Null);
    for Series { what, keys, exits } in series(arch) {
        let steps = if options.is_some() { ", with all steps against speculation" } else { "" };
        progress(&format!("counting {} kinds of exit, {what}{steps}", exits.len()));
        // Some experiments have several figures.
        let experiment = |exit: &Exit| if exit.experiment.starts_with("tlbi-") { "tlbi" } else { exit.experiment };
        let mut experiments: Vec<&str> = exits.iter().map(experiment).collect();
        experiments.dedup();
        let names: Vec<&str> = exits.iter().map(|exit| exit.experiment).collect();
        let (more, run) = count_instructions(arch, &experiments, &names, keys, options)?;
        figures.extend(more);
        last = run;
    }
    Ok((figures, last))
}

/// Runs these experiments on one vCPU; `keys` are additional keys of its VM. Returns the instructions of each exit,
/// which must have a figure under each of the `names`, and the run's JSON. `options` are the hypervisor's, if not the
/// usual ones.
pub(super) fn count_instructions(
    arch: Arch,
    experiments: &[&str],
    names: &[&str],
    keys: &str,
    options: Option<&str>,
) -> Result<(BTreeMap<String, u64>, Value), Failure> {
    let toml = format!(
        "[host]\narch = \"{}\"\npcpus = 1\n[[vm]]\nname = \"measuring\"\nvcpus = 1\nmemory = \"64M\"\n\
         kernel = \"measuring-guest\"\ninitrd = \"none\"\n{keys}cmdline = \"experiments={} iterations=1000\"\n",
        arch.name(),
        experiments.join(",")
    );
    let exact = ["-icount", "shift=0,sleep=off", "-seed", "7", "-rtc", "base=2026-01-01,clock=vm"];
    let arguments: Vec<String> = exact
        .into_iter()
        // QEMU takes the last of these.
        .chain(options.into_iter().flat_map(|options| ["-append", options]))
        .map(|argument| format!("--qemu-arg={argument}"))
        .chain(["--accel=tcg".to_string(), "--time-limit=120s".to_string()])
        .collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let run = dunlin_run_vms(&toml, &arguments)?;

    let output = only_vm(&run)["output"].as_str().unwrap_or_default();
    let figures = figures(output);
    match names.iter().find(|name| !figures.contains_key(**name)) {
        None => Ok((figures, run)),
        Some(missing) => Err(Failure::failed(format!("the measuring guest has no figure for {missing}:\n{output}"))),
    }
}

/// The figures in the measuring guest's output.
fn figures(output: &str) -> BTreeMap<String, u64> {
    let field = |line: &str, name: &str| {
        line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=').map(str::to_string))
    };
    let records = output.lines().filter(|line| line.starts_with("record "));
    records
        .filter_map(|line| Some((field(line, "experiment")?, field(line, "ticks_per_iteration")?.parse().ok()?)))
        .collect()
}

fn table(arch: Arch, figures: &BTreeMap<String, u64>, with_steps: &BTreeMap<String, u64>) {
    println!(
        "{:40} {:>8} {:>8} {:>8} {:>7} {:>10}",
        "instructions of one exit", "Dunlin", "target", "KVM", "ratio", "all steps"
    );
    for exit in series(arch).iter().flat_map(|series| series.exits) {
        let Some(&figure) = figures.get(exit.experiment) else { continue };
        let mark = if exit.target.is_some_and(|target| figure > target) { " too many" } else { "" };
        let or_dash = |number: Option<u64>| number.map_or("-".to_string(), |number| number.to_string());
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        let ratio = exit.kvm.map_or("-".to_string(), |kvm| format!("{:.3}", figure as f64 / kvm as f64));
        let steps = or_dash(with_steps.get(exit.experiment).copied());
        let (target, kvm) = (or_dash(exit.target), or_dash(exit.kvm));
        println!("{:40} {figure:>8} {target:>8} {kvm:>8} {ratio:>7} {steps:>10}{mark}", exit.what);
    }
}

fn write(path: &Path, figures: &BTreeMap<String, u64>, with_steps: &BTreeMap<String, u64>) -> Result<(), Failure> {
    let mut text = String::from(
        "# Instructions per exit, whole round trip: `dunlin bench exits --write` renews this file, `--check` fails when a\n\
         # figure has grown by more than 2 % or exceeds its target.\n[instructions]\n",
    );
    let lines = |figures: &BTreeMap<String, u64>| -> String {
        let checked = figures.iter().filter(|(name, _)| !UNCHECKED.contains(&name.as_str()));
        checked.map(|(name, figure)| format!("{name} = {figure}\n")).collect()
    };
    text += &lines(figures);
    text += "\n# The same with all steps against speculative execution at once. No processor needs all of them.\n\
             [with_all_steps]\n";
    text += &lines(with_steps);
    std::fs::write(path, text).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))
}

/// Figures that are worse than in the file, or worse than their target.
fn check(
    arch: Arch,
    path: &Path,
    figures: &BTreeMap<String, u64>,
    with_steps: &BTreeMap<String, u64>,
) -> Result<Vec<String>, Failure> {
    let bad = |error: String| Failure::bad_input(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let golden: Golden = toml::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let mut complaints = Vec::new();
    for exit in series(arch).iter().flat_map(|series| series.exits) {
        let Some(&figure) = figures.get(exit.experiment) else { continue };
        if let Some(target) = exit.target.filter(|&target| figure > target) {
            complaints.push(format!("{}: {figure} instructions, more than the target of {target}", exit.what));
        }
        if UNCHECKED.contains(&exit.experiment) {
            continue;
        }
        let steps = with_steps.get(exit.experiment).copied();
        for (figure, golden, how) in [
            (Some(figure), &golden.instructions, ""),
            (steps, &golden.with_all_steps, " with all steps against speculation"),
        ] {
            let Some(figure) = figure else { continue };
            match golden.get(exit.experiment) {
                None => {
                    complaints.push(format!(
                        "{}: no figure for {}{how} in {}",
                        exit.what,
                        exit.experiment,
                        path.display()
                    ));
                }
                Some(&before) if figure * 100 > before * (100 + TOLERANCE_PERCENT) => complaints.push(format!(
                    "{}{how}: {figure} instructions, {before} before; if that is meant, renew {} by --write",
                    exit.what,
                    path.display()
                )),
                Some(_) => {}
            }
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{Arch, check, differing, figures, larger};

    #[test]
    fn of_two_runs_that_differ_the_larger_figure_counts_and_is_named() {
        let first = [("cpuid".to_string(), 5), ("rdmsr".to_string(), 7)].into();
        let again = [("cpuid".to_string(), 6), ("rdmsr".to_string(), 7)].into();
        assert_eq!(differing(&first, &again), ["cpuid"]);
        assert_eq!(larger(first, &again), again);
    }

    #[test]
    fn figures_are_read_from_records_alone() {
        let output = "hello guest=x\nrecord experiment=cpuid iterations=9 ticks_per_iteration=171 min=1\nresult a=b\n";
        assert_eq!(figures(output).into_iter().collect::<Vec<_>>(), [("cpuid".to_string(), 171)]);
    }

    #[test]
    fn growth_by_more_than_two_percent_is_named_and_less_is_not() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        write!(file, "[instructions]\ncpuid = 200\nrdmsr = 200\n").expect("is written");
        let now = [("cpuid".to_string(), 205), ("rdmsr".to_string(), 204)].into();
        let complaints = check(Arch::X86_64, file.path(), &now, &[].into()).expect("is read");
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].starts_with("CPUID: 205"), "{complaints:?}");

        write!(file, "[with_all_steps]\ncpuid = 400\n").expect("is written");
        let slower = [("cpuid".to_string(), 410), ("rdmsr".to_string(), 400)].into();
        let complaints = check(Arch::X86_64, file.path(), &[("cpuid".to_string(), 200)].into(), &slower);
        let complaints = complaints.expect("is read");
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].starts_with("CPUID with all steps against speculation: 410"), "{complaints:?}");
    }

    #[test]
    fn figure_above_its_target_is_named_whatever_was_before() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        write!(file, "[instructions]\ncpuid = 400\n").expect("is written");
        let complaints =
            check(Arch::X86_64, file.path(), &[("cpuid".to_string(), 400)].into(), &[].into()).expect("is read");
        assert!(complaints[0].contains("target of 270"), "{complaints:?}");
    }
}
