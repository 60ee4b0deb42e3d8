//! Any accesses, against the manuals' words written as a table of bits.

use fuzz::{Input, target};
use x86_emulate::Vendor::{self, Amd, Intel};

use super::KeptMsrs;

/// What the manuals say of a register's value. All other values raise #GP.
enum Rule {
    /// Reads as this, and writes change nothing.
    Ignores(u64),
    /// Reads as this, and cannot be written.
    ReadOnly(u64),
    /// Keeps a value whose bytes are all memory types (APM vol. 2, 7.7.2).
    Types,
    /// Keeps a memory type in the lowest byte, and these bits above.
    TypeAnd(u64),
    /// Keeps these bits.
    Bits(u64),
    /// Keeps the first bits, and must have the second ones (SDM vol. 4, table 2-2: bits 11 and 12 are read-only).
    BitsWith(u64, u64),
}
use Rule::{Bits, BitsWith, Ignores, ReadOnly, TypeAnd, Types};

const FAST_STRINGS_TO_XD: u64 = 0x4_00c5_0009;

/// The register with this number, if there is one.
fn rule(number: u32, vendor: Vendor, address_bits: u8) -> Option<Rule> {
    let page_numbers = (12..address_bits.min(64)).fold(0, |bits, bit| bits | 1_u64 << bit);
    Some(match (number, vendor) {
        // TSC_ADJUST, the microcode's revision, the debug control.
        (0x3b | 0x8b | 0x1d9, _) => Ignores(0),
        (0x17 | 0x2a, Intel) => Ignores(0),
        (0xc001_0000..=0xc001_0007 | 0xc001_0010 | 0xc001_001a | 0xc001_001d | 0xc001_001f | 0xc001_0055, Amd)
        | (0xc001_1022, Amd) => Ignores(0),
        (0xc001_0015, Amd) => Ignores(1 << 24),
        (0xc001_1029, Amd) => Ignores(2),
        (0x179, _) => ReadOnly(0),
        (0xfe, _) => ReadOnly(0x508),
        (0x1a0, _) => BitsWith(FAST_STRINGS_TO_XD, 0x1800),
        (0x200..=0x20f, _) if number & 1 == 0 => TypeAnd(page_numbers),
        (0x200..=0x20f, _) => Bits(page_numbers | 1 << 11),
        (0x250 | 0x258 | 0x259 | 0x268..=0x26f, _) => Types,
        (0x2ff, _) => TypeAnd(0xc00),
        _ => return None,
    })
}

impl Rule {
    fn takes(&self, value: u64) -> bool {
        let is_type = |byte: u64| [0, 1, 4, 5, 6].contains(&(byte & 0xff));
        match *self {
            Ignores(_) => true,
            ReadOnly(_) => false,
            Types => (0..8).all(|byte| is_type(value >> (8 * byte))),
            TypeAnd(bits) => is_type(value) && value & !bits & !0xff == 0,
            Bits(bits) => value & !bits == 0,
            BitsWith(bits, fixed) => value & !bits == fixed,
        }
    }
}

/// Numbers that are near to a register's.
fn number(input: &mut Input<'_>) -> u32 {
    const AROUND: [u32; 12] =
        [0x10, 0x2a, 0x80, 0xf8, 0x178, 0x1a0, 0x1d8, 0x200, 0x250, 0x2f8, 0xc001_0000, 0xc001_1020];
    match input.byte() {
        at @ 0..=0x7f => AROUND[usize::from(at) % AROUND.len()] + u32::from(input.byte() % 0x60),
        _ => input.u32(),
    }
}

fn any_accesses(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let vendor = input.pick(&[Amd, Intel]);
    let address_bits = input.pick(&[36, 40, 48, 52, 0, 12, 64, 255]);
    let mut registers = KeptMsrs::new();
    while !input.is_empty() {
        let (number, before) = (number(&mut input), input.byte());
        let value = match before & 3 {
            // One bit of what is there changes.
            0 => registers.read(number, vendor).unwrap_or(0) ^ 1 << (before >> 2),
            1 => 0x0101_0101_0101_0101_u64.wrapping_mul(u64::from(before >> 2 & 7)),
            _ => input.u64(),
        };
        let read = registers.read(number, vendor);
        let rule = rule(number, vendor, address_bits);
        assert_eq!(read.is_some(), rule.is_some(), "{number:#x}");
        let written = registers.write(number, value, vendor, address_bits).is_some();
        let shown = registers.read(number, vendor);
        let Some(rule) = rule else {
            assert!(!written, "{number:#x} does not exist");
            continue;
        };
        assert_eq!(written, rule.takes(value), "{number:#x} = {value:#x}");
        match rule {
            Ignores(always) | ReadOnly(always) => assert_eq!((read, shown), (Some(always), Some(always))),
            _ => assert_eq!(shown, if written { Some(value) } else { read }, "{number:#x} = {value:#x}"),
        }
    }
}

#[test]
fn any_write_is_kept_ignored_or_refused_as_the_manuals_say() {
    target("msrs", any_accesses);
}

#[test]
fn reset_values_can_be_written_back() {
    for vendor in [Amd, Intel] {
        let mut registers = KeptMsrs::new();
        for number in (0..0x1000).chain(0xc000_0000..0xc000_1000).chain(0xc001_0000..0xc001_2000) {
            if let Some(value) = registers.read(number, vendor) {
                let is_read_only = matches!(rule(number, vendor, 40), Some(ReadOnly(_)));
                assert_eq!(registers.write(number, value, vendor, 40).is_none(), is_read_only, "{number:#x}");
            }
        }
    }
}

#[test]
fn registers_of_one_vendor_do_not_exist_on_the_others_processors() {
    let registers = KeptMsrs::new();
    for number in [0xc001_0015, 0xc001_1029, 0xc001_0004] {
        assert!(registers.read(number, Amd).is_some() && registers.read(number, Intel).is_none(), "{number:#x}");
    }
    for number in [0x17, 0x2a] {
        assert!(registers.read(number, Intel).is_some() && registers.read(number, Amd).is_none(), "{number:#x}");
    }
}
