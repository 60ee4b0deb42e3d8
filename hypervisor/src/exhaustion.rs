//! Fault injection for allocations: with `selftest=exhaustion`, tests check that every exhausted resource ends in an
//! answer.
//!
//! Code that takes memory, tables or tags for a VM, and can fail, calls [`strikes`] first. The result is false until a
//! command has called [`choose`]: then the given number of calls succeed, and the given number of calls after them
//! fail.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

static IS_ARMED: CachePadded<AtomicBool> = CachePadded::new(AtomicBool::new(false));
static CHOSEN: Chosen = Chosen::new();

/// The choice of failing calls.
struct Chosen {
    asked: AtomicU64,
    first: AtomicU64,
    count: AtomicU64,
}

impl Chosen {
    const fn new() -> Self {
        Self { asked: AtomicU64::new(0), first: AtomicU64::new(0), count: AtomicU64::new(0) }
    }

    fn choose(&self, first: u64, count: u64) -> u64 {
        self.first.store(first, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
        self.asked.swap(0, Ordering::Relaxed)
    }

    fn strikes(&self) -> bool {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let first = self.first.load(Ordering::Relaxed);
        number.checked_sub(first).is_some_and(|after| after < self.count.load(Ordering::Relaxed))
    }
}

/// Whether the next allocation must fail. Without the selftest this is one load of a word that is never written.
#[inline]
pub(crate) fn strikes() -> bool {
    IS_ARMED.load(Ordering::Relaxed) && CHOSEN.strikes()
}

/// Enables commands that choose the failing allocations.
pub(crate) fn arm() {
    IS_ARMED.store(true, Ordering::Relaxed);
}

/// From now on the next `first` calls succeed and the `count` calls after them fail. Returns the number of calls since
/// the last choice. Without the selftest it does nothing and returns `None`.
pub(crate) fn choose(first: u64, count: u64) -> Option<u64> {
    IS_ARMED.load(Ordering::Relaxed).then(|| CHOSEN.choose(first, count))
}

#[cfg(test)]
mod tests {
    use super::Chosen;

    #[test]
    fn those_that_are_chosen_fail_and_no_others() {
        let chosen = Chosen::new();
        let strikes = |times: usize| (0..times).map(|_| chosen.strikes()).collect::<Vec<_>>();
        assert_eq!(strikes(3), [false; 3]);
        assert_eq!(chosen.choose(1, 2), 3);
        assert_eq!(strikes(5), [false, true, true, false, false]);
        assert_eq!(chosen.choose(2, u64::MAX), 5);
        assert_eq!(strikes(4), [false, false, true, true]);
        assert_eq!(chosen.choose(0, 0), 4);
        assert_eq!(strikes(2), [false; 2]);
    }
}
