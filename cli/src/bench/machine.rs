//! A Linux that has the machine's devices on Dunlin, beside the same Linux without Dunlin.
//!
//! Both have the same kernel, initrd, command line, disks and network cards, on the same emulated machine, and run the
//! same script (`machine/measure.sh`). Each run measures everything once. The two take turns, and each begins every
//! other pair, so that other load on the computer affects both alike.
//!
//! An exit costs more in this emulator than its instructions do: QEMU drops its TLB, and walks nested tables to fill
//! it. So the speeds are measured by instructions as well, with clocks that count them.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};

use super::plain::Plain;
use super::record::Record;
use super::target::{Goal, Target};
use super::{Spread, dunlin_run_vms, only_vm, progress};
use crate::args::{MachineBenchArgs, MachineClock, MachinePart};
use crate::assets::Assets;
use crate::config::{Initrd, Kernel, Place};
use crate::failure::Failure;
use crate::records::{Class, Figure, Log};

/// What runs in the guest.
const MEASURE: &str = include_str!("machine/measure.sh");
/// The kernel's command line: that of a VM of `dunlin run`, and an end if it fails.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1";
/// CPUs and memory of the Linux. Dunlin's machine has one CPU more, which runs no vCPUs (decision 0005), and its own
/// memory.
const CPUS: u32 = 2;
const MEMORY: &str = "1024M";
const DISK_BYTES: u64 = 256 << 20;

/// With clocks that count instructions: one in 8 ns. The emulator copies a byte at a time for `rep movsb`, which
/// processors do faster than anything else; without these features Linux copies by words.
const COUNTING: [&str; 4] = ["-icount", "shift=3", "-cpu", "max,-erms,-fsrm"];

/// What the project allows itself.
const BOOT: Goal = Goal::AtMost(1.2);
const SPEED: Goal = Goal::AtLeast(0.8);

/// A quantity that is measured with and without Dunlin.
struct Row {
    part: MachinePart,
    /// Its name in what the guest says.
    key: String,
    what: String,
    unit: &'static str,
    /// What the guest's number is divided by.
    divisor: f64,
    goal: Goal,
    dunlin: Vec<f64>,
    plain: Vec<f64>,
}

impl Row {
    fn new(part: MachinePart, key: String, what: String, unit: &'static str, divisor: f64, goal: Goal) -> Self {
        Self { part, key, what, unit, divisor, goal, dunlin: Vec::new(), plain: Vec::new() }
    }

    /// Dunlin's median by that without Dunlin.
    fn ratio(&self) -> Option<f64> {
        Some(Spread::of(&self.dunlin)?.median / Spread::of(&self.plain)?.median)
    }

    /// The ratios pair by pair.
    fn pairs(&self) -> Option<Spread> {
        let ratios: Vec<f64> = self.dunlin.iter().zip(&self.plain).map(|(dunlin, plain)| dunlin / plain).collect();
        Spread::of(&ratios)
    }

    fn target(&self) -> Target {
        match self.ratio() {
            Some(ratio) => {
                let figures = format!("{ratio:.2} of that without Dunlin, {} wanted", self.goal);
                Target::new(&self.what, figures, self.goal.is_met_by(ratio))
            }
            None => Target::not_judged(&self.what, "not measured on both"),
        }
    }

    fn json(&self, by: MachineClock) -> Value {
        let spread = |values: &[f64]| Spread::of(values).map(Spread::json);
        json!({ "part": "row", "emulated": true, "by": by.name(), "what": self.what, "unit": self.unit,
            "dunlin": spread(&self.dunlin), "plain": spread(&self.plain), "ratio": self.ratio(),
            "ratios": self.pairs().map(Spread::json), "goal": self.goal.to_string(),
            "met": self.ratio().map(|ratio| self.goal.is_met_by(ratio)) })
    }

    fn line(&self) -> String {
        let shown = |values: &[f64]| {
            Spread::of(values).map_or("-".to_string(), |Spread { median, least, greatest }| {
                let digits = if median < 100.0 { 2 } else { 0 };
                format!("{median:.digits$} ({least:.digits$}-{greatest:.digits$})")
            })
        };
        let ratio = self
            .ratio()
            .zip(self.pairs())
            .map_or("-".to_string(), |(ratio, pairs)| format!("{ratio:.2} ({:.2}-{:.2})", pairs.least, pairs.greatest));
        let what = format!("{}, {}", self.what, self.unit);
        format!("{what:44} {:>24} {:>24} {ratio:>18}  emulated", shown(&self.dunlin), shown(&self.plain))
    }
}

/// The name of the boot's row in what is measured.
const BOOTED: &str = "boot";

fn rows() -> Vec<Row> {
    use MachinePart::{Boot, Disk, Net};
    let mut rows = vec![Row::new(Boot, BOOTED.to_string(), "boot, from the start of QEMU".to_string(), "s", 1.0, BOOT)];
    for (disk, name) in [("virtio", "virtio disk"), ("nvme", "NVMe disk"), ("ahci", "AHCI disk")] {
        for (how, what, unit, divisor) in [
            ("randread", "random reads of 4 KiB", "1/s", 1.0),
            ("randwrite", "random writes of 4 KiB", "1/s", 1.0),
            ("read", "sequential reads", "MiB/s", 1024.0),
            ("write", "sequential writes", "MiB/s", 1024.0),
        ] {
            rows.push(Row::new(Disk, format!("{disk}-{how}"), format!("{name}, {what}"), unit, divisor, SPEED));
        }
    }
    for (card, name) in [("virtio", "virtio card"), ("e1000e", "e1000e")] {
        for (how, what) in [("receive", "stream from outside"), ("send", "stream to outside")] {
            rows.push(Row::new(Net, format!("{card}-{how}"), format!("{name}, {what}"), "MiB/s", 1024.0, SPEED));
        }
    }
    rows
}

/// On what the Linux runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ground {
    Dunlin,
    Plain,
}

impl Ground {
    const fn name(self) -> &'static str {
        match self {
            Self::Dunlin => "Dunlin",
            Self::Plain => "QEMU alone",
        }
    }
}

/// Whether this part is measured. How long a boot takes is known by the computer's clock only.
fn is_wanted(part: MachinePart, args: &MachineBenchArgs) -> bool {
    let has_clock = args.by == MachineClock::Time || part != MachinePart::Boot;
    has_clock && (args.part.is_empty() || args.part.contains(&part))
}

pub(crate) fn run(args: &MachineBenchArgs, log: &Log) -> Result<u8, Failure> {
    let wanted = |part| is_wanted(part, args);
    let mut rows = rows();
    rows.retain(|row| wanted(row.part));
    if rows.is_empty() {
        return Err(Failure::bad_input("--by instructions: a boot is measured by time only"));
    }
    let words: Vec<&str> = [(MachinePart::Disk, "disk"), (MachinePart::Net, "net")]
        .into_iter()
        .filter_map(|(part, word)| wanted(part).then_some(word))
        .collect();
    let script = format!("PARTS='{}' SECONDS_OF_FIO={}\n{MEASURE}", words.join(" "), args.seconds);
    // Ten times what it takes. A second of instructions takes several.
    let slowness = if args.by == MachineClock::Time { 1 } else { 4 };
    let limit = (300 + u64::from(args.seconds) * 120) * slowness;

    let cannot = |error: std::io::Error| Failure::failed(format!("disks for the machine: {error}"));
    let folder = tempfile::Builder::new().prefix("dunlin-bench-").tempdir().map_err(cannot)?;
    let assets = Assets::locate();
    let machine = Machine { devices: devices(folder.path(), &assets).map_err(cannot)?, assets, limit, by: args.by };
    let (mut failed, mut last) = (Vec::new(), Value::Null);
    for pair in 1..=args.pairs {
        let order = if pair % 2 == 1 { [Ground::Dunlin, Ground::Plain] } else { [Ground::Plain, Ground::Dunlin] };
        for ground in order {
            progress(&format!("{pair} of {}: {}", args.pairs, ground.name()));
            match machine.run(ground, &script) {
                Ok(measured) => {
                    if ground == Ground::Dunlin {
                        last = measured.run.clone();
                    }
                    for row in &mut rows {
                        measured.add_to(row, ground, args.by, &last, log);
                    }
                }
                Err(failure) => {
                    log.failure(ground.name(), &failure.to_string());
                    failed.push(failure.to_string());
                }
            }
        }
    }
    Ok(report(&rows, args, &failed, log))
}

/// The machine, with and without Dunlin.
struct Machine {
    assets: Assets,
    /// QEMU's arguments for disks and network cards.
    devices: Vec<String>,
    /// Seconds.
    limit: u64,
    by: MachineClock,
}

/// What one run measured.
struct Measured {
    output: String,
    booted: Option<f64>,
    /// The JSON of the run, of Dunlin.
    run: Value,
}

impl Machine {
    fn run(&self, ground: Ground, script: &str) -> Result<Measured, Failure> {
        let clock = match self.by {
            MachineClock::Time => &[][..],
            MachineClock::Instructions => &COUNTING,
        };
        let more = self.devices.iter().map(String::as_str).chain(clock.iter().copied());
        match ground {
            Ground::Dunlin => {
                let toml = format!(
                    "[host]\npcpus = {CPUS}\n[[vm]]\nname = \"machine\"\nrole = \"parent\"\ndevices = \"all\"\nvcpus = {CPUS}\n\
                     memory = \"{MEMORY}\"\nkernel = \"parent\"\ninitrd = \"dunlin\"\ncmdline = \"{CMDLINE}\"\n"
                );
                let limit = format!("--time-limit={}s", self.limit);
                let more: Vec<String> = more.map(|word| format!("--qemu-arg={word}")).collect();
                let mut arguments = vec!["--accel=tcg", &limit, "--exec", script];
                arguments.extend(more.iter().map(String::as_str));
                let run = dunlin_run_vms(&toml, &arguments)?;
                let vm = only_vm(&run);
                let output = vm["output"].as_str().unwrap_or_default().to_string();
                Ok(Measured { output, booted: vm["hello_wall_seconds"].as_f64(), run })
            }
            Ground::Plain => {
                let kernel = self.assets.kernel(&Kernel::Parent, &Place::Option("--kernel"))?;
                let initrd = self.assets.initrd(&Initrd::Dunlin, &Place::Option("--initrd"))?;
                let accel: &[&str] = match self.by {
                    MachineClock::Time => &["-accel", "tcg,thread=multi"],
                    // As `dunlin run` has it: QEMU 10 and 11 end with `Bad icount read` if an x2APIC is used then.
                    MachineClock::Instructions => {
                        &["-accel", "tcg,thread=single", "-global", "max-x86_64-cpu.x2apic=off"]
                    }
                };
                let more: Vec<String> = accel.iter().copied().chain(more).map(str::to_string).collect();
                let plain = Plain {
                    name: ground.name(),
                    kernel: &kernel,
                    initrd: &initrd,
                    cmdline: CMDLINE,
                    cpus: CPUS,
                    memory: MEMORY,
                    limit: self.limit,
                    more: &more,
                };
                let ended = plain.run(script)?;
                Ok(Measured { output: ended.output, booted: Some(ended.booted), run: Value::Null })
            }
        }
    }
}

impl Measured {
    fn add_to(&self, row: &mut Row, ground: Ground, by: MachineClock, last: &Value, log: &Log) {
        let said = || {
            let mut records = Record::all(&self.output, "measured");
            records.find(|record| record.text("name") == Some(&row.key))?.number::<f64>("value")
        };
        let Some(number) = (if row.key == BOOTED { self.booted } else { said() }) else { return };
        let sample = number / row.divisor;
        match ground {
            Ground::Dunlin => row.dunlin.push(sample),
            Ground::Plain => row.plain.push(sample),
        }
        let figure = Figure::new(&row.what, Class::Time, row.unit, [sample]);
        log.emulated(last, figure.at("ground", ground.name()).at("by", by.name()));
    }
}

/// QEMU's arguments for three disks to measure, one with fio, and two network cards with a process that sends and one
/// that receives.
fn devices(folder: &Path, assets: &Assets) -> std::io::Result<Vec<String>> {
    let mut words = Vec::new();
    let mut add = |option: &str, value: String| words.extend([option.to_string(), value]);
    for (name, device) in [
        ("bench", "virtio-blk-pci,drive=bench,serial=bench"),
        ("nvme", "nvme,drive=nvme,serial=1"),
        ("ahci", "ide-hd,drive=ahci,bus=ide.0"),
    ] {
        let disk = folder.join(name);
        File::create(&disk)?.set_len(DISK_BYTES)?;
        add("-drive", format!("if=none,id={name},format=raw,cache=unsafe,file={}", disk.display()));
        add("-device", device.to_string());
    }
    let fio = assets.for_kvm("fio.cpio.gz").map_err(|failure| std::io::Error::other(failure.to_string()))?;
    add("-drive", format!("if=none,id=fio,format=raw,readonly=on,file={}", fio.display()));
    add("-device", "virtio-blk-pci,drive=fio,serial=fio".to_string());
    for (subnet, card) in [(2, "virtio-net-pci"), (3, "e1000e")] {
        let server = format!("guestfwd=tcp:10.0.{subnet}.100");
        add(
            "-netdev",
            format!(
                "user,id=net{subnet},net=10.0.{subnet}.0/24,{server}:1-cmd:dd if=/dev/zero bs=64k count=256 status=none,\
                 {server}:2-cmd:dd of=/dev/null bs=64k count=256 iflag=fullblock status=none"
            ),
        );
        add("-device", format!("{card},netdev=net{subnet}"));
    }
    Ok(words)
}

/// Prints everything, the summary first. The status is 1 if a goal is missed or a figure is missing.
fn report(rows: &[Row], args: &MachineBenchArgs, failed: &[String], log: &Log) -> u8 {
    let targets: Vec<Target> = rows.iter().map(Row::target).collect();
    targets.iter().for_each(|target| target.record(log));
    let by_time = args.by == MachineClock::Time;
    if args.json {
        rows.iter().for_each(|row| println!("{}", row.json(args.by)));
        targets.iter().for_each(|target| println!("{}", target.json()));
        failed.iter().for_each(|why| println!("{}", json!({ "part": "failure", "why": why })));
    } else {
        let met = targets.iter().filter(|target| target.met == Some(true)).count();
        let how = if by_time { "both emulated" } else { "both emulated, a second of 125 million instructions" };
        println!("A VM with the machine's devices, beside the same Linux without Dunlin, {how}:");
        println!("{met} of {} goals are met.", targets.len());
        targets.iter().for_each(|target| println!("{target}"));
        println!("\n{:44} {:>24} {:>24} {:>18}", "median (least-greatest)", "Dunlin", "QEMU alone", "ratio");
        rows.iter().for_each(|row| println!("{}", row.line()));
        failed.iter().for_each(|why| println!("\nnot measured: {why}"));
        if by_time {
            println!("Emulated (TCG): compare times only within a row.");
        }
    }
    u8::from(!failed.is_empty() || targets.iter().any(|target| target.met != Some(true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_figure_of_the_script_has_a_row_and_no_two_rows_are_alike() {
        let rows = rows();
        for (at, row) in rows.iter().enumerate() {
            assert!(rows[..at].iter().all(|other| other.key != row.key && other.what != row.what), "{}", row.what);
            let (device, what) = row.key.split_once('-').unwrap_or((BOOTED, ""));
            assert!(row.key == BOOTED || MEASURE.contains(device) && MEASURE.contains(what), "{}", row.key);
        }
    }

    #[test]
    fn boot_is_measured_by_time_only() {
        use MachinePart::{Boot, Disk, Net};
        let wanted = |by, part: &[MachinePart]| {
            let args = MachineBenchArgs { part: part.to_vec(), pairs: 1, seconds: 1, by, json: false };
            [Boot, Disk, Net].map(|part| is_wanted(part, &args))
        };
        assert_eq!(wanted(MachineClock::Time, &[]), [true, true, true]);
        assert_eq!(wanted(MachineClock::Time, &[Net]), [false, false, true]);
        assert_eq!(wanted(MachineClock::Instructions, &[]), [false, true, true]);
        assert_eq!(wanted(MachineClock::Instructions, &[Boot, Disk]), [false, true, false]);
    }

    #[test]
    fn ratio_is_that_of_the_medians_and_its_spread_that_of_the_pairs() {
        let mut row = rows().remove(1);
        (row.dunlin, row.plain) = (vec![80.0, 90.0, 100.0], vec![100.0, 100.0, 110.0]);
        assert_eq!(row.ratio(), Some(0.9));
        let pairs = row.pairs().expect("there are some");
        assert_eq!((pairs.least, pairs.median), (0.8, 0.9));
        assert_eq!(row.target().met, Some(true));
        row.dunlin = vec![70.0];
        assert_eq!(row.target().met, Some(false));
        row.plain.clear();
        assert_eq!(row.target().met, None);
    }

    #[test]
    fn figure_goes_to_the_row_of_its_name_in_the_rows_unit() {
        let log = Log::open("machine", None).expect("needs no file");
        let measured = Measured {
            output: "measured name=virtio-read value=2048\nmeasured name=nvme-read value=1\n".to_string(),
            booted: Some(2.5),
            run: Value::Null,
        };
        for mut row in rows() {
            measured.add_to(&mut row, Ground::Plain, MachineClock::Time, &Value::Null, &log);
            let expected: &[f64] = match row.key.as_str() {
                BOOTED => &[2.5],
                "virtio-read" => &[2.0],
                "nvme-read" => &[1.0 / 1024.0],
                _ => &[],
            };
            assert_eq!((&row.plain[..], row.dunlin.len()), (expected, 0), "{}", row.what);
        }
    }
}
