//! The ID registers, and the registers that they hide: can the guest access those, and whose contents do they have?
//!
//! Run VMs with different seeds, 1 to 4, beside each other. Each writes its own pattern to every register that takes
//! one, and looks for the patterns of the others there.

use super::Seen;
use super::system::{Encoding, acknowledges, all, instruction, moves_the_ground};
use crate::arch::attempt::Fault;
use crate::arch::{code, cpu_local, tsc};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// Number of VMs with distinct patterns.
const VMS: usize = 4;
/// Maximum number of registers that can hold a pattern.
const MOST: usize = 64;

/// A register, its contents before, and what it keeps of the pattern of each VM.
type Held = (Encoding, u64, [u64; VMS]);

fn pattern(vm: usize) -> u64 {
    (vm as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn read(encoding: Encoding) -> Option<u64> {
    code::execute(cpu_local::index(), instruction(encoding, true), [0; 2]).ok().map(|[value, _]| value)
}

fn write(encoding: Encoding, value: u64) -> bool {
    code::execute(cpu_local::index(), instruction(encoding, false), [value, 0]).is_ok()
}

/// What a register keeps of each pattern, if the results differ.
fn try_patterns(encoding: Encoding) -> Option<[u64; VMS]> {
    let mut held = [0; VMS];
    for (vm, held) in held.iter_mut().enumerate() {
        if !write(encoding, pattern(vm)) {
            return None;
        }
        *held = read(encoding)?;
    }
    // The patterns differ in so many bits that none is there by chance, and none equals a cleared register.
    let differ = |a: usize, b: usize| (held[a] ^ held[b]).count_ones() >= 3;
    let are_apart = (0..VMS).all(|a| held[a] != 0 && (0..a).all(|b| differ(a, b)));
    are_apart.then_some(held)
}

/// Looks for patterns of other VMs in every register that can be written and read.
pub(super) fn registers(context: &Context) -> Outcome {
    let own = usize::try_from(context.settings.seed.unwrap_or(1) - 1).unwrap_or(0) % VMS;
    let mut list: [Held; MOST] = [((0, 0, 0, 0, 0), 0, [0; VMS]); MOST];
    let mut count = 0;
    for encoding in all(3).filter(|&encoding| !acknowledges(encoding) && !moves_the_ground(encoding, true)) {
        let Some(before) = read(encoding) else { continue };
        if let Some(held) = try_patterns(encoding)
            && let Some(place) = list.get_mut(count)
        {
            *place = (encoding, before, held);
            count += 1;
            write(encoding, pattern(own));
        } else {
            write(encoding, before);
        }
    }
    let list = &list[..count];

    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(3));
    let (mut rounds, mut foreign) = (0_u64, 0_u64);
    while tsc::now() < end {
        rounds += 1;
        for &(encoding, _, held) in list {
            let Some(seen) = read(encoding) else { continue };
            let whose = (0..VMS).find(|&vm| vm != own && held[vm] == seen);
            if let Some(vm) = whose {
                foreign += 1;
                if foreign <= 5 {
                    let (op0, op1, crn, crm, op2) = encoding;
                    let of = format_args!("s{op0}_{op1}_c{crn}_c{crm}_{op2}");
                    let seen = format_args!("{seen:#x}-of-seed-{}", vm + 1);
                    record!(
                        "violation",
                        experiment = "hidden-registers",
                        of = of,
                        expected = "own-or-zero",
                        seen = seen
                    );
                }
                write(encoding, pattern(own));
            }
        }
    }
    for &(encoding, before, _) in list {
        write(encoding, before);
    }
    record!("record", experiment = "hidden-registers", registers = count, rounds = rounds, foreign = foreign);
    Outcome::Done { failures: foreign }
}

/// Records all ID registers, and tries some of what they hide.
pub(super) fn id_registers(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    for (crm, op2) in (1..8).flat_map(|crm| (0..8).map(move |op2| (crm, op2))) {
        let value = Seen(read((3, 0, 0, crm, op2)).ok_or(Fault { syndrome: 0 }));
        record!("record", experiment = "id-registers", crm = crm, op2 = op2, value = value);
    }
    let mut cases = Cases::new(context, "id-registers");
    for (name, encoding) in [
        ("lorsa", (3, 0, 10, 4, 0)),
        ("lorc", (3, 0, 10, 4, 3)),
        ("lorid", (3, 0, 10, 4, 7)),
        ("mpam1", (3, 0, 10, 5, 0)),
        ("mpamidr", (3, 0, 10, 4, 4)),
        ("pmscr", (3, 0, 9, 9, 0)),
        ("pmsidr", (3, 0, 9, 9, 7)),
        ("pmblimitr", (3, 0, 9, 10, 0)),
        ("amcr", (3, 3, 13, 2, 0)),
        ("amevcntr00", (3, 3, 13, 4, 0)),
        ("erridr", (3, 0, 5, 3, 0)),
        ("zcr", (3, 0, 1, 2, 0)),
        ("smcr", (3, 0, 1, 2, 6)),
        ("scxtnum", (3, 0, 13, 0, 7)),
        ("gcr", (3, 0, 1, 0, 6)),
        ("pmccntr", (3, 3, 9, 13, 0)),
        ("trfcr", (3, 0, 1, 2, 1)),
        ("accdata", (3, 0, 13, 0, 5)),
    ] {
        for is_read in [true, false] {
            let seen = code::execute(cpu_local::index(), instruction(encoding, is_read), [0; 2]);
            let is_there = !seen.is_err_and(|fault| fault.class() == Fault::UNDEFINED);
            let seen = Seen(seen.map(|[value, _]| value));
            cases.check(name, "a register that is hidden", "undefined", format_args!("{seen}"), !is_there);
        }
    }
    cases.done()
}
