//! Invalid tables of the guest, and CPUs that lose their tables or vectors.

use core::sync::atomic::{AtomicBool, Ordering};

use super::Seen;
use crate::arch::boot::BOOT_ROOT;
use crate::arch::{attempt, control, controller, entries, power, registers, tlb, tsc};
use crate::cpu;
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome, mixed};
use crate::record::record;

/// The root's entry under test, and the first address that it maps.
const ENTRY: usize = 3;
const ADDRESS: u64 = (ENTRY as u64) << 39;

pub(super) fn run(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    let mut cases = Cases::new(context, "bad-tables");
    let root = registers::root();
    for (name, table, works) in [
        ("nowhere", 0xd000_0000, false),
        ("end", (1 << control::physical_bits()) - 4096, false),
        ("device", controller::distributor(), false),
        ("serial", crate::arch::serial::base(), false),
        ("itself", root, true),
    ] {
        BOOT_ROOT.set(ENTRY, entries::table(table));
        tlb::flush_all_of_all();
        // Through the root as the table of all levels: its own entry, which is no page that was ever accessed.
        let address =
            if works { ADDRESS | ADDRESS >> 9 | ADDRESS >> 18 | ADDRESS >> 27 | (8 * ENTRY as u64) } else { ADDRESS };
        let seen = attempt::load_u64(address);
        let matches = match seen {
            Ok(_) => works,
            Err(fault) => fault.is_external() || works && fault.is_own(),
        };
        cases.check(name, "a table there", "an external abort", format_args!("{}", Seen(seen)), matches);
        BOOT_ROOT.set(ENTRY, 0);
        tlb::flush_all_of_all();
    }
    cases.done()
}

static REACHED: AtomicBool = AtomicBool::new(false);

/// CPU 1 loses its tables, and takes aborts for ever, because its vectors are unmapped. The others continue.
pub(super) fn lost_tables(context: &Context) -> Outcome {
    lose(context, "lost-tables", |_| {
        REACHED.store(true, Ordering::SeqCst);
        registers::lose_tables()
    })
}

/// CPU 1 loses its vectors, and takes an exception.
pub(super) fn lost_vectors(context: &Context) -> Outcome {
    lose(context, "lost-vectors", |_| {
        REACHED.store(true, Ordering::SeqCst);
        registers::lose_vectors()
    })
}

/// CPU 1 returns to a state that does not exist.
pub(super) fn illegal_return(context: &Context) -> Outcome {
    lose(context, "illegal-return", |_| {
        REACHED.store(true, Ordering::SeqCst);
        registers::return_illegally()
    })
}

fn lose(context: &Context, name: &str, how: fn(usize)) -> Outcome {
    if !cpu::is_up(1) || !context.judged {
        return Outcome::Unsupported("needs two CPUs, and a hypervisor below");
    }
    REACHED.store(false, Ordering::SeqCst);
    let given = cpu::give(1, how);
    let lost = given && cpu::wait_until(tsc::seconds(5), || REACHED.load(Ordering::SeqCst));
    cpu::retire(1);
    record!("record", experiment = name, cpu = 1, lost = lost);
    // An interrupt to a CPU that will never take it.
    controller::send(cpu::hardware_id(1), crate::interrupt::COUNTED);
    match mixed::run(context) {
        Outcome::Done { failures } => Outcome::Done { failures: failures + u64::from(!lost) },
        other => other,
    }
}

/// CPU 1 turns the whole machine off while CPU 0 works.
pub(super) fn off_by_another(_: &Context) -> Outcome {
    if !cpu::is_up(1) {
        return Outcome::Unsupported("needs two CPUs");
    }
    cpu::give(1, |_| power::off(true));
    cpu::wait_until(tsc::seconds(10), || false);
    record!("violation", experiment = "off-by-another", expected = "vm-stops", seen = "nothing");
    Outcome::Done { failures: 1 }
}
