//! The tables as a guest finds them: through pointers from the RSDP.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use abi::payload::{MAX_VCPUS, Role};
use addr::{Gpa, GpaRange};

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::layout::{MapKind, RESET_STUB, RSDP, memory_map, ram_layout};
use crate::{GuestMemory, OutsideMemory, acpi};

/// The tables with their addresses.
fn tables(vcpus: u32, role: Role) -> Vec<(Gpa, Vec<u8>)> {
    struct Written(Vec<(Gpa, Vec<u8>)>);
    impl GuestMemory for Written {
        fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
            self.0.push((gpa, bytes.to_vec()));
            Ok(())
        }
    }
    let mut written = Written(Vec::new());
    assert_eq!(acpi::write(vcpus, role, &mut written), Ok(()));
    written.0
}

/// Follows the pointers from the RSDP, like a guest, and checks length and checksum of each table.
fn found(vcpus: u32) -> BTreeMap<[u8; 4], Vec<u8>> {
    found_by(vcpus, Role::Guest)
}

fn found_by(vcpus: u32, role: Role) -> BTreeMap<[u8; 4], Vec<u8>> {
    let placed: BTreeMap<u64, Vec<u8>> = tables(vcpus, role).into_iter().map(|(gpa, table)| (gpa.0, table)).collect();
    let table = |address: u64| {
        let table = placed[&address].clone();
        assert_eq!(u32_at(&table, 4), Some(u32::try_from(table.len()).expect("short")));
        assert_eq!(sum(&table), 0);
        (*table.first_chunk::<4>().expect("signature"), table)
    };

    let rsdp = &placed[&RSDP.0];
    assert!(rsdp.starts_with(b"RSD PTR "));
    assert_eq!((rsdp.len(), rsdp[15], sum(&rsdp[..20]), sum(rsdp)), (36, 2, 0, 0));

    let (signature, xsdt) = table(u64_at(rsdp, 24).expect("XSDT address"));
    assert_eq!(&signature, b"XSDT");
    let mut found: BTreeMap<_, _> =
        xsdt[36..].chunks(8).map(|entry| table(u64_at(entry, 0).expect("whole entries"))).collect();
    let (signature, dsdt) = table(u64_at(&found[b"FACP"], 140).expect("X_DSDT"));
    found.insert(signature, dsdt);
    found
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// The entries of a MADT, as type and bytes.
fn madt_entries(madt: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut rest = &madt[44..];
    let mut entries = Vec::new();
    while let [kind, length, ..] = *rest {
        entries.push((kind, rest[..usize::from(length)].to_vec()));
        rest = &rest[usize::from(length)..];
    }
    entries
}

#[test]
fn every_table_is_reached_from_the_rsdp_with_a_good_checksum() {
    for vcpus in [1, 2, 255, 256, MAX_VCPUS] {
        let names: Vec<_> = found(vcpus).into_keys().collect();
        assert_eq!(names, [*b"APIC", *b"DSDT", *b"FACP", *b"MCFG"]);
    }
}

#[test]
fn tables_lie_apart_and_below_the_reset_stub() {
    let ranges: Vec<GpaRange> = tables(MAX_VCPUS, Role::Parent)
        .iter()
        .map(|(gpa, table)| GpaRange::new(*gpa, table.len() as u64).expect("low addresses"))
        .collect();
    for (n, range) in ranges.iter().enumerate() {
        assert!(RSDP <= range.start && range.end() <= RESET_STUB);
        assert!(!ranges[n + 1..].iter().any(|other| other.overlaps(range)));
    }
}

#[test]
fn fadt_names_the_registers_that_we_emulate() {
    let fadt = &found(1)[b"FACP"];
    assert_eq!(u32_at(fadt, 112).map(|flags| flags & (1 << 20 | 1 << 10)), Some(1 << 20 | 1 << 10));
    assert_eq!(u16_at(fadt, 109), Some(1 << 2), "no VGA, no 8042, the clock is there");
    assert_eq!(fadt[108], 0x32, "century");
    let port = |offset: usize| (fadt[offset], fadt[offset + 1], u64_at(fadt, offset + 4));
    assert_eq!(port(116), (1, 8, Some(0xcf9)));
    assert_eq!(fadt[128], 6);
    assert_eq!(port(244), (1, 8, Some(0x600)));
    assert_eq!(port(256), (1, 8, Some(0x601)));
}

#[test]
fn madt_lists_each_vcpu_once_under_its_index() {
    let entries = madt_entries(&found(4)[b"APIC"]);
    let ids: Vec<_> = entries.iter().filter(|(kind, _)| *kind == 0).map(|(_, e)| (e[2], e[3], e[4])).collect();
    assert_eq!(ids, [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1)]);
    assert_eq!(entries.len(), 5);
    assert_eq!(entries[4], (1, [1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0].to_vec()));
}

#[test]
fn madt_names_vcpus_from_255_on_by_x2apic_entries() {
    let entries = madt_entries(&found(300)[b"APIC"]);
    assert_eq!(entries.iter().filter(|(kind, _)| *kind == 0).count(), 255);
    let x2apic: Vec<_> = entries
        .iter()
        .filter(|(kind, _)| *kind == 9)
        .map(|(_, entry)| (u32_at(entry, 4), u32_at(entry, 8), u32_at(entry, 12)))
        .collect();
    assert_eq!(x2apic.len(), 45);
    assert_eq!(x2apic[0], (Some(255), Some(1), Some(255)));
    assert_eq!(x2apic[44], (Some(299), Some(1), Some(299)));
}

#[test]
fn madt_says_that_there_is_no_pic() {
    let madt = &found(1)[b"APIC"];
    assert_eq!(u32_at(madt, 36), Some(0xfee0_0000));
    assert_eq!(u32_at(madt, 40), Some(0));
}

#[test]
fn serial_interrupts_are_edge_triggered_and_active_high() {
    let dsdt = &found(1)[b"DSDT"];
    for (port, pin) in [(0x3f8_u16, 4), (0x2f8, 3)] {
        let [low, high] = port.to_le_bytes();
        // I/O port descriptor, then extended interrupt descriptor: consumer, edge, high, exclusive; one interrupt.
        let resources = [0x47, 1, low, high, low, high, 1, 8, 0x89, 6, 0, 0b0011, 1, pin, 0, 0, 0, 0x79];
        assert!(dsdt.windows(resources.len()).any(|window| window == resources), "{port:#x}");
    }
}

#[test]
fn tables_start_where_linux_is_told() {
    assert!(tables(1, Role::Guest).iter().any(|(gpa, _)| *gpa == Gpa(0xe_0000)));
}

#[test]
fn mcfg_names_one_bus_whose_memory_the_memory_map_reserves() {
    let mcfg = &found(1)[b"MCFG"];
    let (base, buses) = (u64_at(mcfg, 44).expect("an entry"), [mcfg[54], mcfg[55]]);
    assert_eq!((mcfg.len(), base, u16_at(mcfg, 52), buses), (60, 0xe000_0000, Some(0), [0, 0]));
    let ecam = GpaRange::new(Gpa(base), 1 << 20).expect("a low address");
    assert!(memory_map(64 << 20, None).any(|entry| entry.kind == MapKind::Reserved && entry.range == ecam));
    assert!(!ram_layout(u64::MAX).any(|ram| ram.overlaps(&ecam)));
}

#[test]
fn dsdt_declares_a_pci_host_bridge_and_reserves_its_ecam() {
    let dsdt = &found(1)[b"DSDT"];
    let has = |bytes: &[u8]| dsdt.windows(bytes.len()).any(|window| window == bytes);
    // _HID and _CID are compressed names: PNP0A08, PNP0A03, PNP0C02.
    for (name, id) in
        [(b"_HID", [0x41, 0xd0, 0x0a, 0x08]), (b"_CID", [0x41, 0xd0, 0x0a, 0x03]), (b"_HID", [0x41, 0xd0, 0x0c, 0x02])]
    {
        assert!(has(&[&name[..], &[0x0c], &id].concat()), "{id:x?}");
    }
    // A word descriptor for bus numbers: fixed, 0 to 0.
    assert!(has(&[0x88, 13, 0, 2, 0x0c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]));
    // The eight ports of configuration mechanism #1, and fixed memory of 1 MiB.
    assert!(has(&[0x47, 1, 0xf8, 0x0c, 0xf8, 0x0c, 1, 8]));
    assert!(has(&[0x86, 9, 0, 1, 0, 0, 0, 0xe0, 0, 0, 0x10, 0]));
}

#[test]
fn only_a_parent_is_told_of_a_bus_for_hyper_v_devices() {
    let has_bus = |role| found_by(1, role)[b"DSDT"].windows(12).any(|bytes| bytes == b"_HID\x0dVMBUS\0\x08");
    assert!(has_bus(Role::Parent));
    assert!(!has_bus(Role::Guest));
}

#[test]
fn only_a_parent_is_told_of_the_port_for_its_programs() {
    let has = |role, bytes: &[u8]| found_by(1, role)[b"DSDT"].windows(bytes.len()).any(|window| window == bytes);
    let name = b"_HID\x0dLNRO0005\0";
    // Fixed memory of 4 KiB, then an extended interrupt descriptor: consumer, level, high, exclusive; one interrupt.
    let resources = [0x86, 9, 0, 1, 0, 0, 0xb0, 0xfe, 0, 0x10, 0, 0, 0x89, 6, 0, 0b0001, 1, 16, 0, 0, 0, 0x79];
    assert!(has(Role::Parent, name) && has(Role::Parent, &resources));
    assert!(!has(Role::Guest, name));
}
