//! The simulation: threads that take turns, and the same threads without it.

use std::cell::{Cell, RefCell};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler, RoundRobinScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

thread_local! {
    /// Whether a simulation runs on this thread of the operating system.
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
    /// The value that the thread under test has set: see [`Context`].
    static CONTEXT: Cell<usize> = const { Cell::new(0) };
    /// One in so many scheduling points counts, and the state of the generator that chooses it.
    static BURST: Cell<u32> = const { Cell::new(1) };
    /// Scheduling points that are left before threads go in step.
    static LEAD: Cell<u32> = const { Cell::new(0) };
    static RANDOM: RefCell<fastrand::Rng> = const { RefCell::new(fastrand::Rng::with_seed(0)) };
    /// A panic is a result here, and prints nothing.
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// An interleaving with more steps counts as endless, unless its scenario is known to be longer.
pub const STEPS: usize = 50_000;
/// Scheduling points before threads go in step, at most.
const LONGEST_LEAD: u32 = 2_000;
/// Bytes of a thread's stack in a simulation.
const STACK_BYTES: usize = 512 << 10;

/// A number that each thread under test has for itself, simulated or not; 0 at first.
#[derive(Clone, Copy, Debug)]
pub struct Context;

impl Context {
    /// The value.
    #[must_use]
    pub fn get() -> usize {
        CONTEXT.get()
    }

    /// Sets it.
    pub fn set(value: usize) {
        CONTEXT.set(value);
    }
}

/// Another thread of the simulation may continue here.
#[inline]
pub fn point() {
    if SIMULATED.get() && counts() {
        turn(|| shuttle::thread::sleep(Duration::ZERO));
    }
}

/// Whether this point is one at which another thread may continue.
#[inline]
fn counts() -> bool {
    let burst = BURST.get();
    let lead = LEAD.get();
    if lead > 0 {
        LEAD.set(lead - 1);
        return RANDOM.with_borrow_mut(fastrand::Rng::bool);
    }
    burst == 1 || RANDOM.with_borrow_mut(|random| random.u32(..burst)) == 0
}

/// Waits for another thread: lets others go first.
#[inline]
pub fn relax() {
    if SIMULATED.get() {
        turn(shuttle::thread::yield_now);
    } else {
        std::thread::yield_now();
    }
}

#[cold]
fn turn(switch: impl FnOnce()) {
    // A thread that unwinds is not interleaved any more.
    if std::thread::panicking() {
        return;
    }
    let context = CONTEXT.get();
    switch();
    CONTEXT.set(context);
}

/// A thread that was [spawned](spawn).
#[derive(Debug)]
pub struct Thread(Handle);

#[derive(Debug)]
enum Handle {
    Simulated(shuttle::thread::JoinHandle<()>),
    Real(std::thread::JoinHandle<()>),
}

/// Starts a thread of the caller's simulation, or of the operating system.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> Thread {
    let work = || {
        CONTEXT.set(0);
        work();
    };
    if SIMULATED.get() {
        let context = CONTEXT.get();
        let handle = shuttle::thread::spawn(work);
        CONTEXT.set(context);
        Thread(Handle::Simulated(handle))
    } else {
        Thread(Handle::Real(std::thread::spawn(work)))
    }
}

impl Thread {
    /// Waits until it has ended.
    ///
    /// # Panics
    /// The thread has panicked.
    pub fn join(self) {
        let context = CONTEXT.get();
        let ended = match self.0 {
            Handle::Simulated(handle) => handle.join(),
            Handle::Real(handle) => handle.join(),
        };
        CONTEXT.set(context);
        if let Err(panic) = ended {
            resume_unwind(panic);
        }
    }
}

/// Where one thread waits until another wakes it.
#[derive(Debug)]
pub struct Parking(Place);

#[derive(Debug)]
enum Place {
    Simulated(Box<(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar)>),
    Real(Mutex<bool>, Condvar),
}

impl Parking {
    /// For threads of the simulation that the caller is in, or of the operating system.
    #[must_use]
    pub fn new() -> Self {
        Self(if SIMULATED.get() {
            Place::Simulated(Box::new((shuttle::sync::Mutex::new(false), shuttle::sync::Condvar::new())))
        } else {
            Place::Real(Mutex::new(false), Condvar::new())
        })
    }

    /// Waits until another thread [wakes](Self::wake) this one, or has done so since the last call.
    pub fn park(&self) {
        match &self.0 {
            Place::Simulated(place) => turn(|| {
                let (is_woken, changed) = &**place;
                let mut is_woken = is_woken.lock().unwrap_or_else(PoisonError::into_inner);
                while !*is_woken {
                    is_woken = changed.wait(is_woken).unwrap_or_else(PoisonError::into_inner);
                }
                *is_woken = false;
            }),
            Place::Real(is_woken, changed) => {
                let mut is_woken = is_woken.lock().unwrap_or_else(PoisonError::into_inner);
                while !*is_woken {
                    is_woken = changed.wait(is_woken).unwrap_or_else(PoisonError::into_inner);
                }
                *is_woken = false;
            }
        }
    }

    /// Ends the wait of the thread that waits here, or its next one.
    pub fn wake(&self) {
        match &self.0 {
            Place::Simulated(place) => turn(|| {
                let (is_woken, changed) = &**place;
                *is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
                changed.notify_one();
            }),
            Place::Real(is_woken, changed) => {
                *is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
                changed.notify_one();
            }
        }
    }
}

impl Default for Parking {
    fn default() -> Self {
        Self::new()
    }
}

/// How interleavings are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedules {
    /// Any thread continues at each point.
    Random,
    /// The same at one point in so many, which the seed chooses. An interleaving takes less time.
    Bursts(NonZeroU32),
    /// The thread of the highest priority continues, and priorities change this many times. It finds mistakes that need
    /// few changes at the right places (Burckhardt and others, "A Randomized Scheduler with Probabilistic Guarantees of
    /// Finding Bugs", 2010).
    Priorities(usize),
    /// Threads continue in turn, one point each, after a beginning that the seed chooses. It finds threads that hinder
    /// each other for ever as long as they are equally fast, as those of an emulator are.
    InStep,
}

/// Runs `scenario` in this many interleavings, chosen by `seed`. Returns the number of runs.
///
/// # Panics
/// The scenario panics, or waits forever, in some interleaving. The seed and the number of the first such interleaving
/// are printed; the same call repeats it.
pub fn explore(
    schedules: Schedules,
    seed: u64,
    interleavings: usize,
    scenario: impl Fn() + Send + Sync + 'static,
) -> usize {
    match find(schedules, seed, interleavings, STEPS, scenario) {
        Ok(count) => count,
        Err((number, what)) => {
            panic!("interleaving {number} of {schedules:?} with seed {seed:#x}: {what}")
        }
    }
}

/// As [`explore`], for a scenario that is expected to fail: nothing is printed. An interleaving with more steps than
/// `steps` counts as endless.
///
/// # Errors
/// The number of the first interleaving that fails, and how.
pub fn find(
    schedules: Schedules,
    seed: u64,
    interleavings: usize,
    steps: usize,
    scenario: impl Fn() + Send + Sync + 'static,
) -> Result<usize, (usize, String)> {
    static HOOK: Once = Once::new();
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(steps);
    config.silence_warnings = true;

    let number = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = number.clone();
    let burst = match schedules {
        Schedules::Bursts(burst) => burst.get(),
        Schedules::Random | Schedules::Priorities(_) | Schedules::InStep => 1,
    };
    let leads = schedules == Schedules::InStep;
    let scenario = move || {
        let number = counted.fetch_add(1, Ordering::Relaxed) as u64;
        BURST.set(burst);
        let lead = RANDOM.with_borrow_mut(|random| {
            random.seed(seed.wrapping_add(number));
            if leads { random.u32(..LONGEST_LEAD) } else { 0 }
        });
        LEAD.set(lead);
        CONTEXT.set(0);
        scenario();
    };
    let run = || match schedules {
        Schedules::Random | Schedules::Bursts(_) => {
            Runner::new(RandomScheduler::new_from_seed(seed, interleavings), config).run(scenario)
        }
        Schedules::Priorities(changes) => {
            Runner::new(PctScheduler::new_from_seed(seed, changes, interleavings), config).run(scenario)
        }
        Schedules::InStep => Runner::new(RoundRobinScheduler::new(interleavings), config).run(scenario),
    };

    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            if QUIET.get() {
                LAST_PANIC.with_borrow_mut(|last| *last = panic.to_string());
            } else {
                others(panic);
            }
        }));
    });
    assert!(!SIMULATED.replace(true), "a simulation holds no other");
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    SIMULATED.set(false);
    CONTEXT.set(0);
    let number = number.load(Ordering::Relaxed);
    result.map_err(|_| (number, LAST_PANIC.take()))
}
