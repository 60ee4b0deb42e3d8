//! Flushes of other CPUs' TLBs without interrupts: by hypercalls of the Hyper-V interface.
//!
//! It does what Linux does, with interrupts off and the input in this CPU's page. Calls with a mask name VP indices
//! below 64, a sparse set names others, and a flag names all processors.

use core::sync::atomic::Ordering;

use guest_model::command_line::Approach;
use guest_model::cpu_set::{CpuSet, ROOM};
use guest_model::hypercall::{
    self, ALL_PROCESSORS, Control, FLUSH_LIST, FLUSH_LIST_EX, FLUSH_SPACE, FLUSH_SPACE_EX, NON_GLOBAL, SPARSE, SUCCESS,
};

pub(crate) use super::hyperv::{bring_up, prepare_cpu, runtime};
use super::{cpu_local, hyperv, tlb};
use crate::shootdown::Operation;

/// This implementation's name.
pub(crate) const APPROACH: Approach = Approach::Hypercall;

/// Whether remote flush by hypercall is advised, and the interface is up.
pub(crate) fn is_offered() -> bool {
    hyperv::features().is_some_and(|features| features.flush()) && hyperv::is_up()
}

/// Flushes `operation` on the CPUs of `set`, or of all CPUs if `everybody`. Returns `None` if that failed. Interrupts
/// are off.
pub(crate) fn flush(set: &CpuSet, operation: Operation, everybody: bool) -> Option<()> {
    let page = hyperv::input_page(cpu_local::index());
    let words = page.words();
    let put = |at: usize, value: u64| words[at].store(value, Ordering::Relaxed);

    let list = match operation {
        Operation::Whole => None,
        Operation::Range { start, pages } => Some((start, pages)),
        Operation::Page { at } => Some((at, 1)),
    };
    let flags = if list.is_some() { 0 } else { NON_GLOBAL };
    put(0, tlb::root());

    // The target: all, a mask of 64, or banks.
    let (banks, end) = if everybody {
        put(1, flags | ALL_PROCESSORS);
        put(2, 0);
        (0, 3)
    } else {
        put(1, flags);
        let processors = processors(set)?;
        match processors.banks() {
            [] => return Some(()),
            [mask] => {
                put(2, *mask);
                (0, 3)
            }
            _ => {
                let (valid, banks) = hypercall::sparse(&processors);
                put(2, SPARSE);
                put(3, valid);
                banks.iter().enumerate().for_each(|(at, bank)| put(4 + at, *bank));
                (banks.len(), 4 + banks.len())
            }
        }
    };

    // The addresses.
    let mut entries = 0;
    if let Some((start, pages)) = list {
        for entry in hypercall::ranges(start, pages) {
            words.get(end + entries)?.store(entry, Ordering::Relaxed);
            entries += 1;
        }
    }

    let code = match (list, banks) {
        (None, 0) => FLUSH_SPACE,
        (None, _) => FLUSH_SPACE_EX,
        (Some(_), 0) => FLUSH_LIST,
        (Some(_), _) => FLUSH_LIST_EX,
    };
    let control = Control::rep(code, entries as u64).variable(banks as u64);
    let mut done = 0;
    loop {
        let result = hyperv::call(control.start(done).0, page.address(), 0);
        if list.is_none() {
            // As FreeBSD has it: any bit set is a failure.
            return (result == 0).then_some(());
        }
        // The hypervisor may return before the end of a list, but never without progress.
        let progress = hypercall::reps(result);
        if hypercall::status(result) != SUCCESS || progress <= done {
            return None;
        }
        if progress >= entries as u64 {
            return Some(());
        }
        done = progress;
    }
}

/// The VP indices of a set of CPUs; `None` if one is unknown or too large.
fn processors(set: &CpuSet) -> Option<CpuSet> {
    let mut processors = CpuSet::EMPTY;
    for cpu in set.iter() {
        let index = hyperv::vp_index(cpu).filter(|index| *index < ROOM)?;
        processors.insert(index);
    }
    Some(processors)
}
