//! The consoles of a PC: from `console=`, from the firmware (ACPI's SPCR), and by probing.

use std::fs;
use std::path::Path;

use abi::exit_code::{REFUSED, qemu_status};
use system_tests::Machine;
use tempfile::TempDir;

/// The table SPCR behind its header: a 16550 at I/O port 0x2f8, 115 200 Bd. QEMU makes the header.
fn spcr_of_com2() -> [u8; 44] {
    let mut table = [0; 44];
    table[4..8].copy_from_slice(&[1, 8, 0, 1]);
    table[8..16].copy_from_slice(&0x2f8u64.to_le_bytes());
    table[22] = 7;
    table
}

/// The output of COM1 and COM2 until the hypervisor refused to start without a payload. `has`: which of the two the
/// machine has.
fn logs_of(folder: &Path, has: [bool; 2], options: &str, more: &[&str]) -> [String; 2] {
    let files = ["com1", "com2"].map(|name| folder.join(name));
    let mut arguments: Vec<String> = ["-append", options].iter().chain(more).map(|&word| word.to_string()).collect();
    for ((file, has), iobase) in files.iter().zip(has).zip(["0x3f8", "0x2f8"]) {
        fs::write(file, "").expect("a file can be written");
        if has {
            let name = format!("line{iobase}");
            let line = format!("file,id={name},path={}", file.display());
            let uart = format!("isa-serial,iobase={iobase},chardev={name}");
            arguments.extend(["-chardev", &line, "-device", &uart].map(String::from));
        }
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let pc = Machine::X86_64;
    let run = pc.start_kernel(&pc.hypervisor(), "none", &pc.able(), &arguments).expect_status(qemu_status(REFUSED));
    assert_eq!(run.stdout, "");
    files.map(|file| String::from_utf8_lossy(&fs::read(file).expect("was written")).into_owned())
}

/// On which of the two the log is from its first line to its last.
fn lines_with_log(has: [bool; 2], options: &str, more: &[&str]) -> [bool; 2] {
    let folder = TempDir::new().expect("a temporary folder can be made");
    logs_of(folder.path(), has, &format!("log=debug {options}"), more).map(|log| {
        let is_whole = log.contains(" pCPUs, ") && log.contains("cannot start: no boot module");
        assert!(is_whole || log.is_empty(), "{log}");
        is_whole
    })
}

const BOTH: [bool; 2] = [true, true];
const COM1: [bool; 2] = [true, false];
const COM2: [bool; 2] = [false, true];
const NEITHER: [bool; 2] = [false, false];

#[test]
fn log_goes_to_com1_or_to_the_consoles_that_are_named() {
    for (options, expected) in [
        ("", COM1),
        ("console=com1", COM1),
        ("console=com2", COM2),
        ("console=0x2f8,screen", COM2),
        ("console=com1,com2", BOTH),
        // The last of several counts.
        ("console=com1 console=screen", NEITHER),
        ("console=none", NEITHER),
    ] {
        assert_eq!(lines_with_log(BOTH, options, &[]), expected, "{options}");
    }
}

#[test]
fn machine_without_a_serial_line_or_with_com2_only_starts_as_well() {
    assert_eq!(lines_with_log(NEITHER, "", &[]), NEITHER);
    assert_eq!(lines_with_log(NEITHER, "console=com2", &[]), NEITHER);
    assert_eq!(lines_with_log(COM2, "", &[]), NEITHER);
    assert_eq!(lines_with_log(COM2, "console=com2", &[]), COM2);
    // Nothing that was named is there: better on another one than nowhere.
    assert_eq!(lines_with_log(COM2, "console=com1", &[]), COM2);
}

#[test]
fn log_goes_where_firmware_says_unless_it_is_told_otherwise() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("spcr");
    fs::write(&file, spcr_of_com2()).expect("a file can be written");
    let table = format!("sig=SPCR,rev=2,data={}", file.display());
    let table = ["-acpitable", &table];
    assert_eq!(lines_with_log(BOTH, "", &table), COM2);
    assert_eq!(lines_with_log(BOTH, "console=com1", &table), COM1);
    // It is not where the firmware says.
    assert_eq!(lines_with_log(COM1, "", &table), COM1);

    // Damaged: the address ends in the middle of a PCI device.
    let mut table_bytes = spcr_of_com2();
    table_bytes[4] = 2;
    fs::write(&file, table_bytes).expect("a file can be written");
    assert_eq!(lines_with_log(BOTH, "", &table), COM1);
}

#[test]
fn bad_value_is_told_on_all_consoles() {
    for (value, why) in
        [("ttyS0", "unknown word \"ttyS0\" in console="), ("com1,none", "console= has none together with others")]
    {
        let folder = TempDir::new().expect("a temporary folder can be made");
        for log in logs_of(folder.path(), BOTH, &format!("console={value}"), &[]) {
            assert!(log.contains(why), "no '{why}' in {log}");
        }
    }
}
