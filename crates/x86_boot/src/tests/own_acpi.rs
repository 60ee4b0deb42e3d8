//! Tables for the machine that the hypervisor runs on, made of firmware's.

use alloc::vec::Vec;

use abi::payload::Role;
use addr::Gpa;

use crate::bytes::{u32_at, u64_at};
use crate::own_acpi::{MachineTables, PlacedTables, entries, place};

const AT: Gpa = Gpa(0x7f00_0000);
const NAMED: [([u8; 4], u64); 5] =
    [(*b"FACP", 0x1000), (*b"APIC", 0x2000), (*b"IVRS", 0x3000), (*b"DMAR", 0x4000), (*b"MCFG", 0x1_0000_5000)];

/// A table of interrupt controllers with these entries.
fn madt(entries: &[&[u8]]) -> Vec<u8> {
    let mut table = Vec::from([0_u8; 36]);
    table.extend([0, 0, 0xe0, 0xfe, 1, 0, 0, 0]);
    table.extend(entries.concat());
    table
}

fn local_apic(id: u8) -> [u8; 8] {
    [0, 8, id, id, 1, 0, 0, 0]
}

fn machine<'a>(madt: &'a [u8], vcpus: u32, role: Role) -> MachineTables<'a> {
    MachineTables { named: &NAMED, madt, io_apics: &[0, 24], vcpus, role, tool_port: (Gpa(0x20_0000), 5) }
}

/// The table at this address, whose length and checksum are right.
fn table(placed: &PlacedTables, address: u64) -> &[u8] {
    let start = usize::try_from(address - AT.0).expect("is in the tables");
    let length = u32_at(&placed.bytes, start + 4).expect("has a length");
    let table = &placed.bytes[start..start + length as usize];
    assert_eq!(table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0, "checksum");
    table
}

/// The addresses in the XSDT.
fn named(placed: &PlacedTables) -> Vec<u64> {
    assert_eq!(&placed.bytes[..8], b"RSD PTR ");
    assert_eq!(placed.bytes[..36].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0, "checksum");
    entries(table(placed, u64_at(&placed.bytes, 24).expect("names the XSDT")), 8).collect()
}

#[test]
fn vm_finds_the_machines_tables_but_those_of_iommus_and_the_hypervisors_own() {
    let madt = madt(&[&local_apic(0)]);
    let placed = place(&machine(&madt, 1, Role::Parent), AT);
    let [fadt, mcfg, madt, ssdt] = named(&placed)[..] else { panic!("four tables") };
    assert_eq!((fadt, mcfg), (0x1000, 0x1_0000_5000));
    assert_eq!(&table(&placed, madt)[..4], b"APIC");
    let ssdt = table(&placed, ssdt);
    assert_eq!(&ssdt[..4], b"SSDT");
    for name in [&b"LNRO0005"[..], b"VMBUS"] {
        assert!(ssdt.windows(name.len()).any(|window| window == name), "{name:?}");
    }
    assert_eq!(named(&place(&machine(&[], 1, Role::Guest), AT)).len(), 3, "a guest has no port for programs");
}

#[test]
fn vm_finds_the_cpus_and_the_io_apics_that_it_has() {
    let x2apic = |id: u32| {
        let [a, b, c, d] = id.to_le_bytes();
        [9, 16, 0, 0, a, b, c, d, 1, 0, 0, 0, 0, 0, 0, 0]
    };
    let first = [1, 12, 9, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0];
    let second = [1, 12, 10, 0, 0, 0, 0xc1, 0xfe, 24, 0, 0, 0];
    let left_out = [1, 12, 11, 0, 0, 0, 0xc2, 0xfe, 120, 0, 0, 0];
    let firmware = madt(&[
        &local_apic(1),
        &local_apic(0),
        &local_apic(2),
        &x2apic(1),
        &x2apic(2),
        &x2apic(300),
        &second,
        &left_out,
        &first,
        &[2, 10, 0, 0, 2, 0, 0, 0, 0, 0],
    ]);
    let placed = place(&machine(&firmware, 2, Role::Guest), AT);
    let copy = table(&placed, *named(&placed).last().expect("is the last"));
    let expected =
        madt(&[&local_apic(1), &local_apic(0), &x2apic(1), &second, &first, &[2, 10, 0, 0, 2, 0, 0, 0, 0, 0]]);
    assert_eq!(copy[36..], expected[36..]);
}

#[test]
fn damaged_tables_of_firmware_cost_only_what_is_damaged() {
    for damaged in [&[][..], &[0; 7], &[0; 40], &madt(&[&[0, 0]]), &madt(&[&[0, 200, 1]]), &madt(&[&[1], &[0; 3]])] {
        let placed = place(&machine(damaged, 4, Role::Parent), AT);
        let ours = AT.0..AT.0 + placed.bytes.len() as u64;
        for address in named(&placed).into_iter().filter(|address| ours.contains(address)) {
            table(&placed, address);
        }
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..20_000 {
        let length = random.usize(..200);
        let garbage: Vec<u8> = core::iter::repeat_with(|| random.u8(..)).take(length).collect();
        let _ = place(&machine(&garbage, random.u32(..300), Role::Parent), AT);
        assert!(entries(&garbage, random.usize(..20)).count() <= 50);
    }
}

#[test]
fn entry_without_a_length_or_an_id_is_left_out() {
    let copied = |entries: &[&[u8]]| {
        let placed = place(&machine(&madt(entries), 2, Role::Guest), AT);
        Vec::from(&table(&placed, named(&placed)[2])[44..])
    };
    assert_eq!(copied(&[&local_apic(1), &[4, 0], &local_apic(0)]), local_apic(1));
    assert_eq!(copied(&[&local_apic(1), &[4, 1], &local_apic(0)]), local_apic(1));
    assert_eq!(copied(&[&[0, 3, 7], &local_apic(0)]), local_apic(0));
}
