//! What a guest has against speculative execution: bits of its state, and functions of the firmware.

use super::system::{Encoding, instruction};
use super::{Seen, calls};
use crate::arch::attempt::Fault;
use crate::arch::{code, cpu_local, power};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::record::record;

const ID_AA64PFR0: Encoding = (3, 0, 0, 4, 0);
const ID_AA64PFR1: Encoding = (3, 0, 0, 4, 1);
/// PSTATE.SSBS and PSTATE.DIT, as registers, with their bits.
const SSBS: (Encoding, u64) = ((3, 3, 4, 2, 6), 1 << 12);
const DIT: (Encoding, u64) = ((3, 3, 4, 2, 5), 1 << 24);
/// ZCR_EL1, which is hidden: the hypervisor injects an exception.
const HIDDEN: Encoding = (3, 0, 1, 2, 0);

fn execute(encoding: Encoding, is_read: bool, value: u64) -> Result<u64, Fault> {
    code::execute(cpu_local::index(), instruction(encoding, is_read), [value, 0]).map(|[value, _]| value)
}

/// Exits and injected exceptions keep PSTATE.SSBS and PSTATE.DIT. The firmware's functions do what their answers say.
pub(super) fn run(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    let mut cases = Cases::new(context, "speculation");
    let field = |encoding, shift: u32| execute(encoding, true, 0).unwrap_or(0) >> shift & 0xf;
    // With an SSBS of 1 there is the bit, but no instruction that names it.
    for (name, is_there, (register, bit)) in
        [("ssbs", field(ID_AA64PFR1, 4) >= 2, SSBS), ("dit", field(ID_AA64PFR0, 48) != 0, DIT)]
    {
        if !is_there {
            cases.skip(name, "a bit of the state of the processor", "not there");
            continue;
        }
        for value in [bit, 0] {
            let _ = execute(register, false, value);
            power::call(power::SMCCC_VERSION, [0; 3]);
            let _ = execute(HIDDEN, true, 0);
            let seen = execute(register, true, 0);
            cases.check(
                name,
                "after a call and an exception",
                "as written",
                format_args!("{}", Seen(seen)),
                seen == Ok(value),
            );
        }
    }

    const ARCH_FEATURES: u64 = 0x8000_0001;
    for (number, function) in [(1, 0x8000_8000), (2, 0x8000_7fff), (3, 0x8000_3fff)] {
        let answer = calls::answer(ARCH_FEATURES, [function, 0, 0]);
        record!("record", experiment = "speculation", workaround = number, answer = answer);
        let done = calls::answer(function, [0; 3]);
        let expected = if answer < 0 { -1 } else { 0 };
        cases.check("workaround", "a call", "0, or -1 where there is none", format_args!("{done}"), done == expected);
    }
    cases.done()
}
