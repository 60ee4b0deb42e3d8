//! The ACPI tables of the VM that has the machine's devices: made of firmware's.

use abi::payload::Role;
use addr::Gpa;
use fuzz::{Input, target};
use x86_boot::own_acpi::{MachineTables, entries, place};

const AT: Gpa = Gpa(0xe_0000);
const HEADER: usize = 36;

fn u32_at(bytes: &[u8], at: usize) -> usize {
    let word = bytes[at..at + 4].iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
    usize::try_from(word).expect("32 bits")
}

/// Where firmware says that its tables are is its business, but they are not where ours will be.
fn elsewhere(address: u64) -> u64 {
    const ROOM: u64 = 1 << 20;
    if (AT.0..AT.0 + ROOM).contains(&address) { address + ROOM } else { address }
}

fn make(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let role = if input.byte() & 1 == 0 { Role::Guest } else { Role::Parent };
    let vcpus = u32::from(input.u16()) % 513;
    let named: Vec<([u8; 4], u64)> = (0..input.below(5))
        .map(|_| (input.pick(&[*b"APIC", *b"IVRS", *b"DMAR", *b"FACP", *b"MCFG"]), elsewhere(input.u64())))
        .collect();
    let madt = input.rest();
    let machine =
        MachineTables { named: &named, madt, io_apics: &[0, 24], vcpus, role, tool_port: (Gpa(0xfed0_0000), 5) };
    let placed = place(&machine, AT);

    // The root table is the last one, and names the others.
    let whole = placed.bytes.as_slice();
    assert_eq!((&whole[..8], placed.rsdp), (&b"RSD PTR "[..], AT));
    let address = whole[24..32].iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    let table = |address: u64| {
        let start = usize::try_from(address.checked_sub(AT.0)?).ok()?;
        let rest = whole.get(start..)?;
        Some(&rest[..u32_at(rest, 4)])
    };
    let root = table(address).expect("the root table was placed");
    let mut ours = 0;
    let made = entries(root, 8).filter_map(table);
    for table in std::iter::once(root).chain(made) {
        ours += 1;
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(sum, 0, "the checksum of {:?}", &table[..4]);
        if table.starts_with(b"APIC") {
            check_madt(&table[HEADER..], vcpus);
        }
    }
    assert!(ours >= 2 + usize::from(role == Role::Parent), "root, interrupt controllers, and a parent's own");
    let passed = named.iter().filter(|(signature, _)| ![*b"APIC", *b"IVRS", *b"DMAR"].contains(signature));
    assert!(passed.into_iter().all(|(_, address)| entries(root, 8).any(|entry| entry == *address)));
}

/// The entries fill the table, and name no CPU that the VM has not.
fn check_madt(body: &[u8], vcpus: u32) {
    let mut rest = body.get(8..).unwrap_or_default();
    while let &[kind, length, ..] = rest {
        let entry = &rest[..usize::from(length)];
        assert!(length >= 2);
        match kind {
            0 => assert!(u32::from(entry[3]) < vcpus, "{entry:?}"),
            9 => assert!(u32_at(entry, 4) < usize::try_from(vcpus).expect("few"), "{entry:?}"),
            _ => {}
        }
        rest = &rest[entry.len()..];
    }
}

#[test]
fn any_tables_of_a_machine_make_tables_that_can_be_walked() {
    target("own_acpi", make);
}
