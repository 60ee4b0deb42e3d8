//! The run queue: which vCPU runs next on a pCPU.
//!
//! Two questions, one after the other. Which VM? The one whose [`Share`] has used the least for its weight; of a group
//! of VMs, first the group, then the member. Which of its vCPUs? The one that has run the least. This alone is fair and
//! starves nobody: who runs moves behind those who wait.
//!
//! Five cases need care.
//!
//! * A VM that slept for an hour must not run for an hour to catch up. The queue's *floor* is the least virtual time of
//!   the VMs here, and only grows. When a vCPU wakes, its VM is raised to [`WAKE_CREDIT`] below the floor. So it runs
//!   soon, but cannot delay others for long, because its own time continues to grow while it runs.
//! * A VM that never sleeps may lag far behind all the same: it has fewer vCPUs than its share is worth. It is raised,
//!   too, to [`MAX_LAG`] below the floors of its pCPUs ([`RunQueue::floor`]).
//! * A vCPU's own time counts among the vCPUs of its VM in the same queue, and queues differ. One that comes from
//!   elsewhere, or that wakes, is placed between the others: not after the last of them, and at most a credit before
//!   the first.
//! * A vCPU that wakes is in a hurry, for a moment. It goes first, once, as long as its VM has not used more than all
//!   others here ([`Turn::Woken`]).
//! * A vCPU may give way to the others although it has a better claim ([`Turn`]).
//!
//! # The threads of a core
//!
//! The threads of a core share caches, buffers and predictions, through which one can spy on another. So the threads of
//! a core may have one queue in common, from which they take vCPUs of one VM only, as in Linux' core scheduling.
//! While a vCPU runs on one of them, the others get vCPUs of its VM, or nothing. A VM that waits and has a better claim
//! is *promised* the core ([`RunQueue::promise`]): then nobody else gets a thread, those who run are asked to leave,
//! and after the last has left, that VM goes on. A pCPU with a queue of its own is a core of one thread here.
//!
//! The queue is searched each time, because the virtual time of a VM changes while its vCPUs wait. Whoever
//! creates a vCPU makes room for it in each queue where it may ever wait ([`RunQueue::reserve`]). So waiting for a pCPU
//! never allocates.

use alloc::collections::{TryReserveError, VecDeque};

use crate::{CpuId, CpuSet, Share};

/// Ticks that a vCPU has run, or that all vCPUs of a VM have run, divided by the VM's weight.
pub type VirtualTime = u64;

/// How far below the floor a VM may start when it wakes, and a vCPU below the others of its VM, in ticks: about 2 ms of
/// a 2.5 GHz clock.
///
/// A larger value delivers interrupts sooner on a busy pCPU. A smaller one disturbs computing neighbours less.
pub const WAKE_CREDIT: VirtualTime = 5_000_000;

/// How far a VM may lag behind others without losing what it did not use, in virtual ticks.
pub const MAX_LAG: VirtualTime = 40 * WAKE_CREDIT;

/// What waits in a run queue: a vCPU.
pub trait Member {
    /// Its VM's share.
    fn share(&self) -> &Share;
}

/// When a vCPU has its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// Before all others, once: a pCPU was handed over to it.
    Next,
    /// Before those that wait for a fair turn, once: it has just woken, and its VM has used less than another one here.
    Woken,
    /// By what it and its VM have used.
    Fair,
    /// After one other vCPU, if there is one: it has yielded.
    AfterOthers,
}

/// What a vCPU may claim: that of two which has used less goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    turn: Turn,
    of: Holder,
    times: Times,
}

/// Tells VMs apart, and groups of VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    whole: VmKey,
    vm: VmKey,
}

impl Holder {
    fn of(share: &Share) -> Self {
        Self { whole: VmKey::of(share.whole()), vm: VmKey::of(share) }
    }
}

/// Virtual times that decide, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Times {
    /// Of the VM, or of the group that it belongs to.
    pub whole: VirtualTime,
    /// Of the VM.
    pub vm: VirtualTime,
    /// Of the vCPU.
    pub vcpu: VirtualTime,
}

impl Times {
    /// Those of a vCPU that has run for `vcpu`.
    #[must_use]
    pub fn of(share: &Share, vcpu: VirtualTime) -> Self {
        Self { whole: share.whole().time(), vm: share.time(), vcpu }
    }
}

impl Claim {
    fn new(share: &Share, time: VirtualTime, turn: Turn) -> Self {
        Self { turn, of: Holder::of(share), times: Times::of(share, time) }
    }

    /// Its virtual times.
    #[must_use]
    pub fn times(&self) -> Times {
        self.times
    }

    /// Whether it goes before `other`, by more than `margin`.
    #[must_use]
    pub fn is_before(&self, other: &Self, margin: VirtualTime) -> bool {
        if self.turn != other.turn {
            return self.turn < other.turn;
        }
        let (mine, others) = if self.of.whole != other.of.whole {
            (self.times.whole, other.times.whole)
        } else if self.of.vm != other.of.vm {
            (self.times.vm, other.times.vm)
        } else {
            (self.times.vcpu, other.times.vcpu)
        };
        mine.saturating_add(margin) < others
    }
}

fn identity(share: &Share) -> usize {
    core::ptr::from_ref(share).addr()
}

/// The vCPUs (`T`) that wait for one pCPU.
#[derive(Debug)]
pub struct RunQueue<T> {
    /// In no order.
    waiting: VecDeque<Waiting<T>>,
    /// How many have come.
    arrived: u64,
    floor: VirtualTime,
    /// Whether a vCPU may wait that has yielded.
    has_yielders: bool,
    /// The vCPU that was taken to run here last, if one runs: its VM, and its times then.
    running: Option<(Holder, Times)>,
    /// The threads on which vCPUs run, all of one VM.
    inside: CpuSet,
    /// The VM that has the core next, before all others.
    pub(crate) promised_to: Option<VmKey>,
    /// The VM that ran last, and how often it was another one than before.
    last: Option<VmKey>,
    changes: u64,
}

/// Names a VM as long as one of its vCPUs runs or waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmKey(usize);

impl VmKey {
    /// The VM with this share.
    #[must_use]
    pub fn of(share: &Share) -> Self {
        Self(identity(share))
    }

    /// As a word, which is not zero.
    #[must_use]
    pub const fn word(self) -> u64 {
        self.0 as u64
    }
}

/// Who comes for a vCPU.
#[derive(Clone, Copy, Debug)]
pub struct Taker {
    cpu: CpuId,
    /// The VM that alone has vCPUs for it.
    only: Option<VmKey>,
}

impl Taker {
    /// `cpu`, for a vCPU of any VM.
    #[must_use]
    pub const fn any(cpu: CpuId) -> Self {
        Self { cpu, only: None }
    }

    #[inline]
    fn may_take(self, of: Holder, cpus: CpuSet) -> bool {
        cpus.contains(self.cpu) && self.only.is_none_or(|only| only == of.vm)
    }
}

#[derive(Debug)]
struct Waiting<T> {
    time: VirtualTime,
    turn: Turn,
    of: Holder,
    /// Those who came earlier have lower numbers.
    arrived: u64,
    vcpu: T,
}

/// What decides who is first.
type Key = (Turn, VirtualTime, VirtualTime, VirtualTime, u64);

/// What the vCPUs of a VM have in common.
#[derive(Clone, Copy)]
struct Common {
    whole: VirtualTime,
    vm: VirtualTime,
    cpus: CpuSet,
}

impl<T> Waiting<T> {
    #[inline]
    fn claim(&self, common: Common) -> Claim {
        let times = Times { whole: common.whole, vm: common.vm, vcpu: self.time };
        Claim { turn: self.turn, of: self.of, times }
    }

    #[inline]
    fn key(&self, common: Common) -> Key {
        (self.turn, common.whole, common.vm, self.time, self.arrived)
    }
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        // The floor starts one credit up, so that the first wakers have a credit too.
        Self {
            waiting: VecDeque::new(),
            arrived: 0,
            floor: WAKE_CREDIT,
            has_yielders: false,
            running: None,
            inside: CpuSet::NONE,
            promised_to: None,
            last: None,
            changes: 0,
        }
    }
}

impl<T> RunQueue<T> {
    /// Makes room for `count` vCPUs in all, so that [`Self::push`] does not allocate while no more than that wait.
    ///
    /// # Errors
    /// When there is no memory for that; nothing has changed then.
    pub fn reserve(&mut self, count: usize) -> Result<(), TryReserveError> {
        self.waiting.try_reserve_exact(count.saturating_sub(self.waiting.len()))
    }

    /// How many vCPUs there is room for.
    #[must_use]
    pub fn room(&self) -> usize {
        self.waiting.capacity()
    }

    /// Gives back room for more than `count` vCPUs.
    pub fn shrink(&mut self, count: usize) {
        self.waiting.shrink_to(count);
    }

    /// Number of waiting vCPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no vCPU waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The least virtual time of the VMs here, waiting or running.
    #[must_use]
    pub fn floor(&self) -> VirtualTime {
        self.floor
    }

    /// The threads on which vCPUs run.
    #[must_use]
    pub fn inside(&self) -> CpuSet {
        self.inside
    }

    /// The VM whose vCPUs run here, if some do.
    #[must_use]
    pub fn occupant(&self) -> Option<VmKey> {
        self.running.map(|(of, _)| of.vm)
    }

    /// Whether those who run here are asked to leave, or have left, for a VM that goes first.
    #[must_use]
    pub fn is_promised(&self) -> bool {
        self.promised_to.is_some()
    }

    /// How often another VM ran here than before.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// What `cpu`, a thread of this core, may bring here from elsewhere and run at once. Nothing: `None`.
    #[must_use]
    pub fn taker(&self, cpu: CpuId) -> Option<Taker> {
        if self.is_promised() { None } else { Some(Taker { cpu, only: self.occupant() }) }
    }

    /// What `cpu`, a thread of this core, may take from here.
    #[inline]
    fn own_taker(&self, cpu: CpuId) -> Option<Taker> {
        let only = match (self.occupant(), self.promised_to) {
            (Some(_), Some(_)) => return None,
            (occupant, promised_to) => occupant.or(promised_to),
        };
        Some(Taker { cpu, only })
    }

    fn is_free_for_others(&self, of: Holder) -> bool {
        self.promised_to.is_none_or(|promised_to| promised_to != of.vm)
    }
}

impl<T: Member> RunQueue<T> {
    /// The claim of the next vCPU.
    #[must_use]
    pub fn first(&self) -> Option<Claim> {
        self.best(|_, _| true).map(|(_, claim)| claim)
    }

    /// The claim of the next vCPU that somebody else may take. The core is not promised to its VM.
    #[must_use]
    pub fn first_for(&self, taker: Taker) -> Option<Claim> {
        self.best_for(taker).map(|(_, claim)| claim)
    }

    /// Whether [`pop`](Self::pop) has a vCPU for this thread.
    #[must_use]
    pub fn has_for(&self, cpu: CpuId) -> bool {
        self.own_taker(cpu).is_some_and(|taker| self.best(|of, common| taker.may_take(of, common.cpus)).is_some())
    }

    /// The claim of the vCPU that runs here, if one does, with these times.
    #[must_use]
    pub fn running(&self, times: Times) -> Option<Claim> {
        self.running.map(|(of, _)| Claim { turn: Turn::Fair, of, times })
    }

    /// The claim of the next vCPU, and the pCPUs of others that some waiting vCPU may run on.
    #[must_use]
    pub fn outlook(&self) -> (Option<Claim>, CpuSet) {
        let mut takers = 0;
        let first = self.best(|of, common| {
            takers |= if self.is_free_for_others(of) { common.cpus.0 } else { 0 };
            true
        });
        (first.map(|(_, claim)| claim), CpuSet(takers))
    }

    /// Promises the core to the VM of the next vCPU, if it is another one than that whose vCPUs run here. Returns
    /// whether those are to leave.
    pub fn promise(&mut self) -> bool {
        let (first, occupant) = (self.first().map(|first| first.of.vm), self.occupant());
        if !self.is_promised() && occupant.is_some() && first != occupant {
            self.promised_to = first;
        }
        self.is_promised()
    }

    /// Adds a vCPU that ran here last.
    pub fn push(&mut self, time: VirtualTime, turn: Turn, vcpu: T) {
        self.has_yielders |= turn == Turn::AfterOthers;
        let of = Holder::of(vcpu.share());
        let arrived = self.arrived;
        self.arrived += 1;
        self.waiting.push_back(Waiting { time, turn, of, arrived, vcpu });
    }

    /// Adds a vCPU from another queue.
    pub fn push_moved(&mut self, time: VirtualTime, vcpu: T) {
        let (time, _) = self.place(time, vcpu.share());
        self.push(time, Turn::Fair, vcpu);
    }

    /// Adds a vCPU that wakes. Returns its claim. What it is in a hurry for, such as an interrupt, takes little as a
    /// rule, so it goes before VMs that have used less, as long as its own has not used most.
    pub fn push_woken(&mut self, time: VirtualTime, turn: Turn, vcpu: T) -> Claim {
        let share = vcpu.share();
        share.lift(self.floor.saturating_sub(WAKE_CREDIT));
        let whole = share.whole().time();
        let (time, most) = self.place(time, share);
        let has_used_less = self.running.is_some_and(|(_, times)| whole < times.whole) || whole < most;
        let turn = if turn == Turn::Fair && has_used_less { Turn::Woken } else { turn };
        let claim = Claim::new(vcpu.share(), time, turn);
        self.push(time, turn, vcpu);
        claim
    }

    /// Removes the vCPU with the best claim of those that `cpu`, a thread of this core, may run now. It runs there from
    /// now on.
    pub fn pop(&mut self, cpu: CpuId) -> Option<(VirtualTime, T)> {
        debug_assert!(!self.inside.contains(cpu), "{cpu} runs a vCPU already");
        let taker = self.own_taker(cpu)?;
        let mut least = VirtualTime::MAX;
        let (best, claim) = self.best(|of, common| {
            least = least.min(common.whole);
            taker.may_take(of, common.cpus)
        })?;
        self.floor = self.floor.max(least);
        self.running = Some((claim.of, claim.times));
        self.inside = self.inside.with(cpu);
        self.promised_to = None;
        if self.last.replace(claim.of.vm) != Some(claim.of.vm) {
            self.changes += 1;
        }
        let entry = self.waiting.swap_remove_back(best)?;
        if core::mem::take(&mut self.has_yielders) {
            for other in &mut self.waiting {
                other.turn = other.turn.min(Turn::Fair);
            }
        }
        Some((entry.time, entry.vcpu))
    }

    /// Removes the vCPU that would wait longest, of those that somebody else may take: for a pCPU that has no other.
    pub fn take_last(&mut self, taker: Taker) -> Option<(VirtualTime, T)> {
        let mut last: Option<(usize, Key)> = None;
        self.each(|at, entry, common| {
            let key = entry.key(common);
            let may_go = taker.may_take(entry.of, common.cpus) && self.is_free_for_others(entry.of);
            if may_go && last.is_none_or(|(_, other)| key > other) {
                last = Some((at, key));
            }
        });
        self.take(last?.0)
    }

    /// Removes the vCPU with the best claim, of those that somebody else may take: for a pCPU whose own have worse
    /// ones.
    pub fn take_first(&mut self, taker: Taker) -> Option<(VirtualTime, T)> {
        let (first, _) = self.best_for(taker)?;
        self.take(first)
    }

    /// Updates the floor. `running` is the virtual time of the VM, or group, whose vCPU runs here, if one does.
    pub fn advance(&mut self, running: Option<VirtualTime>) {
        let mut least = running;
        self.each(|_, _, common| least = Some(least.map_or(common.whole, |least| least.min(common.whole))));
        self.floor = self.floor.max(least.unwrap_or(0));
    }

    /// No vCPU runs on `cpu` now, a thread of this core. The last one was of a VM, or group, with this virtual time.
    pub fn stop_running(&mut self, cpu: CpuId, whole: VirtualTime) {
        // If others wait, the next one moves the floor.
        if self.waiting.is_empty() {
            self.floor = self.floor.max(whole);
        }
        self.inside = self.inside.without(cpu);
        if self.inside.is_empty() {
            self.running = None;
        }
    }

    /// Looks at all, in no order. vCPUs of one VM often follow one another: what they have in common is read once then.
    #[inline]
    fn each<'a>(&'a self, mut look: impl FnMut(usize, &'a Waiting<T>, Common)) {
        let mut last: Option<&Waiting<T>> = None;
        let mut common = Common { whole: 0, vm: 0, cpus: CpuSet::ALL };
        for (at, entry) in self.waiting.iter().enumerate() {
            if last.is_none_or(|last| last.of != entry.of) {
                let share = entry.vcpu.share();
                common = Common { whole: share.whole().time(), vm: share.time(), cpus: share.cpus() };
                last = Some(entry);
            }
            look(at, entry, common);
        }
    }

    /// The best claim of those that somebody else may take, and its place.
    fn best_for(&self, taker: Taker) -> Option<(usize, Claim)> {
        self.best(|of, common| taker.may_take(of, common.cpus) && self.is_free_for_others(of))
    }

    /// The best claim of those that `may` be chosen, and its place.
    #[inline]
    fn best(&self, mut may: impl FnMut(Holder, Common) -> bool) -> Option<(usize, Claim)> {
        let mut best = None;
        let mut least: Key = (Turn::AfterOthers, VirtualTime::MAX, VirtualTime::MAX, VirtualTime::MAX, u64::MAX);
        self.each(|at, entry, common| {
            let key = entry.key(common);
            if may(entry.of, common) && key < least {
                (best, least) = (Some((at, entry, common)), key);
            }
        });
        best.map(|(at, entry, common)| (at, entry.claim(common)))
    }

    fn take(&mut self, at: usize) -> Option<(VirtualTime, T)> {
        self.waiting.swap_remove_back(at).map(|entry| (entry.time, entry.vcpu))
    }

    /// `time` between those of the other vCPUs of its VM here, and the most that a VM, or group, of others has used.
    fn place(&self, time: VirtualTime, share: &Share) -> (VirtualTime, VirtualTime) {
        let vm = VmKey::of(share);
        let running = self.running.filter(|(of, _)| of.vm == vm).map(|(_, times)| times.vcpu);
        let (mut first, mut last) = running.map_or((VirtualTime::MAX, 0), |mate| (mate, mate));
        let mut most = 0;
        self.each(|_, entry, common| {
            most = most.max(common.whole);
            if entry.of.vm == vm {
                (first, last) = (first.min(entry.time), last.max(entry.time));
            }
        });
        let placed = if first <= last { time.clamp(first.saturating_sub(WAKE_CREDIT), last) } else { time };
        (placed, most)
    }
}
