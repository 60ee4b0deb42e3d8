//! C24 to C33: flushes of sets of processors.

use guest_model::cpu_set::CpuSet;
use guest_model::hypercall::{
    ALL_SPACES, Control, EVERYBODY, FLUSH_LIST_EX, FLUSH_SPACE_EX, INVALID_ALIGNMENT, INVALID_INPUT, INVALID_PARAMETER,
    SPARSE, sparse,
};

use super::flush::{finish, seen_by_all, watchers};
use super::watch::Watch;
use super::{Answer, Cases, SETS_WITHHELD, by_memory};
use crate::arch::hyperv;
use crate::cpu;

/// 0x0013 with a set of `banks` behind it.
fn space(format: u64, valid: u64, banks: &[u64]) -> Answer {
    list(FLUSH_SPACE_EX, format, valid, banks, &[])
}

fn list(code: u16, format: u64, valid: u64, banks: &[u64], entries: &[u64]) -> Answer {
    let mut words = [0; 512];
    words[1] = ALL_SPACES;
    words[2] = format;
    words[3] = valid;
    words.iter_mut().skip(4).zip(banks.iter().chain(entries)).for_each(|(word, value)| *word = *value);
    by_memory(Control::rep(code, entries.len() as u64).variable(banks.len() as u64), &words)
}

fn processors(cpus: &CpuSet) -> CpuSet {
    cpus.iter().filter_map(hyperv::vp_index).collect()
}

pub(super) fn run(cases: &mut Cases, features: hyperv::Features) {
    if !features.ex_sets() {
        cases.skip("C24-C33", "flushes of sets", SETS_WITHHELD);
        return;
    }
    beyond_64(cases);
    let mut watch = Watch::start(&watchers(), cases.patience());
    let all: CpuSet = watch.watchers().iter().chain([0]).collect();
    let set = processors(&all);
    let (valid, banks) = sparse(&set);

    let seen = watch.see(|_| space(SPARSE, valid, banks));
    seen_by_all(cases, "C24b", "0x0013, sparse set of the watchers and the caller", 0, seen);
    let seen = watch.see(|_| space(EVERYBODY, 0, &[]));
    seen_by_all(cases, "C25", "0x0013, everybody, no banks", 0, seen);
    let seen = watch.see(|_| space(EVERYBODY, 3, &[0, 0]));
    seen_by_all(cases, "C26", "0x0013, everybody, with banks, which do not count", 0, seen);
    let seen = watch.see(|page| list(FLUSH_LIST_EX, EVERYBODY, 3, &[0, 0], &[page]));
    seen_by_all(cases, "C27", "0x0014, everybody, with banks: the list follows them", 1 << 32, seen);
    let seen = watch.see(|page| list(FLUSH_LIST_EX, SPARSE, valid, banks, &[page + (1 << 30), page]));
    seen_by_all(cases, "C27b", "0x0014, sparse set: the list follows the banks", 2 << 32, seen);
    cases.status("C28", "0x0013, format 2", &[INVALID_PARAMETER], space(2, 1, &[1]));
    cases.status("C29a", "0x0013, a bank less than listed", &[INVALID_INPUT], space(SPARSE, 3, &[1]));
    cases.status("C29b", "0x0013, a bank more than listed", &[INVALID_INPUT], space(SPARSE, 1, &[1, 0]));
    cases.result("C30", "0x0013, no bank: the empty set", 0, space(SPARSE, 0, &[]));
    cases.result("C31", "0x0013, a bank without members", 0, space(SPARSE, 1, &[0]));
    let seen = watch.see(|_| space(SPARSE, u64::MAX, &[u64::MAX; 64]));
    seen_by_all(cases, "C32", "0x0013, 64 banks with all bits", 0, seen);
    let answer = list(FLUSH_LIST_EX, SPARSE, u64::MAX, &[u64::MAX; 64], &[0; 445]);
    cases.status("C33", "0x0014, 64 banks and 445 entries: beyond the page", &[INVALID_ALIGNMENT], answer);
    finish(cases, watch);
}

fn beyond_64(cases: &mut Cases) {
    let about = "0x0013, sparse set of VP 65 alone";
    let Some(target) = (1..cpu::count()).find(|index| hyperv::vp_index(*index) == Some(65)) else {
        cases.skip("C24", about, "there are not more than 65 vCPUs");
        return;
    };
    let mut watch = Watch::start(&[target].into_iter().collect(), cases.patience());
    let seen = watch.see(|_| space(SPARSE, 2, &[1 << 1]));
    cases.check(
        "C24",
        about,
        "status 0, seen",
        format_args!("{} missed by {}", super::ShownAnswer(seen.answer), seen.missed),
        seen.answer == Ok(0) && seen.missed == 0,
    );
    finish(cases, watch);
}
