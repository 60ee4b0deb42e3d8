//! The host's clock: the time stamp counter, common to all pCPUs.
//!
//! Its rate comes from CPUID leaf 15h, or is measured once against the ACPI PM timer, or the PIT where there is none,
//! together with the rate of the local APIC's timer. A reading of several clocks is as exact as the time that it took,
//! and an emulator may stop the pCPU's thread in the middle. So each end of the measurement is the fastest of many
//! readings.
//!
//! Firmware may leave the counters of some pCPUs apart. Each pCPU compares its own with the first's when it starts
//! ([`meet`]), and adds what is missing wherever it reads the counter. Guests read it without an exit, so each entry
//! adds the same difference for them (`WorldSwitch::arrive`), and a vCPU that moves sees one clock, to within the error
//! of that comparison, which is logged. Counters that agree are left as they are.

#![expect(unsafe_code, reason = "the instructions that read the counter, in their order, and a word by GS")]

use core::arch::asm;
use core::arch::x86_64::{__cpuid, _mm_lfence, _rdtsc};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use sched::CpuId;
use vcpu_layout::Proof;
use x86_defs::cpuid::leaf_8000_0007_edx;

use super::acpi::{Machine, PmTimer};
use super::percpu::ArchPerCpu;
use super::processor::leaf;
use super::quirks;
use super::{apic, irq, port, power};
use crate::arch::ticks::CLOCK;
pub(crate) use crate::arch::ticks::{hz, nanos, nanos_to_ticks, ticks_to_nanos};
use crate::clock_offset::{Agreement, Comparison, Exchange};
use crate::cpu::{self, PerCpu};

/// Rate of the ACPI PM timer (ACPI 4.8.3.3).
const PM_HZ: u32 = 3_579_545;
/// Length of the measurement: one PM tick more or less is 28 parts per million of it.
const WINDOW_PM_TICKS: u32 = PM_HZ / 100;
/// Rate of the PIT (8254), and its ports; the gate of its channel 2 is with the speaker's.
const PIT_HZ: u32 = 1_193_182;
const PIT_CHANNEL_2: u16 = 0x42;
const PIT_COMMAND: u16 = 0x43;
const PIT_GATE: u16 = 0x61;
/// A clock that has not counted as far as it should by then does not count: a second, or several.
const MOST_TSC_TICKS: u64 = 5_000_000_000;
/// Number of readings at each end; the fastest counts.
const READINGS: usize = 24;

/// This pCPU's raw counter: for durations whose ends are both on this pCPU.
#[inline(always)]
pub(in crate::arch::x86_64) fn raw() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction, and nothing disables it in the hypervisor.
    unsafe { _rdtsc() }
}

/// The time now: the counter, made the same on all pCPUs. Not before the pCPU has its block.
#[inline(always)]
pub(crate) fn now() -> u64 {
    at(raw())
}

/// The time when this pCPU's counter was `raw`.
#[inline(always)]
pub(in crate::arch::x86_64) fn at(raw: u64) -> u64 {
    raw.wrapping_add(offset())
}

/// Added to this pCPU's counter, see [`meet`]; also to its guests' readings.
#[inline(always)]
pub(in crate::arch::x86_64) fn offset() -> u64 {
    let offset;
    // SAFETY: GS points to the pCPU's `ArchPerCpu`, of which this reads a word.
    unsafe {
        asm!(
            "mov {}, gs:[{}]",
            out(reg) offset,
            const ArchPerCpu::OFFSET_CLOCK_OFFSET,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    offset
}

/// Busy for `micros` microseconds. For bring-up only.
pub(super) fn delay(micros: u64) {
    let end = now() + nanos_to_ticks(micros * 1000);
    while now() < end {
        core::hint::spin_loop();
    }
}

/// Lets [`nanos`] count from here.
pub(super) fn start() {
    CLOCK.start_at(raw());
}

/// Finds the rates of the counter and of the local APIC's timer.
pub(super) fn calibrate(machine: &Machine) {
    apic::start_count();
    let told = told_by_cpuid();
    let by_pm_timer = machine.pm_timer.and_then(|pm| measure(Reference::Pm(pm)));
    let by_told = || told.map(|hz| (hz, measure_timer(hz)));
    let Some((hz, timer_hz)) = by_pm_timer.or_else(by_told).or_else(|| measure(Reference::begin_pit())) else {
        log::error!("no ACPI PM timer or PIT that counts, and no CPUID leaf 15h: the TSC's rate cannot be found");
        power::exit(abi::exit_code::REFUSED)
    };
    let hz = told.unwrap_or(hz);
    CLOCK.set_rate(hz);
    apic::set_rate(timer_hz, hz);
    log::debug!("TSC {hz} Hz, local APIC timer {timer_hz} Hz");
}

/// Crystal rate times ratio (CPUID leaf 15h), when the CPU gives all three numbers.
fn told_by_cpuid() -> Option<u64> {
    if __cpuid(0).eax < 0x15 {
        return None;
    }
    let leaf = __cpuid(0x15);
    if leaf.eax == 0 || leaf.ebx == 0 || leaf.ecx == 0 {
        return None;
    }
    Some(u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax))
}

/// A clock with a known rate.
#[derive(Clone, Copy)]
enum Reference {
    /// ACPI's timer.
    Pm(PmTimer),
    /// The PC's old timer, of machines without ACPI's: channel 2, which does not interrupt.
    Pit,
}

impl Reference {
    /// The PIT counts down from its highest value, and goes on behind zero (8254, mode 0).
    fn begin_pit() -> Self {
        const CHANNEL_2_BOTH_BYTES_MODE_0: u8 = 0xb0;
        const GATE: u8 = 1;
        const SPEAKER: u8 = 2;
        port::write_u8(PIT_GATE, port::read_u8(PIT_GATE) & !SPEAKER | GATE);
        port::write_u8(PIT_COMMAND, CHANNEL_2_BOTH_BYTES_MODE_0);
        for _ in 0..2 {
            port::write_u8(PIT_CHANNEL_2, 0xff);
        }
        Self::Pit
    }

    fn now(self) -> u32 {
        match self {
            Self::Pm(pm) => port::read_u32(pm.port),
            Self::Pit => {
                const LATCH_CHANNEL_2: u8 = 0x80;
                port::write_u8(PIT_COMMAND, LATCH_CHANNEL_2);
                let left = u16::from_le_bytes([port::read_u8(PIT_CHANNEL_2), port::read_u8(PIT_CHANNEL_2)]);
                u32::from(!left)
            }
        }
    }

    /// Its rate, the bits of its count, and how long a measurement takes, in its ticks.
    const fn properties(self) -> (u32, u32, u32) {
        match self {
            Self::Pm(pm) => (PM_HZ, pm.mask, WINDOW_PM_TICKS),
            Self::Pit => (PIT_HZ, 0xffff, PIT_HZ / 20),
        }
    }
}

/// One reading of the three clocks.
struct Reading {
    tsc: u64,
    reference: u32,
    timer: u32,
}

/// Rates of TSC and local APIC timer by a clock. `None`: it does not count.
fn measure(reference: Reference) -> Option<(u64, u64)> {
    let (reference_hz, mask, window) = reference.properties();
    let first = quickest_reading(reference);
    let elapsed = |now: u32| now.wrapping_sub(first.reference) & mask;
    while elapsed(reference.now()) < window {
        if now() - first.tsc > MOST_TSC_TICKS {
            return None;
        }
        core::hint::spin_loop();
    }
    let last = quickest_reading(reference);

    let window = u128::from(elapsed(last.reference));
    let rate = |counts: u64| {
        let hz = (u128::from(counts) * u128::from(reference_hz) + window / 2) / window;
        u64::try_from(hz).unwrap_or(u64::MAX)
    };
    Some((rate(last.tsc - first.tsc), rate(u64::from(last.timer - first.timer))))
}

fn quickest_reading(reference: Reference) -> Reading {
    let mut best = Reading { tsc: 0, reference: 0, timer: 0 };
    let mut best_took = u64::MAX;
    for _ in 0..READINGS {
        let before = now();
        let (ticks, timer) = (reference.now(), apic::count());
        let took = now() - before;
        if took < best_took {
            best_took = took;
            best = Reading { tsc: before + took / 2, reference: ticks, timer };
        }
    }
    best
}

/// Rate of the local APIC timer from a TSC with a known rate: 10 ms.
fn measure_timer(hz: u64) -> u64 {
    let (start, first) = (now(), apic::count());
    while now() - start < hz / 100 {
        core::hint::spin_loop();
    }
    let (ticks, counts) = (now() - start, apic::count() - first);
    u64::from(counts) * hz / ticks
}

/// A comparison continues until this many requests in a row have brought nothing new, for clocks that agree and for
/// others. Only the fastest message in each direction counts, and guests' messages may be as fast, though rarely.
const QUESTIONS_IN_VAIN: [u32; 2] = [1000, 20_000];
/// And until its error is below 1 µs. A machine answers in less. Under an emulator with fewer threads than pCPUs some
/// answers take milliseconds: the limit is 20 ms for clocks that agree, and 20 s for others.
const FINE_PER_SECOND: u64 = 1_000_000;

/// Number of the pCPU whose turn it is to compare clocks; the first pCPU answers.
static TURN: AtomicU32 = AtomicU32::new(NOBODY);
const NOBODY: u32 = u32::MAX;
/// A question, and the answer to it: a reading of the first pCPU's clock, or [`NO_ANSWER`].
static ASKED: AtomicBool = AtomicBool::new(false);
static ANSWER: AtomicU64 = AtomicU64::new(NO_ANSWER);
const NO_ANSWER: u64 = 0;
/// A pCPU whose clock runs at another rate was found.
static DRIFTS: AtomicBool = AtomicBool::new(false);
/// The difference of each pCPU's clock, times its number, for `selftest=tsc-skew`.
static SKEW: AtomicU64 = AtomicU64::new(0);

/// Makes the counters of the other pCPUs differ by 0.2 to 0.4 s each, as if by firmware.
pub(super) fn plant_skew() {
    SKEW.store((hz() / 5).wrapping_neg(), Ordering::Relaxed);
}

/// Whether guests see an invariant TSC (CPUID 8000_0007 EDX\[8\]), which runs at one rate in all states of the
/// processor.
pub(in crate::arch::x86_64) fn is_invariant() -> bool {
    let told = leaf(0x8000_0007).edx & leaf_8000_0007_edx::TSC_INVARIANT != 0;
    quirks::has_invariant_tsc(told) && !DRIFTS.load(Ordering::Relaxed)
}

/// The first pCPU answers `other` until that has compared its clock.
pub(super) fn answer(other: &PerCpu) {
    TURN.store(other.id.0, Ordering::Release);
    apic::kick(other.id);
    let mut looks = Looks::default();
    while TURN.load(Ordering::Acquire) != NOBODY {
        if ASKED.load(Ordering::Acquire) {
            ASKED.store(false, Ordering::Relaxed);
            ANSWER.store(now_in_order().max(1), Ordering::Release);
            looks = Looks::default();
        }
        looks.wait();
    }
}

/// Both sides poll many times in a row: the faster each sees the other's write, the closer the bounds. Then they pause,
/// because an emulator may run one CPU at a time, until that pauses.
#[derive(Default)]
struct Looks(u8);

impl Looks {
    /// Waits between two polls.
    fn wait(&mut self) {
        self.0 = self.0.wrapping_add(1);
        if self.0 == 0 {
            core::hint::spin_loop();
        }
    }
}

/// Compares this pCPU's clock with the first's, when it is its turn, and sets it by that.
pub(super) fn meet(here: CpuId) {
    while TURN.load(Ordering::Acquire) != here.0 {
        // The first pCPU kicks the one whose turn it is.
        irq::wait();
    }
    let mine = &cpu::this().arch.clock_offset;
    mine.set(Proof::by_place(), SKEW.load(Ordering::Relaxed).wrapping_mul(here.0.into()));

    let (mut comparison, begin) = (Comparison::default(), raw());
    let mut in_vain = 0;
    loop {
        let (patience, vain) = match comparison.agreement() {
            Agreement::Same => (hz() / 50, QUESTIONS_IN_VAIN[0]),
            _ => (hz() * 20, QUESTIONS_IN_VAIN[1]),
        };
        let is_fine = in_vain >= vain && comparison.error() <= hz() / FINE_PER_SECOND;
        if is_fine || raw().wrapping_sub(begin) > patience {
            break;
        }
        let known = comparison;
        comparison.take(ask());
        in_vain = if comparison == known { in_vain + 1 } else { 0 };
    }
    match comparison.agreement() {
        Agreement::Same | Agreement::Unknown => {}
        Agreement::Apart { offset, error } => {
            mine.set(Proof::by_place(), mine.get().wrapping_add_signed(offset));
            let (ticks, side) = (offset.unsigned_abs(), if offset > 0 { "behind" } else { "ahead of" });
            log::warn!("TSC of {here} is {ticks} ticks {side} the first pCPU's: corrected, to {error} ticks");
        }
        Agreement::Drifts => {
            DRIFTS.store(true, Ordering::Relaxed);
            log::warn!("TSC of {here} does not run at the rate of the first pCPU's: guests see no invariant TSC");
        }
    }
    TURN.store(NOBODY, Ordering::Release);
}

/// Asks the first pCPU for the time.
fn ask() -> Exchange {
    ANSWER.store(NO_ANSWER, Ordering::Relaxed);
    let asked = now_in_order();
    ASKED.store(true, Ordering::Release);
    let mut looks = Looks::default();
    let answered = loop {
        match ANSWER.load(Ordering::Acquire) {
            NO_ANSWER => looks.wait(),
            answered => break answered,
        }
    };
    Exchange { asked, answered, heard: now_in_order() }
}

/// Like [`now`], ordered against earlier and later instructions (APM vol. 3, RDTSC).
fn now_in_order() -> u64 {
    // SAFETY: waits for earlier instructions, nothing else. SSE2 is part of x86-64.
    unsafe { _mm_lfence() };
    let now = now();
    // SAFETY: as above.
    unsafe { _mm_lfence() };
    now
}

/// Description of the counter for the log.
pub(in crate::arch::x86_64) fn describe() -> &'static str {
    if is_invariant() { "invariant" } else { "not invariant, also for guests" }
}
