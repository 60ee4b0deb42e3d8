//! Simple mutations, for the replay without a fuzzer. They see no coverage, and only stay near the corpus.

use std::path::PathBuf;

use fastrand::Rng;

/// The longest input.
const LONGEST: usize = 1 << 16;
/// Numbers at which code decides.
const SPECIAL: [u64; 12] =
    [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0x8000_0000, 1 << 63, u64::MAX];

/// One of the inputs after some mutations.
pub(crate) fn mutated(inputs: &[(PathBuf, Vec<u8>)], random: &mut Rng) -> Vec<u8> {
    let any = |random: &mut Rng| inputs[random.usize(..inputs.len())].1.as_slice();
    let mut bytes = any(random).to_vec();
    for _ in 0..random.usize(1..6) {
        step(&mut bytes, any(random), random);
    }
    bytes.truncate(LONGEST);
    bytes
}

fn step(bytes: &mut Vec<u8>, other: &[u8], random: &mut Rng) {
    let at = random.usize(..=bytes.len());
    // Most changes are short, so that the rest keeps its meaning.
    let end = (at + random.usize(..=16)).min(bytes.len());
    match random.u8(..9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.u8(..8),
        1 => bytes[at..end].fill_with(|| random.u8(..)),
        2 | 3 => {
            let word = SPECIAL[random.usize(..SPECIAL.len())].to_le_bytes();
            let width = 1 << random.u8(..4);
            bytes.iter_mut().skip(at).zip(&word[..width]).for_each(|(byte, new)| *byte = *new);
        }
        4 if at < bytes.len() => bytes[at] = bytes[at].wrapping_add(random.u8(..3)).wrapping_sub(1),
        5 => drop(bytes.drain(at..end)),
        6 => drop(bytes.splice(at..at, (0..random.usize(..9)).map(|_| random.u8(..)).collect::<Vec<_>>())),
        7 => {
            let from = random.usize(..=other.len());
            let to = (from + random.usize(..=64)).min(other.len());
            bytes.splice(at..end, other[from..to].iter().copied());
        }
        _ => bytes.truncate(at),
    }
}
