//! Arbitrary machines.

#![no_main]

use ::std;
use ::x86_emulate;
use libfuzzer_sys::fuzz_target;

#[path = "../input.rs"]
mod input;
#[allow(dead_code, reason = "each target uses some of it")]
#[path = "../../src/tests/random.rs"]
mod random;
#[path = "../../src/tests/sound.rs"]
mod sound;

fuzz_target!(|bytes: &[u8]| {
    let mut input = input::Input::new(bytes);
    let code = input.code();
    sound::Arbitrary::new(&code, &mut input).check(&mut input);
});
