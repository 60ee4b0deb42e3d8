//! Flushes of TLBs: HvCallFlushVirtualAddressSpace, HvCallFlushVirtualAddressList and their Ex forms.

use hyperv_defs::{Checked, Control, FlushCall, GvaRanges, Scope};
use shootdown::{CutOff, Pages, Plan};

use super::Ended;
use super::budget::Budget;
use crate::vcpu::run::Running;

/// Number of list elements between two reads of the clock.
const BETWEEN_LOOKS: u16 = 32;

pub(super) fn flush(run: &mut Running<'_>, checked: &Checked, call: &FlushCall<'_>) -> Ended {
    let control = checked.control();
    let (plan, done) = match &call.scope {
        Scope::Everything => (Plan::whole(), control.rep_count()),
        Scope::List(ranges) => plan_for(ranges.clone(), control),
    };

    run.tally.add(|count| &count.flush_calls, 1);
    if !plan.is_empty() {
        let vm = run.vm;
        vm.memory.flush(&plan, vm.vcpus(), call.targets, Some(run));
    }
    if done < control.rep_count() {
        Ended::NotYet(control.with_rep_start(done))
    } else {
        Ended::With(checked.success())
    }
}

/// The flush for a list: the part that was read within the time limit, and the number of elements read.
fn plan_for(ranges: GvaRanges<'_>, control: Control) -> (Plan, u16) {
    let mut plan = Plan::new(CutOff::default());
    let budget = Budget::start();
    for (done, pages) in (control.rep_start() + 1..).zip(ranges) {
        plan.add(Pages::new(pages.first().0, pages.small_pages()));
        if plan.is_whole() {
            // More would change nothing.
            break;
        }
        if done % BETWEEN_LOOKS == 0 && budget.is_spent() {
            return (plan, done);
        }
    }
    (plan, control.rep_count())
}
