//! ACPI tables for the VM that has the machine's devices: the machine's own, with a few replaced.
//!
//! ```text
//! RSDP -> XSDT -> all tables of the machine where firmware has put them, but for
//!                 the MADT (a copy: only CPUs and I/O APICs that the VM has)
//!                 IVRS and DMAR (left out: the IOMMU is the hypervisor's)
//!              -> SSDT of ours: what a parent VM finds besides, see [`crate::acpi`]
//! ```
//!
//! Firmware's tables may be wrong in any way. What cannot be read is left out.

use alloc::vec;
use alloc::vec::Vec;

use abi::payload::Role;
use acpi_tables::aml::Scope;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use addr::Gpa;

use crate::acpi::{HEADER_BYTES, OEM, OEM_REVISION, OEM_TABLE, bytes, tool_port, vmbus};
use crate::bytes::u32_at;

/// The machine's tables, and what its VM has of the machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineTables<'a> {
    /// Signature and address of each table that the root table names.
    pub named: &'a [([u8; 4], u64)],
    /// The table of interrupt controllers (MADT), whole.
    pub madt: &'a [u8],
    /// The I/O APICs that the VM has, by the number of their first interrupts.
    pub io_apics: &'a [u32],
    /// Number of vCPUs; vCPU `n` has APIC id `n`.
    pub vcpus: u32,
    /// What the VM is to others.
    pub role: Role,
    /// Where a parent's port for programs is, and its pin.
    pub tool_port: (Gpa, u32),
}

/// Tables that lie at consecutive addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTables {
    /// Their bytes.
    pub bytes: Vec<u8>,
    /// Where they begin: the RSDP.
    pub rsdp: Gpa,
}

/// Signatures of tables that the VM does not get as they are.
const NOT_PASSED: [[u8; 4]; 3] = [*b"APIC", *b"IVRS", *b"DMAR"];
/// Alignment of each table.
const ALIGN: usize = 16;

/// The tables, for a place that begins at `at`, a multiple of 16.
#[must_use]
pub fn place(machine: &MachineTables<'_>, at: Gpa) -> PlacedTables {
    let mut tables = Vec::from([madt(machine)]);
    if machine.role == Role::Parent {
        tables.push(ssdt(machine));
    }
    let passed = machine.named.iter().filter(|(signature, _)| !NOT_PASSED.contains(signature));
    let mut entries: Vec<u64> = passed.map(|(_, address)| *address).collect();

    // The RSDP comes first, and is known last.
    let mut placed = vec![0; Rsdp::len().next_multiple_of(ALIGN)];
    let mut add = |table: &[u8]| {
        let address = at.0 + placed.len() as u64;
        placed.extend_from_slice(table);
        placed.resize(placed.len().next_multiple_of(ALIGN), 0);
        address
    };
    entries.extend(tables.iter().map(|table| add(table)));
    let mut xsdt = Sdt::new(*b"XSDT", HEADER_BYTES, 1, OEM, OEM_TABLE, OEM_REVISION);
    xsdt.append_slice(&entries.iter().flat_map(|entry| entry.to_le_bytes()).collect::<Vec<_>>());
    let xsdt = add(xsdt.as_slice());

    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    placed.iter_mut().zip(rsdp).for_each(|(to, from)| *to = from);
    PlacedTables { bytes: placed, rsdp: at }
}

/// The addresses of the tables that an RSDT (`width` 4) or an XSDT (8) names.
pub fn entries(root: &[u8], width: usize) -> impl Iterator<Item = u64> {
    let addresses = root.get(HEADER_BYTES as usize..).unwrap_or_default();
    addresses.chunks_exact(width.clamp(4, 8)).map(|entry| {
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(entry).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(bytes)
    })
}

/// Entries of the MADT (ACPI 6.5, 5.2.12.2, 5.2.12.3 and 5.2.12.12).
mod kind {
    pub(super) const LOCAL_APIC: u8 = 0;
    pub(super) const IO_APIC: u8 = 1;
    pub(super) const LOCAL_X2APIC: u8 = 9;
}

/// The MADT with the CPUs and the I/O APICs of the VM.
fn madt(machine: &MachineTables<'_>) -> Vec<u8> {
    const BODY: usize = HEADER_BYTES as usize;
    /// Local APIC address and flags.
    const FIXED: usize = 8;
    let body = machine.madt.get(BODY..).unwrap_or_default();
    let (fixed, mut rest) = body.split_at_checked(FIXED).unwrap_or((body, &[]));

    let mut copy = Vec::from(fixed);
    // An entry shorter than its own head ends the list: whoever walks the copy would not come past it.
    while let &[_, length @ 2..=u8::MAX, ..] = rest
        && let Some((entry, behind)) = rest.split_at_checked(length.into())
    {
        if is_wanted(entry, machine) {
            copy.extend_from_slice(entry);
        }
        rest = behind;
    }
    let mut madt = Sdt::new(*b"APIC", HEADER_BYTES, 5, OEM, OEM_TABLE, OEM_REVISION);
    madt.append_slice(&copy);
    bytes(&madt)
}

/// Whether the VM has what an entry of the MADT describes.
fn is_wanted(entry: &[u8], machine: &MachineTables<'_>) -> bool {
    match entry {
        [kind::LOCAL_APIC, _, _, id, ..] => u32::from(*id) < machine.vcpus,
        [kind::LOCAL_X2APIC, ..] => u32_at(entry, 4).is_some_and(|id| id < machine.vcpus),
        [kind::IO_APIC, ..] => u32_at(entry, 8).is_some_and(|first| machine.io_apics.contains(&first)),
        // Too short for an id.
        [kind::LOCAL_APIC, ..] => false,
        _ => true,
    }
}

/// What a parent finds besides the machine.
fn ssdt(machine: &MachineTables<'_>) -> Vec<u8> {
    let (registers, pin) = machine.tool_port;
    let mut ssdt = Sdt::new(*b"SSDT", HEADER_BYTES, 2, OEM, OEM_TABLE, OEM_REVISION);
    ssdt.append_slice(&Scope::raw("\\_SB_".into(), [vmbus(), tool_port(registers, pin)].concat()));
    bytes(&ssdt)
}
