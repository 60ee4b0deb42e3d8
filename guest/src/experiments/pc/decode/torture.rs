//! Code and operands that try to break an instruction emulator, on all CPUs, for `seconds=`.
//!
//! The run has phases, which all CPUs begin together:
//!
//! 1. *Known* (`torture_known`): instructions whose result the architecture prescribes, undisturbed. Another result is
//!    a violation.
//! 2. *Wild* (`torture_wild`): every second CPU runs random code at CPL 3. Its neighbour flips bytes of that code. It
//!    also flips bits of the page-table entries of code and operands, leaves and upper ones.
//! 3. The same, with the roles swapped.
//!
//! Every run of code ends in an exception or by the timer and is counted; the experiment tests that it ends at all.
//! Each CPU has its own pages ([`Worker::map`]); the local and the I/O APIC are read-only in them.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::{NEEDS_XAPIC, UNBACKED, torture_known, torture_wild};
use crate::arch::code_pages::{self, ALL, NO_EXECUTE, PAGE, PRESENT, UNCACHED, USER};
use crate::arch::encode::END;
use crate::arch::probe::{self, End, PLANNED};
use crate::arch::{apic, attempt, boot, cpu_local, tlb, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::interrupt::TIMER;
use crate::record::record;
use guest_model::random::Random;

/// Pages of each CPU. What is not listed is absent, above all the pages between.
///
/// Two pages of code.
pub(super) const CODE: usize = 0;
/// The local APIC, read-only.
pub(super) const LOCAL_APIC: usize = 16;
/// Two pages of nothing.
pub(super) const NOTHING: usize = 18;
/// Memory, nothing, memory, local APIC, nothing: neighbours of different kinds.
pub(super) const MIXED: usize = 24;
/// Memory with nothing mapped behind it.
pub(super) const MEMORY: usize = 32;
/// A stack.
pub(super) const STACK: usize = 36;
/// The I/O APIC, read-only, if there is one.
pub(super) const IO_APIC: usize = 40;
/// Very much nothing.
pub(super) const FIELD: usize = 64;
pub(super) const FIELD_PAGES: usize = 440;

/// Frames of each CPU: code, the memory of [`MIXED`], [`MEMORY`], [`STACK`].
pub(super) const CODE_FRAMES: [usize; 2] = [0, 1];
pub(super) const MIXED_FRAMES: [usize; 2] = [2, 3];
pub(super) const MEMORY_FRAME: usize = 4;
const STACK_FRAME: usize = 5;

/// Microseconds of a phase.
const PHASE: u64 = 300_000;
/// Violations that are described one by one.
const DESCRIBED: u64 = 20;

/// One CPU at work.
pub(super) struct Worker {
    pub(super) cpu: usize,
    pub(super) random: Random,
    /// The local APIC's version.
    pub(super) version: u32,
    /// Whether a hypervisor is below.
    pub(super) judged: bool,
    /// Ticks by which a timer interrupt may be late: `stall=` seconds, otherwise one.
    pub(super) patience: u64,
}

static SEED: AtomicU64 = AtomicU64::new(0);
static JUDGED: AtomicBool = AtomicBool::new(false);
static FINISH: AtomicU64 = AtomicU64::new(0);
static STALL: AtomicU64 = AtomicU64::new(0);
static PATIENCE: AtomicU64 = AtomicU64::new(0);
/// CPUs that take part; those that have arrived; phases that have begun; when the current one ends.
static MEMBERS: AtomicUsize = AtomicUsize::new(0);
static ARRIVED: AtomicUsize = AtomicUsize::new(0);
static BEGUN: AtomicU64 = AtomicU64::new(0);
static PHASE_END: AtomicU64 = AtomicU64::new(0);
static OVER: AtomicBool = AtomicBool::new(false);
static NO_NX: AtomicBool = AtomicBool::new(false);

/// Ends by vector; the timer's is in the last place.
static ENDS: [AtomicU64; 33] = [const { AtomicU64::new(0) }; 33];
static VIOLATIONS: AtomicU64 = AtomicU64::new(0);
pub(super) static KNOWN: AtomicU64 = AtomicU64::new(0);
pub(super) static WILD: AtomicU64 = AtomicU64::new(0);
pub(super) static DISTURBED: AtomicU64 = AtomicU64::new(0);
/// The maximum delay of a timer interrupt.
pub(super) static LATEST: AtomicU64 = AtomicU64::new(0);
/// Timer interrupts that arrived twice, the second time with interrupts off.
pub(super) static TWICE: AtomicU64 = AtomicU64::new(0);

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    for counter in ENDS.iter().chain([&VIOLATIONS, &KNOWN, &WILD, &DISTURBED, &LATEST, &TWICE, &BEGUN]) {
        counter.store(0, Ordering::SeqCst);
    }
    ARRIVED.store(0, Ordering::SeqCst);
    OVER.store(false, Ordering::SeqCst);
    JUDGED.store(context.judged, Ordering::SeqCst);
    SEED.store(context.settings.seed.unwrap_or(1), Ordering::SeqCst);
    let stall = tsc::seconds(context.settings.stall.unwrap_or(30));
    STALL.store(stall, Ordering::SeqCst);
    PATIENCE.store(tsc::seconds(context.settings.stall.unwrap_or(1)), Ordering::SeqCst);
    FINISH.store(tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(10)), Ordering::SeqCst);

    // No CPU begins before all are counted.
    MEMBERS.store(usize::MAX, Ordering::SeqCst);
    let given = cpu::up().without(0).iter().filter(|index| cpu::give(*index, work)).count();
    MEMBERS.store(given + 1, Ordering::SeqCst);
    work(0);
    let stuck = cpu::wait_for_all(stall);
    report(context, given + 1);
    if NO_NX.load(Ordering::SeqCst) {
        return Outcome::Unsupported("EFER.NXE cannot be set");
    }
    if let Some(cpu) = stuck {
        record!(
            "violation",
            experiment = "emulator-torture",
            of = "end",
            cpu = cpu,
            expected = "finished",
            seen = "stuck"
        );
    }
    let twice = TWICE.load(Ordering::SeqCst);
    if twice != 0 {
        VIOLATIONS.fetch_add(1, Ordering::SeqCst);
        record!("violation", experiment = "emulator-torture", of = "twice", expected = "interrupts once", seen = twice);
    }
    let failures = if context.judged { VIOLATIONS.load(Ordering::SeqCst) } else { 0 };
    Outcome::Done { failures: failures + u64::from(stuck.is_some()) }
}

fn report(context: &Context, members: usize) {
    let ends = |vector: usize| ENDS[vector].load(Ordering::SeqCst);
    let named = [1, 3, 6, 12, 13, 14, 32];
    let others: u64 = (0..ENDS.len()).filter(|vector| !named.contains(vector)).map(ends).sum();
    record!(
        "record",
        experiment = "emulator-torture",
        cpus = members,
        seed = context.settings.seed.unwrap_or(1),
        phases = BEGUN.load(Ordering::SeqCst),
        known = KNOWN.load(Ordering::SeqCst),
        wild = WILD.load(Ordering::SeqCst),
        disturbances = DISTURBED.load(Ordering::SeqCst),
        as_planned = ends(3),
        db = ends(1),
        ud = ends(6),
        ss = ends(12),
        gp = ends(13),
        pf = ends(14),
        timer = ends(32),
        timer_twice = TWICE.load(Ordering::SeqCst),
        other = others,
        latest_interrupt_us = tsc::microseconds(LATEST.load(Ordering::SeqCst)),
        violations = VIOLATIONS.load(Ordering::SeqCst),
    );
}

/// What each CPU does.
fn work(cpu: usize) {
    const EFER: u32 = 0xc000_0080;
    const NXE: u64 = 1 << 11;
    let efer = attempt::read_msr(EFER);
    if attempt::wrmsr(EFER, efer | NXE).is_err() {
        NO_NX.store(true, Ordering::SeqCst);
        OVER.store(true, Ordering::SeqCst);
    }
    let mut worker = Worker {
        cpu,
        random: Random::new(SEED.load(Ordering::SeqCst), cpu as u64),
        version: apic::read(apic::VERSION),
        judged: JUDGED.load(Ordering::SeqCst),
        patience: PATIENCE.load(Ordering::SeqCst),
    };
    let mut begun = 0;
    while begin(&mut begun, cpu) {
        let end = PHASE_END.load(Ordering::SeqCst);
        let runs = |parity| cpu % 2 == parity || cpu ^ 1 >= MEMBERS.load(Ordering::SeqCst);
        worker.map();
        match begun % 3 {
            1 => torture_known::run(&mut worker, end),
            2 if runs(0) => torture_wild::run(&mut worker, end),
            0 if runs(1) => torture_wild::run(&mut worker, end),
            _ => torture_wild::disturb(&mut worker, cpu ^ 1, end),
        }
    }
    apic::disarm();
    probe::reset_x87();
    code_pages::clear(cpu);
    let _ = attempt::wrmsr(EFER, efer);
    tlb::flush_all();
}

/// Waits for all CPUs to have finished the last phase. Answers whether there is another.
fn begin(begun: &mut u64, cpu: usize) -> bool {
    if ARRIVED.fetch_add(1, Ordering::SeqCst) + 1 == MEMBERS.load(Ordering::SeqCst) {
        open();
    }
    let last = tsc::now().saturating_add(STALL.load(Ordering::SeqCst));
    while BEGUN.load(Ordering::SeqCst) == *begun {
        // The number of members becomes known late; by then all may have arrived.
        if cpu == 0 && ARRIVED.load(Ordering::SeqCst) == MEMBERS.load(Ordering::SeqCst) && *begun == 0 {
            open();
        }
        if tsc::now() > last {
            if !OVER.swap(true, Ordering::SeqCst) {
                let arrived = ARRIVED.load(Ordering::SeqCst);
                record!("violation", experiment = "emulator-torture", of = "phase", phase = *begun, arrived = arrived);
                VIOLATIONS.fetch_add(1, Ordering::SeqCst);
            }
            return false;
        }
        if OVER.load(Ordering::SeqCst) {
            return false;
        }
        core::hint::spin_loop();
    }
    *begun += 1;
    !OVER.load(Ordering::SeqCst)
}

/// Begins the next phase, or ends it all; once, however many call.
fn open() {
    let members = MEMBERS.load(Ordering::SeqCst);
    if ARRIVED.compare_exchange(members, 0, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    let now = tsc::now();
    if now >= FINISH.load(Ordering::SeqCst) {
        OVER.store(true, Ordering::SeqCst);
    }
    PHASE_END.store(now + tsc::ticks(PHASE), Ordering::SeqCst);
    BEGUN.fetch_add(1, Ordering::SeqCst);
}

impl Worker {
    /// Puts this CPU's pages into the order that the constants above describe.
    pub(super) fn map(&self) {
        code_pages::clear(self.cpu);
        let device = PRESENT | USER | UNCACHED | NO_EXECUTE;
        let nothing = UNBACKED | ALL | UNCACHED | NO_EXECUTE;
        let memory = |index| self.frame(index) | ALL | NO_EXECUTE;

        for (page, frame) in CODE_FRAMES.into_iter().enumerate() {
            self.point(CODE + page, self.code_entry(frame));
        }
        self.point(LOCAL_APIC, apic::XAPIC_PAGE | device);
        (NOTHING..NOTHING + 2).chain(FIELD..FIELD + FIELD_PAGES).for_each(|page| self.point(page, nothing));
        let mixed = [memory(MIXED_FRAMES[0]), nothing, memory(MIXED_FRAMES[1]), apic::XAPIC_PAGE | device, nothing];
        for (page, entry) in mixed.into_iter().enumerate() {
            self.point(MIXED + page, entry);
        }
        self.point(MEMORY, memory(MEMORY_FRAME));
        self.point(STACK, memory(STACK_FRAME));
        if let Some(at) = boot::io_apic() {
            self.point(IO_APIC, at | device);
        }
        tlb::flush_all();
    }

    pub(super) fn frame(&self, index: usize) -> u64 {
        code_pages::frame(self.cpu, index)
    }

    pub(super) fn at(&self, page: usize) -> u64 {
        code_pages::address(self.cpu, page)
    }

    pub(super) fn code_entry(&self, frame: usize) -> u64 {
        self.frame(frame) | ALL
    }

    /// Sets a page's entry. The caller flushes.
    pub(super) fn point(&self, page: usize, entry: u64) {
        code_pages::point(self.cpu, page, entry);
    }

    /// Writes code and its planned end, `offset` bytes into the two code pages. Answers its address.
    pub(super) fn write_code(&self, offset: u64, code: &[u8]) -> u64 {
        for (byte, at) in code.iter().chain(&[END; 8]).zip(offset..2 * PAGE) {
            let frame = CODE_FRAMES[usize::from(at >= PAGE)];
            code_pages::write(self.frame(frame), at % PAGE, &[*byte]);
        }
        self.at(CODE) + offset
    }
}

/// Counts how code ended.
pub(super) fn count(end: &End) {
    let place = if end.vector == TIMER { 32 } else { usize::from(end.vector).min(31) };
    ENDS[place].fetch_add(1, Ordering::Relaxed);
}

/// Something ended as it must not.
pub(super) fn violation(name: &str, expected: fmt::Arguments<'_>, end: &End, code: &[u8]) {
    if VIOLATIONS.fetch_add(1, Ordering::Relaxed) >= DESCRIBED {
        return;
    }
    let registers = &end.registers;
    record!(
        "violation",
        experiment = "emulator-torture",
        of = name,
        cpu = cpu_local::index(),
        expected = format_args!("\"{expected}\""),
        seen = if end.vector == PLANNED { "end" } else { "exception" },
        vector = end.vector,
        error = format_args!("{:#x}", end.error),
        cr2 = format_args!("{:#x}", end.cr2),
        rip = format_args!("{:#x}", registers.rip),
        rax = format_args!("{:#x}", registers.general[probe::RAX]),
        rcx = format_args!("{:#x}", registers.general[probe::RCX]),
        rdi = format_args!("{:#x}", registers.general[probe::RDI]),
        code = format_args!("{code:02x?}"),
    );
}
