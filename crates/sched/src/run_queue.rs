//! The run queue: which vCPU runs next on a pCPU.
//!
//! Each vCPU has a [`VirtualTime`], the ticks that it has run so far. The queue returns the vCPU with the least. This
//! alone is fair and starves no vCPU: a running vCPU moves behind the waiting ones.
//!
//! Two cases need care. A vCPU that slept for an hour must not run for an hour to catch up. And a vCPU from another
//! pCPU has a time on another queue's scale. The queue's *floor* solves both: the least virtual time of its vCPUs,
//! which only grows. A vCPU wakes at most [`WAKE_CREDIT`] below the floor. So it runs soon, but cannot delay others for
//! long, because its own time continues to grow while it runs. A migrating vCPU keeps its distance to the floor.
//!
//! The queue is a list in the order of virtual time, and short. Whoever creates a vCPU makes room for it in each queue
//! where it may ever wait ([`RunQueue::reserve`]). So waiting for a pCPU never allocates.

use alloc::collections::{TryReserveError, VecDeque};

/// Ticks that a vCPU has run, on the clock of one run queue.
pub type VirtualTime = u64;

/// How far below the floor a vCPU may start when it wakes, in ticks: about 2 ms of a 2.5 GHz clock.
///
/// A larger value delivers interrupts sooner on a busy pCPU. A smaller one disturbs computing neighbours less.
pub const WAKE_CREDIT: VirtualTime = 5_000_000;

/// The vCPUs (`T`) that wait for one pCPU.
#[derive(Debug)]
pub struct RunQueue<T> {
    /// By virtual time, then by order of arrival.
    waiting: VecDeque<(VirtualTime, T)>,
    floor: VirtualTime,
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        // The floor starts one credit up, so that the first wakers have a credit too.
        Self { waiting: VecDeque::new(), floor: WAKE_CREDIT }
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

    /// The least virtual time of the queue's vCPUs.
    #[must_use]
    pub fn floor(&self) -> VirtualTime {
        self.floor
    }

    /// The virtual time of the next vCPU.
    #[must_use]
    pub fn first(&self) -> Option<VirtualTime> {
        self.waiting.front().map(|&(time, _)| time)
    }

    /// The virtual time of a vCPU that wakes and slept since `slept_at`.
    #[must_use]
    pub fn wake_time(&self, slept_at: VirtualTime) -> VirtualTime {
        slept_at.max(self.floor.saturating_sub(WAKE_CREDIT))
    }

    /// `time` on this queue's scale, for a vCPU from a queue whose floor is `other_floor`.
    #[must_use]
    pub fn translate(&self, time: VirtualTime, other_floor: VirtualTime) -> VirtualTime {
        if time >= other_floor {
            self.floor.saturating_add(time - other_floor)
        } else {
            self.floor.saturating_sub(other_floor - time)
        }
    }

    /// Adds a vCPU.
    pub fn push(&mut self, time: VirtualTime, vcpu: T) {
        let at = self.waiting.partition_point(|&(other, _)| other <= time);
        self.waiting.insert(at, (time, vcpu));
    }

    /// Removes the vCPU that has run the least.
    pub fn pop(&mut self) -> Option<(VirtualTime, T)> {
        let (time, vcpu) = self.waiting.pop_front()?;
        self.floor = self.floor.max(time);
        Some((time, vcpu))
    }

    /// Removes the vCPU that would wait longest: the one to migrate.
    pub fn pop_last(&mut self) -> Option<(VirtualTime, T)> {
        self.waiting.pop_back()
    }

    /// Updates the floor with the virtual time of the running vCPU.
    pub fn advance(&mut self, running: VirtualTime) {
        let least = self.first().map_or(running, |first| first.min(running));
        self.floor = self.floor.max(least);
    }
}
