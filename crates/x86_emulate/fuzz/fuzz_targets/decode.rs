//! Bytes of code, through both decoders.

#![no_main]

use ::x86_emulate;
use libfuzzer_sys::fuzz_target;
use random::Source;
use x86_emulate::Mode;

#[path = "../../src/tests/agree.rs"]
mod agree;
#[path = "../input.rs"]
mod input;
#[allow(dead_code, reason = "each target uses some of it")]
#[path = "../../src/tests/random.rs"]
mod random;

fuzz_target!(|bytes: &[u8]| {
    let mut input = input::Input::new(bytes);
    let code = input.code();
    let mode = input.pick(&[Mode::Bits64, Mode::Bits32, Mode::Bits16]);
    let _ = agree::check_decode(mode, &code, &mut input);
});
