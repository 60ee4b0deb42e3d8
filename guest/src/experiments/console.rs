//! Guests that write to their consoles: one without end, and one that writes a little, so that a watcher can time its
//! arrival.

use core::sync::atomic::{AtomicU64, Ordering};

use super::{Context, Outcome};
use crate::arch::{serial, tsc};
use crate::cpu;
use crate::record::record;

/// The bytes of a flood; none of them appears in a record.
const FLOOD: &[u8] = b"################################################################";

static LAST: AtomicU64 = AtomicU64::new(0);

fn seconds(context: &Context) -> u64 {
    context.settings.seconds.unwrap_or(5)
}

pub(super) fn flood(context: &Context) -> Outcome {
    LAST.store(tsc::now() + tsc::seconds(seconds(context)), Ordering::SeqCst);
    for index in (1..cpu::count()).filter(|index| cpu::is_up(*index)) {
        if !cpu::give(index, write) {
            record!("error", about = "cpu-is-busy", cpu = index);
        }
    }
    write(0);
    let stuck = cpu::wait_for_all(tsc::seconds(context.settings.stall.unwrap_or(30)));
    serial::send(b"\r\n");
    Outcome::Done { failures: u64::from(stuck.is_some()) }
}

fn write(_: usize) {
    while tsc::now() < LAST.load(Ordering::Relaxed) {
        serial::send(FLOOD);
    }
}

pub(super) fn chatter(context: &Context) -> Outcome {
    let begun = tsc::now();
    for second in 1..=seconds(context) {
        let due = begun + tsc::seconds(second);
        while tsc::now() < due {
            core::hint::spin_loop();
        }
        record!("progress", experiment = "chatter", second = second);
    }
    Outcome::Done { failures: 0 }
}
