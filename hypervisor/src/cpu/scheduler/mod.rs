//! The scheduler: which vCPU runs on which pCPU, and for how long.
//!
//! Each pCPU has a run queue (`sched::RunQueue`), or all threads of a core have one together. It runs a vCPU of the VM
//! that has used the least for its weight, of these the one that has run the least. A vCPU runs until it blocks, until
//! its slice ends and another has a better claim, or until a woken vCPU has a claim that is better by a margin.
//!
//! `placing` chooses the queue in which a vCPU waits, and moves some from queue to queue. `caps` keeps those out whose
//! VMs have used up their caps. `threads` says which pCPUs run vCPUs, and which of them belong together.

mod caps;
mod placing;
pub(crate) mod threads;

use alloc::collections::{TryReserveError, VecDeque};

use log::info;
use sched::{Claim, CpuId, CpuSet, MAX_LAG, Member, RunQueue, Share, Times, VirtualTime};
use vcpu_layout::{OwnerWord, Proof, lay_out};

use super::preemption::preemption_point_before;
use super::{PerCpu, by_id, finish_housekeeping, housekeeping, is_busy, room};
use crate::arch::{Arch, Machine, VcpuState, trace};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, point};
use crate::trace::longest;
use crate::vcpu::Tally;
use crate::vcpu::run::{RunEnd, Running, run};
use crate::vm::VcpuRef;
pub(super) use caps::release;
pub(crate) use placing::{first_home, wake, wake_next};
use placing::{idle, kick_any_idle, pick, pull, put_back};
pub(crate) use threads::runners;
use threads::{by_core, leader, mates, runs_vcpus};

/// Slices per second: for how long a vCPU runs while others wait.
const SLICES_PER_SECOND: u64 = Machine::SLICES_PER_SECOND;
/// Minimum rate of each pCPU's timer, 100 per second: after a lost interrupt the pCPU continues within this time.
const TICKS_PER_SECOND: u64 = 100;
/// The same for the housekeeping pCPU while it is busy: it works for half a millisecond, so half of its time.
const TICKS_WHEN_BUSY: u64 = 1000;
/// Virtual time runs at about this rate, and not slower than the host's ticks, which may be far fewer: the constants of
/// `sched` and of this file assume it.
const VIRTUAL_HZ: u64 = 2_000_000_000;
/// By how much a woken vCPU must be behind the running one to take its place; less is not worth the switch.
const PREEMPTION_MARGIN: VirtualTime = 2_000_000;
/// By how much a VM that waits elsewhere must be behind the running one to be pulled.
const PULL_MARGIN: VirtualTime = 40_000_000;
/// The longest slice in the virtual time of a VM: one of little weight would be far ahead after a whole one.
const LONGEST_SLICE: VirtualTime = 40_000_000;

/// The shortest slice of a VM of little weight: switches more often cost more than they give.
const SHORTEST_SLICE_NANOS: u64 = 1_000_000;

/// For how long a vCPU has a pCPU to itself that another handed over to it.
const HANDOVER_NANOS: u64 = 50_000;
/// For how long a vCPU runs at least before a woken one takes its place. Without that, one that sleeps and wakes as
/// fast as it can would leave the other nothing but switches. The same as Xen's `ratelimit_us`.
const UNDISTURBED_NANOS: u64 = 1_000_000;
/// How much of a switch is charged to the VM of the vCPU that runs next: vCPUs that yield to each other all the time
/// would take from other VMs what their switches take. What is longer is housekeeping for all.
const LONGEST_SWITCH_NANOS: u64 = 50_000;
/// How much a vCPU runs before its VM is charged for it while others wait for the pCPU. All vCPUs of a VM write one
/// word then. While none waits, it is a whole slice.
const CHARGE_NANOS: u64 = 100_000;
/// How far ahead of others a VM may be and still be charged for the host's work for it.
const MOST_WORKED_AHEAD: VirtualTime = MAX_LAG;
/// As the occupant of a core: it is promised to a VM, and nobody else gets a thread of it.
const PROMISED: u64 = u64::MAX;
/// Periods of caps per second.
const PERIODS_PER_SECOND: u64 = 20;

/// A pCPU's scheduling state.
#[lay_out]
pub(crate) struct Scheduler {
    /// The queue of this pCPU and its mates, if it leads them.
    #[layout(mailbox)]
    queue: Mutex<RunQueue<VcpuRef>>,
    /// Copies of the length of the pCPU's queue, of its floor, of its first VM's virtual time, and of the pCPUs that
    /// may take from it, for readers without the lock.
    #[layout(mailbox)]
    waiting: AtomicU64,
    #[layout(mailbox)]
    floor: AtomicU64,
    #[layout(mailbox)]
    first: AtomicU64,
    #[layout(mailbox)]
    takers: AtomicU64,
    /// With `smt=core`: the VM whose vCPUs run on this core. Zero: none runs.
    #[layout(mailbox)]
    occupant: AtomicU64,
    /// How many of the core's threads run its vCPUs, and, in the upper half, how many stand still for that.
    #[layout(mailbox)]
    inside: AtomicU64,
    /// How often another VM than before ran on this core.
    #[layout(mailbox)]
    changes: AtomicU64,
    /// vCPUs whose VMs have used up their caps, and in virtual ticks when each may go on.
    #[layout(mailbox)]
    parked: Mutex<VecDeque<(u64, VirtualTime, VcpuRef)>>,
    /// The vCPU that runs now: its virtual time when it started, and when that was in ticks of the host clock.
    #[layout(owner)]
    started_with: OwnerWord,
    #[layout(owner)]
    started_at: OwnerWord,
    /// The virtual times of its VM, and of the group, when they were last charged.
    #[layout(owner)]
    vm_time: OwnerWord,
    #[layout(owner)]
    whole_time: OwnerWord,
    /// Host time up to which they were charged.
    #[layout(owner)]
    charged_until: OwnerWord,
    /// Host time up to which the last one was accounted for. What a switch takes from then on is the next one's. Zero:
    /// there was something else in between.
    #[layout(owner)]
    switched_since: OwnerWord,
    /// Host time at which its slice began.
    #[layout(owner)]
    slice_began: OwnerWord,
    /// How long its slice is, in host ticks.
    #[layout(owner)]
    slice: OwnerWord,
    /// Host time at which it gives way to a woken one. Zero: to none.
    #[layout(owner)]
    undisturbed_until: OwnerWord,
    /// Whether it yields: 1, or else 0.
    #[layout(owner)]
    yields: OwnerWord,
    /// Whether others waited for this pCPU when [`minds_others`] looked last: 1, or else 0.
    #[layout(owner)]
    minds_others: OwnerWord,
    /// Whether a vCPU runs now: 1, or else 0.
    #[layout(owner)]
    is_running: OwnerWord,
    /// Host time until which the vCPU that runs may keep the one waiting that handed this pCPU over to it. Zero: none.
    #[layout(owner)]
    handed_over_until: OwnerWord,
    /// Host time at which the first parked vCPU may go on.
    #[layout(owner)]
    release_at: OwnerWord,
}

impl Scheduler {
    pub(crate) fn new() -> Self {
        Self::lay_out(SchedulerFields {
            queue: Mutex::default(),
            waiting: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            first: AtomicU64::new(u64::MAX),
            takers: AtomicU64::new(0),
            occupant: AtomicU64::new(0),
            inside: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            parked: Mutex::default(),
            started_with: OwnerWord::new(0),
            started_at: OwnerWord::new(0),
            vm_time: OwnerWord::new(0),
            whole_time: OwnerWord::new(0),
            charged_until: OwnerWord::new(0),
            switched_since: OwnerWord::new(0),
            slice_began: OwnerWord::new(0),
            slice: OwnerWord::new(0),
            undisturbed_until: OwnerWord::new(0),
            yields: OwnerWord::new(0),
            minds_others: OwnerWord::new(0),
            is_running: OwnerWord::new(0),
            handed_over_until: OwnerWord::new(0),
            release_at: OwnerWord::new(u64::MAX),
        })
    }

    /// Makes room for `count` vCPUs in all.
    ///
    /// # Errors
    /// When there is no memory for that; nothing has changed then.
    pub(super) fn reserve(&self, count: usize) -> Result<(), TryReserveError> {
        self.queue.lock().reserve(count)?;
        let mut parked = self.parked.lock();
        let more = count.saturating_sub(parked.len());
        parked.try_reserve_exact(more)
    }

    /// Frees room for more than `count` vCPUs.
    pub(super) fn shrink(&self, count: usize) {
        self.queue.lock().shrink(count);
        self.parked.lock().shrink_to(count);
    }

    /// Whether a vCPU waits here that may run on `cpu`.
    fn has_for(&self, cpu: CpuId) -> bool {
        CpuSet(self.takers.load(Ordering::SeqCst)).contains(cpu)
    }

    /// The running vCPU's virtual time by `now`.
    fn running_time(&self, now: u64) -> VirtualTime {
        let ran = now.saturating_sub(self.started_at.get());
        self.started_with.get().saturating_add(to_virtual(ran))
    }

    /// Charges the VM of the vCPU that runs here for what that ran until `now`, if it is at `least` so many host ticks.
    /// A VM without others has nobody to share with, so its vCPUs need not write a common word.
    fn charge(&self, here: Proof<'_>, share: &Share, now: u64, least: u64) {
        let ran = now.saturating_sub(self.charged_until.get());
        if ran < least {
            return;
        }
        self.charged_until.set(here, now);
        if competes(share) {
            share.charge(to_virtual(ran), to_virtual(now));
            self.charge_for_mates(share, ran);
            self.note_times(here, share);
        }
    }

    /// Charges the VM for threads of the core that stand still because its vCPUs run here, while others wait for them.
    fn charge_for_mates(&self, share: &Share, ran: u64) {
        let inside = self.inside.load(Ordering::Relaxed);
        let (inside, held) = (inside & u64::from(u32::MAX), inside >> 32);
        if held != 0 && inside != 0 && self.waiting.load(Ordering::Relaxed) != 0 {
            share.charge_for_work(to_virtual(ran * held / inside));
        }
    }

    fn note_times(&self, here: Proof<'_>, share: &Share) {
        self.vm_time.set(here, share.time());
        self.whole_time.set(here, share.whole().time());
    }

    /// The virtual times of the vCPU that runs here, for other pCPUs: those of the VM as they were last charged.
    fn times(&self, now: u64) -> Times {
        Times { whole: self.whole_time.get(), vm: self.vm_time.get(), vcpu: self.running_time(now) }
    }
}

/// The run queue of a pCPU, locked. What changes there is told by [`publish`] and its like before it is released.
fn queue_of(cpu: &PerCpu) -> MutexGuard<'static, RunQueue<VcpuRef>> {
    leader(cpu).scheduler.queue.lock()
}

/// Keeps the copies of a queue's figures true.
fn publish(cpu: &PerCpu, queue: &RunQueue<VcpuRef>) {
    let (first, takers) = queue.outlook();
    for cpu in mates(cpu.id).iter().map(by_id) {
        cpu.scheduler.first.store(first.map_or(u64::MAX, |first| first.times().whole), Ordering::Relaxed);
        cpu.scheduler.takers.store(takers.0, Ordering::SeqCst);
    }
    publish_length(cpu, queue);
}

/// The same after a vCPU was added, whose VM, or group, has used so much and may use these pCPUs.
fn publish_more(cpu: &PerCpu, queue: &RunQueue<VcpuRef>, whole: VirtualTime, cpus: CpuSet) {
    for cpu in mates(cpu.id).iter().map(by_id) {
        let state = &cpu.scheduler;
        state.first.store(state.first.load(Ordering::Relaxed).min(whole), Ordering::Relaxed);
        state.takers.store(state.takers.load(Ordering::Relaxed) | cpus.0, Ordering::SeqCst);
    }
    publish_length(cpu, queue);
}

/// The same after one was taken. What the copies say of the others may be too much: who comes for it finds out.
fn publish_less(cpu: &PerCpu, queue: &RunQueue<VcpuRef>) {
    if queue.is_empty() {
        for cpu in mates(cpu.id).iter().map(by_id) {
            cpu.scheduler.first.store(u64::MAX, Ordering::Relaxed);
            cpu.scheduler.takers.store(0, Ordering::SeqCst);
        }
    }
    publish_length(cpu, queue);
}

fn publish_length(cpu: &PerCpu, queue: &RunQueue<VcpuRef>) {
    for cpu in mates(cpu.id).iter().map(by_id) {
        cpu.scheduler.floor.store(queue.floor(), Ordering::Relaxed);
        cpu.scheduler.waiting.store(queue.len() as u64, Ordering::SeqCst);
    }
}

/// Tells the mates whose vCPUs run here.
fn publish_occupant(cpu: &PerCpu, queue: &RunQueue<VcpuRef>) {
    if !by_core() {
        return;
    }
    let mates = mates(cpu.id);
    let occupant = match queue.occupant() {
        _ if queue.is_promised() => PROMISED,
        Some(vm) => vm.word(),
        None => 0,
    };
    let (inside, all) = (u64::from(queue.inside().len()), u64::from(mates.len()));
    let held = if inside == 0 { 0 } else { all - inside };
    for cpu in mates.iter().map(by_id) {
        cpu.scheduler.occupant.store(occupant, Ordering::SeqCst);
        cpu.scheduler.inside.store(held << 32 | inside, Ordering::Relaxed);
        cpu.scheduler.changes.store(queue.changes(), Ordering::Relaxed);
    }
}

/// How often another VM than before ran on the core of this pCPU, with `smt=core`.
#[allow(dead_code, reason = "not every architecture has steps between VMs")]
pub(crate) fn changes_of_core(cpu: &PerCpu) -> u64 {
    cpu.scheduler.changes.load(Ordering::Relaxed)
}

impl Member for VcpuRef {
    fn share(&self) -> &Share {
        self.vm().share()
    }
}

/// Host ticks as virtual ones.
fn to_virtual(ticks: u64) -> VirtualTime {
    ticks.saturating_mul(scale())
}

fn to_host(ticks: VirtualTime) -> u64 {
    ticks / scale()
}

fn scale() -> u64 {
    VIRTUAL_HZ.checked_div(Machine::hz()).unwrap_or(1).max(1)
}

/// The host's time in virtual ticks.
pub(crate) fn now() -> VirtualTime {
    to_virtual(Machine::now())
}

/// Length of a period of caps, in virtual ticks.
pub(crate) fn cap_period() -> u64 {
    to_virtual(Machine::hz() / PERIODS_PER_SECOND)
}

/// The endless loop of a pCPU: runs vCPUs, with housekeeping in between.
pub(crate) fn run_vcpus(cpu: &'static PerCpu) -> ! {
    if !runs_vcpus(cpu) {
        info!("does housekeeping and runs no vCPUs, because of an error in this machine's emulation");
        loop {
            if !finish_housekeeping(cpu) {
                Machine::arm_timer(next_tick(cpu));
                longest::wait();
            }
        }
    }
    loop {
        turn(cpu);
    }
}

/// One pass of the loop: runs a vCPU, or sleeps.
pub(crate) fn turn(cpu: &'static PerCpu) {
    // One vCPU after the other may run without an entry: a VM of many ends.
    preemption_point_before("switch");
    housekeeping(cpu);
    match pick(cpu) {
        Some((time, vcpu)) => run_one(cpu, time, vcpu),
        None if finish_housekeeping(cpu) => {}
        None => idle(cpu),
    }
}

/// Runs one vCPU on this pCPU, until it leaves.
fn run_one(cpu: &'static PerCpu, time: VirtualTime, vcpu: VcpuRef) {
    let now = Machine::now();
    // This is the pCPU that `cpu` belongs to.
    let here = Proof::by_place();
    if !others_wait(cpu) {
        cpu.scheduler.handed_over_until.set(here, 0);
    }
    let share = vcpu.vm().share();
    let weighed = to_host(share.ticks(LONGEST_SLICE)).max(Machine::nanos_to_ticks(SHORTEST_SLICE_NANOS));
    let slice = weighed.min(Machine::hz() / SLICES_PER_SECOND);
    cpu.scheduler.started_with.set(here, time);
    cpu.scheduler.note_times(here, share);
    cpu.scheduler.started_at.set(here, now);
    cpu.scheduler.slice_began.set(here, now);
    cpu.scheduler.slice.set(here, slice);
    cpu.scheduler.undisturbed_until.set(here, 0);
    cpu.scheduler.yields.set(here, 0);

    let shared = vcpu.vcpu();
    let mut held = shared.own();
    let (owner, proof) = held.split();
    let longest = now.saturating_sub(Machine::nanos_to_ticks(LONGEST_SWITCH_NANOS));
    let since = match cpu.scheduler.switched_since.get() {
        0 => now,
        since => since.max(longest),
    };
    cpu.scheduler.charged_until.set(here, since.saturating_sub(owner.uncharged));
    shared.mailbox().run_on(cpu.id);
    let tally = shared.tally(proof);
    tally.add(|count| &count.wait_ticks, shared.waited(now));
    let came_back = owner.ran_on.replace(cpu.id) == Some(cpu.id) || mutants::is(Mutant::TagKeptOnMove);
    if !came_back {
        shared.set_home(cpu.id);
        tally.add(|count| &count.migrations, 1);
    }
    if let Some((at, key)) = owner.timer.take() {
        by_id(at).timers.remove(key);
    }
    arm(cpu, share, owner.arch.deadline());

    let counted = |tally: Tally<'_>| tally.guest_ticks.get() + tally.host_ticks.get();
    let counted_before = counted(tally);
    cpu.scheduler.is_running.set(here, 1);
    let left = run(&mut Running { cpu, vm: vcpu.vm(), index: vcpu.index(), vcpu: shared, came_back, owner, tally });

    cpu.scheduler.is_running.set(here, 0);

    let now = Machine::now();
    let time = cpu.scheduler.running_time(now);
    // Before the first entry and after the last exit.
    let switching = now.saturating_sub(cpu.scheduler.started_at.get() + counted(tally) - counted_before);
    tally.add(|count| &count.host_ticks, switching);
    cpu.scheduler.charge(here, share, now, least_charge(cpu, share));
    owner.uncharged = now.saturating_sub(cpu.scheduler.charged_until.get());
    cpu.scheduler.switched_since.set(here, now);
    stop_running(cpu, share);
    match left {
        RunEnd::Blocked => {
            // Another pCPU may have woken it already; the next pCPU that runs it waits for this lock, and then finds
            // the timer.
            if let Some(deadline) = owner.arch.deadline()
                && !mutants::is(Mutant::TimerLost)
            {
                owner.timer = Some((cpu.id, cpu.timers.add(deadline, vcpu.clone())));
            }
            drop(held);
            vcpu.vm().stop_if_all_dormant();
        }
        RunEnd::Paused => {}
        RunEnd::Preempted => {
            shared.mailbox().requeue();
            drop(held);
            if mutants::is(Mutant::PutBackTwice) {
                put_back(cpu, time, vcpu.clone());
            }
            put_back(cpu, time, vcpu);
        }
        RunEnd::Ended => {
            drop(held);
            if !mutants::is(Mutant::HandleKept) {
                shared.drop_handle();
            }
            if mutants::is(Mutant::QueueEntryLeft) {
                put_back(cpu, time, vcpu.clone());
            }
            if vcpu.vm().vcpu_left() {
                point();
                trace::tell();
                drop(vcpu);
                // The pCPU that keeps house takes the VM apart.
                super::call_housekeeper();
            }
        }
    }
}

/// The running vCPU is about to block: returns its virtual time so far, for its wake-up.
pub(crate) fn time_of_running(cpu: &PerCpu) -> VirtualTime {
    cpu.scheduler.running_time(Machine::now())
}

fn next_tick(cpu: &PerCpu) -> u64 {
    Machine::now() + Machine::hz() / if is_busy(cpu) { TICKS_WHEN_BUSY } else { TICKS_PER_SECOND }
}

/// Whether a vCPU waits for this pCPU.
#[inline]
pub(crate) fn others_wait(cpu: &PerCpu) -> bool {
    cpu.scheduler.waiting.load(Ordering::Relaxed) != 0
}

/// This pCPU, which is `cpu`, has worked since `began` for a VM with this share. That VM is charged for it, and not the
/// one whose vCPU the work has interrupted. Work on a pCPU that no vCPU needs is free.
///
/// While the VM is further ahead of others than [`MOST_WORKED_AHEAD`], nobody is charged: among many VMs, it would not
/// run for a long time afterwards.
pub(super) fn charge_work(cpu: &PerCpu, share: &Share, began: u64) {
    let (now, here) = (Machine::now(), Proof::by_place());
    let worked = now.saturating_sub(began);
    let state = &cpu.scheduler;
    if state.is_running.get() != 0 {
        state.charged_until.set(here, state.charged_until.get().saturating_add(worked).min(now));
    } else {
        // The next vCPU to run is not charged for it as for a switch.
        state.switched_since.set(here, 0);
        if !others_wait(cpu) {
            return;
        }
    }
    let ahead = share.whole().time().saturating_sub(state.floor.load(Ordering::Relaxed));
    if ahead < MOST_WORKED_AHEAD && competes(share) {
        share.charge_for_work(to_virtual(worked));
    }
}

/// Whether the running vCPU, of a VM with this share, must leave: its VM has used up its cap, its slice is over and
/// another one has a better claim, or a woken one has a claim that is much better.
pub(crate) fn is_due(cpu: &PerCpu, share: &Share) -> bool {
    let (now, here) = (Machine::now(), Proof::by_place());
    let state = &cpu.scheduler;
    state.charge(here, share, now, least_charge(cpu, share));
    if share.left(to_virtual(now)) == 0 {
        return true;
    }
    let is_over = now.saturating_sub(state.slice_began.get()) >= state.slice.get();
    if is_over && competes(share) {
        settle(cpu, share);
    }
    if !others_wait(cpu) {
        state.slice_began.set(here, if is_over { now } else { state.slice_began.get() });
        return false;
    }
    let until = state.handed_over_until.get();
    if until != 0 {
        if now < until || mutants::is(Mutant::HandoverForEver) {
            return false;
        }
        state.handed_over_until.set(here, 0);
        // An idle pCPU takes the one that waits. Otherwise it goes on here: it is about to wait anyway.
        return !kick_any_idle(cpu, CpuSet(state.takers.load(Ordering::Relaxed)));
    }
    is_behind(cpu, share, now, is_over)
}

/// Whether a vCPU waits here with a better claim than the one that runs, whose slice may be over.
fn is_behind(cpu: &PerCpu, share: &Share, now: u64, is_over: bool) -> bool {
    let (here, state) = (Proof::by_place(), &cpu.scheduler);
    let mut queue = queue_of(cpu);
    let running = queue.running(Times::of(share, state.running_time(now)));
    let (Some(running), Some(first)) = (running, queue.first()) else { return true };
    let is_due = queue.is_promised() || is_outrun(cpu, &running, &first, now, is_over);
    if is_over {
        state.slice_began.set(here, now);
    }
    if is_due && by_core() && queue.promise() {
        // The whole core is to change.
        publish_occupant(cpu, &queue);
        let others = queue.inside().without(cpu.id);
        drop(queue);
        others.iter().for_each(Machine::kick);
    }
    is_due
}

/// Whether the running vCPU gives way to the first of those that wait.
fn is_outrun(cpu: &PerCpu, running: &Claim, first: &Claim, now: u64, is_over: bool) -> bool {
    if is_over {
        return !running.is_before(first, 0);
    }
    let state = &cpu.scheduler;
    let is_better = first.is_before(running, PREEMPTION_MARGIN);
    let until = state.started_at.get() + Machine::nanos_to_ticks(UNDISTURBED_NANOS);
    state.undisturbed_until.set(Proof::by_place(), if is_better { until } else { 0 });
    is_better && now >= until
}

/// At the end of a slice: the VM that runs here loses what it lags too far behind others, and one that lags behind it
/// is pulled.
fn settle(cpu: &PerCpu, share: &Share) {
    let cpus = share.cpus();
    let floors = runners().filter(|other| cpus.contains(other.id));
    let highest = floors.map(|other| other.scheduler.floor.load(Ordering::Relaxed)).max().unwrap_or(0);
    share.lift(highest.saturating_sub(MAX_LAG));
    if !others_wait(cpu) {
        let mut queue = queue_of(cpu);
        queue.advance(Some(share.whole().time()));
        publish(cpu, &queue);
    }
    pull(cpu, share.whole().time());
}

/// The vCPU that runs here has nothing to do at the moment. Returns whether it leaves for another.
pub(crate) fn yields(cpu: &PerCpu) -> bool {
    let others_wait = minds_others(cpu);
    cpu.scheduler.yields.set(Proof::by_place(), others_wait.into());
    others_wait
}

/// Looks whether others wait for this pCPU, and remembers the answer. If so, the vCPU that runs here has to leave its
/// guest when it spins.
pub(crate) fn minds_others(cpu: &PerCpu) -> bool {
    let others_wait = others_wait(cpu);
    cpu.scheduler.minds_others.set(Proof::by_place(), others_wait.into());
    others_wait
}

/// Whether others wait for this pCPU now, and did not when [`minds_others`] looked last.
#[inline]
pub(crate) fn has_new_others(cpu: &PerCpu) -> bool {
    others_wait(cpu) && cpu.scheduler.minds_others.get() == 0
}

/// Whether what its vCPUs run counts: there are other VMs, or there is a cap.
fn competes(share: &Share) -> bool {
    share.is_capped() || !room::has_one_vm()
}

/// From how many host ticks on a VM is charged.
fn least_charge(cpu: &PerCpu, share: &Share) -> u64 {
    if share.is_capped() {
        1
    } else if others_wait(cpu) {
        Machine::nanos_to_ticks(CHARGE_NANOS)
    } else {
        Machine::hz() / SLICES_PER_SECOND
    }
}

/// Arms this pCPU's timer for the first of these: the vCPU's own timer, those of blocked vCPUs, the end of the slice,
/// of the VM's cap, of a parked vCPU's wait, the next tick.
#[inline(always)]
pub(crate) fn arm(cpu: &PerCpu, share: &Share, deadline: Option<u64>) {
    let state = &cpu.scheduler;
    let mut earliest = next_tick(cpu).min(cpu.timers.next()).min(deadline.unwrap_or(u64::MAX));
    earliest = earliest.min(state.release_at.get());
    if share.is_capped() {
        let now = Machine::now();
        earliest = earliest.min(now.saturating_add(to_host(share.left(to_virtual(now))) + 1));
    }
    if others_wait(cpu) {
        earliest = earliest.min(state.slice_began.get() + state.slice.get());
        for until in [state.handed_over_until.get(), state.undisturbed_until.get()] {
            earliest = earliest.min(if until == 0 { u64::MAX } else { until });
        }
    }
    Machine::arm_timer(earliest);
}

/// No vCPU runs here now; the last one belongs to a VM with this share.
fn stop_running(cpu: &PerCpu, share: &Share) {
    let mut queue = queue_of(cpu);
    queue.stop_running(cpu.id, share.whole().time());
    for cpu in mates(cpu.id).iter().map(by_id) {
        cpu.scheduler.floor.store(queue.floor(), Ordering::Relaxed);
    }
    publish_occupant(cpu, &queue);
}
