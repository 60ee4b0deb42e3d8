//! PCI's configuration spaces: both access mechanisms give the same result, and software does no harm there.

use crate::arch::forms::{READS, WRITES};
use crate::arch::{boot, cpu_local, port, window};
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// The ports of configuration mechanism #1.
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// Offset of a function in the ECAM: a page each.
const FUNCTION_BYTES: u64 = 4096;
const FUNCTIONS: u32 = 256;

/// `bytes` at `register` of function `function` of bus 0, by the ports; bytes beyond these four read as absent.
pub(super) fn by_ports(function: u32, register: u32, bytes: u8) -> u32 {
    port::write(ADDRESS, 4, ENABLE | function << 8 | register & !3);
    port::read(DATA + (register & 3) as u16, bytes)
}

/// A write to them.
pub(super) fn write_by_ports(function: u32, register: u32, bytes: u8, value: u32) {
    port::write(ADDRESS, 4, ENABLE | function << 8 | register & !3);
    port::write(DATA + (register & 3) as u16, bytes, value);
}

/// Bits of the part of an access that lies within four bytes.
fn inside(register: u32, bytes: u8) -> u32 {
    let bits = 8 * (4 - (register & 3)).min(bytes.into());
    u32::MAX >> (32 - bits)
}

/// Maps the page of a function.
fn map(ecam: u64, function: u32) -> u64 {
    window::map_physical(cpu_local::index(), ecam + u64::from(function) * FUNCTION_BYTES)
}

/// Reads of each width at each byte of each function, by both doors.
pub(super) fn doors(context: &Context) -> Outcome {
    let Some(ecam) = boot::ecam() else { return Outcome::Unsupported("no MCFG") };
    let (mut functions, mut compared, mut failures) = (0, 0u32, 0);
    for function in 0..FUNCTIONS {
        let id = by_ports(function, 0, 4);
        let is_there = id != u32::MAX;
        if is_there {
            functions += 1;
            let class = by_ports(function, 8, 4) >> 8;
            record!(
                "record",
                experiment = "pci-doors",
                function = format_args!("{:02x}.{}", function >> 3, function & 7),
                id = format_args!("{:04x}:{:04x}", id & 0xffff, id >> 16),
                class = format_args!("{class:06x}"),
            );
        }
        let mapped = map(ecam, function);
        // For a function that does not exist, a few registers are enough.
        for register in 0..if is_there { 256 } else { 8 } {
            for (bytes, form) in [(1, 0), (2, 1), (4, 2)] {
                let ports = by_ports(function, register, bytes) & inside(register, bytes);
                let memory = load(mapped + u64::from(register), bytes) & inside(register, bytes);
                compared += 1;
                failures += context.expect(
                    "pci-doors",
                    format_args!("{function:#x}+{register:#x}"),
                    READS[form].0,
                    format_args!("ports {ports:#x} memory {memory:#x}"),
                    ports == memory,
                );
            }
        }
    }
    let bridge = by_ports(0, 0xa, 2) & 0xffff;
    failures += context.expect("pci-doors", format_args!("class"), "600", format_args!("{bridge:x}"), bridge == 0x600);
    record!("record", experiment = "pci-doors", functions = functions, compared = compared);
    Outcome::Done { failures }
}

fn load(at: u64, bytes: u8) -> u32 {
    use crate::arch::attempt::{load_u8, load_u16, load_u32};
    match bytes {
        1 => load_u8(at).map_or(0, u32::from),
        2 => load_u16(at).map_or(0, u32::from),
        _ => load_u32(at).unwrap_or(0),
    }
}

/// All possible writes, at all addresses and in all widths. The header's identity does not change, and both mechanisms
/// still give the same result.
pub(super) fn fuzz(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("QEMU's own devices would be moved");
    }
    let Some(ecam) = boot::ecam() else { return Outcome::Unsupported("no MCFG") };
    let mut random = context.random(0);
    let header = || [0, 8, 0x2c, 0x34].map(|register| by_ports(0, register, 4));
    let before = header();
    let (mut accesses, mut faults) = (0u32, 0u32);

    for round in 0..context.settings.iterations.unwrap_or(4000) {
        // Mostly existing functions, their neighbours, and the last of the bus.
        let function = [0, 0, 0, 1, 8, 0xff, random.bits_u32() & 0xff][random.index(7)];
        let mapped = map(ecam, function);
        for _ in 0..4 {
            // The last bytes of the page are left to accesses that end inside of it.
            let at = mapped + random.below(FUNCTION_BYTES - 8);
            let (_, touch) = if random.below(2) == 0 {
                READS[random.index(READS.len())]
            } else {
                WRITES[random.index(WRITES.len())]
            };
            faults += u32::from(touch(at, random.bits()).is_err());
            accesses += 1;
        }
        // Not the reset register, which lies between the two.
        let number = [ADDRESS, ADDRESS + 2, ADDRESS + 3, DATA, DATA + 1, DATA + 2, DATA + 3][random.index(7)];
        let width = [1, 2, 4][random.index(3)];
        let value = if round % 3 == 0 { u32::MAX } else { random.bits_u32() };
        port::write(number, width, value);
        port::read(number, width);
        accesses += 2;
    }

    record!("record", experiment = "pci-fuzz", accesses = accesses, faults = faults);
    let after = header();
    let mut failures =
        context.expect("pci-fuzz", format_args!("header"), "unchanged", format_args!("{after:x?}"), before == after);
    failures += context.expect("pci-fuzz", format_args!("faults"), "0", format_args!("{faults}"), faults == 0);
    match doors(context) {
        Outcome::Done { failures: more } => failures += more,
        Outcome::Unsupported(_) => {}
    }
    Outcome::Done { failures }
}
