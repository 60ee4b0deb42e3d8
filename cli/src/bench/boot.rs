//! Boot to user space, in turn with the same kernel directly on QEMU.
//!
//! For Dunlin the time begins with the start of the VM, on the hypervisor's clock; for QEMU alone with the start of
//! QEMU, on the tool's. Both end with the greeting of the guest's agent on its second serial line.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use serde_json::{Value, json};

use super::{Spread, dunlin_run, only_vm, progress, since};
use crate::args::{BootArgs, Contender, RunArgs};
use crate::assets::Assets;
use crate::config::{Config, Initrd, Kernel, Place};
use crate::failure::Failure;
use crate::qemu;
use crate::records::{Class, Figure, Log};

/// Time limit of a boot on QEMU alone.
const PATIENCE: Duration = Duration::from_secs(180);
/// Interval between checks for the greeting.
const LOOK: Duration = Duration::from_millis(2);

/// The greatest ratio of the medians, Dunlin to QEMU alone, that the project allows itself.
const TARGET: f64 = 0.9;

pub(crate) fn run(args: &BootArgs, log: &Log) -> Result<u8, Failure> {
    let (mut dunlin, mut direct) = (Vec::new(), Vec::new());
    let mut last = Value::Null;
    for pair in 1..=args.pairs {
        if args.only != Some(Contender::Qemu) {
            progress(&format!("{pair} of {}: Dunlin", args.pairs));
            let (boot, run) = boot_on_dunlin(args)?;
            record_boot(args, log, &run, &boot);
            dunlin.push(boot);
            last = run;
        }
        if args.only != Some(Contender::Dunlin) {
            progress(&format!("{pair} of {}: QEMU alone", args.pairs));
            let seconds = boot_on_qemu(args)?;
            log.emulated(&last, figure(args, "boot of QEMU alone, from its start", Class::Time, "s", seconds));
            direct.push(seconds);
        }
        if let (None, Some(dunlin), Some(direct)) = (args.only, dunlin.last(), direct.last()) {
            let ratio = dunlin.booted / direct;
            log.emulated(&last, figure(args, "boot, Dunlin to QEMU alone", Class::Ratio, "ratio", ratio));
        }
    }
    if dunlin.is_empty() && direct.is_empty() {
        return Err(Failure::bad_input("--pairs 0: nothing to measure"));
    }
    let column = |part: fn(&Boot) -> f64| dunlin.iter().map(part).collect::<Vec<_>>();
    let booted = column(|boot| boot.booted);
    let since_creation = column(|boot| boot.created + boot.booted);
    let since_qemu = column(|boot| boot.wall);
    let pairwise: Vec<f64> = booted.iter().zip(&direct).map(|(dunlin, direct)| dunlin / direct).collect();
    let ratio = match (Spread::of(&booted), Spread::of(&direct)) {
        (Some(dunlin), Some(direct)) => Some(dunlin.median / direct.median),
        _ => None,
    };

    if args.json {
        let value = json!({ "emulated": true, "vcpus": args.vcpus, "pcpus": args.pcpus, "dunlin_seconds": booted,
            "dunlin_seconds_with_creation": since_creation, "dunlin_seconds_since_qemu": since_qemu,
            "qemu_seconds": direct, "ratios": pairwise, "ratio_of_medians": ratio });
        println!("{value:#}");
    } else {
        println!("{} vCPUs, {}; seconds: median (least-greatest) of {}", args.vcpus, args.memory, args.pairs);
        let from = format!("Dunlin, {} pCPUs, from the start of the VM", args.pcpus);
        for (what, values) in [
            (from.as_str(), &booted),
            ("  with the creation of the VM", &since_creation),
            ("  from the start of QEMU and hypervisor", &since_qemu),
            ("QEMU alone, from its start", &direct),
        ] {
            if let Some(spread) = Spread::of(values) {
                println!("{what:42} {spread}");
            }
        }
        if let (Some(ratio), Some(ratios)) = (ratio, Spread::of(&pairwise)) {
            println!("Ratio of the medians {ratio:.2} (at most {TARGET}); pair by pair {ratios}");
        }
        println!("Emulated (TCG): seconds depend on what else this computer does; compare only within a run.");
    }
    Ok(u8::from(ratio.is_some_and(|ratio| ratio > TARGET)))
}

/// A figure of one boot.
fn figure(args: &BootArgs, quantity: &str, class: Class, unit: &'static str, sample: f64) -> Figure {
    let figure = Figure::new(quantity, class, unit, [sample]).at("vcpus", args.vcpus).at("pcpus", args.pcpus);
    figure.at("memory", args.memory.as_str())
}

fn record_boot(args: &BootArgs, log: &Log, run: &Value, boot: &Boot) {
    for (quantity, seconds) in [
        ("boot, from the start of the VM", boot.booted),
        ("boot, with the creation of the VM", boot.created + boot.booted),
        ("boot, from the start of QEMU and hypervisor", boot.wall),
    ] {
        log.emulated(run, figure(args, quantity, Class::Time, "s", seconds));
    }
}

/// Times of one boot on Dunlin, in seconds.
struct Boot {
    /// From the start of its creation to its first vCPU.
    created: f64,
    /// From there to user space.
    booted: f64,
    /// From just before the start of QEMU to user space, on our clock.
    wall: f64,
}

fn boot_on_dunlin(args: &BootArgs) -> Result<(Boot, Value), Failure> {
    let [vcpus, pcpus] = [args.vcpus, args.pcpus].map(|number| number.to_string());
    let host = ["--pcpus", &pcpus, "--accel", "tcg", "--time-limit", "180s"];
    let guest = ["--vcpus", &vcpus, "--memory", &args.memory, "--exec", "true"];
    let run = dunlin_run(&[&host[..], &guest[..]].concat())?;
    let vm = only_vm(&run);
    match ["creation_seconds", "boot_seconds", "hello_wall_seconds"].map(|name| vm[name].as_f64()) {
        [Some(created), Some(booted), Some(wall)] => Ok((Boot { created, booted, wall }, run)),
        _ => Err(Failure::failed(format!("the run did not tell its times: {run}"))),
    }
}

/// Boot of the same kernel, initrd and command line on QEMU alone, in seconds.
fn boot_on_qemu(args: &BootArgs) -> Result<f64, Failure> {
    let config = Config::load(&RunArgs::default())?;
    let cmdline = config.vms.first().map_or_else(String::new, |vm| vm.cmdline.value.clone());
    let assets = Assets::locate();
    let place = Place::Option("--kernel");
    let kernel = assets.kernel(&Kernel::DebianCloud, &place)?;
    let initrd = assets.initrd(&Initrd::Dunlin, &place)?.pop().unwrap_or_default();
    let cannot = |error: std::io::Error| Failure::failed(format!("a boot on QEMU alone: {error}"));
    let directory = tempfile::tempdir().map_err(cannot)?;
    let [agent, errors] = ["agent", "errors"].map(|name| directory.path().join(name));

    let start = Instant::now();
    let mut command = qemu::ends_with_us("qemu-system-x86_64".as_ref(), Signal::KILL).map_err(cannot)?;
    command
        .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", &args.vcpus.to_string()])
        .args(["-m", &args.memory, "-display", "none", "-monitor", "none", "-no-reboot"])
        .args(["-nodefaults", "-no-user-config", "-serial", "null", "-serial"])
        .arg(format!("file:{}", agent.display()))
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", &cmdline])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&errors).map_err(cannot)?);
    let qemu = Killed(command.spawn().map_err(cannot)?);
    let said_hello = wait_for_hello(&agent, start);
    drop(qemu);
    said_hello.ok_or_else(|| {
        let errors = fs::read_to_string(errors).unwrap_or_default();
        Failure::failed(format!("the guest did not say hello on QEMU alone {errors}"))
    })
}

fn wait_for_hello(agent: &Path, start: Instant) -> Option<f64> {
    while start.elapsed() < PATIENCE {
        if fs::read(agent).is_ok_and(|bytes| bytes.starts_with(b"hello ") && bytes.contains(&b'\n')) {
            return Some(since(start));
        }
        sleep(LOOK);
    }
    None
}

/// A process that does not outlive this value.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
