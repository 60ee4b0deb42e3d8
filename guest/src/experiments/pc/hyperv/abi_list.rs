//! B12 to B14: the shape of a rep call.

use guest_model::hypercall::{ALL_SPACES, Control, FLUSH_LIST, INVALID_INPUT};

use super::watch::Watch;
use super::{Cases, NEEDS_TWO, bit, by_memory};
use crate::cpu;

pub(super) fn lists(cases: &mut Cases) {
    let words = [0, ALL_SPACES, bit(0), 0, 0, 0];
    cases.result(
        "B12",
        "0x0003 with rep count 0",
        u64::from(INVALID_INPUT),
        by_memory(Control::rep(FLUSH_LIST, 0), &words),
    );
    let answer = by_memory(Control::rep(FLUSH_LIST, 2).start(2), &words);
    cases.status("B13", "0x0003 with rep count 2, start 2", &[INVALID_INPUT], answer);

    let about = "0x0003 with count 3, start 1, and garbage in entry 0";
    if cpu::count() < 2 {
        cases.skip("B14", about, NEEDS_TWO);
        return;
    }
    let mut watch = Watch::start(&[1].into_iter().collect(), cases.patience());
    let seen = watch.see(|page| {
        let words = [0, ALL_SPACES, bit(0) | bit(1), u64::MAX - 7, page + 0x10_0000, page];
        by_memory(Control::rep(FLUSH_LIST, 3).start(1), &words)
    });
    cases.check(
        "B14",
        about,
        "status 0 reps 3, seen",
        format_args!("{} missed by {}", super::ShownAnswer(seen.answer), seen.missed),
        seen.answer == Ok(3 << 32) && seen.missed == 0 && seen.caller,
    );
    watch.stop();
}
