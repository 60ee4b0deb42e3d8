//! Arbitrary page tables.

#![no_main]

use ::std;
use ::x86_emulate;
use libfuzzer_sys::fuzz_target;

#[allow(dead_code, reason = "there is no code in this one")]
#[path = "../input.rs"]
mod input;
#[allow(dead_code, reason = "each target uses some of it")]
#[path = "../../src/tests/random.rs"]
mod random;
#[path = "../../src/tests/tables.rs"]
mod tables;

fuzz_target!(|bytes: &[u8]| {
    tables::check_walks(&mut input::Input::new(bytes));
});
