//! Boot to user space, in turn with the same kernel directly on QEMU.
//!
//! For Dunlin the time runs from the start of the VM, on the hypervisor's clock; for QEMU alone from the start of QEMU,
//! on ours. Both end when the guest's agent says hello on its second serial line.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Spread, dunlin_run, only_vm, progress, since};
use crate::args::BootArgs;
use crate::assets::Assets;
use crate::config::{Initrd, Kernel, Place};
use crate::failure::Failure;

/// How long a boot without us may take.
const PATIENCE: Duration = Duration::from_secs(180);
/// How often we look whether it has said hello.
const LOOK: Duration = Duration::from_millis(2);

pub(crate) fn run(args: &BootArgs) -> Result<u8, Failure> {
    let (mut dunlin, mut creation, mut direct) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 1..=args.pairs {
        progress(&format!("pair {pair} of {}", args.pairs));
        let (created, booted) = boot_on_dunlin(args)?;
        creation.push(created);
        dunlin.push(booted);
        if !args.only_dunlin {
            direct.push(boot_on_qemu(args)?);
        }
    }

    let empty = || Failure::bad_input("--pairs 0: nothing to measure");
    let on_dunlin = Spread::of(&dunlin).ok_or_else(empty)?;
    let created = Spread::of(&creation).ok_or_else(empty)?;
    let on_qemu = Spread::of(&direct);
    let pairwise: Vec<f64> = dunlin.iter().zip(&direct).map(|(dunlin, direct)| dunlin / direct).collect();
    if args.json {
        let value = json!({ "emulated": true, "vcpus": args.vcpus, "pcpus": args.pcpus, "dunlin_seconds": dunlin,
            "creation_seconds": creation, "qemu_seconds": direct, "ratios": pairwise,
            "ratio_of_medians": on_qemu.map(|on_qemu| on_dunlin.median / on_qemu.median) });
        println!("{value:#}");
        return Ok(0);
    }
    println!("{} vCPUs on {} pCPUs, seconds: median (least-greatest) of {}", args.vcpus, args.pcpus, args.pairs);
    println!("  Dunlin, from the start of the VM        {on_dunlin}");
    println!("  Dunlin, creating the VM before that     {created}");
    if let (Some(on_qemu), Some(ratios)) = (on_qemu, Spread::of(&pairwise)) {
        println!("  QEMU alone, -smp {:<3} from its start     {on_qemu}", args.vcpus);
        println!("  ratio of medians {:.2}; pair by pair {ratios}", on_dunlin.median / on_qemu.median);
    }
    println!("Emulated: only the ratio means something.");
    Ok(0)
}

/// Creation of the VM, and boot of its guest, in seconds.
fn boot_on_dunlin(args: &BootArgs) -> Result<(f64, f64), Failure> {
    let [vcpus, pcpus] = [args.vcpus, args.pcpus].map(|number| number.to_string());
    let run = dunlin_run(&[
        "--vcpus",
        &vcpus,
        "--pcpus",
        &pcpus,
        "--memory",
        &args.memory,
        "--exec",
        "true",
        "--time-limit",
        "180s",
    ])?;
    let vm = only_vm(&run);
    match (vm["creation_seconds"].as_f64(), vm["boot_seconds"].as_f64()) {
        (Some(creation), Some(boot)) => Ok((creation, boot)),
        _ => Err(Failure::failed(format!("the run did not tell its times: {run}"))),
    }
}

/// Boot of the same kernel, initrd and command line on QEMU alone, in seconds.
fn boot_on_qemu(args: &BootArgs) -> Result<f64, Failure> {
    let assets = Assets::locate();
    let place = Place::Option("--kernel");
    let kernel = assets.kernel(&Kernel::DebianCloud, &place)?;
    let initrd = assets.initrd(&Initrd::Dunlin, &place)?.unwrap_or_default();
    let cannot = |error: std::io::Error| Failure::failed(format!("a boot on QEMU alone: {error}"));
    let directory = tempfile::tempdir().map_err(cannot)?;
    let agent = directory.path().join("agent");

    let start = Instant::now();
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", &args.vcpus.to_string()])
        .args([
            "-m",
            &args.memory,
            "-display",
            "none",
            "-monitor",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ])
        .args(["-serial", "null", "-serial"])
        .arg(format!("file:{}", agent.display()))
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", "console=ttyS0 quiet"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(directory.path().join("errors")).map_err(cannot)?);
    let qemu = Killed(command.spawn().map_err(cannot)?);
    let said_hello = wait_for_hello(&agent, start);
    drop(qemu);
    said_hello.ok_or_else(|| {
        let errors = fs::read_to_string(directory.path().join("errors")).unwrap_or_default();
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
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
