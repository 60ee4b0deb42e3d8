//! Many byte strings, random ones and mutated real code, through two decoders.
//!
//! `DECODE_CASES=100000000 cargo test --release -p dunlin-x86-emulate decode_differential -- --nocapture` tries this
//! many and prints what it saw. Without the variable it runs some seconds.

use super::Vec;
use super::agree::{check_decode, is_known, other_decode};
use fastrand::Rng;

use super::random::Source;
use super::std::{collections::BTreeMap, env, eprintln, fs};
use crate::{Mode, Operation};

/// Number of cases, unless the environment sets it.
const CASES: u64 = 300_000;

const MODES: [Mode; 3] = [Mode::Bits64, Mode::Bits32, Mode::Bits16];

/// All legacy prefixes.
pub(super) const PREFIXES: [u8; 11] = [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65, 0x66, 0x67, 0xf0, 0xf2, 0xf3];

/// One-byte opcodes, then the second bytes of two-byte opcodes (0f), of all supported instructions.
const OPCODES: [u8; 49] = [
    0x63, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x8b, 0x8c, 0x8e, 0x8f, 0xa0, 0xa1, 0xa2,
    0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf, 0xc6, 0xc7, 0xf6, 0xf7, 0xfe, 0xff, 0x6c, 0x6d,
    0x6e, 0x6f, 0x90, 0x91, 0xc4, 0xc5, 0x62, 0x50, 0x58, 0x06, 0x0f,
];
const OPCODES_0F: [u8; 25] = [
    0xa3, 0xab, 0xb3, 0xbb, 0xba, 0xb0, 0xb1, 0xc7, 0xc0, 0xc1, 0xb6, 0xb7, 0xbe, 0xbf, 0xc3, 0xb8, 0xb9, 0xbc, 0xa0,
    0x38, 0x3a, 0x01, 0xc2, 0x10, 0x0f,
];

/// Bytes that often are a supported instruction, after up to 17 prefixes.
pub(super) fn likely(source: &mut impl Source) -> [u8; 20] {
    let mut bytes = source.bytes();
    let mut at = 0;
    let count = if source.rarely(8) { source.below(17) } else { source.below(4) };
    for _ in 0..count {
        bytes[at] = if source.rarely(4) { 0x40 | bytes[at] & 15 } else { source.pick(&PREFIXES) };
        at += 1;
    }
    if source.rarely(2) {
        bytes[at] = 0x40 | bytes[at] & 15;
        at += 1;
    }
    match source.below(4) {
        // ADD and similar.
        0 => bytes[at] &= 0x3f,
        1 | 2 => bytes[at] = source.pick(&OPCODES),
        _ => {
            bytes[at] = 0x0f;
            bytes[at + 1] = source.pick(&OPCODES_0F);
            if bytes[at + 1] == 0xc7 && source.rarely(2) {
                // CMPXCHG8B is one of eight instructions there.
                bytes[at + 2] = bytes[at + 2] & 0xc7 | 1 << 3;
            }
        }
    }
    bytes
}

/// Real code: that of this program.
struct RealCode {
    text: Vec<u8>,
    /// Offsets at which supported instructions begin.
    starts: Vec<usize>,
}

impl RealCode {
    fn read() -> Self {
        let file = env::current_exe().and_then(fs::read).expect("a program can read itself");
        let text = executable_part(&file).expect("an ELF file with code");
        let text = &text[..text.len().min(1 << 20)];
        let mut starts = Vec::new();
        let mut at = 0;
        while at + 20 <= text.len() {
            let other = other_decode(Mode::Bits64, &text[at..][..15]);
            if is_known(&other) {
                starts.push(at);
            }
            at += other.len().max(1);
        }
        assert!(starts.len() > 1000, "hardly any instruction in the program");
        Self { text: text.to_vec(), starts }
    }

    /// An instruction with up to three changed bits.
    fn mutated(&self, source: &mut impl Source) -> [u8; 20] {
        let start = self.starts[source.below(self.starts.len())];
        let mut bytes: [u8; 20] = core::array::from_fn(|at| self.text[start + at]);
        for _ in 0..source.below(4) {
            bytes[source.below(8)] ^= 1 << source.below(8);
        }
        bytes
    }
}

/// The first executable segment of a 64-bit ELF file.
fn executable_part(file: &[u8]) -> Option<&[u8]> {
    const CODE_SEGMENT: [u8; 8] = [1, 0, 0, 0, 5, 0, 0, 0];
    let word = |at: usize| {
        let bytes = file.get(at..at + 8)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let (headers, count) = (word(0x20)?, usize::from(*file.get(0x38)?));
    let header = (0..count).map(|number| headers + number * 56).find(|&at| file[at..].starts_with(&CODE_SEGMENT))?;
    file.get(word(header + 8)?..)?.get(..word(header + 32)?)
}

#[test]
fn decode_differential_random_and_mutated_bytes_mean_the_same_to_both_decoders() {
    let cases = env::var("DECODE_CASES").ok().map(|text| text.parse().expect("DECODE_CASES is a number"));
    let seed = env::var("DECODE_SEED").ok().map_or(1, |text| text.parse().expect("DECODE_SEED is a number"));
    let mut source = Rng::with_seed(seed);
    let real = RealCode::read();
    let mut known: BTreeMap<(&str, usize), u64> = BTreeMap::new();
    let mut tried: BTreeMap<&str, u64> = BTreeMap::new();

    for case in 0..cases.unwrap_or(CASES) {
        let (kind, bytes) = match case % 8 {
            0 => ("random", source.bytes()),
            1..=4 => ("likely", likely(&mut source)),
            _ => ("mutated", real.mutated(&mut source)),
        };
        let mode = if kind == "mutated" && !source.rarely(4) { Mode::Bits64 } else { source.pick(&MODES) };
        *tried.entry(kind).or_default() += 1;
        if let Ok(instruction) = check_decode(mode, &bytes, &mut source) {
            *known.entry((kind, instruction.operation as usize)).or_default() += 1;
        }
    }

    for &operation in Operation::ALL {
        let seen = known.get(&("likely", operation as usize)).copied().unwrap_or(0);
        assert!(seen > 40, "{operation:?} was decoded only {seen} times");
    }
    if cases.is_some() {
        for (kind, tried) in tried {
            let decoded: u64 = known.iter().filter(|((of, _), _)| *of == kind).map(|(_, count)| count).sum();
            eprintln!("{kind}: {tried} byte strings, {decoded} of them decoded");
        }
        for &operation in Operation::ALL {
            let count = |kind| known.get(&(kind, operation as usize)).copied().unwrap_or(0);
            eprintln!("{operation:?}: {} likely, {} mutated", count("likely"), count("mutated"));
        }
    }
}

/// No chance here: all opcodes with all addressing modes after each pair of prefixes.
#[test]
fn every_opcode_behind_every_two_prefixes_means_the_same_to_both_decoders() {
    let mut source = Rng::with_seed(2);
    let rex = [0x40, 0x41, 0x44, 0x48, 0x4f];
    let none = 0x90;
    let prefixes: Vec<u8> = PREFIXES.into_iter().chain(rex).chain([none]).collect();
    for &first in &prefixes {
        for &second in &prefixes {
            for opcode in 0..=255_u8 {
                for two in [false, true] {
                    let mut bytes = source.bytes();
                    let shape = [first, second].into_iter().filter(|&prefix| prefix != none);
                    for (at, byte) in shape.chain(two.then_some(0x0f)).chain([opcode]).enumerate() {
                        bytes[at] = byte;
                    }
                    check_decode(source.pick(&MODES), &bytes, &mut source).ok();
                }
            }
        }
    }
}
