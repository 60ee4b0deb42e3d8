//! Storms: what a VM that makes the hypervisor work as hard as it can costs its neighbour.
//!
//! Both VMs have the same weight and share one pCPU, so each is to get half, whatever the other does. The neighbour
//! counts its work by its own clock. Under `-icount` a run repeats exactly, and the loss is that of instructions. Only
//! storms with [dirty logs](rounds) do not repeat exactly, because requests come from outside.

mod rounds;

use std::fmt;

use serde_json::{Value, json};

use super::target::Target;
use super::{dunlin_run_vms_beside, progress};
use crate::args::StormsArgs;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};

/// What a VM does as fast as it can.
#[derive(Clone, Copy)]
struct Storm {
    name: &'static str,
    /// For the table: the VM that ...
    what: &'static str,
    vcpus: u32,
    /// The measuring guest's experiment and its settings, without `seconds=`.
    experiment: &'static str,
    /// Additional keys of the VM's description.
    keys: &'static str,
    /// Whether a dirty log of the VM runs.
    is_logged: bool,
}

const fn storm(name: &'static str, what: &'static str, vcpus: u32, experiment: &'static str) -> Storm {
    Storm { name, what, vcpus, experiment, keys: "", is_logged: false }
}

const fn with(keys: &'static str, storm: Storm) -> Storm {
    Storm { keys, ..storm }
}

const fn logged(keys: &'static str, storm: Storm) -> Storm {
    Storm { keys, is_logged: true, ..storm }
}

/// Every other one is compared with this.
const COMPUTE: Storm = storm("compute", "computes", 1, "compute");

/// One exit after the other: `iterations=endless` repeats it for `seconds=`.
const X86_64: [Storm; 18] = [
    storm("hypercalls", "makes hypercalls that mean nothing", 1, "vmmcall iterations=endless"),
    storm("msrs", "writes TSC_DEADLINE", 1, "wrmsr iterations=endless"),
    storm("control-registers", "changes CR4.PGE", 1, "cr4-write iterations=endless"),
    storm("ports", "writes to a port of its UART", 1, "port-out iterations=endless"),
    with("apic = \"xapic\"", storm("mmio", "reads a register of its xAPIC", 1, "xapic-read iterations=endless")),
    storm("self-ipis", "sends interrupts to itself", 1, "self-ipi-icr iterations=endless"),
    MIXED,
    storm("flushes", "flushes TLBs by hypercall, 4 vCPUs all of them", 4, "flush-storm approach=hypercall"),
    storm("flushes-by-ipi", "flushes TLBs by IPI, 4 vCPUs all of them", 4, "flush-storm approach=ipi"),
    PAGE_FAULTS,
    TOUCHES,
    LOGGED,
    PROTECTED,
    storm("code", "patches code that its other vCPU executes", 2, "patched-code"),
    with("apic = \"xapic\"", storm("cached-code", "writes beside code of emulated accesses", 2, "decode-spread")),
    TIMER,
    NAPS,
    CONSOLE,
];

const AARCH64: [Storm; 14] = [
    storm("hypercalls", "asks the firmware for its version", 1, "hvc iterations=endless"),
    storm("registers", "writes a system register that is trapped", 1, "sysreg-write iterations=endless"),
    storm("mmio", "writes a register of its UART", 1, "mmio-write iterations=endless"),
    storm("gic", "reads a register of the distributor", 1, "gic-read iterations=endless"),
    storm("self-ipis", "sends SGIs to itself", 1, "self-sgi iterations=endless"),
    MIXED,
    storm("flushes", "flushes all TLBs by broadcast, 4 vCPUs", 4, "flush-storm"),
    PAGE_FAULTS,
    TOUCHES,
    LOGGED,
    PROTECTED,
    TIMER,
    NAPS,
    CONSOLE,
];

const MIXED: Storm = storm("mixed", "sends interrupts among 4 vCPUs that halt, fault and exit", 4, "mixed");
const PAGE_FAULTS: Storm = storm("page-faults", "has page faults of its own", 1, "page-fault iterations=endless");
/// It touches a page in 3.4 us, and ends when it has touched this many: after 2.1 s.
const TOUCHES: Storm = with(
    "populate = \"touch-4K\"",
    storm("first-touches", "touches new memory, a fault of stage 2 each", 1, "fresh-pages iterations=620000"),
);
/// All of its memory is written again and again while dirty logs run: large pages are split, and harvested as small
/// ones.
const LOGGED: Storm = logged("", storm("dirty-logs", "writes everywhere while dirty logs run", 1, "stride memory=512"));
/// The same where the processor records no writes: each small page faults at its first write after a round.
const PROTECTED: Storm = logged(
    "split = \"lazy\"\ndirty_source = \"write-protect\"",
    storm("write-faults", "is logged, and faults for each page after each round", 1, "stride memory=512"),
);
/// For how many seconds the neighbour computes beside [`TOUCHES`], which ends by itself.
const SECONDS_OF_TOUCHES: u32 = 2;
const TIMER: Storm = storm("timer", "has a timer that expires all the time", 1, "timer-storm");
const NAPS: Storm = storm("naps", "sleeps until a timer that has almost expired", 1, "naps");
const CONSOLE: Storm = storm("console", "writes to its console", 1, "flood");

/// With these arguments QEMU's clocks count instructions, one in 4 ns.
const CLOCK: [&str; 6] = ["-icount", "shift=2,sleep=off", "-seed", "7", "-rtc", "base=2026-01-01,clock=vm"];

/// The most that a neighbour may lose.
const MOST_LOST: f64 = 0.1;

/// A storm, measured.
struct Weathered {
    storm: Storm,
    /// The neighbour's work in a second of its clock.
    work: f64,
    /// The part of it that the storm cost.
    loss: f64,
}

impl Weathered {
    fn json(&self) -> Value {
        let rounded = (self.loss * 10_000.0).round() / 10_000.0;
        json!({ "name": self.storm.name, "what": self.storm.what, "vcpus": self.storm.vcpus, "loss": rounded })
    }
}

impl fmt::Display for Weathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { storm, work, loss } = self;
        let mark = if *loss > MOST_LOST { "  too much" } else { "" };
        write!(f, "{:18} {:57} {:>9.2} {:>7.1} %{mark}", storm.name, storm.what, work / 1e6, loss * 100.0)
    }
}

pub(crate) fn run(args: &StormsArgs, log: &Log) -> Result<u8, Failure> {
    let chosen = choose(args)?;
    let (base, _) = measure(args, COMPUTE)?;
    let (mut all, mut failed) = (Vec::new(), false);
    for storm in chosen {
        let (work, run) = match measure(args, storm) {
            Ok(measured) => measured,
            Err(failure) => {
                eprintln!("{failure}");
                log.failure(storm.name, &failure.to_string());
                failed = true;
                continue;
            }
        };
        let weathered = Weathered { storm, work, loss: 1.0 - work / base };
        let figure = Figure::new("loss of a neighbour", Class::Ratio, "part", [weathered.loss]);
        log.emulated(&run, figure.at("storm", storm.name).at("vcpus", storm.vcpus).at("pcpus", 1));
        all.push(weathered);
    }
    let worst = all.iter().max_by(|one, other| one.loss.total_cmp(&other.loss));
    let target = worst.map(|worst| {
        let figures = format!("{:.1} %, {}", worst.loss * 100.0, worst.storm.name);
        Target::new("a neighbour loses at most 10 % of its work", figures, worst.loss <= MOST_LOST)
    });
    if let Some(target) = &target {
        target.record(log);
    }
    if args.json {
        let storms: Vec<Value> = all.iter().map(Weathered::json).collect();
        println!("{:#}", json!({ "arch": args.arch.name(), "seconds": args.seconds, "storms": storms }));
    } else {
        if let Some(target) = &target {
            println!("{target}\n");
        }
        println!("{:18} {:57} {:>9} {:>9}", "storm", "the VM that ...", "work", "lost");
        println!("{:18} {:57} {:>9.2}", COMPUTE.name, COMPUTE.what, base / 1e6);
        all.iter().for_each(|weathered| println!("{weathered}"));
        println!(
            "\nWork: millions of passes of a loop in a second, by the neighbour. Emulated by QEMU; instructions count."
        );
    }
    Ok(u8::from(failed || target.is_some_and(|target| target.is_missed())))
}

/// The storms that `args` name.
fn choose(args: &StormsArgs) -> Result<Vec<Storm>, Failure> {
    let all: &[Storm] = match args.arch {
        Arch::X86_64 => &X86_64,
        Arch::Aarch64 => &AARCH64,
    };
    let known = || all.iter().map(|storm| storm.name).collect::<Vec<_>>().join(", ");
    if let Some(unknown) = args.only.iter().find(|name| all.iter().all(|storm| storm.name != **name)) {
        let message = format!("option '--only': there is no storm '{unknown}' on {}", args.arch.name());
        return Err(Failure::bad_input(message).help(format!("known are {}", known())));
    }
    let is_wanted = |storm: &&Storm| args.only.is_empty() || args.only.iter().any(|name| *name == storm.name);
    Ok(all.iter().filter(is_wanted).copied().collect())
}

/// The neighbour's work in a second beside this storm, and the run's JSON.
fn measure(args: &StormsArgs, storm: Storm) -> Result<(f64, Value), Failure> {
    progress(&format!("beside a VM that {}", storm.what));
    let Storm { vcpus, experiment, keys, .. } = storm;
    let (seconds, memory) = match storm.name {
        name if name == TOUCHES.name => (SECONDS_OF_TOUCHES, "2500M"),
        _ if storm.is_logged => (args.seconds, "540M"),
        _ => (args.seconds, "64M"),
    };
    // The storm lasts longer than the neighbour's work.
    let longer = seconds + 1;
    let vm = |name: &str, vcpus: u32, memory: &str, keys: &str, cmdline: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nvcpus = {vcpus}\nmemory = \"{memory}\"\nkernel = \"measuring-guest\"\n\
             initrd = \"none\"\n{keys}\ncmdline = \"{cmdline}\"\n"
        )
    };
    let toml = format!("[host]\narch = \"{}\"\npcpus = 1\n", args.arch.name())
        + &vm("storm", vcpus, memory, keys, &format!("experiments={experiment} seconds={longer}"))
        + &vm("neighbour", 1, "64M", "", &format!("experiments=compute seconds={seconds}"));
    let clock = CLOCK.map(|argument| format!("--qemu-arg={argument}"));
    let arguments: Vec<&str> = clock.iter().map(String::as_str).chain(["--accel=tcg", "--time-limit=10m"]).collect();
    let (run, rounds) = dunlin_run_vms_beside(&toml, &arguments, |pid, has_ended| {
        if storm.is_logged { rounds::log(pid, has_ended, "storm") } else { Ok(0) }
    })?;
    let rounds = rounds?;
    let output = |name: &str| {
        let mut vms = run["vms"].as_array().into_iter().flatten();
        vms.find(|vm| vm["name"] == name).and_then(|vm| vm["output"].as_str()).unwrap_or_default()
    };
    let wrong = |why: &str| {
        let lines: Vec<&str> = output("storm").lines().filter(|line| !line.contains("####")).collect();
        Failure::failed(format!("storm {}: {why}\n{}", storm.name, lines.join("\n")))
    };
    if storm.is_logged && rounds < rounds::ROUNDS {
        return Err(wrong("not even one dirty log was harvested"));
    }
    // What is kept of a console's output may not have the end of a flood.
    if storm.name != CONSOLE.name {
        if !output("storm").contains("failures=0") {
            return Err(wrong("the guest that makes it found something wrong"));
        }
        if lasted(output("storm")) < f64::from(seconds) {
            return Err(wrong("it was over before the neighbour's work"));
        }
    }
    let work = work(output("neighbour"));
    // The first second has the boots.
    let counted = work.get(1..).filter(|rest| rest.len() + 1 >= seconds as usize - 1 && !rest.is_empty());
    let counted = counted.ok_or_else(|| wrong("the neighbour said too little about its work"))?;
    Ok((counted.iter().sum::<f64>() / counted.len() as f64, run.clone()))
}

/// For how many seconds the guest's experiment ran.
fn lasted(output: &str) -> f64 {
    let results = output.lines().filter(|line| line.starts_with("result "));
    let microseconds = results.filter_map(|line| word(line, "microseconds="));
    microseconds.sum::<f64>() / 1e6
}

/// The number behind `key`.
fn word(line: &str, key: &str) -> Option<f64> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.parse().ok())
}

/// The work of each second, from the records of `compute`.
fn work(output: &str) -> Vec<f64> {
    let records = output.lines().filter(|line| line.starts_with("record experiment=compute second="));
    records.filter_map(|line| word(line, "done=")).collect()
}

#[cfg(test)]
mod tests {
    use super::{Arch, StormsArgs, choose, work};

    fn args(arch: Arch, only: &[&str]) -> StormsArgs {
        StormsArgs { arch, only: only.iter().map(ToString::to_string).collect(), seconds: 3, json: false }
    }

    #[test]
    fn work_is_read_second_by_second() {
        let output = "hello\nrecord experiment=compute second=1 done=7\nrecord experiment=compute second=2 done=9\r\n\
                      record experiment=compute cpus=1 all=16\n";
        assert_eq!(work(output), [7.0, 9.0]);
    }

    #[test]
    fn unknown_storm_is_refused_with_the_known_ones() {
        let refused = choose(&args(Arch::Aarch64, &["timer", "msrs"])).err().expect("Arm has no MSRs").to_string();
        assert!(refused.contains("no storm 'msrs' on aarch64"), "{refused}");
        let known = choose(&args(Arch::X86_64, &["timer", "msrs"])).expect("they are known");
        assert_eq!(known.len(), 2);
    }
}
