//! The scheduler: which vCPU runs on which pCPU, and for how long.
//!
//! Each pCPU has a run queue (`sched::RunQueue`) and runs the vCPU that has run the least. A vCPU runs until it blocks,
//! until its time slice ends while others wait, or until a woken vCPU has run less. A woken vCPU goes to its last pCPU,
//! or to an idle one. A pCPU without work steals some from the busiest queue before it idles.

use alloc::collections::TryReserveError;

use crossbeam_utils::CachePadded;
use log::info;
use sched::{IdleSet, RunQueue, VirtualTime};
use spin::Once;
use vcpu_layout::{OwnerWord, Proof, lay_out};

use super::{PerCpu, all, by_id, finish_housekeeping, housekeeping, is_busy, this};
use crate::arch::{Arch, Machine, VcpuState, trace};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Mutex, Ordering, per_host, point};
use crate::vcpu::run::{RunEnd, Running, run};
use crate::vm::VcpuRef;

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

/// For how long a vCPU has a pCPU to itself that another handed over to it.
const HANDOVER_NANOS: u64 = 50_000;

/// A pCPU's scheduling state.
#[lay_out]
pub(crate) struct Scheduler {
    #[layout(mailbox)]
    queue: Mutex<RunQueue<VcpuRef>>,
    /// Copies of the queue's length, of its floor and of its first virtual time, for readers without the lock.
    #[layout(mailbox)]
    waiting: AtomicU64,
    #[layout(mailbox)]
    floor: AtomicU64,
    #[layout(mailbox)]
    first: AtomicU64,
    /// The vCPU that runs now: its virtual time when it started, and when that was in ticks of the host clock.
    #[layout(owner)]
    started_with: OwnerWord,
    #[layout(owner)]
    started_at: OwnerWord,
    /// Whether a vCPU runs now: 1, or else 0.
    #[layout(owner)]
    is_running: OwnerWord,
    /// Host time until which the vCPU that runs may keep the one waiting that handed this pCPU over to it. Zero: none.
    #[layout(owner)]
    handed_over_until: OwnerWord,
}

impl Scheduler {
    pub(crate) fn new() -> Self {
        Self::lay_out(SchedulerFields {
            queue: Mutex::default(),
            waiting: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            first: AtomicU64::new(u64::MAX),
            started_with: OwnerWord::new(0),
            started_at: OwnerWord::new(0),
            is_running: OwnerWord::new(0),
            handed_over_until: OwnerWord::new(0),
        })
    }

    /// Makes room for `count` vCPUs in all.
    ///
    /// # Errors
    /// When there is no memory for that; nothing has changed then.
    pub(super) fn reserve(&self, count: usize) -> Result<(), TryReserveError> {
        self.queue.lock().reserve(count)
    }

    /// Frees room for more than `count` vCPUs.
    pub(super) fn shrink(&self, count: usize) {
        self.queue.lock().shrink(count);
    }

    /// Keeps the copies true. Called before the lock of `queue` is released.
    fn publish(&self, queue: &RunQueue<VcpuRef>) {
        self.floor.store(queue.floor(), Ordering::Relaxed);
        self.first.store(queue.first().unwrap_or(u64::MAX), Ordering::Relaxed);
        self.waiting.store(queue.len() as u64, Ordering::SeqCst);
    }

    /// The running vCPU's virtual time by `now`.
    fn running_time(&self, now: u64) -> VirtualTime {
        let ran = now.saturating_sub(self.started_at.get());
        let scale = VIRTUAL_HZ.checked_div(Machine::hz()).unwrap_or(1).max(1);
        self.started_with.get().saturating_add(ran.saturating_mul(scale))
    }
}

per_host! {
    /// The idle pCPUs. On a cache line of its own, because neighbouring data may be read all the time.
    static IDLE: CachePadded<IdleSet> = CachePadded::new(IdleSet::new());
    static SPARED: Once<bool> = Once::new();
}

/// Whether a pCPU runs vCPUs: all do, except the first if the machine requires that. A single pCPU always does.
fn runs_vcpus(cpu: &PerCpu) -> bool {
    cpu.id.0 != 0 || all().len() == 1 || !*SPARED.call_once(Machine::spares_first_cpu)
}

/// The pCPUs that run vCPUs.
pub(crate) fn runners() -> impl DoubleEndedIterator<Item = &'static PerCpu> + Clone {
    all().iter().map(|cpu| &**cpu).filter(|cpu| runs_vcpus(cpu))
}

/// The endless loop of a pCPU: runs vCPUs, with housekeeping in between.
pub(crate) fn run_vcpus(cpu: &'static PerCpu) -> ! {
    if !runs_vcpus(cpu) {
        info!("does housekeeping and runs no vCPUs, because of an error in this machine's emulation");
        loop {
            if !finish_housekeeping(cpu) {
                Machine::arm_timer(next_tick(cpu));
                Machine::wait();
            }
        }
    }
    loop {
        turn(cpu);
    }
}

/// One pass of the loop: runs a vCPU, or sleeps.
pub(crate) fn turn(cpu: &'static PerCpu) {
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
    cpu.scheduler.started_with.set(here, time);
    cpu.scheduler.started_at.set(here, now);

    let shared = vcpu.vcpu();
    let mut held = shared.own();
    let (owner, proof) = held.split();
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
    arm(cpu, owner.arch.deadline());

    cpu.scheduler.is_running.set(here, 1);
    let left = run(&mut Running { cpu, vm: vcpu.vm(), index: vcpu.index(), vcpu: shared, came_back, owner, tally });

    cpu.scheduler.is_running.set(here, 0);

    let time = cpu.scheduler.running_time(Machine::now());
    advance(cpu, time);
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
                Machine::kick(super::BOOT);
            }
        }
    }
}

/// The running vCPU is about to block: returns its virtual time so far, for its wake-up.
pub(crate) fn time_of_running(cpu: &PerCpu) -> VirtualTime {
    cpu.scheduler.running_time(Machine::now())
}

/// Puts a vCPU that was blocked into a run queue.
pub(crate) fn wake(vcpu: VcpuRef) {
    let home = by_id(vcpu.vcpu().home());
    // A home that is this very pCPU and runs nothing takes it next; to wake another would only move it.
    let picks_next = home.id == this().id && home.scheduler.is_running.get() == 0 && !others_wait(home);
    let target = if picks_next { home } else { idle_one(home).unwrap_or(home) };
    let time = vcpu.vcpu().virtual_time();
    let now = Machine::now();
    vcpu.vcpu().set_queued_at(now);

    let mut queue = target.scheduler.queue.lock();
    let time =
        if target.id == home.id { time } else { queue.translate(time, home.scheduler.floor.load(Ordering::Relaxed)) };
    let time = queue.wake_time(time);
    queue.push(time, vcpu);
    target.scheduler.publish(&queue);
    drop(queue);

    if picks_next {
        return;
    }
    let has_better_claim = || target.scheduler.running_time(now) > time.saturating_add(PREEMPTION_MARGIN);
    if !kick_idle(target) && has_better_claim() {
        // This pCPU, too, may be in the middle of a vCPU: the kick ends that vCPU's next entry at once.
        Machine::kick(target.id);
    }
}

/// The same, called for the vCPU that runs on this pCPU and is about to leave it. The woken one runs here next if no
/// other waits: it needs no interrupt to another pCPU then, and finds the caches that the caller has filled.
///
/// A parent's vCPU and that of its child take turns in this way. The parent's is not asleep when it hands the pCPU
/// over, but about to wait for the child's next exit. If that comes soon, all of this costs two switches. If not, the
/// parent's vCPU goes on, on another pCPU or here ([`is_due`]).
pub(crate) fn wake_next(vcpu: VcpuRef) {
    let cpu = this();
    if cpu.scheduler.is_running.get() == 0 || others_wait(cpu) {
        return wake(vcpu);
    }
    let shared = vcpu.vcpu();
    let (home, time, now) = (by_id(shared.home()), shared.virtual_time(), Machine::now());
    shared.set_queued_at(now);
    let mut queue = cpu.scheduler.queue.lock();
    let floor = home.scheduler.floor.load(Ordering::Relaxed);
    let time = if home.id == cpu.id { time } else { queue.translate(time, floor) };
    let time = queue.wake_time(time);
    queue.push(time, vcpu);
    cpu.scheduler.publish(&queue);
    drop(queue);
    // Whoever runs here is the caller.
    cpu.scheduler.handed_over_until.set(Proof::by_place(), now + Machine::nanos_to_ticks(HANDOVER_NANOS));
}

/// A vCPU was pushed into the queue of `target`: kicks an idle pCPU, if there is one, which finds it there.
fn kick_idle(target: &PerCpu) -> bool {
    if mutants::is(Mutant::WakeWithoutKick) {
        return true;
    }
    let idle = IDLE.claim(target.id);
    if let Some(idle) = idle {
        Machine::kick(idle);
    }
    idle.is_some()
}

/// Puts a vCPU that ran on `cpu` back, there or where fewer wait.
fn put_back(cpu: &'static PerCpu, time: VirtualTime, vcpu: VcpuRef) {
    let now = Machine::now();
    vcpu.vcpu().set_queued_at(now);
    if cpu.scheduler.handed_over_until.get() > now {
        let mut queue = cpu.scheduler.queue.lock();
        if let Some(first) = queue.first() {
            queue.push(time.max(first + 1), vcpu);
            return cpu.scheduler.publish(&queue);
        }
    }
    let waiting = |cpu: &PerCpu| cpu.scheduler.waiting.load(Ordering::Relaxed);
    let shortest = runners().min_by_key(|other| waiting(other)).unwrap_or(cpu);
    let target = idle_one(cpu).unwrap_or(if waiting(shortest) + 1 < waiting(cpu) { shortest } else { cpu });

    let mut queue = target.scheduler.queue.lock();
    // A vCPU that yields before its slice ends goes behind the vCPU to which it yields.
    let time = if target.id == cpu.id {
        queue.first().map_or(time, |first| time.max(first + 1))
    } else {
        queue.translate(time, cpu.scheduler.floor.load(Ordering::Relaxed))
    };
    queue.push(time, vcpu);
    target.scheduler.publish(&queue);
    // This pCPU takes one from its queue next.
    let waits = target.id != cpu.id || queue.len() > 1;
    drop(queue);
    if waits {
        kick_idle(target);
    }
}

/// An idle pCPU, `preferred` if it is one.
fn idle_one(preferred: &'static PerCpu) -> Option<&'static PerCpu> {
    IDLE.find(preferred.id).map(by_id)
}

/// The vCPU to run next: the first of this pCPU's queue, else one from the longest queue.
fn pick(cpu: &PerCpu) -> Option<(VirtualTime, VcpuRef)> {
    let mut queue = cpu.scheduler.queue.lock();
    let next = queue.pop();
    cpu.scheduler.publish(&queue);
    drop(queue);
    next.or_else(|| steal(cpu))
}

fn steal(cpu: &PerCpu) -> Option<(VirtualTime, VcpuRef)> {
    let busiest = runners().max_by_key(|other| other.scheduler.waiting.load(Ordering::SeqCst))?;
    if busiest.scheduler.waiting.load(Ordering::SeqCst) == 0 {
        return None;
    }
    let mut queue = busiest.scheduler.queue.lock();
    let (time, vcpu) = queue.pop_last()?;
    let floor = queue.floor();
    busiest.scheduler.publish(&queue);
    drop(queue);
    Some((cpu.scheduler.queue.lock().translate(time, floor), vcpu))
}

/// Sleeps until an interrupt, unless there is work after all.
fn idle(cpu: &PerCpu) {
    IDLE.announce(cpu.id);
    let has_work = runners().any(|other| other.scheduler.waiting.load(Ordering::SeqCst) != 0);
    if !has_work || mutants::is(Mutant::IdleWithoutLook) {
        Machine::arm_timer(cpu.timers.next().min(next_tick(cpu)));
        Machine::wait();
    }
    IDLE.withdraw(cpu.id);
}

fn next_tick(cpu: &PerCpu) -> u64 {
    Machine::now() + Machine::hz() / if is_busy(cpu) { TICKS_WHEN_BUSY } else { TICKS_PER_SECOND }
}

/// Whether a vCPU waits for this pCPU.
#[inline]
pub(crate) fn others_wait(cpu: &PerCpu) -> bool {
    cpu.scheduler.waiting.load(Ordering::Relaxed) != 0
}

/// Whether the running vCPU must yield: its slice is over and another one waits, or a waiting vCPU has run less.
pub(crate) fn is_due(cpu: &PerCpu) -> bool {
    if !others_wait(cpu) {
        return false;
    }
    let now = Machine::now();
    let until = cpu.scheduler.handed_over_until.get();
    if until != 0 {
        if now < until || mutants::is(Mutant::HandoverForEver) {
            return false;
        }
        cpu.scheduler.handed_over_until.set(Proof::by_place(), 0);
        // An idle pCPU takes the one that waits. Otherwise it goes on here: it is about to wait anyway.
        return !kick_idle(cpu);
    }
    let ran = now.saturating_sub(cpu.scheduler.started_at.get());
    let first = cpu.scheduler.first.load(Ordering::Relaxed);
    ran >= Machine::hz() / SLICES_PER_SECOND
        || cpu.scheduler.running_time(now) > first.saturating_add(PREEMPTION_MARGIN)
}

/// Arms this pCPU's timer for the first of these: the vCPU's own timer, those of blocked vCPUs, the end of the slice,
/// the next tick.
#[inline(always)]
pub(crate) fn arm(cpu: &PerCpu, deadline: Option<u64>) {
    let mut earliest = next_tick(cpu).min(cpu.timers.next()).min(deadline.unwrap_or(u64::MAX));
    if others_wait(cpu) {
        earliest = earliest.min(cpu.scheduler.started_at.get() + Machine::hz() / SLICES_PER_SECOND);
        if let until @ 1.. = cpu.scheduler.handed_over_until.get() {
            earliest = earliest.min(until);
        }
    }
    Machine::arm_timer(earliest);
}

/// Updates the run queue with the virtual time of the running vCPU.
fn advance(cpu: &PerCpu, time: VirtualTime) {
    let mut queue = cpu.scheduler.queue.lock();
    queue.advance(time);
    cpu.scheduler.publish(&queue);
}
