//! Linux as a parent VM: it may create VMs of its own, by `/dev/mshv`.
//!
//! `cargo xtask parent-tests` builds the kernel, which takes long once, and runs these tests.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::{Host, Run, dunlin, dunlin_run_vms, finished, measuring_vm, tool, until};

/// Boots a parent, and runs `script` in it.
fn parent(vcpus: u32, script: &str) -> Run {
    dunlin_run_vms(240, &vm(vcpus), &["--exec", script]).expect_status(0)
}

fn vm(vcpus: u32) -> String {
    format!(
        "[[vm]]\nname = \"parent\"\nvcpus = {vcpus}\nmemory = \"1G\"\nkernel = \"parent\"\ninitrd = \"parent\"\n\
         role = \"parent\"\n"
    )
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn linux_finds_itself_to_be_a_parent_and_complains_of_nothing() {
    // One vCPU for each of the 2 pCPUs, more than that, and many more.
    for vcpus in [2, 4, 20] {
        let log = parent(vcpus, "dmesg -r; ls /dev/mshv; grep Reserved /proc/iomem").stdout;
        for line in ["Hyper-V: running as L1VH partition", "mshv: Hypervisor using core scheduler", "\n/dev/mshv\n"] {
            assert!(log.contains(line), "{vcpus} vCPUs, no '{line}': {log}");
        }
        let pages = format!("{:08x}-3fffffff : Reserved", 0x4000_0000 - vcpus * 0x2000);
        assert!(log.contains(&pages), "{vcpus} vCPUs, no '{pages}': {log}");
        let complaints: Vec<_> =
            log.lines().filter(|line| matches!(line.as_bytes(), [b'<', b'0'..=b'4', b'>', ..])).collect();
        assert!(complaints.is_empty(), "{vcpus} vCPUs: {complaints:#?}");
    }
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn parent_that_names_registers_of_devices_as_pages_of_its_own_harms_nobody() {
    // Assist, event, message and reference TSC page; an HPET, a local APIC, PCI's configuration, and the host's memory.
    let script = "for msr in 0x40000073 0x40000082 0x40000083 0x40000021; do \
         for page in '\\001\\000\\320\\376' '\\001\\000\\340\\376' '\\001\\000\\000\\260' '\\001\\000\\040\\000'; do \
         printf \"$page\"'\\000\\000\\000\\000' | dd of=/dev/cpu/0/msr bs=8 count=1 seek=$((msr)) oflag=seek_bytes status=none \
         && echo \"page of $msr\"; done; done; sleep 1; echo alive";
    let owner = vm(2) + "devices = \"all\"\n";
    let run = dunlin_run_vms(240, &owner, &["--exec", script]).expect_status(0).stdout;
    assert_eq!(run.matches("page of 0x").count(), 16, "{run}");
    assert!(run.contains("alive"), "{run}");
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn parent_with_the_machines_devices_keeps_no_pcpu_from_its_interrupts_by_its_largest_calls() {
    let run = dunlin(&["bench", "bounds", "--parent", "--json"]);
    assert_eq!(run.status, 0, "{run:#?}");
    let json = run.json();
    let measured = |work: &&str| {
        let longest = json["longest"].as_array().into_iter().flatten();
        longest.clone().find(|one| one["work"] == *work).and_then(|one| one["instructions"].as_u64())
    };
    let calls = [
        "create VP",
        "finalize partition",
        "deposit",
        "map pages",
        "get access states",
        "set property",
        "get registers",
        "set registers",
        "assert interrupt",
        "connect port",
    ];
    for call in calls {
        let most = measured(&&*format!("parent: {call}"));
        println!("{call}: {most:?}");
        assert!(most.is_some_and(|most| most <= 50_000), "{call}: {most:?}");
    }
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn guest_loses_nothing_while_a_cpu_of_its_parent_comes_and_goes() {
    // Messages and doorbells for the CPU that goes are heard by the other one. The disk waits for its doorbells, the
    // checks of memory make the guest exit to the driver, and its end waits for all of them.
    const CPU: &str = "/sys/devices/system/cpu/cpu1/online";
    let script = format!(
        "guest-q35 --smp 2 --time-limit 180 --checks disk,net,memory:3 & guest=$!; times=0; \
         while kill -0 $guest 2>/dev/null; do \
         echo 0 > {CPU}; sleep 2; echo 1 > {CPU}; sleep 0.3; times=$((times + 1)); \
         done; \
         wait $guest; echo \"ended with $?, $([ $times -gt 2 ] && echo many) times\"; dmesg -r | grep '^<[0-4]>'; true"
    );
    let output = parent(2, &script).stdout;
    assert!(output.contains("ended with 0, many times"), "{output}");
    assert!(!output.lines().any(|line| line.starts_with('<')), "{output}");
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn guest_of_a_parent_is_counted_shown_and_traced_under_its_parents_name_and_its_number() {
    // Its vCPU exits all the time, for a minute.
    let script = "timeout 60 mshv-check signal --rounds 1000000; true".to_string();
    let host = Host::start(240, 2, &vm(2), |_| vec!["--exec".to_string(), script]);
    let is_child = |vm: &&Value| vm["name"].as_str().is_some_and(|name| name.starts_with("parent/"));
    let child = until("a guest at work", || {
        let stats = host.ask("stats");
        let child = stats.as_array()?.iter().find(is_child)?.clone();
        child["total"]["entries"].as_u64().filter(|entries| *entries > 0).map(|_| child)
    });
    let name = child["name"].as_str().expect("has a name").to_string();
    assert_eq!((child["vcpus"].as_array().map(Vec::len), &child["state"]), (Some(1), &Value::from("running")));
    assert!(child["total"]["exits_total"].as_u64().is_some_and(|exits| exits > 0), "{child}");

    let pid = host.pid().to_string();
    let run = |words: &[&str]| finished(Command::new(tool()).args(words).args(["--host", &pid])).expect_status(0);
    let metrics = run(&["metrics", "--once"]).stdout;
    for metric in ["dunlin_vm_running", "dunlin_vcpu_entries_total"] {
        let has = |line: &str| line.starts_with(metric) && line.contains(&format!("vm=\"{name}\""));
        assert!(metrics.lines().any(has), "no {metric} of {name}: {metrics}");
    }
    let top = run(&["top", "--json", "--delay", "200ms", "--iterations", "2"]).stdout;
    assert!(top.contains(&format!("\"{name}\"")), "{top}");
    assert!(run(&["list"]).stdout.contains(&name));

    let file = host.folder().join("trace.json");
    run(&["trace", "--time", "500ms", "--output", &file.to_string_lossy()]);
    let trace = std::fs::read_to_string(&file).expect("was written");
    assert!(trace.contains(&format!("{name} vCPU 0")), "no run of {name} in the trace");
    host.end();
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn tools_inside_and_outside_of_a_parent_are_answered_beside_each_other_until_it_is_destroyed() {
    // The last one has the port open all the time, when the parent goes.
    let script = "until dunlin list | grep -q other; do sleep 0.1; done; \
                  for round in 1 2 3 4 5 6 7 8 9 10; do dunlin stats --json | grep -o '\"name\":\"[a-z]*\"'; done; \
                  echo counted; dunlin trace --time 4m --output /tmp/trace.json";
    let host = Host::start(240, 2, &vm(2), |_| vec!["--exec".to_string(), script.to_string()]);
    let _ = host.ask("stats");
    let pid = host.pid().to_string();
    let run = |words: &[&str]| finished(Command::new(tool()).args(words).args(["--host", &pid])).expect_status(0);
    // By itself the host would end with the parent.
    let other = host.folder().join("other.toml");
    let description = measuring_vm("other", 1, "experiments=mixed seconds=1000").replace("64M", "32M");
    std::fs::write(&other, description).expect("can be written");
    run(&["create", &other.to_string_lossy(), "--start"]);
    let names = |list: &Value| -> Vec<String> {
        let vms = list.as_array().into_iter().flatten();
        vms.filter_map(|vm| Some(vm["name"].as_str()?.to_string())).collect()
    };
    let mut asked = 0;
    until("the tool inside has counted", || {
        assert_eq!(names(&host.ask("list")), ["parent", "other"]);
        asked += 1;
        host.said().contains("counted").then_some(())
    });
    assert!(asked > 3, "{asked}");
    // A line of the other VM may come in the middle of one.
    let without_other = |line: &str| line.split_once("other| ").map_or(line, |(before, _)| before).to_string();
    let inside: String = host.said().split_inclusive('\n').map(without_other).collect();
    for name in ["parent", "other"] {
        assert_eq!(inside.matches(&format!("\"name\":\"{name}\"")).count(), 10, "{inside}");
    }

    std::thread::sleep(Duration::from_millis(500));
    run(&["destroy", "parent"]);
    assert_eq!(names(&host.ask("list")), ["other"]);
    host.end();
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn parent_with_the_machines_devices_reads_its_disks_and_networks_right_with_and_without_messages() {
    // A disk of random data behind three controllers, and a file of it over two network cards.
    const BYTES: usize = 32 << 20;
    let folder = tempfile::TempDir::new().expect("a temporary folder can be made");
    let content: Vec<u8> = {
        let mut random = fastrand::Rng::with_seed(19);
        std::iter::repeat_with(|| random.u8(..)).take(BYTES).collect()
    };
    let disk = folder.path().join("disk.img");
    std::fs::write(&disk, &content).expect("can be written");
    let disk = disk.display();
    let sum = finished(Command::new("md5sum").arg(format!("{disk}"))).expect_status(0).stdout;
    let sum = sum.split_whitespace().next().expect("a sum").to_string();

    let drive = |id: &str| format!("if=none,id={id},format=raw,file={disk},readonly=on,file.locking=off");
    // The network's server runs a program for each connection.
    let net = |id: &str, subnet: u8| {
        format!("user,id={id},net=10.0.{subnet}.0/24,guestfwd=tcp:10.0.{subnet}.100:80-cmd:cat {disk}")
    };
    let devices = [
        ("-drive", drive("one")),
        ("-device", "virtio-blk-pci,drive=one".to_string()),
        ("-drive", drive("two")),
        ("-device", "nvme,drive=two,serial=1".to_string()),
        ("-drive", drive("three")),
        ("-device", "ide-cd,drive=three,bus=ide.0".to_string()),
        ("-netdev", net("net1", 2)),
        ("-device", "virtio-net-pci,netdev=net1".to_string()),
        ("-netdev", net("net2", 3)),
        ("-device", "e1000e,netdev=net2".to_string()),
    ];
    let devices: Vec<String> = devices
        .iter()
        .flat_map(|(option, value)| [format!("--qemu-arg={option}"), format!("--qemu-arg={value}")])
        .collect();
    let script = format!(
        "ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip link set eth1 up; ip addr add 10.0.3.15/24 dev eth1; \
         for disk in vda nvme0n1 sr0; do echo \"$disk $(dd if=/dev/$disk bs=1M 2>/dev/null | md5sum)\"; done; \
         for net in 2 3; do echo \"net$net $(nc 10.0.$net.100 80 </dev/null | head -c {BYTES} | md5sum)\"; done; \
         cat /proc/interrupts; dmesg | grep -e 'nobody cared' -e timeout -e 'lost interrupt'; true"
    );
    let vm = vm(2) + "devices = \"all\"\n";
    for (append, kind) in [("", "PCI-MSI"), ("pci=nomsi", "fasteoi")] {
        let mut arguments = vec!["--exec", script.as_str(), "--append", append];
        arguments.extend(devices.iter().map(String::as_str));
        let said = dunlin_run_vms(240, &vm, &arguments).expect_status(0).stdout;
        for source in ["vda", "nvme0n1", "sr0", "net2", "net3"] {
            assert!(said.contains(&format!("{source} {sum}")), "{kind}, {source}, {sum}: {said}");
        }
        assert!(said.lines().any(|line| line.contains(kind) && line.contains("nvme")), "{kind}: {said}");
        for complaint in ["nobody cared", "timeout", "lost interrupt"] {
            assert!(!said.contains(complaint), "{kind}: {said}");
        }
    }
}
