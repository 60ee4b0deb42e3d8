//! The cost of TLB tags, by scheme (`tags` of a VM) and by number of tags (`tag_limit`).
//!
//! There are three parts. The first counts how often an entry must do more than compare a word: in the emulator, where
//! counts are real and times are not. The second counts the instructions of a whole exit, exactly, under `-icount`. The
//! third times the hypervisor's own code for tags ([`native`]) in cycles, natively on this computer.

mod native;

use abi::payload::TagScheme;
use serde_json::{Value, json};

use super::exits::count_instructions;
use super::soak::is_clean;
use super::{dunlin_run_vms, progress};
use crate::args::TagsArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::quantity::{percent, show_count};
use crate::records::{Class, Figure, Log};

/// The guests. A tag belongs to a vCPU or a VM; there are more of them than most limits allow.
#[derive(Clone, Copy, Debug)]
struct Guests {
    arch: Arch,
    vms: u32,
    /// vCPUs of each.
    vcpus: u32,
}

const fn guests(arch: Arch) -> Guests {
    match arch {
        Arch::X86_64 => Guests { arch, vms: 1, vcpus: 8 },
        Arch::Aarch64 => Guests { arch, vms: 4, vcpus: 2 },
    }
}

/// pCPUs of their host.
const PCPUS: u32 = 2;
/// The limits: from more tags than vCPUs down to one.
const LIMITS: [u32; 5] = [63, 16, 4, 2, 1];

/// A scheme, with its number of tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    /// The scheme.
    tags: TagScheme,
    /// Number of tags on each pCPU; `flush-always` uses one, whatever the limit.
    limit: Option<u32>,
}

impl Case {
    fn all() -> Vec<Self> {
        let limited = |tags| LIMITS.map(|limit| Self { tags, limit: Some(limit) });
        let mut all = vec![Self { tags: TagScheme::FlushAlways, limit: None }];
        all.extend(limited(TagScheme::Generation));
        all.extend(limited(TagScheme::Epoch));
        all
    }

    /// The keys of a VM that choose it.
    fn keys(self) -> String {
        let limit = self.limit.map_or(String::new(), |limit| format!("tag_limit = {limit}\n"));
        format!("tags = \"{}\"\n{limit}", self.tags)
    }

    /// Whether it is run where there is little time: one tag for each vCPU and more, fewer, and one for all.
    fn is_quick(self) -> bool {
        self.limit.is_none_or(|limit| [63, 4, 1].contains(&limit))
    }

    /// As settings of a record.
    fn settings(self, figure: Figure) -> Figure {
        let figure = figure.at("tags", self.tags.name());
        match self.limit {
            Some(limit) => figure.at("tag_limit", limit),
            None => figure,
        }
    }

    fn limit(self) -> String {
        self.limit.map_or("-".to_string(), |limit| limit.to_string())
    }
}

/// The load of a guest while its entries are counted.
struct Load {
    /// Its name in records.
    name: &'static str,
    /// A description.
    what: &'static str,
    /// Words of the measuring guest's command line.
    cmdline: &'static str,
    /// Whether it is run where there is little time.
    is_quick: bool,
}

const ON_X86_64: [Load; 2] = [
    Load {
        name: "mixed",
        what: "mixed load: interrupts, timers, halts, page faults, on all vCPUs",
        cmdline: "experiments=mixed seconds=3",
        is_quick: true,
    },
    Load {
        name: "steady",
        what: "steady: one vCPU exits about 1,000,000 times for CPUID, the others halt",
        cmdline: "experiments=cpuid iterations=120000",
        is_quick: false,
    },
];

const ON_AARCH64: [Load; 3] = [
    Load {
        name: "mixed",
        what: "mixed load: interrupts, timers, waits, page faults, on all vCPUs of all VMs",
        cmdline: "experiments=mixed seconds=3",
        is_quick: true,
    },
    Load {
        name: "own-data",
        what: "the same addresses in all VMs, and in each other data, which it reads and compares",
        cmdline: "experiments=own-data seconds=3",
        is_quick: false,
    },
    Load {
        name: "private",
        what: "vCPUs with tables of their own, which they flush for themselves alone",
        cmdline: "experiments=private-pages seconds=3",
        is_quick: false,
    },
];

/// The loads of an architecture, and its shortest exit.
const fn loads(arch: Arch) -> (&'static [Load], &'static str) {
    match arch {
        Arch::X86_64 => (&ON_X86_64, "cpuid"),
        Arch::Aarch64 => (&ON_AARCH64, "hvc"),
    }
}

pub(crate) fn run(args: &TagsArgs, log: &Log) -> Result<u8, Failure> {
    let mut clean = true;
    if !args.native {
        let (loads, quickest) = loads(args.arch);
        for load in loads.iter().filter(|load| !args.quick || load.is_quick) {
            clean &= count_entries(guests(args.arch), load, args, log)?;
        }
        count_round_trips(args.arch, quickest, args.json, log)?;
    }
    measure_natively(args.json, log);
    Ok(u8::from(!clean))
}

/// Prints a heading, except with --json.
fn heading(json: bool, text: &str) {
    if !json {
        println!("{text}");
    }
}

/// Entries of one VM, and their work for tags. Each entry makes one check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entries {
    entries: u64,
    assignments: u64,
    generations: u64,
    flushes: u64,
    flushes_all: u64,
    migrations: u64,
}

impl Entries {
    /// From a VM's counters, if they are all there.
    fn read(counters: &Value) -> Option<Self> {
        let counter = |name: &str| counters[name].as_u64();
        Some(Self {
            entries: counter("entries").filter(|&entries| entries > 0)?,
            assignments: counter("tag_assignments")?,
            generations: counter("tag_generations")?,
            flushes: counter("tlb_flushes")?,
            flushes_all: counter("tlb_flushes_all")?,
            migrations: counter("migrations")?,
        })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            entries: self.entries + other.entries,
            assignments: self.assignments + other.assignments,
            generations: self.generations + other.generations,
            flushes: self.flushes + other.flushes,
            flushes_all: self.flushes_all + other.flushes_all,
            migrations: self.migrations + other.migrations,
        }
    }

    /// Entries that flushed their own tag alone.
    fn flushes_own(self) -> u64 {
        self.flushes.saturating_sub(self.flushes_all)
    }

    /// Of all entries in per cent: assignments, new generations, flushes of the own tag, of everything.
    fn shares(self) -> [f64; 4] {
        [self.assignments, self.generations, self.flushes_own(), self.flushes_all]
            .map(|count| percent(count, self.entries))
    }

    fn row(self, case: Case) -> String {
        let [assignments, generations, own, all] = self.shares();
        format!(
            "{:13}{:>6}{:>12}{assignments:>12.4}{generations:>12.4}{own:>12.4}{all:>12.4}{:>10}{:>12}",
            case.tags,
            case.limit(),
            show_count(self.entries),
            show_count(self.flushes),
            show_count(self.migrations)
        )
    }

    fn record(self, log: &Log, run: &Value, guests: Guests, load: &Load, case: Case) {
        let figure = |quantity: &str, unit, sample: f64| {
            let figure = Figure::new(quantity, Class::Count, unit, [sample]).observations(self.entries);
            let figure = case.settings(figure).at("load", load.name);
            figure.at("vms", guests.vms).at("vcpus", guests.vcpus).at("pcpus", PCPUS)
        };
        let [assignments, generations, own, all] = self.shares();
        for (quantity, share) in [
            ("assignments of a tag", assignments),
            ("new generations", generations),
            ("flushes of the own tag", own),
            ("flushes of all tags", all),
        ] {
            log.emulated(run, figure(quantity, "% of entries", share));
        }
        log.emulated(run, figure("entries", "entries", self.entries as f64));
        log.emulated(run, figure("changes of pCPU", "changes", self.migrations as f64));
    }

    fn json(self, guests: Guests, load: &Load, case: Case, clean: bool) -> Value {
        let [assignments, generations, own, all] = self.shares();
        json!({
            "bench": "tags", "part": load.name, "emulated": true, "tags": case.tags.name(), "tag_limit": case.limit,
            "arch": guests.arch.name(), "vms": guests.vms, "vcpus": guests.vcpus, "pcpus": PCPUS, "clean": clean,
            "entries": self.entries, "checks": self.entries, "assignments": self.assignments,
            "generations": self.generations, "flushes_own": self.flushes_own(), "flushes_all": self.flushes_all,
            "migrations": self.migrations,
            "assignments_percent": assignments, "generations_percent": generations, "flushes_own_percent": own,
            "flushes_all_percent": all,
        })
    }
}

/// The columns of [`Entries::row`].
fn columns() -> String {
    format!(
        "{:13}{:>6}{:>12}{:>12}{:>12}{:>12}{:>12}{:>10}{:>12}",
        "scheme", "tags", "checks", "assigned %", "new gen. %", "own tag %", "all tags %", "flushes", "migrations"
    )
}

/// The host: VMs that differ only in their random numbers and in the data that they use.
fn described(Guests { arch, vms, vcpus }: Guests, load: &Load, case: Case) -> String {
    let mut toml = format!("[host]\narch = \"{}\"\npcpus = {PCPUS}\n", arch.name());
    for vm in 1..=vms {
        toml += &format!(
            "[[vm]]\nname = \"tags-{vm}\"\nvcpus = {vcpus}\nmemory = \"64M\"\nkernel = \"measuring-guest\"\n\
             initrd = \"none\"\n{}cmdline = \"{} seed={vm}\"\n",
            case.keys(),
            load.cmdline
        );
    }
    toml
}

/// Runs `load` with each scheme and limit. Returns whether every guest found its machine in order.
fn count_entries(guests: Guests, load: &Load, args: &TagsArgs, log: &Log) -> Result<bool, Failure> {
    let json = args.json;
    heading(
        json,
        &format!(
            "{}\n{} x {} vCPUs on {PCPUS} pCPUs; each entry is one check; per cent of entries\n",
            load.what, guests.vms, guests.vcpus
        ),
    );
    heading(json, &columns());
    let mut all_clean = true;
    for case in Case::all().into_iter().filter(|case| !args.quick || case.is_quick()) {
        progress(&format!("{} load, {}, tags: {}", load.name, case.tags, case.limit()));
        let run = dunlin_run_vms(&described(guests, load, case), &["--accel=tcg", "--time-limit=180s"])?;
        let vms = run["vms"].as_array().map_or(&[][..], Vec::as_slice);
        let entries = vms
            .iter()
            .try_fold(Entries::default(), |sum, vm| Some(sum.plus(Entries::read(&vm["counters"])?)))
            .filter(|sum| sum.entries > 0)
            .ok_or_else(|| Failure::failed(format!("no counts of entries and flushes: {run}")))?;
        let outputs = || vms.iter().map(|vm| vm["output"].as_str().unwrap_or_default());
        let clean = outputs().all(is_clean);
        entries.record(log, &run, guests, load, case);
        if json {
            println!("{}", entries.json(guests, load, case, clean));
        } else {
            println!("{}{}", entries.row(case), if clean { "" } else { "  NOT CLEAN" });
        }
        if !clean {
            outputs().for_each(|output| eprintln!("{output}"));
            all_clean = false;
        }
    }
    heading(
        json,
        "\nFlushes of everything hit neighbours too. On x86-64, with epochs and no fewer tags than vCPUs, a vCPU flushes its tag\n\
         when it moves to another pCPU (migrations, including its first arrival) or a flush was requested, and never else.\n",
    );
    Ok(all_clean)
}

/// Counts the instructions of the shortest exit for each scheme, and for a scheme that begins a new generation at every
/// assignment.
fn count_round_trips(arch: Arch, quickest: &str, json: bool, log: &Log) -> Result<(), Failure> {
    heading(
        json,
        &format!(
            "Instructions of a whole exit ({quickest}), guest and hypervisor, 1 vCPU on 1 pCPU (exact; not timed)\n"
        ),
    );
    heading(json, &format!("{:13}{:>6}{:>14}", "scheme", "tags", "instructions"));
    let cases = [
        (TagScheme::FlushAlways, None),
        (TagScheme::Generation, None),
        (TagScheme::Generation, Some(1)),
        (TagScheme::Epoch, None),
    ];
    for case in cases.map(|(tags, limit)| Case { tags, limit }) {
        progress(&format!("counting instructions, {}, tags: {}", case.tags, case.limit()));
        let (figures, run) = count_instructions(arch, &[quickest], &[quickest], &case.keys(), None)?;
        let Some(&instructions) = figures.get(quickest) else { continue };
        let figure = Figure::new("instructions of one exit", Class::Exact, "instructions", [instructions as f64]);
        log.emulated(&run, case.settings(figure).at("exit", quickest).at("vcpus", 1).at("pcpus", 1));
        if json {
            let record = json!({
                "bench": "tags", "part": format!("{quickest}_exit"), "arch": arch.name(), "emulated": true, "tags": case.tags.name(), "tag_limit": case.limit,
                "instructions": instructions,
            });
            println!("{record}");
        } else {
            println!("{:13}{:>6}{instructions:>14}", case.tags, case.limit());
        }
    }
    heading(json, "\nThe processor must reload flushed translations later; this takes time, but no instructions.\n");
    Ok(())
}

/// Published figures of Xen on AMD-V (Biemueller, 2007): the work of an entry, its cycles, and its share of all VMRUNs.
const XEN: [(&str, &str, &str); 4] = [
    ("check", "20", "100 %"),
    ("assignment", "42", "30 %"),
    ("new generation", "460-600", "0.3 %"),
    ("flush", "-", "1.5 %"),
];

fn measure_natively(json: bool, log: &Log) {
    progress("timing the code for tags on this computer");
    let figures = native::all();
    for native::Figure { name, rounds, .. } in &figures {
        log.native(Figure::new("tag code", Class::Time, "cycles", rounds.as_slice()).at("operation", *name));
    }
    if json {
        for figure in figures {
            println!("{}", native_record(figure));
        }
        return;
    }
    println!("The code for tags on this computer, natively: cycles above an empty loop, median of 31 rounds\n");
    println!("{:34}{:>9}   least-greatest", "operation", "cycles");
    for native::Figure { name, cycles, min, max, .. } in figures {
        println!("{name:34}{cycles:>9.1}   {min:.1}-{max:.1}");
    }
    println!("\nXen on AMD-V, as published (Biemueller, 2007)\n");
    println!("{:34}{:>9}   of all VMRUNs", "operation", "cycles");
    for (name, cycles, share) in XEN {
        println!("{name:34}{cycles:>9}   {share}");
    }
    println!(
        "\nXen's figures are those of another CPU: proportions can be compared (which part is rare, which is expensive), cycles cannot.\n\
         No figure here includes the later cost of a flush, when the TLB is empty."
    );
}

fn native_record(figure: native::Figure) -> Value {
    let native::Figure { name, cycles, min, max, .. } = figure;
    json!({ "bench": "tags", "part": "native", "emulated": false, "name": name, "cycles": cycles, "min": min, "max": max })
}

#[cfg(test)]
mod tests;
