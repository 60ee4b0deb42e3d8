//! Odd or wrong data from boot loaders and firmware: the hypervisor uses the reliable part, or prints the error and
//! stops. It never just resets.

use std::path::Path;

use abi::exit_code::{CLEAN, PANIC, REFUSED, qemu_status};
use system_tests::boot_loader::start_info::{COMMAND_LINE, MEMORY_MAP, MEMORY_MAP_ENTRIES, MODULE_LIST, MODULES, RSDP};
use system_tests::boot_loader::{BootLoader, DATA};
use system_tests::{Machine, Run};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// By which a multiboot2 loader makes itself known in EAX.
const MULTIBOOT2: u32 = 0x36d7_6289;

/// Starts the hypervisor by this loader, on a machine with 256 MiB and these further arguments for QEMU.
fn start(loader: &BootLoader, more: &[&str]) -> Run {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("loader");
    loader.write(&Machine::X86_64.hypervisor(), &file);
    start_file(&file, "stdio", more)
}

/// Starts this file, with QEMU's `-serial` for the serial line.
fn start_file(file: &Path, serial: &str, more: &[&str]) -> Run {
    Machine::X86_64.start_kernel(file, serial, &Machine::X86_64.able(), more)
}

fn refuses(loader: &BootLoader, more: &[&str], why: &str) {
    let run = start(loader, more).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains(why) && !run.stdout.contains("cpu0 panic"), "no '{why}' in {run:#?}");
}

/// A loader that passes this memory map instead of QEMU's: start, bytes, and E820 type.
fn with_map(ranges: impl IntoIterator<Item = (u64, u64, u32)>) -> BootLoader {
    let mut loader = BootLoader::default();
    let mut entries = 0;
    for (start, bytes, kind) in ranges {
        loader.data.extend([start, bytes, kind.into()].into_iter().flat_map(u64::to_le_bytes));
        entries += 1;
    }
    loader.edits = vec![(MEMORY_MAP, DATA, true), (MEMORY_MAP_ENTRIES, entries, false)];
    loader
}

/// The memory map of a machine with 256 MiB.
const USUAL: [(u64, u64, u32); 2] = [(0, 0x9_fc00, RAM), (MIB, 255 * MIB, RAM)];

/// How much memory `check` calls free, in MiB.
fn free_mib(run: &Run) -> u64 {
    let found = run.stdout.split_once(" MiB are free").and_then(|(before, _)| before.rsplit_once("of "));
    let found = found.and_then(|(before, _)| before.trim_end().rsplit(' ').next()).and_then(|word| word.parse().ok());
    found.unwrap_or_else(|| panic!("no free memory in {run:#?}"))
}

fn check(loader: &BootLoader) -> Run {
    start(loader, &["-append", "check"]).expect_status(qemu_status(CLEAN))
}

#[test]
fn only_what_is_surely_ram_is_used_of_a_map_with_holes_overlaps_crumbs_and_unknown_kinds() {
    let plain = free_mib(&check(&with_map(USUAL)));
    // 16 MiB each: firmware's runtime code, an unknown kind, reserved over RAM, RAM with a hole at every other page,
    // ACPI's, and RAM that is listed twice.
    let mut map = vec![
        (0xfd_0000_0000, 3 << 32, RESERVED),
        (160 * MIB, 16 * MIB, 20),
        (176 * MIB, 16 * MIB, 0xf000_0000),
        (200 * MIB - 77, 8 * MIB + 78, RESERVED),
        (208 * MIB, 8 * MIB, RESERVED),
        (128 * MIB, 16 * MIB, RAM),
        (128 * MIB, 16 * MIB, 3),
        (8 * MIB, 16 * MIB, RAM),
    ];
    map.extend((0..100).map(|crumb| (100 * MIB + crumb * 0x2000, 0x1000, RESERVED)));
    map.extend(USUAL);
    let odd = free_mib(&check(&with_map(map.iter().copied())));
    let lost = plain - odd;
    assert!((64..=66).contains(&lost), "{plain} - {odd}");

    map.reverse();
    assert_eq!(free_mib(&check(&with_map(map))), odd, "the order means nothing");
}

#[test]
fn more_than_a_tebibyte_is_used_around_the_hole_that_amds_machines_have_below_it() {
    // None of it is allocated before its first use.
    let memory = "memory-backend-ram,id=memory,size=1100G,reserve=off";
    let machine =
        ["-machine", "q35,memory-backend=memory", "-object", memory, "-cpu", "max,phys-bits=48", "-m", "1100G"];
    let run = start(&BootLoader::default(), &[&machine[..], &["-append", "check"]].concat());
    assert!(run.status == qemu_status(CLEAN) && free_mib(&run) > 1099 << 10, "{run:#?}");
}

#[test]
fn maps_without_enough_memory_or_with_too_many_ranges_are_refused() {
    refuses(&with_map([]), &[], "cannot start: the boot loader passed no memory map");
    refuses(&with_map([(0, 0x9_fc00, RAM), (MIB, 4 * MIB, RAM)]), &[], "cannot start: too little memory");
    // The machine's first memory is beyond the first page tables.
    refuses(&with_map([(0, 0x9_fc00, RAM), (5 << 30, 1 << 30, RAM)]), &[], "cannot start: too little memory");
    let crumbs = (0..5000).map(|crumb| (crumb * 0x2000, 0x1000, RESERVED));
    refuses(&with_map(crumbs.chain(USUAL)), &[], "cannot start: the memory map has too many ranges");
    // Crumbs of RAM can be left out.
    let crumbs = (0..5000).map(|crumb| (100 * MIB + crumb * 0x2000, 0x1000, RAM));
    let run = check(&with_map(
        [(0, 0x9_fc00, RAM), (MIB, 99 * MIB, RAM), (200 * MIB, 56 * MIB, RAM)].into_iter().chain(crumbs),
    ));
    assert!(run.stdout.contains("ranges of RAM are not used"), "{run:#?}");
}

/// A loader that passes a module of these bytes, from there on.
fn with_module(start: u64, bytes: u64) -> BootLoader {
    BootLoader {
        data: [start, bytes, 0, 0].into_iter().flat_map(u64::to_le_bytes).collect(),
        edits: vec![(MODULE_LIST, DATA, true), (MODULES, 1, false)],
        ..BootLoader::default()
    }
}

#[test]
fn modules_at_impossible_places_are_refused() {
    refuses(&with_module(2 * MIB + 5, 100), &[], "overlaps the hypervisor's image");
    refuses(&with_module(MIB, 64 * MIB), &[], "overlaps the hypervisor's image");
    refuses(&with_module(u64::MAX - 5, 100), &[], "cannot start: the boot loader's data is damaged");
    refuses(&with_module(0x9_f000, 0x2000), &[], "is not in RAM");
    refuses(&with_module(1 << 40, 0x2000), &[], "is not in RAM");
    refuses(&with_module(64 * MIB, 0), &[], "cannot start: ");
    refuses(&with_module(64 * MIB, 4096), &[], "not a Dunlin payload");
}

/// A table of ACPI with its checksum off by `wrong`.
fn table(mut bytes: Vec<u8>, checksum: usize, wrong: u8) -> Vec<u8> {
    bytes[checksum] = 0;
    bytes[checksum] = bytes.iter().fold(wrong, |sum, byte| sum.wrapping_sub(*byte));
    bytes
}

/// The root pointer (ACPI 5.2.5.3, revision 2), with its checksums off by `wrong`.
fn root_pointer(xsdt: u64, wrong: u8) -> Vec<u8> {
    let mut bytes = b"RSD PTR \0DUNLIN\x02\0\0\0\0\x24\0\0\0".to_vec();
    bytes.extend(xsdt.to_le_bytes());
    bytes.extend([0; 4]);
    let first = table(bytes[..20].to_vec(), 8, wrong);
    bytes[..20].copy_from_slice(&first);
    table(bytes, 32, wrong)
}

/// A system description table (ACPI 5.2.6) with this content; its length field is larger by `more`.
fn description_table(signature: &[u8; 4], content: &[u8], more: u32, wrong: u8) -> Vec<u8> {
    let length = u32::try_from(36 + content.len()).expect("short").wrapping_add(more);
    let mut bytes = signature.to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(b"\x01\0DUNLINTABLES  ");
    bytes.resize(36, 0);
    bytes.extend(content);
    table(bytes, 9, wrong)
}

/// Where the tables of [`with_tables`] are, each in a page.
const TABLES: u64 = DATA as u64 + 0x1000;

/// A loader that passes an ACPI root pointer and has these tables, each in a page from [`TABLES`] on.
fn with_tables(root: &[u8], tables: &[Vec<u8>]) -> BootLoader {
    let mut data = root.to_vec();
    for table in tables {
        data.resize(data.len().next_multiple_of(0x1000), 0);
        data.extend(table);
    }
    BootLoader { data, edits: vec![(RSDP, DATA, true)], ..BootLoader::default() }
}

#[test]
fn acpi_tables_with_wrong_checksums_lengths_and_addresses_are_refused() {
    let processor = [0u8, 8, 0, 0, 1, 0, 0, 0];
    let madt = |content: &[u8], more, wrong| {
        let mut all = vec![0, 0, 0xe0, 0xfe, 1, 0, 0, 0];
        all.extend(content);
        description_table(b"APIC", &all, more, wrong)
    };
    let xsdt = |address: u64, wrong| description_table(b"XSDT", &address.to_le_bytes(), 0, wrong);
    let second = TABLES + 0x1000;
    for (what, root, tables) in [
        ("checksum of the root pointer", root_pointer(TABLES, 1), vec![]),
        ("no root pointer", vec![0; 64], vec![]),
        ("checksum of the XSDT", root_pointer(TABLES, 0), vec![xsdt(second, 1)]),
        ("no XSDT", root_pointer(0, 0), vec![]),
        ("XSDT beyond all memory", root_pointer(1 << 60, 0), vec![]),
        ("another table for the XSDT", root_pointer(TABLES, 0), vec![madt(&processor, 0, 0)]),
        ("no MADT", root_pointer(TABLES, 0), vec![description_table(b"XSDT", &[], 0, 0)]),
        ("checksum of the MADT", root_pointer(TABLES, 0), vec![xsdt(second, 0), madt(&processor, 0, 1)]),
        ("MADT of 4 GiB", root_pointer(TABLES, 0), vec![xsdt(second, 0), madt(&processor, 0xffff_ff00, 0)]),
        (
            "XSDT shorter than its header",
            root_pointer(TABLES, 0),
            vec![description_table(b"XSDT", &[0; 8], 0u32.wrapping_sub(40), 0)],
        ),
    ] {
        let run = start(&with_tables(&root, &tables), &[]);
        let is_told = run.stdout.contains("error") && run.stdout.contains("ACPI");
        assert!(run.status == qemu_status(REFUSED) && is_told && !run.stdout.contains("panic"), "{what}: {run:#?}");
    }
    // Entries without an end must not cause an endless loop.
    for entry in [&[0u8, 0][..], &[0, 1, 2, 3], &[9, 255, 0, 0]] {
        let tables = [xsdt(second, 0), madt(entry, 0, 0)];
        let run = start(&with_tables(&root_pointer(TABLES, 0), &tables), &[]);
        assert!([REFUSED, PANIC].map(qemu_status).contains(&run.status), "{entry:?}: {run:#?}");
    }
}

#[test]
fn who_passes_nothing_that_is_known_is_told_so() {
    let with = |eax, ebx, data: &[u8]| BootLoader {
        data: data.to_vec(),
        registers: Some((eax, ebx)),
        ..BootLoader::default()
    };
    refuses(&with(0, DATA, &[0; 64]), &[], "passed neither a PVH start info nor a multiboot2 boot information");
    refuses(&with(0, 0, &[]), &[], "is out of reach");
    refuses(&with(MULTIBOOT2, 0, &[]), &[], "is out of reach");
    refuses(&with(MULTIBOOT2, u32::MAX - 7, &[]), &[], "is out of reach");
    refuses(&with(MULTIBOOT2, DATA, &[0; 64]), &[], "the boot loader's data is damaged");
    refuses(&with(MULTIBOOT2, DATA, &[0xff; 64]), &[], "the boot loader's data is damaged");
    // An end and no more.
    let empty = [16u32, 0, 0, 8].map(u32::to_le_bytes).concat();
    refuses(&with(MULTIBOOT2, DATA, &empty), &[], "passed no memory map");
    refuses(&with(MULTIBOOT2, DATA + 4, &empty), &[], "is damaged");
}

/// A multiboot2 boot information with a tag of each kind that is read.
fn boot_information() -> Vec<u8> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let tag = |kind: u32, content: &[u8]| {
        let mut bytes = words(&[kind, u32::try_from(8 + content.len()).expect("short")]);
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    };
    let mut map = words(&[24, 0]);
    for (start, bytes, kind) in USUAL {
        map.extend([start, bytes, kind.into()].into_iter().flat_map(u64::to_le_bytes));
    }
    let mut module = words(&[0x400_0000, 0x400_1000]);
    module.extend(b"payload\0");
    let mut framebuffer = 0xfd00_0000u64.to_le_bytes().to_vec();
    framebuffer.extend(words(&[4096, 1024, 768]));
    framebuffer.extend([32, 1, 0, 0, 16, 8, 8, 8, 0, 8]);
    let mut all = vec![0; 8];
    for (kind, content) in [
        (1, &b"check\0"[..]),
        (3, &module),
        (6, &map),
        (8, &framebuffer),
        (14, &root_pointer(0, 0)[..20]),
        (15, &root_pointer(1 << 20, 0)),
        (0, &[]),
    ] {
        all.extend(tag(kind, content));
    }
    let length = u32::try_from(all.len()).expect("short").to_le_bytes();
    all[..4].copy_from_slice(&length);
    all
}

#[test]
fn damaged_boot_informations_end_in_a_message_and_never_in_a_reset() {
    let whole = boot_information();
    let with = |data: Vec<u8>| BootLoader { data, registers: Some((MULTIBOOT2, DATA)), ..BootLoader::default() };
    refuses(&with(whole.clone()), &[], "ACPI");

    let mut rng = fastrand::Rng::with_seed(15);
    let mut below = |limit: usize| rng.usize(..limit);
    for _ in 0..24 {
        let mut data = whole.clone();
        for _ in 0..1 + below(3) {
            let (at, value) = (below(data.len() / 4) * 4, [0, 1, 7, 24, 0x7fff_ffff, u32::MAX][below(6)]);
            data[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let run = start(&with(data.clone()), &["-vga", "std"]);
        let is_told = run.stdout.contains("error") || run.stdout.contains("panic");
        assert!([REFUSED, PANIC].map(qemu_status).contains(&run.status) && is_told, "{data:x?}: {run:#?}");
    }
}

#[test]
fn command_lines_without_an_end_or_out_of_reach_do_no_harm() {
    let endless =
        BootLoader { data: vec![b'x'; 8192], edits: vec![(COMMAND_LINE, DATA, true)], ..BootLoader::default() };
    refuses(&endless, &[], "unknown option");
    let beyond = BootLoader { edits: vec![(COMMAND_LINE, u32::MAX, true)], ..BootLoader::default() };
    refuses(&beyond, &[], "no boot module");
}

#[test]
fn words_that_are_no_options_are_named_with_the_nearest_and_nothing_is_started() {
    let loader = BootLoader::default();
    refuses(&loader, &["-append", "lgo=debug"], "cannot start: unknown option \"lgo=debug\": did you mean log?");
    refuses(
        &loader,
        &["-append", "log=loud"],
        "unknown value \"loud\" of log=, one of: off, error, warn, info, debug, trace",
    );
    refuses(&loader, &["-append", "panic"], "the option panic needs a value, one of: halt, reset");
}

#[test]
fn processors_that_cannot_run_vms_are_told_why_and_what_to_do() {
    let loader = BootLoader::default();
    refuses(
        &loader,
        &["-append", "selftest=svm-locked"],
        "the firmware has locked SVM off (VM_CR.SVMDIS): allow it in the firmware's set-up",
    );
    refuses(&loader, &["-cpu", "max,svm=off"], "no AMD SVM");
    let run = start(&loader, &["-cpu", "qemu32"]).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains("cannot start: this processor has no 64-bit mode"), "{run:#?}");
}

#[test]
fn check_tells_what_there_is_and_what_is_missing_with_the_remedy() {
    let all = check(&BootLoader::default()).stdout;
    for about in ["processor", "features", "TSC", "interrupts", "IOMMU", "power off", "processors", "memory", "payload"]
    {
        assert!(all.contains(&format!("check: {about}")), "no {about} in {all}");
    }
    assert!(all.contains("check: VMs can run on this machine"), "{all}");

    for (more, missing) in [
        (["-cpu", "max,svm=off"], "no AMD SVM"),
        (["-m", "64M"], "VMs need 128 MiB"),
        (["-cpu", "max,xsave=off"], "no XSAVE"),
    ] {
        let arguments = [&more[..], &["-append", "check"]].concat();
        let run = start(&BootLoader::default(), &arguments).expect_status(qemu_status(REFUSED));
        let is_told = run.stdout.contains(missing) && run.stdout.contains("VMs cannot run on this machine as it is");
        assert!(is_told, "no '{missing}' in {run:#?}");
    }
    let arguments = ["-append", "check selftest=svm-locked"];
    let run = start(&BootLoader::default(), &arguments).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains("missing  the firmware has locked SVM off"), "{run:#?}");
}

#[test]
fn machine_without_any_console_ends_as_others_do() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("loader");
    BootLoader::default().write(&Machine::X86_64.hypervisor(), &file);
    let run = |more: &[&str]| start_file(&file, "none", &[&["-vga", "none"], more].concat()).status;
    assert_eq!(run(&["-append", "check"]), qemu_status(CLEAN));
    assert_eq!(run(&[]), qemu_status(REFUSED));
}
