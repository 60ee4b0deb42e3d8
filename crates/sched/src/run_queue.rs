//! The run queue: who runs next on a pCPU.
//!
//! Each vCPU carries a [`VirtualTime`], the ticks that it has run so far. The queue hands out the one with the least.
//! That alone is fair and starves nobody: whoever runs moves behind those who wait.
//!
//! Two cases need care. A vCPU that slept for an hour must not run for an hour to catch up, and a vCPU that comes from
//! another pCPU brings a number from another clock. Both are solved by the queue's *floor*: the least virtual time that
//! is still in play there, which only grows. A sleeper wakes at most [`WAKE_CREDIT`] below the floor; so it runs soon,
//! and yet cannot push others aside for long, because its own time is kept and grows while it runs. A migrant keeps its
//! distance to the floor and changes the clock.

use alloc::collections::BTreeMap;

/// Ticks that a vCPU has run, on the clock of one run queue.
pub type VirtualTime = u64;

/// How far below the floor a vCPU may start when it wakes, in ticks: about 2 ms of a 2.5 GHz clock.
///
/// Larger lets interrupts be taken sooner on a busy pCPU, smaller keeps spinning neighbours undisturbed.
pub const WAKE_CREDIT: VirtualTime = 5_000_000;

/// The vCPUs (`T`) that wait for one pCPU.
#[derive(Debug)]
pub struct RunQueue<T> {
    /// By virtual time, then by order of arrival.
    waiting: BTreeMap<(VirtualTime, u64), T>,
    floor: VirtualTime,
    arrivals: u64,
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        // The floor starts one credit up, so that the first sleepers have a credit too.
        Self { waiting: BTreeMap::new(), floor: WAKE_CREDIT, arrivals: 0 }
    }
}

impl<T> RunQueue<T> {
    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The least virtual time in play.
    #[must_use]
    pub fn floor(&self) -> VirtualTime {
        self.floor
    }

    /// The virtual time of who would run next.
    #[must_use]
    pub fn first(&self) -> Option<VirtualTime> {
        self.waiting.first_key_value().map(|(&(time, _), _)| time)
    }

    /// Where a vCPU that slept since `slept_at` starts again.
    #[must_use]
    pub fn wake_time(&self, slept_at: VirtualTime) -> VirtualTime {
        slept_at.max(self.floor.saturating_sub(WAKE_CREDIT))
    }

    /// `time`, on this queue's clock, for a vCPU that comes from a queue whose floor is `other_floor`.
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
        self.arrivals += 1;
        self.waiting.insert((time, self.arrivals), vcpu);
    }

    /// Takes the vCPU that has had the least.
    pub fn pop(&mut self) -> Option<(VirtualTime, T)> {
        let ((time, _), vcpu) = self.waiting.pop_first()?;
        self.floor = self.floor.max(time);
        Some((time, vcpu))
    }

    /// Takes the vCPU that would wait longest: the one to give away.
    pub fn pop_last(&mut self) -> Option<(VirtualTime, T)> {
        self.waiting.pop_last().map(|((time, _), vcpu)| (time, vcpu))
    }

    /// Tells the queue how far the vCPU that runs on its pCPU has come.
    pub fn advance(&mut self, running: VirtualTime) {
        let least = self.first().map_or(running, |first| first.min(running));
        self.floor = self.floor.max(least);
    }
}
