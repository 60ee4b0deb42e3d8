//! The longest work during which a pCPU takes no interrupts, for `bounds` on the command line (`dunlin bench bounds`).
//!
//! The hypervisor runs with interrupts off. A pCPU takes them when it enters a guest, when it sleeps, and at
//! [preemption points](crate::cpu::preemption). What lies between two of these is a stretch. Its name is what the pCPU
//! was last busy with: the exit, or the part of its housekeeping.
//!
//! An emulator's clock that counts instructions makes these times counts of instructions, the same in each run. Without
//! the option nothing is measured, and an exit costs what it always does: a vCPU whose exits are recorded is
//! [traced](super).

use alloc::vec::Vec;

use crossbeam_utils::CachePadded;
use log::info;
use spin::Once;

use crate::arch::{Arch, Machine, VcpuState};
use crate::cpu;
use crate::sync::{Mutex, per_host};
use crate::vcpu::run::Running;

/// Kinds of work that a pCPU tells apart.
const KINDS: usize = 128;

struct Stretch {
    /// When the last one ended, in host ticks. Zero before the first.
    since: u64,
    /// What the pCPU does.
    work: &'static str,
    /// The longest one of each kind of work, in host ticks.
    longest: Vec<(&'static str, u64)>,
    /// When the vCPU that runs here has left its guest last, as far as that is known here, and for how long it had been
    /// in it until then, in host ticks.
    left_at: u64,
    guest_ticks: u64,
}

per_host! {
    static STRETCHES: Once<Vec<CachePadded<Mutex<Stretch>>>> = Once::new();
}

impl Stretch {
    fn new() -> Self {
        Self { since: 0, work: "start", longest: Vec::with_capacity(KINDS), left_at: 0, guest_ticks: 0 }
    }

    /// Interrupts had their turn at this time.
    fn end(&mut self, now: u64) {
        if let Some(ticks) = now.checked_sub(self.since).filter(|_| self.since != 0) {
            note(&mut self.longest, self.work, ticks);
        }
        self.since = now;
    }
}

fn note(longest: &mut Vec<(&'static str, u64)>, work: &'static str, ticks: u64) {
    if let Some((_, most)) = longest.iter_mut().find(|(name, _)| *name == work) {
        *most = ticks.max(*most);
    } else if longest.len() < KINDS {
        longest.push((work, ticks));
    }
}

/// From now on stretches are measured. Called once, when the VMs of the payload run.
pub(crate) fn arm() {
    STRETCHES.call_once(|| cpu::all().iter().map(|_| CachePadded::new(Mutex::new(Stretch::new()))).collect());
}

/// Whether stretches are measured.
pub(crate) fn is_on() -> bool {
    STRETCHES.get().is_some()
}

fn here(act: impl FnOnce(&mut Stretch)) {
    if let Some(stretch) = STRETCHES.get().and_then(|all| all.get(cpu::this().id.index())) {
        act(&mut stretch.lock());
    }
}

/// This pCPU is busy with `work` from now on.
pub(crate) fn busy_with(work: &'static str) {
    here(|stretch| stretch.work = work);
}

/// A vCPU runs here from now on.
pub(crate) fn begins(run: &Running<'_>) {
    here(|stretch| {
        stretch.work = "switch";
        (stretch.left_at, stretch.guest_ticks) = (run.owner.arch.left_at(), run.tally.guest_ticks.get());
    });
}

/// The vCPU that runs here has left its guest, for this reason: one stretch has ended when it entered it, another one
/// has begun. Called once or more for each exit, the first time before any other function here.
pub(crate) fn left(run: &Running<'_>, reason: impl FnOnce() -> &'static str) {
    here(|stretch| {
        let (left_at, guest_ticks) = (run.owner.arch.left_at(), run.tally.guest_ticks.get());
        if left_at != stretch.left_at {
            let was_in_guest = guest_ticks.saturating_sub(stretch.guest_ticks);
            stretch.end(left_at.saturating_sub(was_in_guest));
            (stretch.since, stretch.work) = (left_at, reason());
            (stretch.left_at, stretch.guest_ticks) = (left_at, guest_ticks);
        }
    });
}

/// Takes this pCPU's interrupts, in the vCPU loop.
#[inline]
pub(crate) fn take_interrupts() {
    if !is_on() {
        return Machine::take_interrupts();
    }
    ends_now();
    Machine::take_interrupts();
    begins_now();
}

/// This pCPU sleeps until an interrupt.
pub(crate) fn wait() {
    ends_now();
    Machine::wait();
    begins_now();
    busy_with("wake-up");
}

/// This pCPU takes its interrupts now.
pub(crate) fn ends_now() {
    here(|stretch| stretch.end(Machine::now()));
}

/// It has taken them.
pub(crate) fn begins_now() {
    here(|stretch| stretch.since = Machine::now());
}

/// Logs the longest stretch of each kind of work, the longest first.
pub(crate) fn report() {
    let Some(all) = STRETCHES.get() else { return };
    let mut longest = Vec::with_capacity(KINDS);
    for stretch in all {
        stretch.lock().longest.iter().for_each(|(work, ticks)| note(&mut longest, work, *ticks));
    }
    longest.sort_by_key(|(_, ticks)| core::cmp::Reverse(*ticks));
    for (work, ticks) in longest {
        info!("without interrupts for {} ns: {work}", Machine::ticks_to_nanos(ticks));
    }
}

#[cfg(test)]
mod tests {
    use super::Stretch;

    #[test]
    fn longest_stretch_of_each_work_is_kept_and_what_came_before_the_first_chance_is_not() {
        let mut stretch = Stretch::new();
        stretch.end(1000);
        for (work, end) in [("cpuid", 1100), ("msr", 1150), ("cpuid", 1350), ("cpuid", 1360)] {
            stretch.work = work;
            stretch.end(end);
        }
        assert_eq!(stretch.longest, [("cpuid", 200), ("msr", 50)]);
    }
}
