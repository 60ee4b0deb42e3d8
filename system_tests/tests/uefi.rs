//! An Arm machine starts the hypervisor in three ways: UEFI alone, UEFI and GRUB from the image of `dunlin image`, and
//! QEMU without firmware. If the hypervisor cannot start, it prints the reason on the firmware's console.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use system_tests::{Machine, dunlin, finished, qemu, until};
use tempfile::TempDir;

/// The machine on which UEFI can start it.
const MACHINE: &str = "virt,gic-version=3,virtualization=on,acpi=off";
const CPU: &str = "max,pauth-impdef=on";

/// QEMU without firmware, with the serial line in this file.
fn qemu(machine: &str, cpu: &str, serial: &Path) -> Command {
    let mut command = qemu::of(Machine::Aarch64, 240);
    command
        .args(["-machine", machine, "-cpu", cpu, "-m", "1G", "-smp", "2"])
        .args(["-serial", &format!("file:{}", serial.display())]);
    command
}

/// Arguments for UEFI firmware.
fn uefi() -> [String; 2] {
    let firmware = Machine::Aarch64.assets().join("uefi.fd");
    assert!(firmware.is_file(), "{} is missing: run `cargo xtask test build` first", firmware.display());
    ["-bios".to_string(), firmware.display().to_string()]
}

fn folder() -> TempDir {
    TempDir::new().expect("a temporary folder can be made")
}

/// Arguments that present this image to the firmware as a USB stick.
fn stick(image: &Path) -> [String; 6] {
    let drive = format!("if=none,id=stick,format=raw,readonly=on,file={}", image.display());
    ["-drive", &drive, "-device", "qemu-xhci", "-device", "usb-storage,drive=stick"].map(str::to_string)
}

/// Starts the machine, and waits for the message that it cannot start, because of `why`. The firmware then continues,
/// and would try to boot something else.
fn refuses(machine: &str, arguments: &[String], why: &str) {
    let folder = folder();
    let serial = folder.path().join("serial.log");
    let mut firmware = qemu(machine, CPU, &serial)
        .args(uefi())
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU can be started");
    until(why, || {
        let log = String::from_utf8_lossy(&fs::read(&serial).ok()?).into_owned();
        log.contains(&format!("Dunlin cannot start: {why}")).then_some(())
    });
    // SIGTERM to `timeout`, which passes it on.
    let _ = finished(Command::new("kill").arg(firmware.id().to_string()));
    let _ = firmware.wait();
}

/// Arguments that make the firmware start the hypervisor as a kernel.
fn kernel(more: &[&str]) -> Vec<String> {
    let hypervisor = Machine::Aarch64.assets().join("hypervisor").display().to_string();
    ["-kernel", &hypervisor].iter().chain(more).map(|&word| word.to_string()).collect()
}

#[test]
fn without_a_payload_it_says_so() {
    refuses(MACHINE, &kernel(&[]), "no payload");
}

#[test]
fn without_a_device_tree_it_says_what_to_do() {
    let machine = MACHINE.replace(",acpi=off", "");
    refuses(&machine, &kernel(&["-initrd", "/etc/services"]), "the firmware describes the machine by ACPI");
}

#[test]
fn without_el2_it_says_so() {
    let machine = MACHINE.replace(",virtualization=on", "");
    refuses(&machine, &kernel(&["-initrd", "/etc/services"]), "the firmware runs at EL1");
}

/// Starts the machine, and returns its serial output until it powered off.
fn ends(cpu: &str, arguments: &[String]) -> String {
    let folder = folder();
    let serial = folder.path().join("serial.log");
    let run = finished(qemu(MACHINE, cpu, &serial).args(arguments));
    let log = fs::read(&serial).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    assert_eq!(run.status, 0, "{log}{run:?}");
    log
}

fn has_lines(log: &str, lines: &[&str]) {
    for line in lines {
        assert!(log.contains(line), "no '{line}' in {log}");
    }
}

#[test]
fn firmware_passes_options_and_payload_on_each_processor() {
    let payload = "not a Dunlin payload";
    for (cpu, options, line) in [
        (CPU, "log=info", payload),
        ("neoverse-n1", "log=info", payload),
        ("cortex-a57", "lgo=info", "unknown option \"lgo=info\""),
    ] {
        let arguments = kernel(&["-initrd", "/etc/services", "-append", options]);
        let log = ends(cpu, &[&uefi()[..], &arguments].concat());
        has_lines(&log, &["2 pCPUs", line]);
    }
}

/// Output of the default VM's guest, and the hypervisor's last line.
const WORK: [&str; 3] = ["CPUs online: 1", "Parallel job: 1 of 1 workers finished", "all VMs have ended"];

/// Runs the default VM on a machine with the newest processor and on one with an older processor.
fn runs_the_default_vm(arguments: &[String]) {
    for cpu in [CPU, "neoverse-n1"] {
        has_lines(&ends(cpu, arguments), &WORK);
    }
}

/// The image of the default VM.
fn image(folder: &Path) -> PathBuf {
    let image = folder.join("dunlin.iso");
    let arguments = ["image", "--arch", "aarch64", "--vcpus", "1", "-o", &image.to_string_lossy()];
    let _run = dunlin(&arguments).expect_status(0);
    image
}

/// Arguments that start the hypervisor with the payload of the image.
fn kernel_with_payload(folder: &Path) -> Vec<String> {
    let payload = folder.join("payload");
    let mut extract = Command::new("xorriso");
    extract.args(["-osirrox", "on", "-indev"]).arg(image(folder)).args(["-extract", "/boot/payload"]).arg(&payload);
    let _run = finished(&mut extract).expect_status(0);
    kernel(&["-initrd", &payload.to_string_lossy()])
}

#[test]
fn grub_runs_the_default_vm_on_each_processor() {
    let folder = folder();
    runs_the_default_vm(&[&uefi()[..], &stick(&image(folder.path()))].concat());
}

#[test]
fn firmware_alone_runs_the_default_vm_on_each_processor() {
    let folder = folder();
    runs_the_default_vm(&[&uefi()[..], &kernel_with_payload(folder.path())].concat());
}

#[test]
fn default_vm_runs_on_each_processor_without_firmware() {
    let folder = folder();
    runs_the_default_vm(&kernel_with_payload(folder.path()));
}
