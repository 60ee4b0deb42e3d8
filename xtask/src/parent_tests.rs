//! `cargo xtask parent-tests`: runs a parent VM, and tries in it what a parent can do.
//!
//! Each test is a command in a parent of its own, so that one that hangs leaves the others alone. A test that cannot
//! run has failed.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::artifacts::{self, Places};
use crate::{ci, libvirt, parent, userland, workloads};

struct Test {
    name: &'static str,
    what: &'static str,
    /// Run by `sh` in the parent. Its status tells the outcome, its last line why. The first test has none: it is a
    /// file of system tests.
    command: &'static str,
    /// The same in a minute or two, if the command takes long.
    quick: Option<&'static str>,
    /// Seconds. Ten times what it takes, and more.
    limit: u32,
}

/// In the second kernel, with options like those of distributions.
const STOCK: &str = "stock";
/// Needs that kernel, too: it merges pages, and swaps to compressed memory.
const RECLAIM: &str = "reclaim";

/// Mixed load for [`MINUTES`]. It runs only if it is named.
const LOAD: &str = "load";
/// The same for a VM that owns the machine's disks and network cards, for [`MINUTES`].
const MACHINE: &str = "machine";
/// The same without messages of interrupts: all of them come by level-triggered pins.
const MACHINE_PINS: &str = "machine-pins";
/// Stands for the number of minutes in the commands of these.
const MINUTES: &str = "MINUTES";
/// It needs more memory.
const CLONES: &str = "clones";
/// With Debian and libvirt as the parent's root file system.
const LIBVIRT: &str = "libvirt";
/// With the same.
const VIRT_INSTALL: &str = "virt-install";
/// With the same.
const SAVED: &str = "libvirt-saved";
/// With the same on two hosts, whose network cards are joined.
const MOVES: &str = "libvirt-moves";
/// With a host whose processor has all features, and another one.
const REFUSED: &str = "move-refused";

/// The emulator copies a byte at a time for `rep movsb`, which processors do faster than anything else. Without these
/// features Linux copies by words, in half the time and less.
const CPU: [&str; 2] = ["--qemu-arg=-cpu", "--qemu-arg=max,-erms,-fsrm"];

impl Test {
    /// What the second of two hosts runs, whose network cards are joined, and the CPU it has.
    fn second(&self) -> Option<(&'static str, [&'static str; 2])> {
        match self.name {
            MOVES => Some(("libvirt-moves target 2", CPU)),
            REFUSED => Some(("guest-refused target", [CPU[0], "--qemu-arg=max,-erms,-fsrm,-movbe,-aes"])),
            _ => None,
        }
    }

    /// The file of VMs.
    fn file(&self) -> &'static str {
        match self.name {
            LOAD => "vms/load.toml",
            MOVES | REFUSED => "vms/libvirt-pair.toml",
            _ if self.is_with_devices() => "vms/machine-load.toml",
            _ if self.is_with_libvirt() => "vms/libvirt.toml",
            _ => "vms/parent.toml",
        }
    }

    /// Whether the parent's root file system is Debian with libvirt.
    fn is_with_libvirt(&self) -> bool {
        [LIBVIRT, VIRT_INSTALL, SAVED, MOVES].contains(&self.name)
    }

    /// Whether it runs only if it is named, for as long as wanted.
    fn is_long(&self) -> bool {
        self.name == LOAD || self.is_with_devices()
    }

    /// Whether the parent has disks and network cards of the machine's.
    fn is_with_devices(&self) -> bool {
        [MACHINE, MACHINE_PINS].contains(&self.name)
    }

    /// The words for kernel and initrd, if they are others than those in the file.
    fn kernel(&self) -> Option<&'static str> {
        match self.name {
            STOCK | RECLAIM => Some("parent-stock"),
            REFUSED => Some("parent"),
            _ => None,
        }
    }

    /// `dunlin run` of this script.
    fn dunlin(&self, places: &Places, limit: u32, script: &str) -> Command {
        let mut dunlin = Command::new(places.tool());
        dunlin.arg("run").arg(places.root.join(self.file()));
        dunlin.args(["--time-limit", &format!("{limit}s"), "--exec", script]).stdin(Stdio::null());
        if let Some(kernel) = self.kernel() {
            dunlin.args(["--kernel", kernel, "--initrd", kernel]);
        }
        dunlin
    }
}

/// Those of `parent.rs`, `own_machine.rs` and `functions.rs` in `system_tests/tests` that need its kernel. `cargo xtask
/// test` leaves them out: the kernel takes a quarter of an hour on a machine that has not built it before.
const SYSTEM: &str = "system";

/// What a VM beside a parent under load runs. Linux notices that a vCPU has waited for a pCPU while it handled a
/// timer's interrupt. Here many wait.
macro_rules! beside {
    () => {
        "dmesg >/tmp/before; /dunlin/workloads storm --seconds $((MINUTES * 60)) | tail -n 1; \
         dmesg | grep -v 'hrtimer: interrupt took' | diff /tmp/before - && echo 'no message of the kernel'"
    };
}

const TESTS: &[Test] = &[
    Test { name: SYSTEM, what: "system tests with a parent, or with its kernel", command: "", quick: None, limit: 600 },
    Test {
        name: "device",
        what: "the kernel finds that it may be a parent, and offers the device",
        command: "dmesg | grep -e 'running as L1VH' -e mshv; [ -c /dev/mshv ]",
        quick: None,
        limit: 120,
    },
    Test {
        name: STOCK,
        what: "a kernel like Fedora's, with the device in a module: statistics, and a guest",
        command: "dmesg | grep -e 'running as L1VH' -e mshv -e Vmbus; lsmod; [ -c /dev/mshv ] && \
                  mount -t debugfs debug /sys/kernel/debug && mshv-check stats && \
                  guest-q35 --smp 2 --checks disk,net",
        quick: None,
        limit: 900,
    },
    Test {
        name: "tool",
        what: "`dunlin` in the parent: at the same time, killed, with garbage",
        command: "tool-check",
        quick: None,
        limit: 600,
    },
    Test {
        name: "life",
        what: "partitions come and go",
        command: "mshv-check life",
        quick: Some("mshv-check life --rounds 50"),
        limit: 1800,
    },
    Test { name: "vp", what: "a VP's pages and its first state", command: "mshv-check vp", quick: None, limit: 120 },
    Test {
        name: "run",
        what: "a guest of 13 bytes",
        command: "mshv-check run --rounds 100",
        quick: Some("mshv-check run"),
        limit: 600,
    },
    Test {
        name: "interrupts",
        what: "external interrupts, pins and NMIs",
        command: "mshv-check interrupts --rounds 100",
        quick: Some("mshv-check interrupts"),
        limit: 600,
    },
    Test {
        name: "signal",
        what: "signals end the runs of a VP",
        command: "mshv-check signal",
        quick: Some("mshv-check signal --rounds 50"),
        limit: 900,
    },
    Test {
        name: "memory",
        what: "the kernel takes pages away from 4 running VPs",
        command: "mshv-check memory --vps 4",
        quick: Some("mshv-check memory --vps 4 --invalidations 1000"),
        limit: 3600,
    },
    Test {
        name: RECLAIM,
        what: "the same while the kernel swaps, merges pages and makes huge ones; with the second kernel",
        command: "mshv-check reclaim --invalidations 5000",
        quick: Some("mshv-check reclaim --invalidations 500"),
        limit: 3600,
    },
    Test {
        name: "hyperv",
        what: "the kernel takes pages away that the hypervisor reads and writes for guests",
        command: "mshv-check hyperv",
        quick: Some("mshv-check hyperv --invalidations 1000"),
        limit: 1800,
    },
    Test {
        name: "kill",
        what: "processes with running guests are killed",
        command: "mshv-check kill",
        quick: Some("mshv-check kill --rounds 20"),
        limit: 1800,
    },
    Test { name: "input", what: "wrong calls are refused", command: "mshv-check input", quick: None, limit: 300 },
    Test {
        name: "fuzz",
        what: "random hypercalls",
        command: "mshv-check fuzz",
        quick: Some("mshv-check fuzz --calls 20000"),
        limit: 3600,
    },
    Test {
        name: "mshv-ioctls",
        what: "unit tests of the crate mshv-ioctls",
        command: "mshv-ioctls",
        quick: None,
        limit: 1800,
    },
    Test {
        name: "microvm",
        what: "a microvm reaches user space and halts",
        command: "guest-microvm",
        quick: None,
        limit: 400,
    },
    Test {
        name: "microvm-4",
        what: "a microvm with 4 vCPUs: disk, network, memory, TLB, Hyper-V",
        command: "guest-microvm --smp 4 --checks disk,net,memory:3,tlb:5,hyperv",
        quick: Some("guest-microvm --smp 4 --checks disk,net,memory:1,hyperv"),
        limit: 900,
    },
    Test {
        name: "microvm-compaction",
        what: "the same while the kernel moves its memory",
        command: "while sleep 0.2; do echo 1 >/proc/sys/vm/compact_memory; done & \
                  guest-microvm --smp 2 --checks disk,memory:8,tlb:5,hyperv; status=$?; kill %1; exit $status",
        quick: None,
        limit: 900,
    },
    Test {
        name: "q35",
        what: "a q35 with firmware reaches user space and powers off",
        command: "guest-q35",
        quick: None,
        limit: 900,
    },
    Test {
        name: "q35-2",
        what: "a q35 with 2 vCPUs: disk, network, memory, TLB, Hyper-V",
        command: "guest-q35 --smp 2 --checks disk,net,memory:3,tlb:5,hyperv",
        quick: Some("guest-q35 --smp 2 --checks disk,net"),
        limit: 1200,
    },
    Test {
        name: "q35-reboot",
        what: "a guest that reboots ends QEMU",
        command: "guest-q35 --end reboot",
        quick: None,
        limit: 900,
    },
    Test {
        name: "debian",
        what: "Debian's kernel as guest",
        command: "guest-q35 --smp 2 --checks hyperv --kernel /guest/vmlinuz-cloud",
        quick: None,
        limit: 900,
    },
    Test {
        name: "boots-q35",
        what: "Debian's kernels, started by SeaBIOS: two, with 1, 4 and 16 vCPUs",
        command: "guests-boot q35",
        quick: Some("guests-boot q35 --kernels newest --smp 4"),
        limit: 3600,
    },
    Test {
        name: "boots-ovmf",
        what: "the same, started by UEFI",
        command: "guests-boot ovmf",
        quick: Some("guests-boot ovmf --kernels newest --smp 4"),
        limit: 3600,
    },
    Test {
        name: "boots-microvm",
        what: "the same, without firmware",
        command: "guests-boot microvm",
        quick: Some("guests-boot microvm --kernels newest --smp 4"),
        limit: 3600,
    },
    Test {
        name: "ovmf-pflash",
        what: "UEFI in a pflash drive, without a drive for its variables",
        command: "guest-q35 --memory 256 --kernel /guest/vmlinuz-newest -- \
                  -drive if=pflash,format=raw,readonly=on,file=/guest/OVMF_CODE_4M.fd",
        quick: None,
        limit: 900,
    },
    Test {
        name: "two",
        what: "two guests at a time",
        command: "guest-microvm --smp 2 --checks disk,memory:2 >/tmp/one & \
                  guest-q35 --checks disk; status=$?; wait $! || status=1; tail -n 1 /tmp/one; exit $status",
        quick: None,
        limit: 1200,
    },
    Test {
        name: "move",
        what: "a guest moves from QEMU to QEMU while it works, all memory compared",
        command: "guest-moves --moves 20 --compare",
        quick: Some("guest-moves --moves 3 --compare"),
        limit: 3600,
    },
    Test {
        name: "move-4",
        what: "the same with 4 vCPUs that flush each other's TLBs",
        command: "guest-moves --moves 20 --smp 4 --compare",
        quick: Some("guest-moves --moves 3 --smp 4 --compare"),
        limit: 3600,
    },
    Test {
        name: "save",
        what: "a guest is saved to a file and loaded from it",
        command: "guest-moves --moves 10 --smp 2 --by file",
        quick: Some("guest-moves --moves 2 --smp 2 --by file"),
        limit: 3600,
    },
    Test {
        name: "tracking",
        what: "a move is cancelled: the guest's large pages come back, and it is as fast as before",
        command: "parent-bench tracking 2 192 0",
        quick: None,
        limit: 900,
    },
    Test {
        name: CLONES,
        what: "ten guests from one file beside each other, each with an identity of its own",
        command: "guest-moves --clones 10",
        quick: Some("guest-moves --clones 3"),
        limit: 3600,
    },
    Test {
        name: "move-faults",
        what: "moves that fail, in 13 ways: the guest runs on one side, and goes on",
        command: "guest-moves --moves 20 --faults all",
        quick: Some("guest-moves --moves 1 --faults all"),
        limit: 7200,
    },
    Test {
        name: REFUSED,
        what: "a host whose processor lacks features refuses a guest by their names, and it goes on where it was",
        command: "guest-refused source 'AES, MOVBE'",
        quick: None,
        limit: 900,
    },
    Test {
        name: LIBVIRT,
        what: "libvirt's domains of the type hyperv, from define to undefine",
        command: "libvirt-check domain",
        quick: None,
        limit: 3600,
    },
    Test {
        name: VIRT_INSTALL,
        what: "virt-install makes a domain from a disk with Debian",
        command: "libvirt-check cloud",
        quick: None,
        limit: 3600,
    },
    Test {
        name: SAVED,
        what: "a domain is saved to a file and restored, with guest-move",
        command: "libvirt-check saved",
        quick: None,
        limit: 3600,
    },
    Test {
        name: MOVES,
        what: "a domain moves to another host and back by `virsh migrate`, with guest-move",
        command: "libvirt-moves source 2",
        quick: None,
        limit: 3600,
    },
    Test {
        name: LOAD,
        what: "only if named: two guests with Debian under mixed load, beside a VM that checks itself",
        command: concat!("if [ -c /dev/mshv ]; then guests-under-load MINUTES; else ", beside!(), "; fi"),
        quick: None,
        limit: 1800,
    },
    Test {
        name: MACHINE,
        what: "only if named: the owner of three disks and two network cards, beside two VMs that check themselves",
        command: concat!("if [ -c /dev/mshv ]; then machine-under-load MINUTES; else ", beside!(), "; fi"),
        quick: None,
        limit: 1800,
    },
    Test {
        name: MACHINE_PINS,
        what: "only if named: the same with level-triggered interrupts",
        command: concat!("if [ -c /dev/mshv ]; then machine-under-load MINUTES; else ", beside!(), "; fi"),
        quick: None,
        limit: 1800,
    },
];

const HELP: &str = "\
cargo xtask parent-tests [NAME..] [--quick] [--minutes N] [--json] [--list] [--no-build] [--help]

Runs a parent VM (vms/parent.toml) for each test, and one command in it. All of it takes hours under emulation.

  NAME        only tests of these names
  --quick     smaller numbers: half an hour
  --minutes N how long `load` (60) or `machine` (30) lasts; with --quick 3. Use it as `parent-tests load --minutes 30`
  --json      one line of JSON for each test, instead of the table
  --list      what there is
  --no-build  what is built already

What a test has printed is in target/parent-tests/NAME.out and NAME.err. The status is 0 if all have passed.
";

/// What became of a test.
struct Outcome {
    test: &'static Test,
    /// Why it failed.
    failed: Option<String>,
    /// What it said last.
    last: String,
    took: Duration,
}

/// Runs the command.
pub(crate) fn command(places: &Places, words: &[String]) -> Result<ExitCode> {
    let (mut names, mut quick, mut as_json, mut is_built) = (Vec::new(), false, false, false);
    let mut minutes = None;
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--help" | "-h" => {
                print!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            "--list" => {
                TESTS.iter().for_each(|test| println!("{:18} {}", test.name, test.what));
                return Ok(ExitCode::SUCCESS);
            }
            "--quick" => quick = true,
            "--minutes" => {
                let number = words.next().and_then(|number| number.parse::<u32>().ok());
                minutes =
                    Some(number.filter(|number| (1..=1440).contains(number)).context("--minutes wants 1 to 1440")?);
            }
            "--json" => as_json = true,
            "--no-build" => is_built = true,
            name if TESTS.iter().any(|test| test.name == name) => names.push(name),
            other => bail!("no test `{other}`\n\n{HELP}"),
        }
    }
    let is_wanted = |test: &Test| if names.is_empty() { !test.is_long() } else { names.contains(&test.name) };
    if !is_built {
        let wants_libvirt = TESTS.iter().any(|test| test.is_with_libvirt() && is_wanted(test));
        ci::set_up(places, if wants_libvirt { &["parent", "libvirt"] } else { &["parent"] })?;
        if TESTS.iter().any(|test| test.kernel().is_some() && is_wanted(test)) {
            parent::build_stock(places)?;
        } else {
            parent::build(places)?;
        }
        if names.contains(&LOAD) {
            userland::build(places)?;
        }
        if TESTS.iter().any(|test| test.is_long() && is_wanted(test)) {
            // For the VMs beside the parent.
            workloads::build(places)?;
        }
        if wants_libvirt {
            libvirt::build(places)?;
        }
    }
    let folder = places.target.join("parent-tests");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;

    let mut outcomes = Vec::new();
    for test in TESTS.iter().filter(|test| is_wanted(test)) {
        eprintln!("xtask: {}: {}", test.name, test.what);
        if test.is_long() {
            tell_if_busy();
        }
        let outcome =
            if test.name == SYSTEM { system_tests(places, test) } else { run(places, &folder, test, quick, minutes)? };
        match &outcome.failed {
            None => eprintln!("xtask: {}: passed", test.name),
            Some(why) => eprintln!("xtask: {}: FAILED: {why}", test.name),
        }
        outcomes.push(outcome);
    }
    for Outcome { test, failed, last, took } in &outcomes {
        let (word, text) = failed.as_ref().map_or(("passed", last), |why| ("FAILED", why));
        if as_json {
            let ok = failed.is_none();
            println!("{}", json!({ "test": test.name, "ok": ok, "seconds": took.as_secs_f64(), "text": text }));
        } else {
            println!("{:18} {word} {:7.1} s  {text}", test.name, took.as_secs_f64());
        }
    }
    let all_passed = outcomes.iter().all(|outcome| outcome.failed.is_none());
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Mixed load needs the machine for itself: Linux in a guest that has waited 21 s for a CPU says so in its log, and the
/// test has failed.
fn tell_if_busy() {
    const MINE: f64 = 1.0;
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load = load.and_then(|load| load.split(' ').next()?.parse::<f64>().ok());
    if let Some(load) = load.filter(|load| *load > MINE) {
        eprintln!("xtask: this machine is busy (load average {load}); if other work goes on, this is going to fail");
    }
}

fn system_tests(places: &Places, test: &'static Test) -> Outcome {
    let mut tests = places.cargo(&["test", "--no-fail-fast", "--release", "--package", "dunlin-system-tests"]);
    let files = ["--test", "parent", "--test", "own_machine", "--test", "functions"];
    tests.args(files).args(["--", "--ignored", "--test-threads=1"]);
    let started = Instant::now();
    let failed = artifacts::run(&mut tests).err().map(|error| format!("{error:#}"));
    Outcome { test, failed, last: String::new(), took: started.elapsed() }
}

fn run(places: &Places, folder: &Path, test: &'static Test, quick: bool, minutes: Option<u32>) -> Result<Outcome> {
    let minutes = minutes.unwrap_or(match test.name {
        _ if quick => 3,
        _ if test.is_with_devices() => 30,
        _ => 60,
    });
    let script = test.quick.filter(|_| quick).unwrap_or(test.command).replace(MINUTES, &minutes.to_string());
    // Guests under load need long to start, and to end what they have begun.
    let limit = test.limit + if test.is_long() { minutes * 120 } else { 0 };
    let file = |ending: &str| create(folder, test.name, ending);
    let second = match test.second() {
        Some((script, cpu)) => Some(second_host(places, folder, test, (script, cpu), limit)?),
        None => None,
    };
    let mut dunlin = test.dunlin(places, limit, &script);
    dunlin.args(CPU);
    if test.is_long() {
        dunlin.arg("--log");
    }
    if test.is_with_devices() {
        dunlin.args(devices(folder)?.iter().map(|word| format!("--qemu-arg={word}")));
    }
    if second.is_some() {
        dunlin.args(plug(folder, ""));
    }
    if test.name == MACHINE_PINS {
        dunlin.args(["--append", "pci=nomsi"]);
    }
    if test.name == CLONES {
        dunlin.args(["--memory", "3G"]);
    }
    dunlin.stdout(file("out")?).stderr(file("err")?);
    let started = Instant::now();
    let status = dunlin.status().with_context(|| format!("cannot run {}", places.tool().display()))?;
    let took = started.elapsed();
    // Without the first one, it ends after some minutes.
    let second = second.map(|mut second| second.wait()).transpose()?;

    let text_of = |ending: &str| {
        let bytes = fs::read(folder.join(format!("{}.{ending}", test.name))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (said, errors) = (text_of("out"), text_of("err"));
    let last = last_line(&said);
    let failed = failure(status.code(), &last, &last_line(&errors), limit).or_else(|| complaint(&errors));
    let failed = failed.or_else(|| {
        let last = last_line(&text_of("second.out"));
        failure(second?.code(), &last, "", limit).map(|why| format!("the second host: {why}"))
    });
    Ok(Outcome { test, failed, last, took })
}

fn create(folder: &Path, name: &str, ending: &str) -> Result<File> {
    let path = folder.join(format!("{name}.{ending}"));
    File::create(&path).with_context(|| format!("cannot write {}", path.display()))
}

/// Starts the second of two hosts. When this returns, the first one can be joined to it.
fn second_host(
    places: &Places,
    folder: &Path,
    test: &Test,
    (script, cpu): (&str, [&str; 2]),
    limit: u32,
) -> Result<Child> {
    const START: Duration = Duration::from_secs(10);
    let wire = folder.join(WIRE);
    let _ = fs::remove_file(&wire);
    let mut dunlin = test.dunlin(places, limit, script);
    dunlin.args(cpu).args(plug(folder, "server=on,"));
    dunlin.stdout(create(folder, test.name, "second.out")?).stderr(create(folder, test.name, "second.err")?);
    let second = dunlin.spawn().with_context(|| format!("cannot run {}", places.tool().display()))?;
    let until = Instant::now() + START;
    while !wire.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(second)
}

/// A socket, by which two hosts' cards are joined.
const WIRE: &str = "wire";

/// Arguments for a network card of a host. Each packet costs an emulated one a lot, so they may be long.
fn plug(folder: &Path, role: &str) -> Vec<String> {
    let wire = folder.join(WIRE);
    let words = [
        "-netdev".to_string(),
        format!("stream,id=wire,{role}addr.type=unix,addr.path={}", wire.display()),
        "-device".to_string(),
        "virtio-net-pci,netdev=wire,host_mtu=61440,romfile=".to_string(),
    ];
    words.map(|word| format!("--qemu-arg={word}")).into()
}

/// QEMU's arguments for three disks and two network cards, each of another kind. In each network 10.0.N.100 is a server
/// of commands, which `parent/files/bin/machine-under-load` knows.
fn devices(folder: &Path) -> Result<Vec<String>> {
    const DISK_BYTES: u64 = 64 << 20;
    let given = folder.join("machine.given");
    let mut bytes = vec![0; 4 << 20];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes)).context("no random bytes")?;
    fs::write(&given, bytes).with_context(|| format!("cannot write {}", given.display()))?;
    let given = given.display();
    let mut words = Vec::new();
    let mut add = |option: &str, value: String| words.extend([option.to_string(), value]);
    for (name, device) in [
        ("virtio", "virtio-blk-pci,drive=virtio"),
        ("ahci", "ide-hd,drive=ahci,bus=ide.0"),
        ("nvme", "nvme,drive=nvme,serial=1"),
    ] {
        let disk = folder.join(format!("machine.{name}"));
        let made = File::create(&disk).and_then(|file| file.set_len(DISK_BYTES));
        made.with_context(|| format!("cannot make {}", disk.display()))?;
        add("-drive", format!("if=none,id={name},format=raw,cache=unsafe,file={}", disk.display()));
        add("-device", device.to_string());
    }
    for (subnet, card) in [(2, "virtio-net-pci"), (3, "e1000e")] {
        let service = format!("guestfwd=tcp:10.0.{subnet}.100");
        add(
            "-netdev",
            format!(
                "user,id=net{subnet},net=10.0.{subnet}.0/24,{service}:1-cmd:sh -c 'head -c 4194304 | md5sum',\
                 {service}:2-cmd:cat {given},{service}:3-cmd:md5sum {given}"
            ),
        );
        add("-device", format!("{card},netdev=net{subnet}"));
    }
    Ok(words)
}

fn last_line(text: &str) -> String {
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

/// The first line of the hypervisor's log that is not for information only: `[  1.5] cpu0 warn  text`. That a machine
/// has no IOMMU is known.
fn complaint(errors: &str) -> Option<String> {
    let is_complaint = |line: &&str| {
        let word = line.strip_prefix('[').and_then(|rest| rest.split_once("] cpu")).map(|(_, rest)| rest);
        word.and_then(|rest| rest.split_whitespace().nth(1)).is_some_and(|level| level != "info")
            && !line.contains("no IOMMU guards this machine")
    };
    errors.lines().find(is_complaint).map(|line| format!("the hypervisor says '{line}'"))
}

/// Why a test has failed that ended with this status, and these last lines.
fn failure(status: Option<i32>, last: &str, last_error: &str, limit: u32) -> Option<String> {
    let said = if last.is_empty() { String::new() } else { format!(", after '{last}'") };
    match status {
        Some(0) => None,
        Some(124) => Some(format!("not done after {limit} s{said}")),
        Some(1) if !last.is_empty() => Some(last.to_owned()),
        Some(status) => Some(format!("status {status}: {last_error}{said}")),
        None => Some(format!("a signal has ended the tool{said}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_tells_what_was_said_last() {
        assert_eq!(failure(Some(0), "all is well", "", 9), None);
        assert_eq!(failure(Some(1), "pages lost", "ended", 9).as_deref(), Some("pages lost"));
        assert_eq!(failure(Some(1), "", "no kernel", 9).as_deref(), Some("status 1: no kernel"));
        assert_eq!(
            failure(Some(124), "GUEST: user space", "", 9).as_deref(),
            Some("not done after 9 s, after 'GUEST: user space'")
        );
        assert!(failure(None, "", "", 9).is_some());
    }

    #[test]
    fn line_of_the_hypervisors_log_that_is_no_information_is_a_complaint() {
        let log = "  0.0 s  host: QEMU\n[    0.4] cpu0 info  3 pCPUs\n[   12.5] cpu1 info  parent/100: memory freed\n\
                   [    0.6] cpu0 warn  machine owns devices: no IOMMU guards this machine: no IVRS\n";
        assert_eq!(complaint(log), None);
        let found = complaint(&format!("{log}[   13.0] cpu1 warn  lost\n[   14.0] cpu1 info  x\n"));
        assert_eq!(found.as_deref(), Some("the hypervisor says '[   13.0] cpu1 warn  lost'"));
    }

    #[test]
    fn last_line_is_the_last_one_with_words() {
        assert_eq!(last_line("one\n two \n\n"), "two");
        assert_eq!(last_line(""), "");
    }

    #[test]
    fn names_of_tests_are_unique_and_every_test_has_a_command() {
        for (at, test) in TESTS.iter().enumerate() {
            assert!((!test.command.is_empty() || test.name == SYSTEM) && test.limit > 0);
            assert!(TESTS[..at].iter().all(|other| other.name != test.name), "{}", test.name);
        }
    }
}
