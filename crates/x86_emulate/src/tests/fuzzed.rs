//! Targets of the fuzzer: the checks of the other tests, with its bytes instead of pseudorandom numbers.

use fastrand::Rng;
use fuzz::{Input, target};

use super::random::Source;
use super::{agree, sound, tables};
use crate::Mode;

/// The fuzzer's bytes. When they run out, what follows is pseudorandom, and the same each time.
struct Bytes<'a> {
    input: Input<'a>,
    then: Rng,
}

impl<'a> Bytes<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { input: Input::new(bytes), then: Rng::with_seed(bytes.len() as u64) }
    }
}

impl Source for Bytes<'_> {
    fn word(&mut self) -> u64 {
        if self.input.is_empty() { self.then.word() } else { self.input.u64() }
    }
}

/// Both decoders give the same, or both reject the bytes.
#[test]
fn any_bytes_are_the_instruction_that_another_decoder_sees() {
    target("decode", |bytes| {
        let mut source = Bytes::new(bytes);
        let code = source.input.array();
        let mode = source.pick(&[Mode::Bits64, Mode::Bits32, Mode::Bits16]);
        let _ = agree::check_decode(mode, &code, &mut source);
    });
}

/// Only a finished instruction changes anything, and devices see only what the instruction does.
#[test]
fn any_machine_is_changed_by_finished_instructions_only() {
    target("emulate", |bytes| {
        let mut source = Bytes::new(bytes);
        let code: [u8; 20] = source.input.array();
        sound::Arbitrary::new(&code, &mut source).check(&mut source);
    });
}

#[test]
fn any_walk_with_a_cache_finds_what_one_without_finds() {
    target("walk", |bytes| {
        tables::check_walks(&mut Bytes::new(bytes));
    });
}
