//! Arbitrary machines, checked against the rules of every emulation.

use super::differential::likely;
use fastrand::Rng;

use super::random::Source;
use super::sound::Arbitrary;
use super::std::{collections::BTreeMap, env, eprintln};
use crate::{Cpu, Mode, Operation, Outcome, decode};

/// Number of machines, unless `EMULATE_CASES` sets it.
const CASES: u64 = 30_000;

#[test]
fn arbitrary_machines_keep_the_rules_and_only_a_done_instruction_leaves_a_trace() {
    let cases = env::var("EMULATE_CASES").ok().map(|text| text.parse().expect("EMULATE_CASES is a number"));
    let mut source = Rng::with_seed(11);
    let mut outcomes: BTreeMap<&str, u64> = BTreeMap::new();
    let mut done: BTreeMap<usize, u64> = BTreeMap::new();

    for _ in 0..cases.unwrap_or(CASES) {
        // Mostly code that is valid in any mode.
        let mut code = likely(&mut source);
        while !source.rarely(16) && (decode(Mode::Bits64, &code).is_err() || decode(Mode::Bits32, &code).is_err()) {
            code = likely(&mut source);
        }
        let machine = Arbitrary::new(&code, &mut source);
        let decoded = decode(machine.state.mode(), &code);
        let name = match machine.check(&mut source) {
            Outcome::Done { .. } => {
                if let Ok(instruction) = decoded {
                    *done.entry(instruction.operation as usize).or_default() += 1;
                }
                "done"
            }
            Outcome::Again => "again",
            Outcome::Fault(exception) if exception.vector == 14 => "page fault",
            Outcome::Fault(exception) if exception.vector == 13 => "protection fault",
            Outcome::Fault(_) => "stack fault",
            Outcome::Retry => "retry",
            Outcome::Unsupported { .. } => "unsupported",
            Outcome::Unbacked(_) => "unbacked",
        };
        *outcomes.entry(name).or_default() += 1;
    }

    if cases.is_some() {
        eprintln!("{outcomes:?}");
        for &operation in Operation::ALL {
            eprintln!("{operation:?}: done {} times", done.get(&(operation as usize)).unwrap_or(&0));
        }
    }
    for name in ["done", "again", "page fault", "protection fault", "stack fault", "retry", "unsupported", "unbacked"] {
        assert!(outcomes.get(name).is_some_and(|&count| count > 20), "{name} is rare: {outcomes:?}");
    }
    for &operation in Operation::ALL {
        assert!(done.get(&(operation as usize)).is_some_and(|&count| count > 2), "{operation:?} is rare");
    }
}
