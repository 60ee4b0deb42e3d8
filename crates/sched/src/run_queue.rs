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
//! The queue is short, so it is searched each time: the virtual time of a VM changes while its vCPUs wait. Whoever
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
    whole: usize,
    vm: usize,
}

impl Holder {
    fn of(share: &Share) -> Self {
        Self { whole: identity(share.whole()), vm: identity(share) }
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

    /// The order in a queue.
    fn key(&self) -> (Turn, Times) {
        (self.turn, self.times)
    }
}

fn identity(share: &Share) -> usize {
    core::ptr::from_ref(share).addr()
}

/// The vCPUs (`T`) that wait for one pCPU.
#[derive(Debug)]
pub struct RunQueue<T> {
    /// By order of arrival.
    waiting: VecDeque<Waiting<T>>,
    floor: VirtualTime,
    /// Whether a vCPU may wait that has yielded.
    has_yielders: bool,
    /// The vCPU that was taken to run here: its VM, and its times then.
    running: Option<(Holder, Times)>,
}

#[derive(Debug)]
struct Waiting<T> {
    time: VirtualTime,
    turn: Turn,
    vcpu: T,
}

impl<T: Member> Waiting<T> {
    fn claim(&self) -> Claim {
        Claim::new(self.vcpu.share(), self.time, self.turn)
    }
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        // The floor starts one credit up, so that the first wakers have a credit too.
        Self { waiting: VecDeque::new(), floor: WAKE_CREDIT, has_yielders: false, running: None }
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
}

impl<T: Member> RunQueue<T> {
    /// The claim of the next vCPU.
    #[must_use]
    pub fn first(&self) -> Option<Claim> {
        self.claims().min_by_key(Claim::key)
    }

    /// The claim of the next vCPU of those that may run on `cpu`.
    #[must_use]
    pub fn first_for(&self, cpu: CpuId) -> Option<Claim> {
        self.claims_for(cpu).map(|(_, claim)| claim).min_by_key(Claim::key)
    }

    /// The claim of the vCPU that runs here, if one does, with these times.
    #[must_use]
    pub fn running(&self, times: Times) -> Option<Claim> {
        self.running.map(|(of, _)| Claim { turn: Turn::Fair, of, times })
    }

    /// The claim of the next vCPU, and the pCPUs that some waiting vCPU may run on.
    #[must_use]
    pub fn outlook(&self) -> (Option<Claim>, CpuSet) {
        let mut takers = 0;
        let claims = self.waiting.iter().map(|entry| {
            takers |= entry.vcpu.share().cpus().0;
            entry.claim()
        });
        let first = claims.min_by_key(Claim::key);
        (first, CpuSet(takers))
    }

    /// Adds a vCPU that ran here last.
    pub fn push(&mut self, time: VirtualTime, turn: Turn, vcpu: T) {
        self.has_yielders |= turn == Turn::AfterOthers;
        self.waiting.push_back(Waiting { time, turn, vcpu });
    }

    /// Adds a vCPU from another queue.
    pub fn push_moved(&mut self, time: VirtualTime, vcpu: T) {
        let time = self.place(time, vcpu.share());
        self.push(time, Turn::Fair, vcpu);
    }

    /// Adds a vCPU that wakes. Returns its claim. What it is in a hurry for, such as an interrupt, takes little as a
    /// rule, so it goes before VMs that have used less, as long as its own has not used most.
    pub fn push_woken(&mut self, time: VirtualTime, turn: Turn, vcpu: T) -> Claim {
        let share = vcpu.share();
        share.lift(self.floor.saturating_sub(WAKE_CREDIT));
        let whole = share.whole().time();
        let waiting = || self.waiting.iter().map(|entry| entry.vcpu.share().whole().time());
        let has_used_less =
            self.running.is_some_and(|(_, times)| whole < times.whole) || waiting().any(|other| whole < other);
        let turn = if turn == Turn::Fair && has_used_less { Turn::Woken } else { turn };
        let time = self.place(time, share);
        let claim = Claim::new(vcpu.share(), time, turn);
        self.push(time, turn, vcpu);
        claim
    }

    /// Removes the vCPU with the best claim. It runs here from now on.
    pub fn pop(&mut self) -> Option<(VirtualTime, T)> {
        let mut least = VirtualTime::MAX;
        let claims = self.waiting.iter().map(|entry| {
            let claim = entry.claim();
            least = least.min(claim.times.whole);
            claim
        });
        let (best, claim) = claims.enumerate().min_by_key(|(_, claim)| claim.key())?;
        self.floor = self.floor.max(least);
        self.running = Some((claim.of, claim.times));
        let entry = self.waiting.remove(best)?;
        if core::mem::take(&mut self.has_yielders) {
            for other in &mut self.waiting {
                other.turn = other.turn.min(Turn::Fair);
            }
        }
        Some((entry.time, entry.vcpu))
    }

    /// Removes the vCPU that would wait longest, of those that may run on `cpu`: for a pCPU that has no other.
    pub fn take_last(&mut self, cpu: CpuId) -> Option<(VirtualTime, T)> {
        let last = self.claims_for(cpu).max_by_key(|(_, claim)| claim.key());
        self.take(last)
    }

    /// Removes the vCPU with the best claim, of those that may run on `cpu`: for a pCPU whose own have worse ones.
    pub fn take_first(&mut self, cpu: CpuId) -> Option<(VirtualTime, T)> {
        let first = self.claims_for(cpu).min_by_key(|(_, claim)| claim.key());
        self.take(first)
    }

    /// Updates the floor. `running` is the virtual time of the VM, or group, whose vCPU runs here, if one does.
    pub fn advance(&mut self, running: Option<VirtualTime>) {
        let waiting = self.waiting.iter().map(|entry| entry.vcpu.share().whole().time()).min();
        let least = running.into_iter().chain(waiting).min();
        self.floor = self.floor.max(least.unwrap_or(0));
    }

    /// No vCPU runs here now. The last one was of a VM, or group, with this virtual time.
    pub fn stop_running(&mut self, whole: VirtualTime) {
        // If others wait, the next one moves the floor.
        if self.waiting.is_empty() {
            self.floor = self.floor.max(whole);
        }
        self.running = None;
    }

    fn claims(&self) -> impl Iterator<Item = Claim> {
        self.waiting.iter().map(Waiting::claim)
    }

    /// The claims of the vCPUs that may run on `cpu`, with their places in the queue.
    fn claims_for(&self, cpu: CpuId) -> impl Iterator<Item = (usize, Claim)> {
        let may = move |entry: &Waiting<T>| entry.vcpu.share().cpus().contains(cpu);
        self.waiting.iter().enumerate().filter(move |(_, entry)| may(entry)).map(|(at, entry)| (at, entry.claim()))
    }

    fn take(&mut self, chosen: Option<(usize, Claim)>) -> Option<(VirtualTime, T)> {
        self.waiting.remove(chosen?.0).map(|entry| (entry.time, entry.vcpu))
    }

    /// `time` between those of the other vCPUs of its VM here.
    fn place(&self, time: VirtualTime, share: &Share) -> VirtualTime {
        let vm = identity(share);
        let waiting = self.waiting.iter().filter(|entry| identity(entry.vcpu.share()) == vm);
        let running = self.running.filter(|(of, _)| of.vm == vm);
        let mates = waiting.map(|entry| entry.time).chain(running.map(|(_, times)| times.vcpu));
        let ends = mates.fold(None, |ends, mate| {
            let (first, last) = ends.unwrap_or((mate, mate));
            Some((mate.min(first), mate.max(last)))
        });
        ends.map_or(time, |(first, last)| time.clamp(first.saturating_sub(WAKE_CREDIT), last))
    }
}
