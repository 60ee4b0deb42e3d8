//! `cargo xtask bochs`: runs the hypervisor and its guests on Bochs, a second emulator of AMD's SVM, and the only one
//! of Intel's VT-x.
//!
//! Bochs has other mistakes than QEMU, and features that QEMU's SVM lacks: the VMCB has the next RIP, one ASID can be
//! flushed, XSETBV and SVM's other intercepts work, and VMRUN loads the interrupt shadow. Each run here starts a PC
//! from an image of `dunlin image`, through BIOS and GRUB, and ends when the machine powers off.
//!
//! A comment next to each affected run describes how Bochs differs from processors.

mod compare;
mod machine;
mod verdict;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, Places, Wanted};
use crate::emulators::{BOCHS, Unpacked};
use machine::{End, Machine, Outcome};
use verdict::{PROCESSORS, Processor, Wants};

const HELP: &str = "\
cargo xtask bochs [--short] [--cpu MODEL] [--json] [--list] [--help] [RUN..]
cargo xtask bochs --compare [RUN..]

Starts the hypervisor and its guests on Bochs 3.0, from the image that `dunlin image` makes: a second emulation of AMD's SVM, written
by others than QEMU's, and the only one of Intel's VT-x. Bochs comes from Debian trixie and is unpacked in the user's cache, not installed.
Each run has a time limit, shows where it is every five seconds, and leaves its files in target/bochs/RUN:
serial.log (what hypervisor and guests wrote), bochs.log, the image, and the configuration to start it again by hand.

  --compare the measuring guest's runs on both processors, without the steps against speculation and with those that the
            processor needs: what each said, line by line, equal or not, and the instructions of each kind of exit.
            The status is 1 if lines differ for which there is no reason
  --cpu     ryzen (AMD, as without this option) or corei7_skylake_x (Intel)
  --short   the runs that `cargo xtask test` makes on both processors, a minute or two on each
  --json    one line of JSON for each run on standard output; progress goes to standard error
  --list    the runs
  RUN..     only these. `parent` and `dirty-log` run only if they are named, because they need what `make parent`
            builds; on VT-x `debian-2`, too, because it fails there by a mistake of Bochs'

In the table, ticks are Bochs' clock: instructions of one CPU, or of all CPUs that are not halted at once; 50 million are a second of
the machine's time. They nearly repeat from run to run; wall times are those of this computer. The status is 0 if all runs did what
is expected of them.
";

/// The image's content.
enum Guest {
    /// The default VM with this many vCPUs: boots Debian, works a little, powers off.
    Debian { vcpus: u32 },
    /// The default VM with one vCPU, whose kernel says how it stands with the weaknesses of its processor.
    Weaknesses,
    /// A parent VM, in which unmodified QEMU runs a guest.
    Parent,
    /// A parent VM that logs what another VM writes: by each way there is, with a copy that is compared in the end.
    Logged,
    /// Two VMs with one vCPU each that run experiments of the measuring guest.
    Two { cmdline: &'static str },
    /// A VM with this many vCPUs that runs experiments of the measuring guest.
    Measuring { vcpus: u32, apic: &'static str, cmdline: &'static str },
}

impl Guest {
    /// A VM with one vCPU and an x2APIC that runs experiments.
    const fn measuring(cmdline: &'static str) -> Self {
        Self::Measuring { vcpus: 1, apic: "x2apic", cmdline }
    }
}

struct Run {
    name: &'static str,
    what: &'static str,
    cpus: u32,
    guest: Guest,
    machine: On,
    /// Experiments that are left out on the processor with VT-x.
    not_on_vt_x: &'static [&'static str],
    /// Several times the duration on an idle computer.
    limit: Duration,
    when: When,
}

/// The machine of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// As it is named on the command line.
    Usual,
    /// With registers of speculation: a later model of Intel's, or AMD's with what Bochs can add to it. That does not
    /// show in AMD's CPUID, so the hypervisor is told.
    WithSpecCtrl,
    /// The same, where the hypervisor takes no steps against speculation.
    WithoutSteps,
}

impl On {
    /// Bochs' name of the processor and what is added to it, for this vendor.
    fn model(self, processor: Processor) -> &'static str {
        match self {
            Self::Usual => processor.model,
            _ if processor == PROCESSORS[0] => "ryzen, add_features=\"sca_mitigations\"",
            Self::WithSpecCtrl | Self::WithoutSteps => "corei7_icelake_u",
        }
    }

    /// Options for the hypervisor.
    fn options<'a>(self, processor: Processor) -> impl Iterator<Item = &'a str> {
        let option = match self {
            Self::WithSpecCtrl if processor == PROCESSORS[0] => Some("selftest=spec-ctrl"),
            Self::WithoutSteps => Some(NO_STEPS),
            Self::Usual | Self::WithSpecCtrl => None,
        };
        option.into_iter()
    }
}

/// Which commands make a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Also those with `--short`.
    Short,
    /// Those without it.
    Long,
    /// The same on SVM. On VT-x only those that name it: a mistake of Bochs' makes it fail there, see [`RUNS`].
    LongOnSvm,
    /// Only those that name it: it needs what `make parent` builds.
    Named,
}

const MINUTE: Duration = Duration::from_secs(60);

/// Some experiments are missing, because of three mistakes of Bochs 3.0. With these mended in a copy of its source, the
/// experiments pass (docs/real-machine.md).
///
/// * VMRUN uses the *guest's* IF to decide whether physical interrupts are masked, although V_INTR_MASKING is set (APM
///   vol. 2, 15.21.1). So a guest that is entered with IF clear does not exit for the host's timer or a kick.
///   `events` and `control-registers` wait for ever until the console takes more. A second vCPU on one CPU does not
///   start. On two CPUs `hv-flush`, `init-self-other` and `stale` wait for a vCPU that does not hear them.
/// * On several CPUs, an exit between an exception and the first instruction of its handler stores the RIP of the
///   faulting instruction, but the handler's RSP. `nested-event` meets this, so it runs on one CPU.
/// * An intercepted #DB does not set DR6.BS. The hypervisor steps over the IRET of an NMI's handler, and does not see
///   that the step has completed. So the guest takes one NMI and no other; `events` sends more.
///
/// `emulator-torture` ends Bochs by an assertion of its own, in string instructions.
///
/// With VT-x two of these are different. An entry with the *guest's* IF clear masks physical interrupts until the guest
/// changes IF, although external interrupts exit (SDM vol. 3C, 26.2). While the guest itself clears IF they do exit,
/// and so the second mistake shows more often: `mixed`, which `halt-cli` runs, and Debian on two CPUs meet it. And a
/// timer of 20 us is due more often than this slow machine can take its interrupts: `timer-storm` makes no progress.
const RUNS: &[Run] = &[
    Run {
        name: "exits",
        what: "exits by each instruction, MSRs, XSETBV, SVM's instructions, steps, self-IPIs, halts, on 1 CPU",
        cpus: 1,
        guest: Guest::measuring(
            "iterations=200 experiments=reserved-msr,svm-instructions,xsetbv-bad,msr-values,page-fault,nested-event,\
             step-exits,vmmcall,cpuid,rdmsr,wrmsr,cr4-write,x2apic-read,x2apic-eoi,port-in,port-out,self-ipi,\
             self-ipi-icr,hlt-wake",
        ),
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "fuzz",
        what: "random accesses to MSRs, ports, PCI and devices; missing memory; hidden state, on 1 CPU",
        cpus: 1,
        guest: Guest::measuring(
            "iterations=50 seconds=1 experiments=hidden-state,msr-fuzz,port-fuzz,pci-doors,pci-fuzz,mmio-fuzz,\
             hypercall-fuzz,write-nowhere,timer-storm,one-clock,stale,cr3-beyond-width",
        ),
        machine: On::Usual,
        not_on_vt_x: &["timer-storm"],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "hyperv",
        what: "the Hyper-V interface: its CPUID leaves, control words, and interrupts by hypercall, on 1 CPU",
        cpus: 1,
        guest: Guest::measuring("experiments=hv-discovery,hv-abi,hv-ipi"),
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "apic-modes",
        what: "the local APIC off, as xAPIC, as x2APIC, elsewhere, on 1 CPU",
        cpus: 1,
        guest: Guest::measuring("experiments=apic-modes"),
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "xapic",
        what: "instruction forms on a device, code that changes, faults and steps, on 1 CPU with an xAPIC",
        cpus: 1,
        guest: Guest::Measuring {
            vcpus: 1,
            apic: "xapic",
            cmdline: "iterations=40 seconds=1 variant=a experiments=xapic-read,xapic-tpr-read,xapic-eoi,\
                      decode-coherence,emulate-forms,decode-variant,mmio-fuzz,step-exits,nested-event",
        },
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "two-cpus",
        what: "2 vCPUs on 2 CPUs flush each other's TLBs, patch code, compare clocks, spin and halt",
        cpus: 2,
        guest: Guest::Measuring {
            vcpus: 2,
            apic: "x2apic",
            cmdline: "seconds=1 experiments=shootdown,flush-storm,patched-code,one-clock,spin-cli,halt-cli",
        },
        machine: On::Usual,
        // The first has the others do the second.
        not_on_vt_x: &["halt-cli", "mixed"],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "spec-ctrl",
        what: "2 VMs on 1 CPU, each with SPEC_CTRL of its own (Intel: corei7_icelake_u)",
        cpus: 1,
        guest: Guest::Two { cmdline: "seconds=1 experiments=spec-ctrl,msr-values" },
        machine: On::WithSpecCtrl,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(3),
        when: When::Short,
    },
    Run {
        name: "debian-1",
        what: "Debian with 1 vCPU on 1 CPU reaches user space and powers off",
        cpus: 1,
        guest: Guest::Debian { vcpus: 1 },
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(10),
        when: When::Short,
    },
    Run {
        name: "debian-2-on-1",
        what: "Debian with 2 vCPUs on 1 CPU",
        cpus: 1,
        guest: Guest::Debian { vcpus: 2 },
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(10),
        when: When::Long,
    },
    Run {
        name: "debian-4-on-1",
        what: "Debian with 4 vCPUs on 1 CPU",
        cpus: 1,
        guest: Guest::Debian { vcpus: 4 },
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(10),
        when: When::Long,
    },
    Run {
        name: "debian-2",
        what: "Debian with 2 vCPUs on 2 CPUs",
        cpus: 2,
        guest: Guest::Debian { vcpus: 2 },
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(15),
        when: When::LongOnSvm,
    },
    Run {
        name: "weaknesses",
        what: "Debian's kernel says how it stands with its processor's weaknesses",
        cpus: 1,
        guest: Guest::Weaknesses,
        machine: On::WithSpecCtrl,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(10),
        when: When::Long,
    },
    Run {
        name: "weaknesses-off",
        what: "the same, without the hypervisor's steps against them",
        cpus: 1,
        guest: Guest::Weaknesses,
        machine: On::WithoutSteps,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(10),
        when: When::Long,
    },
    Run {
        name: "parent",
        what: "a parent VM with 2 vCPUs on 1 CPU, and a guest of QEMU in it (after `make parent`)",
        cpus: 1,
        guest: Guest::Parent,
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(15),
        when: When::Named,
    },
    Run {
        name: "dirty-log",
        what: "a parent logs what a Debian with 2 vCPUs writes, on 1 CPU (after `make parent`)",
        cpus: 1,
        guest: Guest::Logged,
        machine: On::Usual,
        not_on_vt_x: &[],
        limit: MINUTE.saturating_mul(15),
        when: When::Named,
    },
];

/// The VM `writer` writes to files in its memory. The parent logs that by each way that the processor has; each round
/// updates a copy on the host.
const LOGGERS_SCRIPT: &str = "\
if [ ! -e /dev/mshv ]; then \
while :; do dd if=/dev/urandom of=/tmp/random bs=64k count=16; dd if=/dev/zero of=/tmp/zero bs=64k count=64; done; \
fi; \
for source in pml hardware write-protect; do \
dunlin dirty start writer --split adaptive --source $source --mirror || continue; \
for round in 1 2 3 4; do dunlin dirty round writer; done; \
dunlin pause writer; dunlin dirty round writer; \
dunlin dirty compare writer && echo the copy by $source is right; \
dunlin resume writer; dunlin dirty stop writer; \
dunlin stats --vm writer | grep -e dirty -e stage; \
done; dunlin stop writer";

/// What the parent does: as on the PCs of `cargo xtask image-matrix`.
const PARENTS_SCRIPT: &str = "dmesg | grep 'running as'; guest-microvm; status=$?; \
[ $status = 0 ] || dmesg | tail -n 20; echo the guest has ended with $status";

/// Runs the commands in `rest`.
pub(crate) fn command(places: &Places, rest: &[String]) -> Result<ExitCode> {
    let (mut is_short, mut is_json, mut compares) = (false, false, false);
    let mut names = Vec::new();
    let [mut processor, _] = PROCESSORS;
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "--cpu" => {
                let model = rest.next().map_or("", String::as_str);
                let found = PROCESSORS.into_iter().find(|processor| processor.model == model);
                let known = PROCESSORS.map(|processor| processor.model).join(" or ");
                processor = found.with_context(|| format!("--cpu `{model}`: give {known}"))?;
            }
            "--compare" => compares = true,
            "--short" => is_short = true,
            "--json" => is_json = true,
            "--help" | "-h" => {
                print!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            "--list" => {
                for Run { name, what, when, .. } in RUNS {
                    println!("{name:14} {what}{}", if *when == When::Short { " (short)" } else { "" });
                }
                return Ok(ExitCode::SUCCESS);
            }
            name if RUNS.iter().any(|run| run.name == name) => names.push(name),
            unknown => bail!("no run `{unknown}`; `cargo xtask bochs --list` shows them, `--help` says what they are"),
        }
    }
    let is_wanted = |run: &&Run| match run.when {
        _ if !names.is_empty() => names.contains(&run.name),
        When::Short => true,
        When::Long => !is_short,
        When::LongOnSvm => !is_short && processor == PROCESSORS[0],
        When::Named => false,
    };

    artifacts::run(Command::new(places.root.join("xtask/setup.sh")).arg("image"))?;
    artifacts::build(places, Wanted::ForDefaultVm)?;
    if compares {
        return compare_processors(places, |run| names.is_empty() || names.contains(&run.name));
    }
    let failures = perform(places, processor, is_wanted, is_json)?;
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Performs runs with what was built before, and shows a table of the results. Returns what has failed, and why.
fn perform(
    places: &Places,
    processor: Processor,
    is_wanted: impl Fn(&&Run) -> bool,
    is_json: bool,
) -> Result<Vec<String>> {
    let bochs = BOCHS.unpack()?;
    let results: Vec<_> =
        RUNS.iter().filter(is_wanted).map(|run| (run, run.perform(places, &bochs, processor, None))).collect();
    if is_json {
        results.iter().for_each(|(run, result)| println!("{}", run.json(result)));
    }
    print_table(&results);
    let failures = results.iter().filter_map(|(run, result)| {
        let why = match result {
            Ok(Done { complaints, .. }) if complaints.is_empty() => return None,
            Ok(Done { complaints, .. }) => complaints.join("; "),
            Err(error) => format!("{error:#}"),
        };
        Some(format!("{} on {}: {why}", run.name, processor.model))
    });
    Ok(failures.collect())
}

/// Performs the measuring guest's runs on both processors, and compares what it said.
fn compare_processors(places: &Places, is_wanted: impl Fn(&Run) -> bool) -> Result<ExitCode> {
    let bochs = BOCHS.unpack()?;
    let mut done = Vec::new();
    for run in RUNS.iter().filter(|run| matches!(run.guest, Guest::Measuring { .. }) && is_wanted(run)) {
        for has_steps in [false, true] {
            let option = if has_steps { None } else { Some(NO_STEPS) };
            let [amd, intel] = PROCESSORS.map(|processor| run.perform(places, &bochs, processor, option));
            done.push((run, has_steps, [amd?, intel?]));
        }
    }
    let pairs = done.iter().map(|(run, has_steps, both)| compare::Pair {
        run: run.name,
        has_steps: *has_steps,
        left_out: run.not_on_vt_x,
        serials: both.each_ref().map(|done| done.outcome.serial.as_str()),
    });
    let (text, mut failures) = compare::show(&pairs.collect::<Vec<_>>());
    print!("{text}");
    failures.extend(done.iter().flat_map(|(run, _, both)| {
        both.iter().flat_map(|done| done.complaints.iter().map(|complaint| format!("{}: {complaint}", run.name)))
    }));
    failures.iter().for_each(|failure| eprintln!("{failure}"));
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The short form, for `cargo xtask test`.
pub(crate) fn short(places: &Places) -> Result<()> {
    artifacts::build(places, Wanted::ForDefaultVm)?;
    short_of_built(places)
}

/// The same, after all was built. A failure on one processor does not keep the other from being tried.
pub(crate) fn short_of_built(places: &Places) -> Result<()> {
    let mut failures = Vec::new();
    for processor in PROCESSORS {
        failures.extend(perform(places, processor, |run| run.when == When::Short, false)?);
    }
    match failures.as_slice() {
        [] => Ok(()),
        failures => bail!("not all did what is expected of it:\n{}", failures.join("\n")),
    }
}

/// A run that came to an end.
struct Done {
    outcome: Outcome,
    /// Errors found.
    complaints: Vec<String>,
}

/// A command line of the measuring guest, without these experiments.
fn without(cmdline: &str, left_out: &[&str]) -> String {
    let (settings, experiments) = cmdline.rsplit_once("experiments=").unwrap_or((cmdline, ""));
    let kept: Vec<&str> = experiments.split(',').filter(|name| !left_out.contains(name)).collect();
    format!("{settings}experiments={}", kept.join(","))
}

impl Run {
    /// Performs it; `option` goes to the hypervisor.
    fn perform(&self, places: &Places, bochs: &Unpacked, processor: Processor, option: Option<&str>) -> Result<Done> {
        let mut results = places.target.join("bochs");
        if processor != PROCESSORS[0] {
            results.push(processor.model);
        }
        let folder = machine::folder(&results, self.name)?;
        let tell = |words: &str| eprintln!("bochs {:12} {words}", self.name);
        tell(self.what);
        let image = self.make_image(places, &folder, processor)?;
        let options: Vec<&str> = option.into_iter().chain(self.machine.options(processor)).collect();
        if !options.is_empty() {
            let changed = with_option(fs::read(&image)?, &options.join(" "));
            fs::write(&image, changed.context("the image's menu has no room for an option")?)?;
        }
        let machine = Machine {
            model: self.machine.model(processor),
            bochs,
            image: &image,
            cpus: self.cpus,
            memory_mib: if matches!(self.guest, Guest::Parent | Guest::Logged) { 2048 } else { 1024 },
            limit: self.limit,
        };
        let outcome = machine.run(&folder, &mut |words| tell(words))?;
        let mut complaints = self.wants(processor).missing_in(&outcome.serial);
        if outcome.end != End::Off {
            complaints.insert(0, format!("ended by {}, not by turning itself off", outcome.end.name()));
        }
        for complaint in &complaints {
            tell(&format!("FAILED: {complaint}"));
        }
        if !complaints.is_empty() {
            tell(&format!("all that was said: {}", folder.join("serial.log").display()));
        }
        Ok(Done { outcome, complaints })
    }

    fn make_image(&self, places: &Places, folder: &Path, processor: Processor) -> Result<PathBuf> {
        let image = folder.join("dunlin.iso");
        let mut command = Command::new(places.tool());
        command.arg("image").arg("--output").arg(&image).env("CARGO_TARGET_DIR", &places.target);
        match &self.guest {
            Guest::Debian { vcpus } => {
                command.args(["--vcpus", &vcpus.to_string()]);
            }
            Guest::Weaknesses => {
                command.args(["--vcpus", "1", "--exec", "grep . /sys/devices/system/cpu/vulnerabilities/*"]);
            }
            Guest::Parent => {
                command.arg(places.root.join("vms/parent.toml")).args(["--exec", PARENTS_SCRIPT]);
            }
            Guest::Logged => {
                let file = folder.join("vms.toml");
                let parent = "[[vm]]\nname = \"parent\"\nrole = \"parent\"\nvcpus = 2\nmemory = \"1G\"\n\
                              kernel = \"parent\"\ninitrd = \"parent\"\n\n";
                let writer = "[[vm]]\nname = \"writer\"\nvcpus = 2\nmemory = \"128M\"\n";
                fs::write(&file, format!("{parent}{writer}"))?;
                command.arg(file).args(["--exec", LOGGERS_SCRIPT]);
            }
            Guest::Measuring { vcpus, apic, cmdline } => {
                let file = folder.join("vms.toml");
                let left_out = if processor == PROCESSORS[0] { &[] } else { self.not_on_vt_x };
                fs::write(&file, measuring_vm("measuring", *vcpus, apic, &without(cmdline, left_out)))?;
                command.arg(file);
            }
            Guest::Two { cmdline } => {
                let file = folder.join("vms.toml");
                let vms = [1, 2].map(|seed| {
                    measuring_vm(&format!("measuring-{seed}"), 1, "x2apic", &format!("seed={seed} {cmdline}"))
                });
                fs::write(&file, vms.concat())?;
                command.arg(file);
            }
        }
        artifacts::output(command.current_dir(&places.root)).context("no image")?;
        Ok(image)
    }

    fn wants(&self, processor: Processor) -> Wants {
        match &self.guest {
            Guest::Debian { vcpus } => Wants::debian(processor, self.cpus, *vcpus),
            Guest::Weaknesses => Wants::weaknesses(processor, self.cpus, self.machine == On::WithSpecCtrl),
            Guest::Parent => Wants::parent(processor, self.cpus),
            Guest::Logged => Wants::logged(processor, self.cpus),
            Guest::Two { .. } => Wants::experiments(processor, self.cpus, 2),
            Guest::Measuring { .. } => Wants::experiments(processor, self.cpus, 1),
        }
    }

    fn json(&self, result: &Result<Done>) -> serde_json::Value {
        let mut line = serde_json::json!({ "run": self.name, "cpus": self.cpus });
        match result {
            Ok(Done { outcome, complaints }) => {
                line["status"] = if complaints.is_empty() { "passed" } else { "failed" }.into();
                line["end"] = outcome.end.name().into();
                line["wall_seconds"] = outcome.wall.as_secs_f64().into();
                line["ticks"] = outcome.ticks.into();
                line["complaints"] = complaints.clone().into();
            }
            Err(error) => {
                line["status"] = "not run".into();
                line["complaints"] = vec![format!("{error:#}")].into();
            }
        }
        line
    }
}

/// Bochs does not say that it is an emulator, so the hypervisor takes steps against speculation there.
const NO_STEPS: &str = "mitigations=off";

/// An image whose first entry has one more option. The menu keeps its length: the entry loses its name and its indent.
/// `None` if there is no such entry, or it is too short.
fn with_option(mut image: Vec<u8>, option: &str) -> Option<Vec<u8>> {
    const OPTIONS: &str = "log=info\n";
    let find = |from: usize, words: &str| {
        let place = image.get(from..)?.windows(words.len()).position(|window| window == words.as_bytes())?;
        Some(from + place)
    };
    let name = find(0, "menuentry \"Dunlin: ")? + "menuentry \"".len();
    let end = find(name, "\"")?;
    let options = find(end, OPTIONS)?;
    let mut entry = String::from_utf8_lossy(image.get(end..options)?).replace("\n    ", "\n").into_bytes();
    entry.extend(format!("{option} {OPTIONS}").bytes());
    let old = name..options + OPTIONS.len();
    // Spaces in front of the next line.
    (entry.len() <= old.len()).then(|| entry.resize(old.len(), b' '))?;
    image.get_mut(old)?.copy_from_slice(&entry);
    Some(image)
}

fn measuring_vm(name: &str, vcpus: u32, apic: &str, cmdline: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nvcpus = {vcpus}\nmemory = \"64M\"\nkernel = \"measuring-guest\"\n\
         initrd = \"none\"\napic = \"{apic}\"\ncmdline = \"{cmdline}\"\n"
    )
}

/// On standard error, where progress is: standard output is for programs.
fn print_table(results: &[(&Run, Result<Done>)]) {
    eprintln!("\n{:14} {:>4}  {:8} {:>8} {:>14}  what", "run", "CPUs", "status", "wall", "ticks");
    for (run, result) in results {
        match result {
            Ok(Done { outcome, complaints }) => {
                let status = if complaints.is_empty() { "passed" } else { "FAILED" };
                let wall = format!("{:.1} s", outcome.wall.as_secs_f64());
                let ticks = format!("{:.1} M", outcome.ticks as f64 / 1e6);
                eprintln!("{:14} {:>4}  {status:8} {wall:>8} {ticks:>14}  {}", run.name, run.cpus, run.what);
                complaints.iter().for_each(|complaint| eprintln!("{:14}       {complaint}", ""));
            }
            Err(error) => eprintln!("{:14} {:>4}  NOT RUN  {error:#}", run.name, run.cpus),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NO_STEPS, with_option};

    #[test]
    fn image_keeps_its_length_when_it_gets_an_option() {
        let menu = "..\nmenuentry \"Dunlin: measuring\" {\n    multiboot2 /boot/dunlin log=info\n    module2 x\n}\n";
        let changed = with_option(menu.as_bytes().to_vec(), NO_STEPS).expect("it has an entry");
        assert_eq!(changed.len(), menu.len());
        let changed = String::from_utf8(changed).expect("text");
        assert!(changed.contains("menuentry \"\" {\nmultiboot2 /boot/dunlin mitigations=off log=info\n"), "{changed}");
        assert!(changed.ends_with("    module2 x\n}\n"), "{changed}");
        assert_eq!(with_option(b"nothing".to_vec(), NO_STEPS), None);
        assert_eq!(with_option(menu.as_bytes().to_vec(), &"x".repeat(99)), None, "too long");
    }
}
