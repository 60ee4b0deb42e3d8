//! GRUB starts the hypervisor from the image of `dunlin image`, by BIOS and by UEFI, as a CD and as a USB disk. The
//! hypervisor prints an error if GRUB passes no payload, or too much.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use abi::exit_code::{REFUSED, qemu_status};
use system_tests::line::SerialLine;
use system_tests::monitor::Monitor;
use system_tests::{Machine, assets, dunlin, finished, measuring_vm, qemu, until};
use tempfile::TempDir;

/// Debian's UEFI for QEMU: its code, and the variables that it changes.
const UEFI: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];

/// How the PC finds the image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Medium {
    Cd,
    UsbDisk,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Firmware {
    Bios,
    Uefi,
}

/// Starts a PC from `image`, waits until it powers off, and returns QEMU's status and the serial output.
fn start(folder: &Path, image: &Path, firmware: Firmware, medium: Medium, more: &[&str]) -> (i32, String) {
    let serial = folder.join("serial.log");
    let mut command = qemu::able(Machine::X86_64, 300);
    command.args(["-serial", &format!("file:{}", serial.display())]).args(more);
    match medium {
        Medium::Cd => command.arg("-cdrom").arg(image),
        Medium::UsbDisk => command
            .args(["-drive", &format!("if=none,id=stick,format=raw,readonly=on,file={}", image.display())])
            .args(["-device", "qemu-xhci", "-device", "usb-storage,drive=stick"]),
    };
    if firmware == Firmware::Uefi {
        // The firmware stores how it started the last time, so each start gets a fresh copy.
        let variables = folder.join("variables.fd");
        fs::copy(UEFI[1], &variables).expect("UEFI's variables are there: `cargo xtask test system` installs them");
        command
            .args(["-drive", &format!("if=pflash,format=raw,readonly=on,file={}", UEFI[0])])
            .args(["-drive", &format!("if=pflash,format=raw,file={}", variables.display())]);
    }
    let run = finished(&mut command);
    let log = fs::read(&serial).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    (run.status, log)
}

fn folder() -> TempDir {
    TempDir::new().expect("a temporary folder can be made")
}

/// The image of the default VM starts, its guest does its work, and the machine powers off.
fn runs_the_default_vm(firmware: Firmware, medium: Medium, more: &[&str]) {
    let folder = folder();
    let image = folder.path().join("dunlin.iso");
    let _run = dunlin(&["image", "--vcpus", "2", "-o", &image.to_string_lossy()]).expect_status(0);
    let (status, log) = start(folder.path(), &image, firmware, medium, more);
    for line in ["CPUs online: 2", "Parallel job: 2 of 2 workers finished", "all VMs have ended"] {
        assert!(log.contains(line), "no '{line}' in {log}");
    }
    assert_eq!(status, 0, "the machine turns itself off by ACPI: {log}");
}

#[test]
fn image_starts_from_bios_as_a_cd() {
    runs_the_default_vm(Firmware::Bios, Medium::Cd, &["-smp", "2", "-m", "1G"]);
}

#[test]
fn image_starts_from_bios_as_a_usb_disk_with_eight_cpus_and_memory_above_4_gib() {
    runs_the_default_vm(Firmware::Bios, Medium::UsbDisk, &["-smp", "8", "-m", "6G"]);
}

#[test]
fn image_starts_from_uefi_as_a_cd_with_one_cpu() {
    runs_the_default_vm(Firmware::Uefi, Medium::Cd, &["-smp", "1", "-m", "1G"]);
}

#[test]
fn image_starts_from_uefi_as_a_usb_disk() {
    runs_the_default_vm(Firmware::Uefi, Medium::UsbDisk, &["-smp", "2", "-m", "1G"]);
}

#[test]
fn run_by_firmware_and_grub_is_a_run_like_any_other() {
    let run = dunlin(&["run", "--firmware", "bios", "--accel=tcg", "--vcpus", "2", "--exec", "nproc"]).expect_status(0);
    assert_eq!(run.stdout.trim(), "2", "{run:#?}");
    let refused = dunlin(&["run", "--arch", "aarch64", "--firmware", "bios"]);
    assert!(refused.status != 0 && refused.stderr.contains("--firmware is for x86_64 only"), "{refused:#?}");
}

/// An image of our own with these files and lines of GRUB's configuration.
fn image_of(folder: &Path, files: &[(&str, &[u8])], lines: &str) -> PathBuf {
    let boot = folder.join("tree/boot");
    fs::create_dir_all(boot.join("grub")).expect("folders can be made");
    fs::copy(assets().join("hypervisor"), boot.join("dunlin"))
        .expect("the hypervisor is built: run `make build` first");
    for (name, bytes) in files {
        fs::write(boot.join(name), bytes).expect("a file can be written");
    }
    let menu = format!("set timeout=0\nmenuentry x {{\n{lines}\n}}\n");
    fs::write(boot.join("grub/grub.cfg"), menu).expect("a file can be written");
    let image = folder.join("own.iso");
    let _run = finished(Command::new("grub-mkrescue").arg("-o").arg(&image).arg(folder.join("tree"))).expect_status(0);
    image
}

/// The hypervisor prints why it does not start, and ends with a status of its own.
fn refuses(files: &[(&str, &[u8])], lines: &str, more: &[&str], why: &str) {
    let folder = folder();
    let image = image_of(folder.path(), files, lines);
    let all = [&["-smp", "2", "-m", "256M"], &qemu::DEBUG_EXIT[..], more].concat();
    let (status, log) = start(folder.path(), &image, Firmware::Bios, Medium::Cd, &all);
    assert!(log.contains(why), "no '{why}' in {log}");
    assert_eq!(status, qemu_status(REFUSED), "{log}");
}

#[test]
fn without_a_payload_it_says_so() {
    refuses(&[], "multiboot2 /boot/dunlin", &[], "cannot start: no boot module");
}

#[test]
fn of_two_modules_one_must_be_called_payload() {
    let lines = "multiboot2 /boot/dunlin\nmodule2 /boot/a\nmodule2 /boot/b";
    refuses(&[("a", b"a"), ("b", b"b")], lines, &[], "cannot start: several boot modules");
}

#[test]
fn damaged_payload_is_refused() {
    let lines = "multiboot2 /boot/dunlin\nmodule2 /boot/payload payload";
    let mut bytes = b"DUNLINPL".to_vec();
    bytes.resize(9000, 0xa5);
    refuses(&[("payload", &bytes)], lines, &[], "cannot start: ");
    refuses(&[("payload", &bytes[..20])], lines, &[], "cannot start: ");
}

#[test]
fn option_in_grubs_line_is_the_hypervisors() {
    let lines = "multiboot2 /boot/dunlin log=debug selftest=unknown";
    refuses(&[], lines, &[], "unknown value \"unknown\" of selftest=");
}

/// VMs whose files are boot modules. All but the first are wrong.
const VMS_OF_MODULES: &str = "\
[[vm]]
name = \"installed\"
memory = \"208M\"
kernel = \"module\"
initrd = \"module\"
cmdline = \"console=ttyS0 quiet dunlin.agent=ttyS0\"

[[vm]]
name = \"without\"
memory = \"16M\"
kernel = \"module:absent\"
initrd = \"none\"

[[vm]]
name = \"doubtful\"
memory = \"16M\"
kernel = \"module\"
initrd = \"module:twice\"

[[vm]]
name = \"odd\"
memory = \"16M\"
kernel = \"module:text\"
initrd = \"none\"
";

/// A file for an initrd of Debian: a script to run.
fn script(folder: &Path, text: &str) -> Vec<u8> {
    let tree = folder.join("initrd");
    fs::create_dir_all(tree.join("dunlin")).expect("folders can be made");
    fs::write(tree.join("dunlin/exec"), text).expect("a file can be written");
    let mut pack = Command::new(assets().join("busybox"));
    pack.args(["sh", "-c", "\"$0\" find dunlin | \"$0\" cpio -o -H newc"]).arg(assets().join("busybox"));
    let packed = pack.current_dir(tree).output().expect("busybox is there: run `make build` first");
    assert!(packed.status.success() && !packed.stdout.is_empty(), "{packed:?}");
    packed.stdout
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Debian's kernel, and an initrd that runs this script.
fn debian(folder: &Path, text: &str) -> (Vec<u8>, Vec<u8>) {
    let mut initrd = read(&assets().join("initrd.cpio.gz"));
    // Archives follow each other at multiples of four bytes.
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    initrd.extend(script(folder, text));
    (read(&assets().join("vmlinuz-cloud")), initrd)
}

/// GRUB loads a VM's kernel and initrd as modules. The machine has room for the VM only when the memory of a module
/// that nobody needs is free again.
fn vm_runs_from_modules(firmware: Firmware) {
    let folder = folder();
    let [file, payload] = ["vms.toml", "payload"].map(|name| folder.path().join(name));
    fs::write(&file, VMS_OF_MODULES).expect("a file can be written");
    let _run = dunlin(&["payload", &file.to_string_lossy(), "-o", &payload.to_string_lossy()]).expect_status(0);
    let (kernel, initrd) = debian(folder.path(), "cat /proc/cmdline\n");
    let files: [(&str, &[u8]); 5] = [
        ("payload", &read(&payload)),
        ("vmlinuz", &kernel),
        ("initrd", &initrd),
        ("unused", &vec![0x5a; 96 << 20]),
        ("text", b"This is not a kernel."),
    ];
    let lines = "multiboot2 /boot/dunlin log=info\nmodule2 /boot/unused microcode\nmodule2 /boot/payload payload\n\
                 module2 /boot/vmlinuz kernel word=of-grub ro\nmodule2 --nounzip /boot/initrd initrd odd\n\
                 module2 /boot/text text\nmodule2 /boot/text twice\nmodule2 /boot/text twice";
    let image = image_of(folder.path(), &files, lines);
    let (status, log) = start(folder.path(), &image, firmware, Medium::Cd, &["-smp", "2", "-m", "320M"]);
    for line in [
        "the boot module 'microcode' is not used",
        "installed: 'odd' after the initrd's name is not used",
        "console=ttyS0 quiet dunlin.agent=ttyS0 word=of-grub ro",
        "without: kernel: no boot module is called 'absent'",
        "doubtful: initrd: several boot modules are called 'twice'",
        "odd: not a kernel: 21 bytes that start with 54 68 69 73",
        "exit=0",
        "all VMs have ended",
    ] {
        assert!(log.contains(line), "no '{line}' in {log}");
    }
    assert_eq!(status, 0, "the machine turns itself off by ACPI: {log}");
}

#[test]
fn vm_gets_kernel_and_initrd_from_modules_of_grub_by_bios() {
    vm_runs_from_modules(Firmware::Bios);
}

#[test]
fn vm_gets_kernel_and_initrd_from_modules_of_grub_by_uefi() {
    vm_runs_from_modules(Firmware::Uefi);
}

/// A VM with the machine's devices.
const OWNER: &str = "\
[[vm]]
name = \"owner\"
memory = \"400M\"
kernel = \"module\"
initrd = \"module\"
devices = \"all\"
cmdline = \"console=ttyS0 dunlin.agent=ttyS0\"
";

#[test]
fn vm_with_the_devices_calls_the_services_of_uefi() {
    const SCRIPT: &str = "cat /sys/class/dmi/id/sys_vendor /sys/firmware/efi/fw_platform_size\n\
        echo \"pieces: $(ls /sys/firmware/efi/runtime-map | wc -l)\"; test -e /sys/firmware/efi/runtime && echo there\n";
    let folder = folder();
    let [file, payload] = ["vms.toml", "payload"].map(|name| folder.path().join(name));
    fs::write(&file, OWNER).expect("a file can be written");
    let _run = dunlin(&["payload", &file.to_string_lossy(), "-o", &payload.to_string_lossy()]).expect_status(0);
    let (kernel, initrd) = debian(folder.path(), SCRIPT);
    let files: [(&str, &[u8]); 3] = [("payload", &read(&payload)), ("vmlinuz", &kernel), ("initrd", &initrd)];
    let lines = "multiboot2 /boot/dunlin log=info\nmodule2 /boot/payload payload\nmodule2 /boot/vmlinuz kernel\n\
                 module2 --nounzip /boot/initrd initrd";
    let image = image_of(folder.path(), &files, lines);
    let machine = ["-machine", "q35", "-smp", "2", "-m", "1G"];
    let (status, log) = start(folder.path(), &image, Firmware::Uefi, Medium::Cd, &machine);
    for line in [
        "owner: it has UEFI's runtime services",
        "efi: EFI v2",
        "SMBIOS=0x",
        // After the first call, which tells the firmware its new addresses.
        "Registered efivars operations",
        "QEMU",
        "there",
        "exit=0",
        "turned the machine off",
    ] {
        assert!(log.contains(line), "no '{line}' in {log}");
    }
    assert!(!log.contains("Unable to switch EFI") && !log.contains("[Firmware Bug]"), "{log}");
    let pieces = log.split("pieces: ").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse::<u32>().ok());
    assert!(pieces.is_some_and(|count| count > 1), "{log}");
    assert_eq!(status, 0, "the machine turns itself off by ACPI: {log}");
}

#[test]
fn file_that_only_grub_can_load_is_refused_by_what_needs_the_file() {
    let folder = folder();
    let file = folder.path().join("vms.toml").to_string_lossy().into_owned();
    fs::write(&file, VMS_OF_MODULES).expect("a file can be written");
    for arguments in [&["run", &file][..], &["image", &file, "-o", "/dev/null"]] {
        let run = dunlin(arguments).expect_status(2);
        assert!(run.stderr.contains("vms.toml:4: key 'kernel': there is no boot module 'kernel' here"), "{run:#?}");
        assert!(run.stderr.contains("'dunlin payload'"), "{run:#?}");
    }
}

/// Height of a character on the screen, in pixels.
const CELL_HEIGHT: usize = 16;

/// The screen of a machine that GRUB has started with these lines, at its end after it printed `why`: the log, and a
/// flag for each text row that has any. Also saved as `DUNLIN_SCREENS/{name}.ppm`, if that is set.
fn screen(lines: &str, files: &[(&str, &[u8])], why: &str, name: &str) -> (String, Vec<bool>) {
    let folder = folder();
    let image = image_of(folder.path(), files, &format!("insmod all_video\n{lines}"));
    let serial = folder.path().join("serial.log");
    // Without the debug exit: the machine stops, and its screen can be read.
    let mut qemu = qemu::able(Machine::X86_64, 60)
        .args(["-smp", "2", "-m", "256M", "-vga", "std"])
        .args(["-serial", &format!("file:{}", serial.display())])
        .args(Monitor::qemu_arguments(folder.path()))
        .arg("-cdrom")
        .arg(image)
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU can be started");
    let log = until("the reason for the refusal", || {
        let log = String::from_utf8_lossy(&fs::read(&serial).ok()?).into_owned();
        log.contains(why).then_some(log)
    });
    let rows = rows_of_text(folder.path(), name);
    let _ = qemu.wait();
    (log, rows)
}

/// Ends the QEMU whose monitor is in `folder`. Returns a flag for each row of characters on its screen: whether it has
/// text.
fn rows_of_text(folder: &Path, name: &str) -> Vec<bool> {
    let picture = folder.join("screen.ppm");
    let mut monitor = Monitor::attach(folder);
    let said = monitor.say(&format!("screendump {}", picture.display()));
    monitor.quit();
    if let Some(screens) = std::env::var_os("DUNLIN_SCREENS") {
        let kept = Path::new(&screens).join(format!("{name}.ppm"));
        fs::copy(&picture, kept).expect("a picture can be kept there");
    }

    // A header of three lines (format, size, largest value), then three bytes for each pixel.
    let bytes = fs::read(&picture).unwrap_or_else(|error| panic!("no picture ({error}): {said}"));
    let header = b"P6\n1024 768\n255\n";
    assert!(bytes.starts_with(header), "{:?}", String::from_utf8_lossy(&bytes[..20]));
    let lit: Vec<bool> = bytes[header.len()..].chunks(1024 * 3).map(|row| row.iter().any(|&byte| byte > 128)).collect();
    lit.chunks(CELL_HEIGHT).map(|cell| cell.contains(&true)).collect()
}

#[test]
fn what_is_logged_is_shown_on_the_screen_and_stays_there_after_a_refusal() {
    let lines = "multiboot2 /boot/dunlin selftest=svm-locked";
    let (log, rows) = screen(lines, &[], "cannot start: the firmware has locked SVM off", "refused");
    // GRUB's own output does not count; a line may continue in the next row.
    let lines = log.lines().filter(|line| line.starts_with('[') && line.contains("cpu0 ")).count();
    let text_rows = rows.into_iter().filter(|is_text| *is_text).count();
    assert!(lines >= 2 && (lines..=2 * lines).contains(&text_rows), "{text_rows} rows of text for {log}");
}

#[test]
fn start_that_ends_before_there_is_memory_is_told_on_the_screen_too() {
    let lines = "multiboot2 /boot/dunlin\nmodule2 /boot/a\nmodule2 /boot/b";
    let (_, rows) = screen(lines, &[("a", b"a"), ("b", b"b")], "cannot start: several boot modules", "early");
    // Nothing but the reason, at the top.
    let text: Vec<usize> = rows.iter().enumerate().filter_map(|(row, is_text)| is_text.then_some(row)).collect();
    assert!(text == [0] || text == [0, 1], "{text:?}");
}

/// The rows of text on a PC's screen while a guest writes. `entry` counts the entries of the menu from 0. The guest's
/// text comes over the serial port in any case.
fn rows_while_a_guest_writes(image: &Path, entry: usize, name: &str) -> Vec<bool> {
    let folder = folder();
    let mut qemu = qemu::able(Machine::X86_64, 120)
        .args(["-smp", "2", "-m", "256M", "-vga", "std"])
        .args(Monitor::qemu_arguments(folder.path()))
        .args(SerialLine::qemu_arguments(folder.path(), "line"))
        .args(["-serial", "chardev:line", "-cdrom"])
        .arg(image)
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU can be started");
    let mut line = SerialLine::attach(folder.path(), "line");
    line.wait_for("on the serial port only");
    // GRUB's keys for the next entry, and for its start.
    line.type_keys("\x0e".repeat(entry).as_bytes());
    line.type_keys(b"\r");
    line.wait_for("experiment=chatter second=2");
    let rows = rows_of_text(folder.path(), name);
    let _ = qemu.wait();
    rows
}

#[test]
fn entry_of_the_menu_for_the_serial_port_only_leaves_the_screen_alone() {
    let folder = folder();
    let [file, image] = ["vms.toml", "dunlin.iso"].map(|name| folder.path().join(name));
    fs::write(&file, measuring_vm("measuring", 1, "experiments=chatter seconds=60")).expect("a file can be written");
    let _run = dunlin(&["image", &file.to_string_lossy(), "-o", &image.to_string_lossy()]).expect_status(0);
    let count = |rows: Vec<bool>| rows.into_iter().filter(|is_text| *is_text).count();
    let usual = count(rows_while_a_guest_writes(&image, 0, "usual"));
    let serial_only = count(rows_while_a_guest_writes(&image, 3, "serial-only"));
    assert!(usual >= 5 && serial_only == 0, "{usual} and {serial_only} rows of text");
}
