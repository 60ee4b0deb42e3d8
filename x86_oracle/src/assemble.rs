//! Generates instruction bytes.
//!
//! There are two sources. A table has all opcodes that the emulator should know, so that none is rare. Random bytes, of
//! which only the first few are likely prefixes, cover what the table's author has missed.

use crate::random::Random;
use x86_emulate::{MAX_LENGTH, Mode};

/// The operands after an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operands {
    /// ModRM, with any register.
    Any,
    /// ModRM, with this extension of the opcode.
    Extended(u8),
    /// Nothing: a string instruction.
    Implied,
    /// An address.
    Absolute,
}

/// An opcode.
#[derive(Clone, Copy, Debug)]
struct Opcode {
    bytes: &'static [u8],
    operands: Operands,
    can_be_locked: bool,
}

const fn any(bytes: &'static [u8]) -> Opcode {
    Opcode { bytes, operands: Operands::Any, can_be_locked: false }
}

const fn extended(bytes: &'static [u8], extension: u8) -> Opcode {
    Opcode { bytes, operands: Operands::Extended(extension), can_be_locked: false }
}

const fn implied(bytes: &'static [u8]) -> Opcode {
    Opcode { bytes, operands: Operands::Implied, can_be_locked: false }
}

const fn absolute(bytes: &'static [u8]) -> Opcode {
    Opcode { bytes, operands: Operands::Absolute, can_be_locked: false }
}

const fn lockable(opcode: Opcode) -> Opcode {
    Opcode { can_be_locked: true, ..opcode }
}

/// All opcodes (APM vol. 3, A.1), except the eight that 00 to 3F and 80 to 83 have in common.
const OPCODES: [Opcode; 61] = [
    any(&[0x88]),
    any(&[0x89]),
    any(&[0x8a]),
    any(&[0x8b]),
    extended(&[0xc6], 0),
    extended(&[0xc7], 0),
    absolute(&[0xa0]),
    absolute(&[0xa1]),
    absolute(&[0xa2]),
    absolute(&[0xa3]),
    any(&[0x0f, 0xc3]),
    any(&[0x0f, 0xb6]),
    any(&[0x0f, 0xb7]),
    any(&[0x0f, 0xbe]),
    any(&[0x0f, 0xbf]),
    any(&[0x63]),
    lockable(any(&[0x86])),
    lockable(any(&[0x87])),
    any(&[0x84]),
    any(&[0x85]),
    extended(&[0xf6], 0),
    extended(&[0xf7], 0),
    extended(&[0xf6], 1),
    extended(&[0xf7], 1),
    lockable(extended(&[0xfe], 0)),
    lockable(extended(&[0xff], 0)),
    lockable(extended(&[0xfe], 1)),
    lockable(extended(&[0xff], 1)),
    lockable(extended(&[0xf6], 2)),
    lockable(extended(&[0xf7], 2)),
    lockable(extended(&[0xf6], 3)),
    lockable(extended(&[0xf7], 3)),
    any(&[0x0f, 0xa3]),
    lockable(any(&[0x0f, 0xab])),
    lockable(any(&[0x0f, 0xb3])),
    lockable(any(&[0x0f, 0xbb])),
    extended(&[0x0f, 0xba], 4),
    lockable(extended(&[0x0f, 0xba], 5)),
    lockable(extended(&[0x0f, 0xba], 6)),
    lockable(extended(&[0x0f, 0xba], 7)),
    lockable(any(&[0x0f, 0xb0])),
    lockable(any(&[0x0f, 0xb1])),
    lockable(extended(&[0x0f, 0xc7], 1)),
    lockable(extended(&[0x0f, 0xc7], 1)),
    lockable(any(&[0x0f, 0xc0])),
    lockable(any(&[0x0f, 0xc1])),
    extended(&[0xff], 6),
    extended(&[0xff], 6),
    extended(&[0x8f], 0),
    extended(&[0x8f], 0),
    implied(&[0xa4]),
    implied(&[0xa5]),
    implied(&[0xa6]),
    implied(&[0xa7]),
    implied(&[0xaa]),
    implied(&[0xab]),
    implied(&[0xac]),
    implied(&[0xad]),
    implied(&[0xae]),
    implied(&[0xaf]),
    implied(&[0xa5]),
];

/// Prefixes; the number of segment prefixes.
const PREFIXES: [u8; 11] = [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65, 0x66, 0x67, 0xf0, 0xf2, 0xf3];
const SEGMENTS: usize = 6;

/// Bytes that begin with an instruction, often one that the emulator knows.
pub(crate) fn assemble(random: &mut Random, mode: Mode) -> [u8; MAX_LENGTH] {
    let mut bytes = [0; MAX_LENGTH];
    let text = if random.one_in(3) { anything(random, mode) } else { known(random, mode) };
    // The bytes after an instruction are not always zero.
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte = text.get(place).copied().unwrap_or_else(|| random.byte());
    }
    bytes
}

fn anything(random: &mut Random, mode: Mode) -> Vec<u8> {
    let mut text = Vec::new();
    for _ in 0..random.below(4) {
        text.push(random.pick(&PREFIXES));
        if mode == Mode::Bits64 && random.one_in(4) {
            text.push(rex(random));
        }
    }
    if mode == Mode::Bits64 && random.one_in(2) {
        text.push(rex(random));
    }
    if random.one_in(4) {
        text.push(0x0f);
    }
    text
}

fn known(random: &mut Random, mode: Mode) -> Vec<u8> {
    // One in four is arithmetic: 00 to 3B in steps of 8, or 80 to 83.
    let arithmetic = random.byte() & 7;
    let short = arithmetic << 3 | random.byte() & 3;
    let group = 0x80 | random.byte() & 3;
    let (opcode, operands, can_be_locked) = match random.below(8) {
        0 => (vec![short], Operands::Any, short & 2 == 0 && arithmetic != 7),
        1 => (vec![group], Operands::Extended(arithmetic), arithmetic != 7),
        _ => {
            let Opcode { bytes, operands, can_be_locked } = random.pick(&OPCODES);
            (bytes.to_vec(), operands, can_be_locked)
        }
    };

    let mut text = Vec::new();
    let mut maybe = |times, prefix| {
        if random.one_in(times) {
            text.push(prefix);
        }
    };
    maybe(3, 0x66);
    maybe(5, 0x67);
    if can_be_locked {
        maybe(5, 0xf0);
    }
    if operands == Operands::Implied {
        maybe(3, 0xf2);
        maybe(2, 0xf3);
    } else {
        maybe(40, 0xf2);
        maybe(40, 0xf3);
    }
    if random.one_in(5) {
        text.push(random.pick(&PREFIXES[..SEGMENTS]));
    }
    // In any order.
    for place in 1..text.len() {
        let other = random.below(place as u64 + 1);
        text.swap(place, usize::try_from(other).expect("small"));
    }
    if mode == Mode::Bits64 && !random.one_in(3) {
        text.push(rex(random));
    }
    text.extend(opcode);

    // No register in place of the memory operand.
    let mod_rm = random.byte() & 0x3f | random.pick(&[0_u8, 0, 0x40, 0x40, 0x80]);
    match operands {
        Operands::Any => text.push(mod_rm),
        Operands::Extended(extension) => text.push(mod_rm & 0xc7 | extension << 3),
        Operands::Implied | Operands::Absolute => {}
    }
    text
}

fn rex(random: &mut Random) -> u8 {
    0x40 | random.byte() & 0xf
}
