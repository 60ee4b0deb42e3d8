//! VMs that go into a file and come back, in the same host or in another: their guests check that nothing is lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use system_tests::{Host, Machine, Run, each_machine, finished, measuring_vm, tool, until, within};

/// A VM that keeps a host alive.
fn keeper() -> String {
    measuring_vm("keeper", 1, "experiments=mixed seconds=100000")
}

/// A host for restored VMs, with this much memory and these arguments.
fn host(machine: Machine, memory: &str, more: &[&str]) -> Host {
    let toml = format!("memory = \"{memory}\"\n\n{}", keeper());
    let more: Vec<String> = more.iter().map(ToString::to_string).collect();
    let host = Host::start_on(machine, 900, 2, &toml, |_| more);
    // It answers from now on.
    let _ = host.ask("list");
    host
}

fn dunlin(host: &Host, words: &[&str]) -> Run {
    finished(Command::new(tool()).args(words).args(["--host", &host.pid().to_string()]))
}

/// Something that has to work.
fn does(host: &Host, words: &[&str]) -> Run {
    let run = dunlin(host, words);
    assert!(run.status == 0, "{words:?}: {run:#?}\nsaid: {}", host.said());
    run
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a folder with a plain name")
}

/// Waits until the host has shown this text.
fn shows(host: &Host, what: &str) {
    let shown = within(Duration::from_secs(400), || host.said().contains(what).then_some(()));
    assert!(shown.is_some(), "no \"{what}\":\n{}", host.said());
}

fn is_clean(said: &str) {
    for bad in ["failure ", "panic", "BUG:", "lockup", "stall"] {
        assert!(!said.contains(bad), "\"{bad}\": {said}");
    }
}

/// Ends a host whose VMs do not end by themselves.
fn ends(host: Host) {
    does(&host, &["stop", "keeper"]);
    let run = host.finish();
    assert_eq!(run.status, 0, "{run:#?}");
}

/// A file beside a host.
fn file(host: &Host, name: &str, text: &str) -> PathBuf {
    let path = host.folder().join(name);
    fs::write(&path, text).expect("a file can be written there");
    path
}

/// What Debian runs: checks of its memory and its clocks, a step a second.
const CHECKS: &str = "\
dd if=/dev/urandom of=/tmp/data bs=1M count=24 2>/dev/null; md5sum /tmp/data >/tmp/sum; last=0; i=0
while [ $i -lt 16 ]; do
  md5sum -c /tmp/sum >/dev/null || echo failure of memory
  now=$(cut -d. -f1 /proc/uptime); [ $now -ge $last ] || echo failure of the clock; [ $now -le $((last + 20)) ] || \
[ $last = 0 ] || echo failure: a gap in the clock from $last to $now
  last=$now; i=$((i + 1)); echo step $i; sleep 1
done
dmesg -r | grep '^<[0-3]>'; dmesg | grep -iE 'lockup|stall|unstable|skew'
echo finished after $i steps";

each_machine! {
    fn measuring_guest_goes_on_in_another_host_with_its_own_checks_clean(machine) {
        let folder = tempfile::tempdir().expect("can be made");
        let saved = folder.path().join("guest.vm");
        // Halted, spinning and waiting vCPUs, their timers, IPIs on their way. On Arm also what the other host emulates
        // for a VM whose time stood still: the physical counter, and the physical timer.
        let (cmdline, experiments): (_, &[&str]) = match machine {
            Machine::X86_64 => ("experiments=mixed seconds=15 seed=3", &["mixed"]),
            Machine::Aarch64 => ("experiments=mixed,physical-timer seconds=15 seed=3", &["mixed", "physical-timer"]),
        };
        let first = Host::start_on(machine, 600, 2, &measuring_vm("guest", 4, cmdline), |_| Vec::new());
        shows(&first, "progress");
        let run = does(&first, &["save", "guest", text(&saved), "--json"]);
        let told = run.json();
        eprintln!("measuring guest, saved: {told}");
        assert!(told["memory_bytes"].as_u64() > Some(1 << 18), "{told}");
        // Its only VM has ended, and so has the host.
        let first = first.finish();
        assert!(first.status == 0 && first.stderr.contains("ended, saved"), "{first:#?}");
        is_clean(&first.stderr);

        let second = host(machine, "500M", &[]);
        let told = does(&second, &["restore", text(&saved), "--json"]).json();
        eprintln!("measuring guest, restored: {told}");
        for experiment in experiments {
            shows(&second, &format!("guest| result experiment={experiment} failures=0"));
        }
        is_clean(&second.said());
        ends(second);
    }

    fn copy_of_a_vm_that_stays_runs_beside_it(machine) {
        let host = host(machine, "500M", &[]);
        let vm = file(&host, "guest.toml", &measuring_vm("guest", 2, "experiments=mixed seconds=12 seed=4"));
        let saved = host.folder().join("guest.vm");
        does(&host, &["create", text(&vm), "--start"]);
        shows(&host, "guest| progress");
        does(&host, &["save", "guest", text(&saved), "--stay"]);
        let again = dunlin(&host, &["save", "guest", text(&saved)]);
        assert!(again.status == 2 && again.stderr.contains("--replace"), "{again:#?}");
        let taken = dunlin(&host, &["restore", text(&saved)]);
        assert!(taken.status == 2 && taken.stderr.contains("already has a VM 'guest'"), "{taken:#?}");
        does(&host, &["restore", text(&saved), "--name", "second"]);
        for name in ["guest", "second"] {
            shows(&host, &format!("{name}| result experiment=mixed failures=0"));
        }
        is_clean(&host.said());
        let names: Vec<_> =
            fs::read_dir(host.folder()).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
        assert!(!names.iter().any(|name| name.to_string_lossy().starts_with(".guest.vm")), "{names:?}");
        ends(host);
    }

    fn file_that_cannot_be_restored_is_refused_with_the_reason_and_leaves_nothing(machine) {
        let first = host(machine, "400M", &[]);
        let vm = file(&first, "guest.toml", &measuring_vm("guest", 1, "experiments=mixed seconds=1000"));
        let saved = first.folder().join("guest.vm");
        does(&first, &["create", text(&vm), "--start"]);
        shows(&first, "guest| progress");
        does(&first, &["save", "guest", text(&saved)]);
        let before = first.ask("host");
        let good = fs::read(&saved).expect("it was written");

        let bad = first.folder().join("bad.vm");
        let mut rng = fastrand::Rng::with_seed(7);
        let refused = |bytes: &[u8], reasons: &[&str]| {
            fs::write(&bad, bytes).expect("a file can be written there");
            let run = dunlin(&first, &["restore", text(&bad)]);
            assert!(run.status == 2 && reasons.iter().any(|why| run.stderr.contains(why)), "{reasons:?}: {run:#?}");
        };
        for _ in 0..20 {
            let mut bytes = good.clone();
            let at = rng.usize(20..bytes.len());
            bytes[at] ^= 1 << rng.u32(..8);
            refused(&bytes, &["it is damaged", "cut short"]);
            refused(&good[..rng.usize(..good.len())], &["cut short", "no saved VM"]);
        }
        let mut other = good.clone();
        other[8] = 99;
        refused(&other, &["version 99"]);
        refused(b"#!/bin/sh\n", &["no saved VM"]);
        let after = first.ask("host");
        for figure in ["vms", "alive_vms", "vcpus", "tags_owned"] {
            assert_eq!(after[figure], before[figure], "{figure}");
        }

        // The guest was told of more than this processor has.
        let (processor, lacks) = match machine {
            Machine::X86_64 => ("--qemu-arg=max,-adx", "lacks ADX"),
            Machine::Aarch64 => ("--qemu-arg=max,pauth=off", "lacks API (ID_AA64ISAR1_EL1)"),
        };
        let lesser = host(machine, "400M", &["--qemu-arg=-cpu", processor]);
        let _ = lesser.ask("list");
        let run = dunlin(&lesser, &["restore", text(&saved)]);
        assert!(run.status == 1 && run.stderr.contains(lacks), "{run:#?}");
        until("nothing is left of it", || (lesser.ask("host")["vms"] == 1).then_some(()));
        ends(lesser);

        // The good one still is one.
        does(&first, &["restore", text(&saved)]);
        does(&first, &["destroy", "guest"]);
        is_clean(&first.said());
        ends(first);
    }

    fn vm_goes_on_when_its_tool_is_killed(machine) {
        let host = host(machine, "400M", &[]);
        let vm = file(&host, "guest.toml", &measuring_vm("guest", 2, "experiments=mixed seconds=10 seed=6"));
        does(&host, &["create", text(&vm), "--start"]);
        shows(&host, "guest| progress");
        let (saved, said) = (host.folder().join("guest.vm"), host.folder().join("said"));
        let mut save = Command::new(tool())
            .args(["save", "guest", text(&saved), "--host", &host.pid().to_string()])
            .stderr(fs::File::create(&said).expect("a file can be written there"))
            .spawn()
            .expect("the tool can be started");
        // It stops when the VM stands still, and then it is no more.
        until("the VM stands still", || fs::read_to_string(&said).ok()?.contains("stands still").then_some(()));
        for signal in ["-STOP", "-KILL"] {
            let _ = finished(Command::new("kill").args([signal, &save.id().to_string()]));
        }
        let _ = save.wait();
        if saved.exists() {
            // The save was faster.
            does(&host, &["restore", text(&saved)]);
        }
        shows(&host, "guest| result experiment=mixed failures=0");
        // By the guest's clock it took the 10 s that it was told, without the 30 s for which it stood still.
        let said = host.said();
        let took = said.split("guest| result experiment=mixed failures=0 microseconds=").nth(1);
        let took = took.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        assert!(took.is_some_and(|took| took < 30_000_000), "{took:?}: {said}");
        is_clean(&host.said());
        ends(host);
    }

    fn vm_that_the_host_has_no_memory_for_is_refused_and_leaves_nothing(machine) {
        let first = host(machine, "600M", &[]);
        let vm = "[[vm]]\nname = \"guest\"\nvcpus = 1\nmemory = \"300M\"\nkernel = \"measuring-guest\"\n\
                  initrd = \"none\"\ncmdline = \"experiments=mixed seconds=1000\"\n";
        let vm = file(&first, "guest.toml", vm);
        let saved = first.folder().join("guest.vm");
        does(&first, &["create", text(&vm), "--start"]);
        shows(&first, "guest| progress");
        does(&first, &["save", "guest", text(&saved)]);

        let second = host(machine, "300M", &[]);
        let before = second.ask("host");
        for _ in 0..3 {
            let run = dunlin(&second, &["restore", text(&saved)]);
            assert!(run.status == 1 && run.stderr.contains("memory"), "{run:#?}");
        }
        let after = second.ask("host");
        for figure in ["vms", "alive_vms", "vcpus", "tags_owned", "memory_free_bytes"] {
            assert_eq!(after[figure], before[figure], "{figure}: {after}");
        }
        ends(second);
        does(&first, &["restore", text(&saved)]);
        does(&first, &["destroy", "guest"]);
        ends(first);
    }

    fn vm_goes_on_when_its_save_is_interrupted(machine) {
        let host = host(machine, "400M", &[]);
        let vm = file(&host, "guest.toml", &measuring_vm("guest", 2, "experiments=mixed seconds=10 seed=5"));
        does(&host, &["create", text(&vm), "--start"]);
        shows(&host, "guest| progress");
        // Nobody can write there.
        let run = dunlin(&host, &["save", "guest", "/proc/guest.vm"]);
        assert_eq!(run.status, 2, "{run:#?}");
        let saved = host.folder().join("guest.vm");
        let mut save = Command::new(tool())
            .args(["save", "guest", text(&saved), "--host", &host.pid().to_string()])
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("the tool can be started");
        std::thread::sleep(Duration::from_millis(300));
        let _ = finished(Command::new("kill").args(["-TERM", &save.id().to_string()]));
        let _ = save.wait();
        if saved.exists() {
            // The save was faster.
            does(&host, &["restore", text(&saved)]);
        }
        shows(&host, "guest| result experiment=mixed failures=0");
        is_clean(&host.said());
        ends(host);
    }

    fn debian_goes_on_in_another_host(machine) {
        let folder = tempfile::tempdir().expect("can be made");
        let saved = folder.path().join("debian.vm");
        let first = host(machine, "900M", &[]);
        let vm = "[[vm]]\nname = \"debian\"\nvcpus = 2\nmemory = \"400M\"\nkernel = \"debian-cloud\"\n";
        let vm = file(&first, "debian.toml", vm);
        does(&first, &["create", text(&vm), "--start", "--exec", CHECKS]);
        shows(&first, "debian| step 4\n");
        let told = does(&first, &["save", "debian", text(&saved), "--json"]).json();
        eprintln!("debian, saved: {told}");
        let said = first.said();
        is_clean(&said);
        assert!(!said.contains("debian| finished"), "{said}");
        ends(first);

        let second = host(machine, "900M", &[]);
        let _ = second.ask("list");
        let told = does(&second, &["restore", text(&saved), "--json"]).json();
        eprintln!("debian, restored: {told}");
        shows(&second, "finished after 16 steps");
        shows(&second, "vm \"debian\": ended, power off");
        is_clean(&second.said());
        ends(second);
    }
}

#[test]
fn file_of_another_architecture_is_refused_with_both_names() {
    let hosts = [Machine::X86_64, Machine::Aarch64].map(|machine| {
        let host = host(machine, "400M", &[]);
        let vm = file(&host, "guest.toml", &measuring_vm("guest", 1, "experiments=mixed seconds=1000"));
        let saved = host.folder().join("guest.vm");
        does(&host, &["create", text(&vm), "--start"]);
        shows(&host, "guest| progress");
        does(&host, &["save", "guest", text(&saved)]);
        (machine, host, saved)
    });
    for [(here, host, _), (there, _, saved)] in [[&hosts[0], &hosts[1]], [&hosts[1], &hosts[0]]] {
        let run = dunlin(host, &["restore", text(saved)]);
        let why = format!("its VM is for {}, and the host is {}", there.name(), here.name());
        assert!(run.status == 2 && run.stderr.contains(&why), "{run:#?}");
        assert_eq!(host.ask("host")["vms"], 1);
    }
    hosts.into_iter().for_each(|(_, host, _)| ends(host));
}
