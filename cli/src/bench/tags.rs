//! What the tags of TLB entries cost, by scheme (`tags` of a VM) and by how many tags there are (`tag_limit`).
//!
//! Three views. How often an entry has to do more than compare a word: counted in the emulator, where counts are real and
//! times are not. How long an entry is: instructions of a whole exit, exact under `-icount`. And the hypervisor's own code
//! for tags ([`native`]), which runs on this computer as it is and is timed in cycles.

mod native;

use serde_json::{Value, json};

use super::exits::count_instructions;
use super::soak::is_clean;
use super::{dunlin_run_vms, only_vm, progress};
use crate::args::TagsArgs;
use crate::failure::Failure;
use crate::quantity::{percent, show_count};

/// vCPUs of the guests whose entries are counted: more than most limits.
const VCPUS: u32 = 8;
/// pCPUs of their host.
const PCPUS: u32 = 2;
/// Limits that are tried: more than the vCPUs, then fewer and fewer.
const LIMITS: [u32; 5] = [63, 16, 4, 2, 1];

/// A scheme, and how many tags it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    /// Its name, as the key `tags` takes it.
    tags: &'static str,
    /// Tags of each pCPU; the one that flushes always uses one whatever it has.
    limit: Option<u32>,
}

impl Case {
    fn all() -> Vec<Self> {
        let limited = |tags| LIMITS.map(|limit| Self { tags, limit: Some(limit) });
        let mut all = vec![Self { tags: "flush-always", limit: None }];
        all.extend(limited("generation"));
        all.extend(limited("epoch"));
        all
    }

    /// The keys of a VM that choose it.
    fn keys(self) -> String {
        let limit = self.limit.map_or(String::new(), |limit| format!("tag_limit = {limit}\n"));
        format!("tags = \"{}\"\n{limit}", self.tags)
    }

    fn limit(self) -> String {
        self.limit.map_or("-".to_string(), |limit| limit.to_string())
    }
}

/// What a guest does while its entries are counted.
struct Load {
    /// What records call it.
    name: &'static str,
    /// What it is, in words.
    what: &'static str,
    /// Words of the measuring guest's command line.
    cmdline: &'static str,
}

const LOADS: [Load; 2] = [
    Load {
        name: "mixed",
        what: "mixed load: interrupts, timers, halts, page faults, on all vCPUs",
        cmdline: "experiments=mixed seconds=3",
    },
    Load {
        name: "steady",
        what: "steady: one vCPU exits about 1,000,000 times for CPUID, the others halt",
        cmdline: "experiments=cpuid iterations=120000",
    },
];

pub(crate) fn run(args: &TagsArgs) -> Result<u8, Failure> {
    let mut clean = true;
    if !args.native {
        for load in &LOADS {
            clean &= count_entries(load, args.json)?;
        }
        count_round_trips(args.json)?;
    }
    measure_natively(args.json);
    Ok(u8::from(!clean))
}

/// Says what comes next, in a table for people.
fn heading(json: bool, text: &str) {
    if !json {
        println!("{text}");
    }
}

/// Entries of one VM, and what they had to do about tags. Each entry is one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    fn json(self, load: &Load, case: Case, clean: bool) -> Value {
        let [assignments, generations, own, all] = self.shares();
        json!({
            "bench": "tags", "part": load.name, "emulated": true, "tags": case.tags, "tag_limit": case.limit,
            "vcpus": VCPUS, "pcpus": PCPUS, "clean": clean,
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

/// Runs `load` with each scheme and limit. Returns whether every guest found its machine in order.
fn count_entries(load: &Load, json: bool) -> Result<bool, Failure> {
    heading(
        json,
        &format!("{}\n{VCPUS} vCPUs on {PCPUS} pCPUs; each entry is one check; per cent of entries\n", load.what),
    );
    heading(json, &columns());
    let mut all_clean = true;
    for case in Case::all() {
        progress(&format!("{} load, {}, tags: {}", load.name, case.tags, case.limit()));
        let toml = format!(
            "[host]\npcpus = {PCPUS}\n[[vm]]\nname = \"tags\"\nvcpus = {VCPUS}\nmemory = \"64M\"\n\
             kernel = \"measuring-guest\"\ninitrd = \"none\"\n{}cmdline = \"{}\"\n",
            case.keys(),
            load.cmdline
        );
        let run = dunlin_run_vms(&toml, &["--accel=tcg", "--time-limit=180s"])?;
        let vm = only_vm(&run);
        let entries = Entries::read(&vm["counters"])
            .ok_or_else(|| Failure::failed(format!("entries and flushes were not counted: {vm}")))?;
        let output = vm["output"].as_str().unwrap_or_default();
        let clean = is_clean(output);
        if json {
            println!("{}", entries.json(load, case, clean));
        } else {
            println!("{}{}", entries.row(case), if clean { "" } else { "  NOT CLEAN" });
        }
        if !clean {
            eprintln!("{output}");
            all_clean = false;
        }
    }
    heading(
        json,
        "\nFlushes of everything hit neighbours too. With epochs and no fewer tags than vCPUs, a vCPU flushes its own tag\n\
         when it comes to another pCPU (migrations, its first arrival among them) or a flush was asked for, and never else.\n",
    );
    Ok(all_clean)
}

/// Counts the instructions of a CPUID exit for each scheme, and for one that begins a new generation at every assignment.
fn count_round_trips(json: bool) -> Result<(), Failure> {
    heading(json, "Instructions of a whole CPUID exit, guest and hypervisor, 1 vCPU on 1 pCPU (exact; not timed)\n");
    heading(json, &format!("{:13}{:>6}{:>14}", "scheme", "tags", "instructions"));
    let cases = [("flush-always", None), ("generation", None), ("generation", Some(1)), ("epoch", None)];
    for case in cases.map(|(tags, limit)| Case { tags, limit }) {
        progress(&format!("counting instructions, {}, tags: {}", case.tags, case.limit()));
        let figures = count_instructions(&["cpuid"], &case.keys())?;
        let Some(&instructions) = figures.get("cpuid") else { continue };
        if json {
            let record = json!({
                "bench": "tags", "part": "cpuid_exit", "emulated": true, "tags": case.tags, "tag_limit": case.limit,
                "instructions": instructions,
            });
            println!("{record}");
        } else {
            println!("{:13}{:>6}{instructions:>14}", case.tags, case.limit());
        }
    }
    heading(
        json,
        "\nWhat a flush throws away has to be looked up again afterwards; that takes time, but no instructions.\n",
    );
    Ok(())
}

/// What was published of Xen on AMD-V (Biemueller, 2007): what an entry did, its cycles, and the share of all VMRUNs.
const XEN: [(&str, &str, &str); 4] = [
    ("check", "20", "100 %"),
    ("assignment", "42", "30 %"),
    ("new generation", "460-600", "0.3 %"),
    ("flush", "-", "1.5 %"),
];

fn measure_natively(json: bool) {
    progress("timing the code for tags on this computer");
    let figures = native::all();
    if json {
        for figure in figures {
            println!("{}", native_record(figure));
        }
        return;
    }
    println!("The code for tags on this computer, natively: cycles beyond an empty loop, median of 31 rounds\n");
    println!("{:34}{:>9}   least-greatest", "operation", "cycles");
    for native::Figure { name, cycles, min, max } in figures {
        println!("{name:34}{cycles:>9.1}   {min:.1}-{max:.1}");
    }
    println!("\nXen on AMD-V, as published (Biemueller, 2007)\n");
    println!("{:34}{:>9}   of all VMRUNs", "operation", "cycles");
    for (name, cycles, share) in XEN {
        println!("{name:34}{cycles:>9}   {share}");
    }
    println!(
        "\nXen's figures are those of another CPU: shapes compare (which part is rare, which is dear), cycles do not.\n\
         No figure here includes what a flush costs afterwards, when the TLB is empty."
    );
}

fn native_record(figure: native::Figure) -> Value {
    let native::Figure { name, cycles, min, max } = figure;
    json!({ "bench": "tags", "part": "native", "emulated": false, "name": name, "cycles": cycles, "min": min, "max": max })
}

#[cfg(test)]
mod tests;
