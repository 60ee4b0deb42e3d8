//! Dirty logs of running guests. No write is ever lost, for any order of rounds, lost rounds, stops and starts. Cold
//! memory stays in large pages, and all memory is in large pages again after the log.
//!
//! Each round updates a copy of the VM's memory on the host, like a migration. After one more round a paused VM's
//! memory must equal the copy. The guest (experiment `scribble`) writes at random on all vCPUs all the time, sometimes
//! by an emulated instruction. The test writes like a device.
//!
//! `DIRTY_STEPS` is the least number of steps of the guest; 10 000 000 is the long form. `DIRTY_SEED` selects another
//! sequence; a failure prints it.

use std::time::Duration;

use abi::control::{Command, Refusal};
use abi::payload::{DirtyLogging, DirtySource, Split};
use fastrand::Rng;
use system_tests::port::Port;
use system_tests::{Host, measuring_vm, until, vm};

const VCPUS: u32 = 4;
const PCPUS: u32 = 2;

const SPLITS: [Split; 3] = [Split::Adaptive, Split::Eager, Split::Lazy];
const SOURCES: [DirtySource; 2] = [DirtySource::Hardware, DirtySource::WriteProtect];

/// The emulated host.
#[derive(Clone, Copy, Debug)]
struct Machine {
    arch: &'static str,
    cpu: Option<&'static str>,
    /// GPAs that the guest only scribbles on, so that a device may write there.
    scribbled: [u64; 2],
}

const X86: Machine = Machine { arch: "x86_64", cpu: None, scribbled: [24 << 20, 60 << 20] };
/// Where memory begins on AArch64.
const ARM_RAM: u64 = 1 << 30;
/// FEAT_BBM level 2: a large page is split by one store.
const ARM_MAX: Machine =
    Machine { arch: "aarch64", cpu: None, scribbled: [ARM_RAM + (24 << 20), ARM_RAM + (60 << 20)] };
/// FEAT_BBM level 0: a large page is broken before its parts are made.
const ARM_N1: Machine = Machine { cpu: Some("neoverse-n1"), ..ARM_MAX };

impl Machine {
    /// A host with one VM, whose guest runs `cmdline`, with this many MiB of memory. The host has the same amount again
    /// for a mirror.
    fn start(self, seconds: u32, vcpus: u32, memory: u32, cmdline: &str) -> Host {
        let host = format!("memory = \"{}M\"\n", 2 * memory + 128);
        let toml = host + &measuring_vm("measuring", vcpus, cmdline).replace("\"64M\"", &format!("\"{memory}M\""));
        Host::start(seconds, PCPUS, &toml, |_| {
            let mut more = vec![format!("--arch={}", self.arch)];
            if let Some(cpu) = self.cpu {
                more.extend(["--qemu-arg=-cpu".to_string(), format!("--qemu-arg={cpu}")]);
            }
            more
        })
    }
}

fn number(name: &str, by_default: u64) -> u64 {
    std::env::var(name).map_or(by_default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// All ways to log, some with a pace.
fn settings() -> Vec<DirtyLogging> {
    let paces = |split| if split == Split::Eager { vec![None, Some(40)] } else { vec![None] };
    let with = |split: Split, source| {
        paces(split).into_iter().map(move |splits_per_second| DirtyLogging {
            split,
            source: Some(source),
            splits_per_second,
        })
    };
    SPLITS.iter().flat_map(|&split| SOURCES.iter().flat_map(move |&source| with(split, source))).collect()
}

/// One VM, its guest scribbling, and what was done to it.
struct Torture {
    port: Port,
    random: Rng,
    machine: Machine,
    /// The last things done, for a report.
    done: Vec<String>,
}

impl Torture {
    fn any(&mut self, count: usize) -> usize {
        usize::try_from(self.random.u64(..count as u64)).unwrap_or(0)
    }

    /// Something at random. The log runs, with a mirror.
    fn step(&mut self) {
        match self.random.u64(..8) {
            0 | 1 => {
                let lose = self.random.u64(..3) == 0;
                let pages = self.port.round(lose).pages;
                self.done.push(format!("round, lost: {lose}, {pages} pages"));
            }
            2 | 3 => self.write_as_a_device(),
            4 => {
                // A copy of a paused VM is correct too.
                self.port.done(Command::Pause { vm: 0 });
                self.write_as_a_device();
                let lose = self.random.u64(..2) == 0;
                self.port.round(lose);
                self.port.done(Command::Resume { vm: 0 });
                self.done.push(format!("round of a paused VM, lost: {lose}"));
            }
            _ => {
                let millis = self.random.u64(..12);
                std::thread::sleep(Duration::from_millis(millis));
                self.done.push(format!("{millis} ms"));
            }
        }
    }

    fn write_as_a_device(&mut self) {
        let [from, until] = self.machine.scribbled;
        let length = 1 + self.random.u64(..2000);
        let gpa = from + self.random.u64(..until - from - length);
        let bytes = (0..length).map(|_| self.random.u8(..)).collect();
        self.port.done(Command::Write { vm: 0, gpa, bytes });
        self.done.push(format!("write of {length} bytes to {gpa:#x}"));
    }

    /// After one more round, memory and mirror are equal.
    fn check(&mut self) {
        self.port.done(Command::Pause { vm: 0 });
        self.port.round(false);
        let found = self.port.compare();
        let last: Vec<_> = self.done.iter().rev().take(12).rev().collect();
        assert_eq!((found.different, found.first), (0, None), "{found:?} after {last:#?}");
        assert!(found.pages >= (56 << 20) / 4096, "{found:?}");
        self.port.done(Command::Resume { vm: 0 });
        self.done.push("check".to_string());
    }
}

/// The guest's step count, which it prints every second.
fn steps_so_far(host: &Host) -> u64 {
    let said = host.said();
    let last = said.lines().rev().find(|line| line.starts_with("progress experiment=scribble"));
    last.and_then(|line| field(line, "steps")).unwrap_or(0)
}

/// The number under that name in a record.
fn field(record: &str, name: &str) -> Option<u64> {
    record.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// All ways to log, one after the other on a VM that never stops writing.
fn nothing_is_lost(machine: Machine) {
    let steps = number("DIRTY_STEPS", 0);
    let seed = number("DIRTY_SEED", 1);
    let host = machine.start(3600, VCPUS, 64, &format!("experiments=scribble seed={seed}"));
    let mut torture = Torture { port: Port::of(&host), random: Rng::with_seed(seed), machine, done: Vec::new() };
    let settings = settings();
    let mut logged = vec![0; settings.len()];

    let mut turn = 0;
    while turn < settings.len() || steps_so_far(&host) < steps {
        // In order at first, so that each has its turn; then at random.
        let at = if turn < settings.len() { turn } else { torture.any(settings.len()) };
        turn += 1;
        let how = settings[at];
        torture.done.push(format!("seed {seed}: {how:?}"));
        if !torture.port.start_log(how, true) {
            continue;
        }
        logged[at] += 1;
        for _ in 0..3 {
            for _ in 0..torture.random.u64(..8) {
                torture.step();
            }
            torture.check();
        }
        torture.port.done(Command::DirtyStop { vm: 0 });
    }
    let write_protect = |how: &DirtyLogging| how.source == Some(DirtySource::WriteProtect);
    assert!(settings.iter().zip(&logged).all(|(how, &count)| count > 0 || !write_protect(how)), "{logged:?}");

    torture.port.type_keys(b"q");
    let json = host.finish().json();
    let output = vm(&json, "measuring")["output"].as_str().unwrap_or_default();
    let record = output.lines().find(|line| line.starts_with("record experiment=scribble")).unwrap_or_default();
    let count = |name| field(record, name).unwrap_or_else(|| panic!("no {name} in {output}"));
    assert!(count("steps") >= steps.max(100_000) && count("reads") > 0, "{record}");
    println!("{machine:?}: {turn} logs, {record}");
    assert!(output.trim_end().ends_with("failures=0"), "{output}");
}

#[test]
fn nothing_that_is_written_is_lost_on_x86_64() {
    nothing_is_lost(X86);
}

#[test]
fn nothing_that_is_written_is_lost_on_aarch64_that_splits_by_one_store() {
    nothing_is_lost(ARM_MAX);
}

#[test]
fn nothing_that_is_written_is_lost_on_aarch64_that_breaks_before_it_makes() {
    nothing_is_lost(ARM_N1);
}

/// The needs of a log while the guest writes to a tenth of the memory: splits, and bytes of tables.
fn needs_of(port: &mut Port, vcpus: u32, split: Split) -> [u64; 2] {
    let before = port.counters(vcpus);
    let how = DirtyLogging { split, source: Some(DirtySource::WriteProtect), splits_per_second: None };
    assert!(port.start_log(how, false));
    for _ in 0..3 {
        port.round(false);
        std::thread::sleep(Duration::from_millis(300));
    }
    until("the last split", || (!port.info().is_splitting).then_some(()));
    let info = port.info();
    let splits = port.counters(vcpus).dirty_splits - before.dirty_splits + info.splits_ahead;

    let collapses = info.collapses;
    port.done(Command::DirtyStop { vm: 0 });
    let after = until("the last large page", || {
        let info = port.info();
        (!info.is_collapsing).then_some(info)
    });
    assert!(after.collapses - collapses >= splits, "{splits} splits, and {after:?}");
    [splits, info.table_bytes]
}

#[test]
fn cold_memory_stays_in_large_pages_and_all_of_it_comes_back() {
    let host = X86.start(180, 2, 280, "experiments=stride seconds=150 memory=256 regions=10");
    let mut port = Port::of(&host);
    until("a guest that writes", || host.said().contains("begin experiment=stride").then_some(()));
    let before = port.info().table_bytes;
    let [adaptive, eager, again] =
        [Split::Adaptive, Split::Eager, Split::Adaptive].map(|split| needs_of(&mut port, 2, split));
    println!("splits and bytes of tables: {before} before; adaptive {adaptive:?}, eager {eager:?}, adaptive {again:?}");
    assert!(eager[0] >= 128, "256 MiB are large pages: {eager:?}");
    assert!(adaptive[0] > 0 && adaptive[0] * 100 <= eager[0] * 15, "splits: {adaptive:?} of {eager:?}");
    let grown = |tables: u64| tables.saturating_sub(before);
    // Again after everything was split: all of those tables have come back.
    for few in [adaptive, again] {
        assert!(grown(few[1]) * 100 <= grown(eager[1]) * 15, "tables: {few:?} of {eager:?}, {before} bytes before");
    }
    host.end();
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let host = X86.start(120, 1, 64, "experiments=scribble");
    let mut port = Port::of(&host);
    let mut refused = |command: Command, why| {
        let what = format!("{command:?}");
        assert_eq!(port.ask(command), Err(why), "{what}");
    };
    refused(Command::DirtyRound { vm: 0, lose: false }, Refusal::NotLogging);
    refused(Command::DirtyStop { vm: 0 }, Refusal::NotLogging);
    refused(Command::DirtyCompare { vm: 0 }, Refusal::NotLogging);
    refused(Command::DirtyStart { vm: 7, how: None, mirror: false }, Refusal::NoSuchVm);
    refused(Command::Pause { vm: 7 }, Refusal::NoSuchVm);
    refused(Command::Write { vm: 0, gpa: 64 << 20, bytes: vec![1] }, Refusal::NoMemoryThere);
    refused(Command::Write { vm: 0, gpa: u64::MAX, bytes: vec![1, 2] }, Refusal::NoMemoryThere);

    port.done(Command::DirtyStart { vm: 0, how: None, mirror: false });
    let mut refused = |command: Command, why| assert_eq!(port.ask(command), Err(why));
    refused(Command::DirtyStart { vm: 0, how: None, mirror: true }, Refusal::Logging);
    refused(Command::DirtyCompare { vm: 0 }, Refusal::NoMirror);
    port.done(Command::DirtyStop { vm: 0 });
    let how = DirtyLogging { split: Split::Lazy, source: Some(DirtySource::WriteProtect), splits_per_second: None };
    assert!(port.start_log(how, true));
    assert_eq!(port.ask(Command::DirtyCompare { vm: 0 }), Err(Refusal::NotPaused));

    // A paused VM can be stopped.
    port.done(Command::Pause { vm: 0 });
    port.done(Command::Stop { vm: 0 });
    let json = host.finish().json();
    assert_eq!(vm(&json, "measuring")["stop_reason"], "stopped by command", "{json:#}");
}
