//! All CPUs at once. Each does one random action after the other, and checks all that it can.
//!
//! | done | checked |
//! |---|---|
//! | IPI to a random CPU | the receiver's handler sees the mail that was there before the IPI was sent |
//! | timer, spinning or halted | it comes, and not before its time |
//! | halt until an IPI or a timer | something wakes the CPU |
//! | touch of an unmapped page | the page is mapped by the handler and holds what was stored |
//! | trapped registers, devices | the answer is the one for this CPU |
//! | general registers over a spin | they hold what they held |
//! | always | vector registers, float control, what else a CPU has of its own; the clock never runs backwards |
//!
//! IPIs of one vector coalesce, so a receiver cannot count them. Instead each pair of CPUs has a counter of mail. The
//! sender increments it, then sends the IPI, and sends no other until the receiver's handler has copied the counter.
//! With more than 16 CPUs several senders share a vector, and the IPI of one can hide the loss of another's.
//!
//! Every CPU watches its neighbour's count of rounds. So the record names a stuck CPU and what it waited for. If all
//! CPUs are halted and no timer fires, no CPU can report it. The host must then notice that no `progress` record
//! arrives, and no `done` after it.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use guest_model::random::Random;

use super::{Context, Outcome};
use crate::arch::boot::MAX_CPUS;
use crate::arch::registers::{self, FloatControl, GENERAL, VectorPattern};
use crate::arch::{attempt, controller, interrupts, tsc, window};
use crate::cpu;
use crate::interrupt::{MAILBOX, MAILBOXES, TIMER, taken};
use crate::record::record;

/// Mail per receiver and sender.
type Mail = [[AtomicU32; MAX_CPUS]; MAX_CPUS];
/// Mail that was sent, written by the sender.
static SENT: Mail = [const { [const { AtomicU32::new(0) }; MAX_CPUS] }; MAX_CPUS];
/// Mail that the receiver's handler has seen.
static SEEN: Mail = [const { [const { AtomicU32::new(0) }; MAX_CPUS] }; MAX_CPUS];

/// The counters of each CPU.
#[derive(Clone, Copy)]
enum Count {
    Rounds,
    IpisSent,
    IpisAwaited,
    Mail,
    Timers,
    Halts,
    PageFaults,
    Exits,
    RegisterChecks,
    CrossCpuBackwards,
}

const COUNTS: usize = 10;

/// What a CPU waits for, for the watchdog.
#[derive(Clone, Copy)]
enum Waiting {
    Nothing,
    Mail(usize),
    TimerSpinning,
    TimerHalted,
    AnyInterrupt,
    Finished,
}

#[repr(align(128))]
struct State {
    counts: [AtomicU64; COUNTS],
    waiting: AtomicU64,
    /// Largest delay of a timer beyond its time, in ticks.
    latest: AtomicU64,
}

static STATES: [State; MAX_CPUS] = [const {
    State { counts: [const { AtomicU64::new(0) }; COUNTS], waiting: AtomicU64::new(0), latest: AtomicU64::new(0) }
}; MAX_CPUS];

static STOP: AtomicBool = AtomicBool::new(false);
static FAILURES: AtomicU64 = AtomicU64::new(0);
static NEWEST_TSC: AtomicU64 = AtomicU64::new(0);

/// Settings of the run: seed, rounds per CPU (0: no limit), patience in ticks, ticks to run (0: no limit).
static SEED: AtomicU64 = AtomicU64::new(0);
static ROUNDS: AtomicU64 = AtomicU64::new(0);
static PATIENCE: AtomicU64 = AtomicU64::new(0);
static DURATION: AtomicU64 = AtomicU64::new(0);
/// Exits in a row.
static BURST: AtomicU64 = AtomicU64::new(1);

/// Failures that are described one by one; the rest is only counted.
const DESCRIBED: u64 = 20;

impl Waiting {
    fn encode(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::TimerSpinning => 1,
            Self::TimerHalted => 2,
            Self::AnyInterrupt => 3,
            Self::Finished => 4,
            Self::Mail(to) => 16 + to as u64,
        }
    }
}

struct ShownWaiting(u64);

impl fmt::Display for ShownWaiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("nothing"),
            1 => f.write_str("timer-spinning"),
            2 => f.write_str("timer-halted"),
            3 => f.write_str("any-interrupt-halted"),
            4 => f.write_str("finished"),
            to => write!(f, "ipi-seen-by-{}", to.saturating_sub(16)),
        }
    }
}

/// Counts a failure, and describes the first ones.
macro_rules! failure {
    ($($field:ident = $value:expr),* $(,)?) => {
        if FAILURES.fetch_add(1, Ordering::Relaxed) < DESCRIBED {
            record!("violation", experiment = "mixed", $($field = $value),*);
        }
    };
}

fn wait_mark(cpu: usize, waiting: Waiting) {
    STATES[cpu].waiting.store(waiting.encode(), Ordering::Relaxed);
}

fn count(cpu: usize, what: Count) {
    STATES[cpu].counts[what as usize].fetch_add(1, Ordering::Relaxed);
}

fn total(what: Count) -> u64 {
    STATES.iter().map(|state| state.counts[what as usize].load(Ordering::Relaxed)).sum()
}

/// The mailbox interrupt `slot` on CPU `to`: copies the counters of all senders that use it.
pub(crate) fn collect(to: usize, slot: usize) {
    let senders = SENT[to].iter().zip(&SEEN[to]).take(cpu::count());
    for (sent, seen) in senders.skip(slot).step_by(usize::from(MAILBOXES)) {
        let sent = sent.load(Ordering::SeqCst);
        if seen.swap(sent, Ordering::SeqCst) != sent {
            count(to, Count::Mail);
        }
    }
}

pub(in crate::experiments) fn run(context: &Context) -> Outcome {
    let settings = context.settings;
    let default_seconds = if settings.iterations.is_some() { 0 } else { 5 };
    let patience = tsc::seconds(settings.stall.unwrap_or(30));
    SEED.store(settings.seed.unwrap_or(1), Ordering::SeqCst);
    ROUNDS.store(settings.iterations.unwrap_or(0), Ordering::SeqCst);
    DURATION.store(tsc::seconds(settings.seconds.unwrap_or(default_seconds)), Ordering::SeqCst);
    PATIENCE.store(patience, Ordering::SeqCst);
    BURST.store(settings.burst.unwrap_or(1), Ordering::SeqCst);
    FAILURES.store(0, Ordering::SeqCst);
    NEWEST_TSC.store(0, Ordering::SeqCst);
    STOP.store(false, Ordering::SeqCst);
    for state in &STATES {
        state.counts.iter().for_each(|count| count.store(0, Ordering::SeqCst));
        state.waiting.store(0, Ordering::SeqCst);
        state.latest.store(0, Ordering::SeqCst);
    }

    let unexpected_before = unexpected_interrupts();
    let start = tsc::now();
    for index in 1..cpu::count() {
        if cpu::is_up(index) && !cpu::give(index, work) {
            failure!(of = "start", cpu = index, expected = "free", seen = "busy");
        }
    }
    work(0);
    let stuck = loop {
        // As long as one CPU makes rounds, the others are slow, not stuck.
        let rounds = total(Count::Rounds);
        match cpu::wait_for_all(patience) {
            Some(stuck) if rounds == total(Count::Rounds) => break Some(stuck),
            Some(_) => {}
            None => break None,
        }
    };
    if let Some(stuck) = stuck {
        let waiting = ShownWaiting(STATES[stuck].waiting.load(Ordering::Relaxed));
        failure!(of = "end", cpu = stuck, expected = "finished", seen = "stuck", waiting_for = waiting);
    }

    // Mail whose arrival no CPU waited for must have arrived too.
    let all_seen = || unseen_mail().is_none();
    if !cpu::wait_until(patience, all_seen)
        && let Some((from, to)) = unseen_mail()
    {
        failure!(of = "ipi", from = from, to = to, expected = "seen", seen = "lost-at-the-end");
    }

    let unexpected = unexpected_interrupts() - unexpected_before;
    if unexpected > 0 {
        failure!(of = "vectors", expected = "known-only", seen = unexpected);
    }

    let failures = FAILURES.load(Ordering::SeqCst);
    report("record", start);
    let latest = STATES.iter().map(|state| state.latest.load(Ordering::Relaxed)).max().unwrap_or(0);
    record!(
        "record",
        experiment = "mixed",
        about = "totals",
        register_checks = total(Count::RegisterChecks),
        ipis_awaited = total(Count::IpisAwaited),
        timer_latest_microseconds = tsc::microseconds(latest),
        tsc_backwards_across_cpus = total(Count::CrossCpuBackwards),
        failures = failures,
    );
    Outcome::Done { failures }
}

/// The first pair of sender and receiver whose mail has not been seen.
fn unseen_mail() -> Option<(usize, usize)> {
    (0..cpu::count()).filter(|to| cpu::is_up(*to)).find_map(|to| {
        let differs = |from: &usize| SENT[to][*from].load(Ordering::SeqCst) != SEEN[to][*from].load(Ordering::SeqCst);
        (0..cpu::count()).find(differs).map(|from| (from, to))
    })
}

/// Interrupts with an unused vector.
fn unexpected_interrupts() -> u64 {
    (0..cpu::count()).map(|index| taken(index).unexpected.load(Ordering::Relaxed)).sum()
}

fn report(kind: &str, start: u64) {
    let fields = format_args!(
        "experiment=mixed cpus={} milliseconds={} rounds={} ipis={} mail={} timers={} halts={} page_faults={} exits={} failures={}",
        cpu::count(),
        tsc::microseconds(tsc::now() - start) / 1000,
        total(Count::Rounds),
        total(Count::IpisSent),
        total(Count::Mail),
        total(Count::Timers),
        total(Count::Halts),
        total(Count::PageFaults),
        total(Count::Exits),
        FAILURES.load(Ordering::Relaxed),
    );
    crate::record::emit(format_args!("{kind} {fields}"));
}

/// The job of each CPU.
fn work(cpu: usize) {
    let seed = SEED.load(Ordering::Relaxed);
    let mut worker = Worker {
        cpu,
        random: Random::new(seed, cpu as u64),
        sent_at: [0; MAX_CPUS],
        stored: [0; window::DEMAND_PAGES],
        vectors: VectorPattern::new(seed ^ (cpu as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        mark: 0xffff_8000_0000_0000 | (cpu as u64 + 1) << 20,
        last_tsc: 0,
        neighbour_rounds: 0,
        neighbour_since: tsc::now(),
        neighbour_reported: false,
    };
    worker.prepare();

    let start = tsc::now();
    let (rounds, duration) = (ROUNDS.load(Ordering::Relaxed), DURATION.load(Ordering::Relaxed));
    let mut next_report = start + tsc::seconds(2);
    let mut done = 0;
    while !STOP.load(Ordering::Relaxed) && (rounds == 0 || done < rounds) {
        worker.round();
        worker.check();
        done += 1;

        let now = tsc::now();
        if cpu == 0 && duration != 0 && now - start >= duration {
            STOP.store(true, Ordering::SeqCst);
        }
        if cpu == 0 && now >= next_report {
            report("progress", start);
            next_report = now + tsc::seconds(2);
        }
        if done % 64 == 0 {
            worker.watch_neighbour(now);
        }
    }

    worker.finish();
}

/// One CPU's view of the run.
struct Worker {
    cpu: usize,
    random: Random,
    /// When the last mail went to each CPU; zero when it has been seen or given up.
    sent_at: [u64; MAX_CPUS],
    /// The contents of each demand page.
    stored: [u64; window::DEMAND_PAGES],
    vectors: VectorPattern,
    /// A canonical address that differs by CPU, for the bases and DR0.
    mark: u64,
    last_tsc: u64,
    neighbour_rounds: u64,
    neighbour_since: u64,
    neighbour_reported: bool,
}

impl Worker {
    fn prepare(&mut self) {
        FloatControl::of(self.cpu).set();
        self.vectors.load();
        if !registers::mark(self.mark) {
            failure!(of = "marks", cpu = self.cpu, expected = "written", seen = "fault");
        }
        for page in 0..window::DEMAND_PAGES {
            window::unmap(self.cpu, page);
        }
        window::serve_demand(self.cpu, true);
        for page in 0..window::DEMAND_PAGES {
            let _ = attempt::store_u64(window::demand_page(self.cpu, page), 0);
        }
        wait_mark(self.cpu, Waiting::Nothing);
        interrupts::enable();
    }

    fn finish(&mut self) {
        interrupts::disable();
        controller::disarm();
        window::serve_demand(self.cpu, false);
        wait_mark(self.cpu, Waiting::Finished);
    }

    fn round(&mut self) {
        match self.random.below(100) {
            0..25 => self.send_mail(false),
            25..35 => self.send_mail(true),
            35..45 => self.timer(false),
            45..58 => self.timer(true),
            58..64 => self.halt(),
            64..78 => self.page_fault(),
            78..90 => self.exits(),
            _ => self.hold_general(),
        }
        wait_mark(self.cpu, Waiting::Nothing);
        count(self.cpu, Count::Rounds);
    }

    /// Sends an IPI to a random CPU, if that CPU has seen the last one; waits until this one is seen, or not.
    fn send_mail(&mut self, wait: bool) {
        let to = self.random.index(cpu::count());
        if !cpu::is_up(to) {
            return;
        }
        let (sent, seen) = (&SENT[to][self.cpu], &SEEN[to][self.cpu]);

        if sent.load(Ordering::SeqCst) != seen.load(Ordering::SeqCst) {
            self.check_age(to);
            return;
        }
        let number = sent.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        self.sent_at[to] = tsc::now();
        let slot = u8::try_from(self.cpu % usize::from(MAILBOXES)).unwrap_or(0);
        controller::send(cpu::hardware_id(to), MAILBOX + slot);
        count(self.cpu, Count::IpisSent);

        if wait {
            wait_mark(self.cpu, Waiting::Mail(to));
            count(self.cpu, Count::IpisAwaited);
            while seen.load(Ordering::SeqCst) != number && self.sent_at[to] != 0 {
                self.check_age(to);
                core::hint::spin_loop();
            }
        }
    }

    /// Gives up mail that has not been seen for too long.
    fn check_age(&mut self, to: usize) {
        let age = tsc::now().saturating_sub(self.sent_at[to]);
        if self.sent_at[to] != 0 && age > PATIENCE.load(Ordering::Relaxed) {
            self.sent_at[to] = 0;
            failure!(
                of = "ipi",
                from = self.cpu,
                to = to,
                expected = "seen",
                seen = "lost",
                microseconds = tsc::microseconds(age),
            );
            // So that later mail is checked on its own.
            SEEN[to][self.cpu].store(SENT[to][self.cpu].load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    /// Arms the timer, by deadline or by count, and waits for it, spinning or halted.
    fn timer(&mut self, halted: bool) {
        let taken = taken(self.cpu);
        let delay = tsc::ticks(5 + self.random.below(500));
        let by_deadline = controller::has_deadline() && self.random.below(2) == 0;

        interrupts::disable();
        let before = taken.timer.load(Ordering::Acquire);
        let start = tsc::now();
        // A count is rounded and its clock was calibrated: allow for 2 % and 5 us.
        let (due, slack) = if by_deadline {
            controller::arm_deadline(TIMER, start + delay);
            (start + delay, 0)
        } else {
            let real = controller::arm_once(TIMER, delay);
            (start + real, real / 50 + tsc::ticks(5))
        };

        let patience = PATIENCE.load(Ordering::Relaxed);
        let came = || taken.timer.load(Ordering::Acquire) != before;
        let lost = || tsc::now() > due.saturating_add(patience);
        if halted {
            wait_mark(self.cpu, Waiting::TimerHalted);
            while !came() && !lost() {
                interrupts::sleep();
                count(self.cpu, Count::Halts);
            }
            interrupts::enable();
        } else {
            wait_mark(self.cpu, Waiting::TimerSpinning);
            interrupts::enable();
            while !came() && !lost() {
                core::hint::spin_loop();
            }
        }

        count(self.cpu, Count::Timers);
        if !came() {
            controller::disarm();
            failure!(of = "timer", cpu = self.cpu, expected = "came", seen = "lost", by_deadline = by_deadline);
            return;
        }
        let at = taken.timer_at.load(Ordering::Relaxed);
        STATES[self.cpu].latest.fetch_max(at.saturating_sub(due), Ordering::Relaxed);
        if at + slack < due {
            let early = tsc::microseconds(due - at);
            failure!(
                of = "timer",
                cpu = self.cpu,
                expected = "not-early",
                seen = "early",
                microseconds = early,
                by_deadline = by_deadline,
            );
        }
    }

    /// Halts until any interrupt; a timer makes sure that there is one.
    fn halt(&mut self) {
        let taken = taken(self.cpu);
        let mail = &STATES[self.cpu].counts[Count::Mail as usize];
        interrupts::disable();
        let before = (taken.timer.load(Ordering::Acquire), mail.load(Ordering::Acquire));
        controller::arm_once(TIMER, tsc::ticks(1000 + self.random.below(4000)));
        wait_mark(self.cpu, Waiting::AnyInterrupt);
        while (taken.timer.load(Ordering::Acquire), mail.load(Ordering::Acquire)) == before {
            interrupts::sleep();
            count(self.cpu, Count::Halts);
        }
        // With interrupts off: a timer that fires now must not count as the next one.
        controller::disarm();
        interrupts::enable();
    }

    /// Unmaps a page, touches it, and checks its contents.
    fn page_fault(&mut self) {
        let page = self.random.index(window::DEMAND_PAGES);
        let at = window::demand_page(self.cpu, page);
        let mapped = window::mapped_on_demand(self.cpu);
        window::unmap(self.cpu, page);

        let held = attempt::load_u64(at);
        if held != Ok(self.stored[page]) || window::mapped_on_demand(self.cpu) != mapped + 1 {
            failure!(of = "page", cpu = self.cpu, page = page, expected = "mapped-and-unchanged", seen = "not");
        }
        self.stored[page] = self.random.bits();
        let _ = attempt::store_u64(at, self.stored[page]);
        count(self.cpu, Count::PageFaults);
    }

    /// A few exits with known results.
    fn exits(&mut self) {
        for _ in 0..BURST.load(Ordering::Relaxed) {
            count(self.cpu, Count::Exits);
            let (what, matches) = registers::ask(self.random.index(registers::QUESTIONS), cpu::hardware_id(self.cpu));
            if !matches {
                failure!(of = what, cpu = self.cpu, expected = "own", seen = "other");
            }
        }
    }

    fn hold_general(&mut self) {
        let pattern: [u64; GENERAL] = core::array::from_fn(|_| self.random.bits());
        let spins = self.random.bits_u32() & 0x3fff;
        let held = registers::hold_general(&pattern, spins);
        if held != pattern {
            let register = held.iter().zip(&pattern).position(|(a, b)| a != b).unwrap_or(0);
            failure!(of = "general-register", cpu = self.cpu, register = register, expected = "kept", seen = "changed");
        }
    }

    /// Checks after every round.
    fn check(&mut self) {
        count(self.cpu, Count::RegisterChecks);
        let held = VectorPattern::held();
        if let Some(register) = held.first_difference(&self.vectors) {
            failure!(of = "vector-register", cpu = self.cpu, register = register, expected = "kept", seen = "changed");
            self.vectors.load();
        }
        if FloatControl::held() != FloatControl::of(self.cpu) {
            failure!(of = "float-control", cpu = self.cpu, expected = "kept", seen = "changed");
            FloatControl::of(self.cpu).set();
        }
        for (what, held, kept) in registers::marks(self.mark, self.cpu) {
            if held != kept {
                failure!(
                    of = what,
                    cpu = self.cpu,
                    expected = format_args!("{kept:#x}"),
                    seen = format_args!("{held:#x}"),
                );
            }
        }

        let newest = NEWEST_TSC.load(Ordering::SeqCst);
        let now = tsc::now();
        if now < self.last_tsc {
            failure!(
                of = "tsc",
                cpu = self.cpu,
                expected = "forwards",
                seen = "backwards",
                ticks = self.last_tsc - now
            );
        }
        if now < newest {
            count(self.cpu, Count::CrossCpuBackwards);
        }
        NEWEST_TSC.fetch_max(now, Ordering::SeqCst);
        self.last_tsc = now;
    }

    /// Names the next CPU if it has made no round for too long.
    fn watch_neighbour(&mut self, now: u64) {
        let neighbour = (self.cpu + 1) % cpu::count();
        let state = &STATES[neighbour];
        let rounds = state.counts[Count::Rounds as usize].load(Ordering::Relaxed);
        let waiting = state.waiting.load(Ordering::Relaxed);
        if rounds != self.neighbour_rounds || waiting == Waiting::Finished.encode() || !cpu::is_up(neighbour) {
            self.neighbour_rounds = rounds;
            self.neighbour_since = now;
            return;
        }
        let still = now.saturating_sub(self.neighbour_since);
        if still > PATIENCE.load(Ordering::Relaxed) && !self.neighbour_reported {
            self.neighbour_reported = true;
            failure!(
                of = "progress",
                cpu = neighbour,
                expected = "moving",
                seen = "stuck",
                rounds = rounds,
                waiting_for = ShownWaiting(waiting),
                microseconds = tsc::microseconds(still),
            );
        }
    }
}
