//! Timers of blocked vCPUs: each pCPU keeps those of the vCPUs that blocked on it.
//!
//! A running vCPU does not need this, because its pCPU's own timer is armed for it. A vCPU that blocks leaves its
//! deadline here, and takes it back when it runs again, on any pCPU. The room for that is reserved when the vCPU is
//! created ([`Timers::reserve`]), so blocking never allocates.

use alloc::collections::{TryReserveError, VecDeque};

use sched::Pending;

use super::step::Step;
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::vm::VcpuRef;

/// The deadlines of one pCPU.
#[derive(Default)]
pub(crate) struct Timers {
    list: Mutex<List>,
    /// The earliest deadline, `u64::MAX` if there is none: the owner reads it without the lock.
    next: Next,
}

#[derive(Default)]
struct List {
    /// In the order of their keys.
    by_deadline: VecDeque<(Key, VcpuRef)>,
    added: u64,
}

struct Next(AtomicU64);

impl Default for Next {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

/// Names an entry: deadline in ticks of the host clock, then order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u64, u64);

impl Timers {
    /// Makes room for `count` deadlines in all.
    ///
    /// # Errors
    /// When there is no memory for that; nothing has changed then.
    pub(crate) fn reserve(&self, count: usize) -> Result<(), TryReserveError> {
        let list = &mut self.list.lock().by_deadline;
        list.try_reserve_exact(count.saturating_sub(list.len()))
    }

    /// Frees room for more than `count` deadlines.
    pub(crate) fn shrink(&self, count: usize) {
        self.list.lock().by_deadline.shrink_to(count);
    }

    /// Adds a deadline.
    pub(crate) fn add(&self, deadline: u64, vcpu: VcpuRef) -> Key {
        let mut list = self.list.lock();
        list.added += 1;
        let key = Key(deadline, list.added);
        let at = list.by_deadline.partition_point(|(other, _)| *other < key);
        list.by_deadline.insert(at, (key, vcpu));
        self.note_next(&list);
        key
    }

    /// Takes a deadline back, if it has not passed already.
    pub(crate) fn remove(&self, key: Key) {
        let mut list = self.list.lock();
        let found = list.by_deadline.binary_search_by_key(&key, |(other, _)| *other);
        let removed = found.ok().and_then(|at| list.by_deadline.remove(at));
        self.note_next(&list);
        drop(list);
        // Dropped outside of the lock: it may be the last reference to its VM.
        drop(removed);
    }

    /// The earliest deadline, `u64::MAX` if there is none.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.next.0.load(Ordering::Relaxed)
    }

    /// Posts to vCPUs whose deadline has passed at `now`: to all of them, or to those of one step. A timer that is
    /// armed for the next one expires at once.
    #[inline]
    pub(crate) fn expire(&self, now: u64) {
        if self.next() <= now {
            self.expire_some(now);
        }
    }

    fn expire_some(&self, now: u64) {
        let step = Step::begin();
        while self.next() <= now {
            let mut list = self.list.lock();
            let is_due = list.by_deadline.front().is_some_and(|(key, _)| key.0 <= now);
            let Some((_, due)) = is_due.then(|| list.by_deadline.pop_front()).flatten() else { break };
            self.note_next(&list);
            drop(list);
            if !mutants::is(Mutant::TimerNotPosted) {
                due.vm().post(due.index(), Pending::TIMER);
            }
            if step.is_over() {
                break;
            }
        }
    }

    fn note_next(&self, list: &List) {
        let next = list.by_deadline.front().map_or(u64::MAX, |(key, _)| key.0);
        self.next.0.store(next, Ordering::Relaxed);
    }
}
