//! Threads that take turns: one runs at a time, and at each step a random number chooses the next. The same seed
//! repeats a run.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};

use fastrand::Rng;

/// Which thread has the turn, and which are left.
pub(crate) struct Turns {
    holder: AtomicUsize,
    /// The threads that have begun and not ended.
    threads: Mutex<Vec<(usize, Thread)>>,
    chance: Mutex<Rng>,
    steps_left: AtomicU64,
    is_over: AtomicBool,
}

impl Turns {
    pub(crate) fn new(seed: u64, steps: u64) -> Self {
        Self {
            holder: AtomicUsize::new(usize::MAX),
            threads: Mutex::new(Vec::new()),
            chance: Mutex::new(Rng::with_seed(seed)),
            steps_left: AtomicU64::new(steps),
            is_over: AtomicBool::new(false),
        }
    }

    /// Runs `body(0)` to `body(count - 1)`, each in a thread of its own, and begins with the first.
    pub(crate) fn run(&self, count: usize, body: impl Fn(usize) + Sync) {
        thread::scope(|scope| {
            let body = &body;
            let mut threads = locked(&self.threads);
            for me in 0..count {
                let handle = scope.spawn(move || {
                    let _done = Done { turns: self, me };
                    self.wait_for_turn(me);
                    body(me);
                });
                threads.push((me, handle.thread().clone()));
            }
            self.holder.store(0, Ordering::Release);
            threads[0].1.unpark();
        });
    }

    /// May give the turn to another thread.
    pub(crate) fn step(&self, me: usize) {
        if self.steps_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            self.end();
        }
        if self.below(2) == 0 {
            self.pass_on();
            self.wait_for_turn(me);
        }
    }

    /// From now on threads begin nothing new.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// A number below `end`.
    pub(crate) fn below(&self, end: usize) -> usize {
        locked(&self.chance).usize(..end)
    }

    fn pass_on(&self) {
        let threads = locked(&self.threads);
        if !threads.is_empty() {
            let (next, thread) = &threads[self.below(threads.len())];
            self.holder.store(*next, Ordering::Release);
            thread.unpark();
        }
    }

    fn wait_for_turn(&self, me: usize) {
        while self.holder.load(Ordering::Acquire) != me {
            thread::park();
        }
    }
}

/// Ends a thread, also after a panic: the others continue without it.
struct Done<'a> {
    turns: &'a Turns,
    me: usize,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.turns.end();
        }
        locked(&self.turns.threads).retain(|&(other, _)| other != self.me);
        self.turns.pass_on();
    }
}

/// The data of a lock; a panic while it was held is reported elsewhere.
pub(crate) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
