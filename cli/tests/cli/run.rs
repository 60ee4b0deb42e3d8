//! Whole runs, the host played by the test.

use std::io::Write;
use std::process::Output;

use abi::control::{Answer, Command, Line, Message, Refusal, StopReason, VmEvent};
use abi::exit_code::{PANIC, REFUSED, qemu_status};
use abi::payload::{File, Payload};
use serde_json::Value;

use crate::rig::{Host, Rig, SECOND, after, is_alive, wait_for};

/// The whole run: `words` for the tool, `script` for the host.
fn run(rig: &Rig, words: &[&str], script: impl FnOnce(&mut Host) + Send + 'static) -> Output {
    let host = rig.play(script);
    let output = rig.run(words).output().expect("runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    host.join().unwrap_or_else(|_| panic!("the host was upset; the tool said {errors}"));
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn command_runs_in_the_guest_and_its_output_and_status_are_ours() {
    let rig = Rig::new();
    let output = run(&rig, &["--exec", "echo 'hi'; exit 3"], |host| {
        let vm = &host.manifest.vms[0];
        let initrd = vm.initrd.as_ref().and_then(File::blob).expect("has one");
        let initrd = Payload::read(&host.payload).expect("is one").blob(initrd).to_vec();
        let script = b"#!/bin/sh\necho 'hi'; exit 3\n";
        assert!(initrd.starts_with(b"compressed\x00\x00070701"));
        assert!(initrd.windows(script.len()).any(|part| part == script));

        host.up();
        host.agent(0, b"hi\nraw \0 byte\n");
        host.line(0, Line::Agent, b"\0ex");
        host.line(0, Line::Agent, b"it=3\n");
        host.stop(0, StopReason::PowerOff, "vCPU 0 wrote PM1a");
        host.serve();
    });
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert_eq!(output.stdout, b"hi\nraw \0 byte\n");
    let errors = text(&output.stderr);
    for part in [
        "host: QEMU 7.2.22",
        "hypervisor 0.1.0: 2 pCPUs, 600 MiB",
        "vm \"default\": started, 4 vCPUs, 512 MiB",
        "vm \"default\": Linux 6.1.0-test, 4 CPUs online, user space reached, 2.50 s after its start",
        "vm \"default\": ended, power off: vCPU 0 wrote PM1a",
    ] {
        assert!(errors.contains(part), "{part:?} is missing in {errors}");
    }
}

#[test]
fn run_without_terminal_prints_a_summary() {
    let output = run(&Rig::new(), &[], |host| {
        assert_eq!(after(&host.arguments, "-smp"), "3");
        assert_eq!(after(&host.arguments, "-append"), "log=info");
        let vm = &host.manifest.vms[0];
        assert_eq!((vm.name.as_str(), vm.vcpus, vm.memory_bytes), ("default", 4, 512 << 20));
        assert_eq!(vm.cmdline, "console=ttyS0 quiet");
        host.up();
        host.agent(0, b"Linux guest\n\0exit=0\n");
        host.stop(0, StopReason::PowerOff, "");
        host.serve();
    });
    let summary = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{summary}{}", text(&output.stderr));
    for part in [
        "Linux guest\n",
        "vm \"default\": 4 vCPUs, Linux 6.1.0-test, 4 CPUs online\n",
        "2.50 s from its start to user space, after 0.50 s of creation",
        "exits  4,000 (io_exits 3,600, halt_exits 400)",
        "guest 75.0 %, host 12.5 %, waiting for a pCPU 12.5 %",
        "end    power off",
    ] {
        assert!(summary.contains(part), "{part:?} is missing in {summary}");
    }
}

#[test]
fn json_is_one_object_and_all_there_is_on_standard_output() {
    let rig = Rig::new();
    let output = run(&rig, &["--json", "--exec", "true", "--vcpus", "33"], |host| {
        host.up();
        host.agent(0, b"out\n\0exit=7\n");
        host.stop(0, StopReason::PowerOff, "");
        host.serve();
    });
    assert_eq!(output.status.code(), Some(7));
    let json: Value = serde_json::from_slice(&output.stdout).expect("is one object");
    let vm = &json["vms"][0];
    assert_eq!(json["status"], 7);
    assert_eq!(json["host"]["tsc_hz"], SECOND);
    assert_eq!((&vm["kernel"], &vm["cpus_online"]), (&"6.1.0-test".into(), &4.into()));
    assert_eq!((&vm["boot_seconds"], &vm["exit_status"], &vm["output"]), (&2.5.into(), &7.into(), &"out\n".into()));
    assert_eq!(vm["counters"]["exits"]["io_exits"], 33 * 900);
    assert_eq!(vm["vcpu_counters"].as_array().map(Vec::len), Some(33));
    assert_eq!(vm["vcpu_counters"][32]["guest_seconds"], 3.0);
}

#[test]
fn counters_that_went_with_the_machine_were_asked_for_before() {
    let output = run(&Rig::new(), &[], |host| {
        host.up();
        host.agent(0, b"\0exit=0\n");
        let asked = host.next().expect("asks for counters");
        assert_eq!(asked.command, Command::Stats { vm: 0, first: 0 });
        host.answer(asked);
        host.stop(0, StopReason::PowerOff, "");
        let asked = host.next().expect("asks again");
        host.say(&Message::Reply { id: asked.id, result: Err(Refusal::NotRunning) });
        host.serve();
    });
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("exits  4,000"), "{}", text(&output.stdout));
}

#[test]
fn machine_that_dies_before_its_command_ends_is_a_failure_that_says_why() {
    let output = run(&Rig::new(), &["--exec", "true"], |host| {
        host.up();
        host.agent(0, b"half\n\0exit");
        host.line(0, Line::Console, b"Kernel panic - not syncing\r\n");
        host.stop(0, StopReason::TripleFault, "vCPU 2 at rip 0x1000");
        host.serve();
    });
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stdout, b"half\n\0exit");
    let errors = text(&output.stderr);
    assert!(
        errors.contains("vm \"default\" ended before its command had finished: triple fault: vCPU 2 at rip 0x1000"),
        "{errors}"
    );
    assert!(errors.contains("    Kernel panic - not syncing"), "{errors}");
}

#[test]
fn of_two_machines_one_may_fail_and_the_other_is_told_of_all_the_same() {
    let rig = Rig::new();
    rig.write("two.toml", b"[[vm]]\nname = \"left\"\n[[vm]]\nname = \"right\"\n");
    let output = run(&rig, &["two.toml"], |host| {
        let [left, right] = &host.manifest.vms[..] else { panic!("there are two") };
        assert_eq!((&left.kernel, &left.initrd), (&right.kernel, &right.initrd), "equal files are packed once");
        host.up();
        host.event(0, 1, VmEvent::Creating);
        host.event(0, 2, VmEvent::Failed("no memory left".to_string()));
        host.agent(1, b"one\ntwo");
        host.line(1, Line::Agent, b"\n\0exit=0\n");
        host.stop(1, StopReason::PowerOff, "");
        host.serve();
    });
    assert_eq!(output.status.code(), Some(1));
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(out.contains("right| one\nright| two\n"), "{out}");
    assert!(out.contains("vm \"right\": 1 vCPUs, Linux 6.1.0-test") && out.contains("exits  1,000"), "{out}");
    assert!(errors.contains("vm \"left\" could not be created: no memory left"), "{errors}");
}

#[test]
fn machine_with_an_initrd_of_its_own_has_its_console_copied() {
    let rig = Rig::new();
    for (reason, status) in [(StopReason::PowerOff, 0), (StopReason::TripleFault, 1)] {
        let _ = std::fs::remove_file(rig.path("arguments"));
        let output = run(&rig, &["--initrd", "none"], move |host| {
            assert_eq!(host.manifest.vms[0].initrd, None);
            host.up();
            host.start(0);
            host.line(0, Line::Console, b"hello\r\n");
            host.stop(0, reason, "");
            host.serve();
        });
        assert_eq!(output.status.code(), Some(status));
        assert!(text(&output.stdout).starts_with("hello\r\n"));
    }
}

#[test]
fn hypervisor_that_panics_or_refuses_leaves_its_last_words_and_its_log() {
    for (code, says) in [(PANIC, "the hypervisor panicked"), (REFUSED, "the hypervisor refused to start")] {
        let output = run(&Rig::new(), &[], move |host| {
            host.log("first\r\npanic at svm.rs:1 on pCPU 1\r\n");
            host.end(qemu_status(code));
        });
        assert_eq!(output.status.code(), Some(1));
        let errors = text(&output.stderr);
        assert!(errors.contains(&format!("{says}:\n    first\n    panic at svm.rs:1 on pCPU 1")), "{errors}");
        assert!(errors.contains("The hypervisor's log: "), "{errors}");
        assert!(!errors.contains("still running"), "{errors}");
    }
}

#[test]
fn log_is_shown_as_it_comes_and_kept_after_a_failure() {
    let rig = Rig::new();
    let output = run(&rig, &["--log"], |host| {
        host.log("[0.000 pcpu 0] here I am\r\n");
        host.up();
        host.end(0);
    });
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.contains("\n[0.000 pcpu 0] here I am\n"), "{errors}");
    assert!(errors.contains("the host was reset"), "{errors}");
    let kept = std::fs::read_dir(rig.path(""))
        .expect("is there")
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with("dunlin-run-"))
        .expect("is kept");
    assert!(kept.path().join("hypervisor.log").exists());
    assert!(!kept.path().join("payload").exists());
}

#[test]
fn qemu_that_fails_is_quoted() {
    let rig = Rig::new();
    rig.write("complaint", b"qemu: could not do that\n");
    let output = run(&rig, &[], |host| host.end(1));
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.contains("QEMU ended with status 1:\n    qemu: could not do that"), "{errors}");
}

#[test]
fn good_run_leaves_nothing_behind() {
    let rig = Rig::new();
    let output = run(&rig, &[], |host| {
        host.up();
        host.agent(0, b"\0exit=0\n");
        host.stop(0, StopReason::PowerOff, "");
        host.serve();
    });
    assert_eq!(output.status.code(), Some(0));
    let left: Vec<_> =
        std::fs::read_dir(rig.path("")).expect("is there").flatten().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("dunlin-run-")), "{left:?}");
    assert_eq!(std::fs::read_dir(rig.path("dunlin")).expect("is there").count(), 0);
}

#[test]
fn time_limit_ends_the_run_and_qemu() {
    let rig = Rig::new();
    let output = run(&rig, &["--time-limit", "500ms"], |host| {
        host.up();
        host.start(0);
        host.line(0, Line::Console, b"last words of the kernel");
        while host.next().is_some() {}
    });
    assert_eq!(output.status.code(), Some(124));
    let errors = text(&output.stderr);
    assert!(
        errors.contains("the time limit of 0.5 s ended the run; vm \"default\" had not reached user space"),
        "{errors}"
    );
    assert!(errors.contains("last words of the kernel"), "{errors}");
    assert!(!is_alive(rig.qemu_pid()));
}

#[test]
fn qemu_does_not_outlive_the_tool_whatever_ends_it() {
    for (signal, status) in [("TERM", Some(143)), ("INT", Some(130)), ("KILL", None)] {
        let rig = Rig::new();
        let host = rig.play(|host| {
            host.up();
            while host.next().is_some() {}
        });
        let mut tool = rig.run(&[]).spawn().expect("runs");
        rig.wait_for_connection();
        let pid = rig.qemu_pid();
        assert!(is_alive(pid));
        let killed = std::process::Command::new("kill").args(["-s", signal, &tool.id().to_string()]).status();
        assert!(killed.expect("is installed").success());
        assert_eq!(tool.wait().expect("is ours").code(), status, "SIG{signal}");
        assert!(wait_for(|| (!is_alive(pid)).then_some(())).is_some(), "QEMU outlived SIG{signal}");
        host.join().expect("was not upset");
    }
}

#[test]
fn nonsense_from_the_hypervisor_is_reported_and_harmless() {
    let output = run(&Rig::new(), &[], |host| {
        host.up();
        let mut noise: Vec<u8> = (0..40_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
        noise.push(0);
        host.stream.write_all(&noise).expect("is read");
        host.line(77, Line::Agent, b"hello from nowhere\n");
        host.event(u32::MAX, u64::MAX, VmEvent::Started);
        host.say(&Message::Reply { id: 12345, result: Ok(Answer::Accepted(u32::MAX)) });
        host.event(0, u64::MAX, VmEvent::Creating);
        host.event(0, 0, VmEvent::Started);
        host.line(0, Line::Agent, b"hello kernel=\x1b[2J cpus=99999999999 uptime=x\n\0exit=0\n");
        let asked = host.next().expect("asks for counters");
        let vcpus = vec![abi::counters::VcpuCounters { exits: [u64::MAX; 15], ..Default::default() }; 16];
        let answer = Answer::Stats { vm: 9, first: u32::MAX, at_ns: 0, vcpus: vcpus.clone() };
        host.say(&Message::Reply { id: asked.id, result: Ok(answer) });
        let answer = Answer::Stats { vm: 0, first: 0, at_ns: 0, vcpus };
        host.stop(0, StopReason::PowerOff, "\x1b[2Jdetail");
        let asked = host.next().expect("asks again");
        host.say(&Message::Reply { id: asked.id, result: Ok(answer) });
        host.stop(0, StopReason::TripleFault, "again");
        host.serve();
    });
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert!(errors.contains("invalid frame from the hypervisor: "), "{errors}");
    // Output of the guest is passed on as it is; what we say ourselves cannot move the cursor.
    assert!(!errors.contains('\u{1b}'), "{errors}");
    assert!(out.contains("exits  18,446,744,073,709,551,615"), "{out}");
}

#[test]
fn hypervisor_of_another_version_is_named() {
    let output = run(&Rig::new(), &["--time-limit", "5s"], |host| {
        let plain = [99, 1, 2, 3];
        let sum = crc_of(&plain);
        let mut frame = cobs::encode_vec(&[&plain[..], &sum].concat());
        frame.push(0);
        host.stream.write_all(&frame).expect("is read");
        host.end(qemu_status(REFUSED));
    });
    assert!(text(&output.stderr).contains("protocol version 99, expected"), "{}", text(&output.stderr));
}

fn crc_of(bytes: &[u8]) -> [u8; 4] {
    crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC).checksum(bytes).to_le_bytes()
}

#[test]
fn dry_run_prints_the_line_and_starts_nothing() {
    let rig = Rig::new();
    let words = ["--dry-run", "--pcpus", "3", "--qemu-arg=-icount", "--qemu-arg=shift=0,sleep=off"];
    let output = rig.run(&words).output().expect("runs");
    let line = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for part in [
        "-machine q35 ",
        "-smp 4 ",
        "-cpu max ",
        "-device isa-debug-exit,iobase=0xf4,iosize=4 ",
        "-device virtio-serial-pci,max_ports=2 ",
        "-append log=info ",
        "-icount shift=0,sleep=off\n",
    ] {
        assert!(line.contains(part), "{part:?} is missing in {line}");
    }
    assert!(!rig.path("arguments").exists());
}

#[test]
fn payload_for_a_boot_loader_has_the_names_of_modules_and_the_bytes_of_files() {
    let rig = Rig::new();
    rig.write(
        "vms.toml",
        b"[[vm]]\nname = \"a\"\nkernel = \"module\"\ninitrd = \"module:a.img\"\ncmdline = \"quiet\"\n\
          [[vm]]\nname = \"b\"\ninitrd = \"module:b.img\"\n[[vm]]\nname = \"c\"\nkernel = \"module:k\"\n",
    );
    let written = || rig.dunlin(&["payload", "vms.toml", "-o", "made"]).output().expect("runs");
    let output = written();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let bytes = std::fs::read(rig.path("made")).expect("was written");
    let payload = Payload::read(&bytes).expect("is one");
    assert!(payload.manifest.exit_when_idle);
    let module = |name: &str| File::Module(name.to_string());
    let [a, b, c] = &payload.manifest.vms[..] else { panic!("there are three") };
    assert_eq!((&a.kernel, &a.initrd, a.cmdline.as_str()), (&module("kernel"), &Some(module("a.img")), "quiet"));
    assert_eq!(b.kernel.blob().map(|blob| payload.blob(blob)), Some(&crate::rig::kernel()[..]));
    assert_eq!((&b.initrd, &c.kernel), (&Some(module("b.img")), &module("k")));
    let initrd = c.initrd.as_ref().and_then(File::blob).map(|blob| payload.blob(blob));
    assert!(initrd.is_some_and(|bytes| bytes.starts_with(b"compressed")), "ours");
    assert!(c.cmdline.ends_with("dunlin.agent=ttyS0"), "{}", c.cmdline);

    // What is there stays as it is when the new file cannot be made.
    rig.write("vms.toml", b"[[vm]]\nname = \"a\"\nkernel = \"nowhere\"\n");
    assert_eq!(written().status.code(), Some(2));
    assert_eq!(std::fs::read(rig.path("made")).expect("is there"), bytes);
    let nowhere = rig.dunlin(&["payload", "vms.toml", "--arch", "x86_64", "-o", "no/folder/made"]).output();
    assert_ne!(nowhere.expect("runs").status.code(), Some(0));
}
