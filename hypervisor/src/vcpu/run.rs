//! The loop: take the pending work, enter, handle the exit.
//!
//! Before each entry the vCPU announces that it is about to be in its guest, and only then tests for pending work. A
//! sender works in the opposite order: it posts, then reads whether the vCPU is in its guest, and kicks it if so. So
//! one of the two sees the other (`shootdown::Presence`). Host interrupts are masked from the test until the guest runs
//! ([`Arch::defer_interrupts`]), so a kick in between ends the new entry at once. The loop tests the word once per
//! entry, and no request waits longer than that.

use abi::counters::ExitReason;
pub(crate) use abi::trace::RunEnd;
use sched::Pending;

use super::{Owner, Tally, Vcpu, unsent};
use crate::arch::{Arch, Machine, VcpuState};
use crate::cpu::{self, PerCpu, scheduler};
use crate::mutants::{self, Mutant};
use crate::sync::Ordering;
use crate::trace::{self, longest};
use crate::vm::Vm;

/// A vCPU on the pCPU that runs it.
pub(crate) struct Running<'a> {
    /// The pCPU.
    pub(crate) cpu: &'static PerCpu,
    /// The VM.
    pub(crate) vm: &'a Vm,
    /// The vCPU's number within its VM.
    pub(crate) index: u32,
    /// The part that other pCPUs see.
    pub(crate) vcpu: &'a Vcpu,
    /// Whether the vCPU ran on this pCPU last.
    pub(crate) came_back: bool,
    /// The part that this pCPU owns now.
    pub(crate) owner: &'a mut Owner,
    /// Its counters.
    pub(crate) tally: Tally<'a>,
}

/// The next step of the loop after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Enter again.
    Resume,
    /// A host interrupt waits: take it, see whether the slice is over.
    Interrupted,
    /// The guest has nothing to do until something is posted.
    Idle,
    /// The guest spins: let a waiting vCPU run.
    Yield,
    /// The vCPU is suspended: its parent handles the exit.
    #[allow(dead_code, reason = "not every architecture has parents")]
    Suspended,
}

/// Runs the vCPU until it blocks, others are due, or its VM ends.
// A function of its own: inlined into the scheduler, the loop has fewer registers, and each exit spills more.
#[inline(never)]
pub(crate) fn run(run: &mut Running<'_>) -> RunEnd {
    // Made at its first use, which enables virtualization: this must come before the use of GIF.
    let host = run.cpu.host_context();
    let mut held = run.vm.memory.tag_pool().on(run.cpu.id);
    let tags = &mut *held;
    Machine::defer_interrupts();
    run.owner.arch.load(host, tags, run.came_back);
    run.owner.arch.renew_intercepts(scheduler::minds_others(run.cpu));
    run.uncount_dormant();
    if !run.is_held() {
        run.expire_due();
    }

    let mut traced = trace::looks().then(|| Traced::begin(run));
    let paused = if run.is_held() { run.wait_while_held() } else { None };
    let end = paused.unwrap_or_else(|| match Machine::uses_second_back_end() {
        false => run_loop::<false>(run, host, tags, &mut traced),
        true => run_loop::<true>(run, host, tags, &mut traced),
    });
    if let Some(traced) = traced {
        traced.end(run, end);
    }

    run.owner.arch.unload(tags);
    Machine::stop_deferring_interrupts();
    end
}

/// Enters the guest and handles its exits, again and again. Each back end has a copy: in one for both the code of one
/// would take registers from the other.
#[inline(never)]
fn run_loop<const SECOND_BACK_END: bool>(
    run: &mut Running<'_>,
    host: &<Machine as Arch>::HostContext,
    tags: &mut <Machine as Arch>::CpuTags,
    traced: &mut Option<Traced>,
) -> RunEnd {
    loop {
        Machine::prepare(run);
        if !run.owner.arch.activity().is_active() {
            if let Some(traced) = traced {
                traced.look(run);
            }
            if run.vcpu.mailbox().has_work()
                && let Some(end) = take_pending(run)
            {
                return end;
            }
            if !run.owner.arch.activity().is_awake() && !run.owner.arch.try_wake() {
                if run.block() {
                    return RunEnd::Blocked;
                }
                run.owner.arch.activity().set_traced(traced.is_some());
                continue;
            }
            run.owner.arch.activity().set_traced(traced.is_some());
        }

        // Shootdowns, stops, interrupts of others: all land here.
        let is_tested = mutants::is(Mutant::TestBeforeEnter) && !run.vcpu.mailbox().has_work();
        run.vcpu.presence().enter(run.cpu.id.0);
        if !is_tested && run.vcpu.mailbox().has_work() {
            run.vcpu.presence().leave();
            if let Some(end) = take_pending(run) {
                return end;
            }
            continue;
        }

        if mutants::is(Mutant::PresenceLeftEarly) {
            run.vcpu.presence().leave();
        }
        Machine::enter(SECOND_BACK_END, &mut run.owner.arch, host, tags, run.vm.memory.epoch(), run.tally);
        if !mutants::is(Mutant::WritesNotReported) {
            Machine::report_writes(SECOND_BACK_END, run);
        }
        run.vcpu.presence().leave();

        match Machine::handle_exit(SECOND_BACK_END, run) {
            Next::Resume | Next::Idle => {}
            Next::Interrupted => {
                if let Some(traced) = traced {
                    traced.measure(run);
                }
                if let Some(end) = run.let_interrupts_in() {
                    return end;
                }
                if trace::looks() != traced.is_some() {
                    return RunEnd::Preempted;
                }
            }
            Next::Yield => {
                // The exit took the place of the guest's own PAUSE, which gives way to the other thread of a core. An
                // emulator that runs its CPUs in turn goes to the next one.
                core::hint::spin_loop();
                if scheduler::yields(run.cpu) {
                    return RunEnd::Preempted;
                }
                run.owner.arch.renew_intercepts(false);
            }
            Next::Suspended => {
                if let Some(end) = run.wait_while_held() {
                    return end;
                }
            }
        }
    }
}

/// A traced run of a vCPU: each exit is recorded.
///
/// The vCPU is [traced](super::activity::Activity::set_traced): the loop treats it as waiting, so it takes this path
/// between two entries. Other vCPUs pay nothing for that.
struct Traced {
    /// Time of the last unrecorded exit.
    left_at: u64,
    /// The exits that were counted until then.
    exits: [u64; ExitReason::COUNT],
}

impl Traced {
    #[cold]
    fn begin(run: &mut Running<'_>) -> Self {
        trace::run_began(run.vm.number, run.index);
        run.owner.arch.activity().set_traced(true);
        longest::begins(run);
        Self { left_at: run.owner.arch.left_at(), exits: run.tally.exits() }
    }

    /// Records the last exit, if there was one since the last call: the counter that has changed gives its reason.
    #[cold]
    fn look(&mut self, run: &Running<'_>) {
        let left_at = run.owner.arch.left_at();
        if left_at == self.left_at {
            return;
        }
        self.measure(run);
        let exits = run.tally.exits();
        trace::exit(left_at, self.reason(&exits));
        *self = Self { left_at, exits };
    }

    /// Why the guest was left last.
    fn reason(&self, exits: &[u64; ExitReason::COUNT]) -> ExitReason {
        let counted = ExitReason::ALL.iter().find(|&&reason| exits[reason as usize] != self.exits[reason as usize]);
        *counted.unwrap_or(&ExitReason::Other)
    }

    /// Measures what lies before and after the last time in the guest, unless that was done.
    #[cold]
    fn measure(&self, run: &Running<'_>) {
        longest::left(run, || self.reason(&run.tally.exits()).name());
    }

    fn end(mut self, run: &mut Running<'_>, end: RunEnd) {
        self.look(run);
        run.owner.arch.activity().set_traced(false);
        trace::run_ended(end);
    }
}

/// Takes the pending work. Returns why the run ends, if it ends.
#[cold]
#[inline(never)]
fn take_pending(run: &mut Running<'_>) -> Option<RunEnd> {
    let work = carry_out(run);
    if work.contains(Pending::STOP) {
        return Some(RunEnd::Ended);
    }
    if work.contains(Pending::PAUSE)
        && let Some(end) = run.wait_while_held()
    {
        return Some(end);
    }
    if work.contains(Pending::SEND) { run.let_interrupts_in() } else { None }
}

/// Takes the pending work and does it, except work that concerns the VM.
fn carry_out(run: &mut Running<'_>) -> Pending {
    let work = run.vcpu.mailbox().take();
    run.vm.pass_on(run.index, work);
    if work.contains(Pending::STOP) {
        return work;
    }
    if work.contains(Pending::FLUSH) {
        run.vm.memory.flush_owed(run.vcpu, run.owner, run.tally);
    }
    Machine::take_posted(&mut run.owner.arch, run.vcpu.posted(), work);
    // Timers of a vCPU that is held expire when it goes on: its parent may have stopped its time.
    if work.contains(Pending::TIMER) && (!run.is_held() || mutants::is(Mutant::TimerWhileHeld)) {
        Machine::expire_timers(run, Machine::now());
    }
    if work.contains(Pending::MESSAGE) {
        Machine::deliver_messages(run);
    }
    if work.contains(Pending::SEND) {
        unsent::go_on(run.vm, run.vcpu);
    }
    Machine::prepare(run);
    work
}

impl Running<'_> {
    /// Blocks the vCPU unless work was posted in between. Returns whether it blocked.
    fn block(&mut self) -> bool {
        // A timer that has expired by now ends the halt as well.
        let now = Machine::now();
        if self.owner.arch.deadline().is_some_and(|deadline| deadline <= now) {
            Machine::expire_timers(self, now);
            Machine::prepare(self);
            if self.owner.arch.try_wake() {
                return false;
            }
        }
        self.vcpu.set_virtual_time(scheduler::time_of_running(self.cpu));
        self.count_if_dormant();
        if mutants::is(Mutant::BlockWithoutTest) {
            let _ = self.vcpu.mailbox().take();
        }
        if !self.vcpu.mailbox().block() {
            self.uncount_dormant();
            return false;
        }
        self.tally.add(|count| &count.blocks, 1);
        true
    }

    /// Whether the vCPU must not enter its guest now.
    pub(crate) fn is_held(&self) -> bool {
        self.vm.is_paused() || self.vcpu.suspended().load(Ordering::SeqCst) != 0
    }

    /// Takes the host's interrupts that wait. Returns why the run ends, if another vCPU is due.
    #[inline(always)]
    fn let_interrupts_in(&mut self) -> Option<RunEnd> {
        longest::take_interrupts();
        cpu::housekeeping(self.cpu);
        Machine::expire_timers(self, Machine::now());
        if scheduler::is_due(self.cpu, self.vm.share()) {
            return Some(RunEnd::Preempted);
        }
        self.owner.arch.renew_intercepts(scheduler::minds_others(self.cpu));
        scheduler::arm(self.cpu, self.vm.share(), self.owner.arch.deadline());
        None
    }

    /// Blocks the vCPU as long as its VM is paused or the vCPU suspended. Posted work is done, but the guest does not
    /// run.
    #[cold]
    #[inline(never)]
    fn wait_while_held(&mut self) -> Option<RunEnd> {
        while self.is_held() {
            if self.vcpu.mailbox().has_work() {
                let work = carry_out(self);
                if work.contains(Pending::STOP) {
                    return Some(RunEnd::Ended);
                }
                if work.contains(Pending::SEND) {
                    longest::take_interrupts();
                    cpu::housekeeping(self.cpu);
                }
                // The post may have said that the pause is over.
                if !mutants::is(Mutant::PauseNotLookedAtAgain) {
                    continue;
                }
            }
            self.vcpu.set_virtual_time(scheduler::time_of_running(self.cpu));
            if self.vcpu.mailbox().block() {
                return Some(RunEnd::Paused);
            }
        }
        self.expire_due();
        if !mutants::is(Mutant::WaitedForNothing) {
            Machine::held_no_more(self);
        }
        None
    }

    /// Lets timers expire that are due. While the vCPU waited for its turn, or was held, no timer was armed for it. If
    /// its turns are short, the pCPU's timer may always be too late for it.
    fn expire_due(&mut self) {
        let now = Machine::now();
        if self.owner.arch.deadline().is_some_and(|deadline| deadline <= now) {
            Machine::expire_timers(self, now);
        }
    }

    /// Counts the vCPU among the dormant ones of its VM, if it is dormant: only another vCPU can make it run again.
    fn count_if_dormant(&mut self) {
        if self.owner.arch.is_dormant() {
            self.owner.is_counted_dormant = true;
            self.vm.add_dormant();
        }
    }

    fn uncount_dormant(&mut self) {
        if core::mem::take(&mut self.owner.is_counted_dormant) {
            self.vm.remove_dormant();
        }
    }
}
