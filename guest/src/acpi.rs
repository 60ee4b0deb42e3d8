//! The CPUs, and where PCI is: from the RSDP through the root table to the MADT (ACPI 6.5, 5.2.5 to 5.2.12) and the
//! MCFG.
//!
//! A function returns physical memory, so tests can run the whole walk on the host. A table with a wrong checksum or
//! length counts as absent.

/// Returns `length` bytes of physical memory at an address, or `None` if the guest has no memory there.
pub trait Physical {
    /// The bytes `[at, at + length)`.
    fn bytes(&self, at: u64, length: usize) -> Option<&[u8]>;
}

/// Size of the header that every table begins with (ACPI 6.5, 5.2.6).
const HEADER: usize = 36;
/// The largest valid length of a table.
const LONGEST: usize = 1 << 20;

/// The MADT: interrupt controllers, one of them per CPU.
#[derive(Clone, Copy, Debug)]
pub struct Madt<'a>(&'a [u8]);

/// Finds the MADT, starting at the RSDP at physical address `rsdp`.
#[must_use]
pub fn madt(memory: &impl Physical, rsdp: u64) -> Option<Madt<'_>> {
    find(memory, rsdp, b"APIC").map(Madt)
}

/// Physical address of the configuration spaces of PCI bus 0: the first entry of the MCFG (PCI Firmware Specification
/// 3.2, 4.1.2).
#[must_use]
pub fn ecam(memory: &impl Physical, rsdp: u64) -> Option<u64> {
    u64_at(find(memory, rsdp, b"MCFG")?, HEADER + 8)
}

/// Finds the first table with this signature.
fn find<'m>(memory: &'m impl Physical, rsdp: u64, signature: &[u8; 4]) -> Option<&'m [u8]> {
    let first = memory.bytes(rsdp, 20)?;
    if !first.starts_with(b"RSD PTR ") || sum(first) != 0 {
        return None;
    }

    // Revision 2 has a second part with a 64-bit pointer; firmware may leave that pointer zero.
    let extended = if first[15] >= 2 { memory.bytes(rsdp, 36).filter(|bytes| sum(bytes) == 0) } else { None };
    let xsdt = extended.and_then(|bytes| u64_at(bytes, 24)).filter(|&at| at != 0);
    let (root, root_signature, width) = match xsdt {
        Some(at) => (at, b"XSDT", 8),
        None => (u64::from(u32_at(first, 16)?), b"RSDT", 4),
    };

    let entries = table(memory, root, root_signature)?.get(HEADER..)?;
    entries
        .chunks_exact(width)
        .filter_map(|entry| if width == 8 { u64_at(entry, 0) } else { u32_at(entry, 0).map(u64::from) })
        .find_map(|at| table(memory, at, signature))
}

impl Madt<'_> {
    /// APIC ids of the CPUs that may be started, in the order of the table (types 0 and 9, 5.2.12.2 and 5.2.12.12).
    pub fn cpus(&self) -> impl Iterator<Item = u32> + '_ {
        self.structures().filter_map(|(kind, body)| {
            let (id, flags) = match kind {
                0 => (u32::from(*body.get(3)?), u32_at(body, 4)?),
                9 => (u32_at(body, 4)?, u32_at(body, 8)?),
                _ => return None,
            };
            (flags & 1 != 0).then_some(id)
        })
    }

    /// Physical address of the first I/O APIC (type 1, 5.2.12.3).
    #[must_use]
    pub fn io_apic(&self) -> Option<u64> {
        self.structures().find_map(|(kind, body)| if kind == 1 { u32_at(body, 4).map(u64::from) } else { None })
    }

    fn structures(&self) -> impl Iterator<Item = (u8, &[u8])> + '_ {
        let mut rest = self.0.get(HEADER + 8..).unwrap_or(&[]);
        core::iter::from_fn(move || {
            let (&kind, &length) = (rest.first()?, rest.get(1)?);
            let length = usize::from(length);
            if length < 2 || length > rest.len() {
                return None;
            }
            let (body, after) = rest.split_at(length);
            rest = after;
            Some((kind, body))
        })
    }
}

/// The whole table at `at`, if it carries `signature` and its bytes sum to zero.
fn table<'m>(memory: &'m impl Physical, at: u64, signature: &[u8; 4]) -> Option<&'m [u8]> {
    let header = memory.bytes(at, HEADER)?;
    if !header.starts_with(signature) {
        return None;
    }
    let length = usize::try_from(u32_at(header, 4)?).ok().filter(|l| (HEADER..=LONGEST).contains(l))?;
    memory.bytes(at, length).filter(|bytes| sum(bytes) == 0)
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}
