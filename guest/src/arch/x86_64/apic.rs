//! The local APIC in both of its shapes: x2APIC by MSR, xAPIC by memory (APM vol. 2, chapter 16).
//!
//! Registers are named by their xAPIC offset; the x2APIC's MSR is 0x800 + offset / 16.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use spin::Once;

use super::attempt::{read_msr, write_msr};
use super::boot::BootInfo;
use super::{attempt, control, interrupts, tsc};

/// APIC_BASE: bit 11 enables, bit 10 selects x2APIC.
pub(crate) const APIC_BASE: u32 = 0x1b;
/// TSC_DEADLINE: a TSC value at which the timer fires once; zero disarms.
pub(crate) const TSC_DEADLINE: u32 = 0x6e0;
/// Address of the xAPIC's registers.
pub(crate) const XAPIC_PAGE: u64 = 0xfee0_0000;

/// Register offsets (APM vol. 2, table 16-2).
pub(crate) const VERSION: u64 = 0x30;
pub(crate) const EOI: u64 = 0xb0;
const ID: u64 = 0x20;
const TASK_PRIORITY: u64 = 0x80;
const SPURIOUS: u64 = 0xf0;
const IN_SERVICE: u64 = 0x100;
const REQUESTED: u64 = 0x200;
pub(crate) const COMMAND: u64 = 0x300;
const COMMAND_HIGH: u64 = 0x310;
pub(crate) const LVT_TIMER: u64 = 0x320;
const LVT_LINT0: u64 = 0x350;
const LVT_LINT1: u64 = 0x360;
const LVT_ERROR: u64 = 0x370;
const INITIAL_COUNT: u64 = 0x380;
const CURRENT_COUNT: u64 = 0x390;
const DIVIDE: u64 = 0x3e0;

/// Counts of the fastest period that leaves time for anything else.
pub(crate) const STORM: u32 = 1;

const MASKED: u32 = 1 << 16;
const PERIODIC: u32 = 1 << 17;
const DEADLINE: u32 = 2 << 17;

static X2APIC: AtomicBool = AtomicBool::new(false);
/// Timer counts per 2^20 TSC ticks.
static TIMER_RATE: AtomicU64 = AtomicU64::new(1 << 20);

/// Chooses the shape and enables the first CPU's APIC.
pub(crate) fn prepare(_: &BootInfo, force_xapic: bool) {
    // A loader may have left x2APIC on, which can only be left through "off".
    X2APIC.store(control::has_x2apic() && !force_xapic, Ordering::SeqCst);
    if !is_x2apic() && read_msr(APIC_BASE) >> 10 & 1 != 0 {
        write_msr(APIC_BASE, read_msr(APIC_BASE) & !(3 << 10));
    }
    enable_this_cpu();
    calibrate_timer();
}

/// Whether registers are reached by MSR.
pub(crate) fn is_x2apic() -> bool {
    X2APIC.load(Ordering::Relaxed)
}

/// Enables this CPU's APIC in the chosen shape: nothing masked by priority, no local interrupt.
pub(crate) fn enable_this_cpu() {
    // Writes the MSR only if it must: a machine may refuse it.
    let base = read_msr(APIC_BASE);
    let wanted = base | 1 << 11 | if is_x2apic() { 1 << 10 } else { 0 };
    if base >> 11 & 1 == 0 {
        // From off, x2APIC is reached through xAPIC only (APM vol. 2, 16.9).
        write_msr(APIC_BASE, base | 1 << 11);
    }
    if base != wanted {
        write_msr(APIC_BASE, wanted);
    }
    write(TASK_PRIORITY, 0);
    for lvt in [LVT_TIMER, LVT_LINT0, LVT_LINT1, LVT_ERROR] {
        write(lvt, MASKED | 0xff);
    }
    write(DIVIDE, 0b1011);
    write(SPURIOUS, 0x1ff);
}

/// Reads a register.
pub(crate) fn read(register: u64) -> u32 {
    if is_x2apic() {
        (read_msr(msr(register)) & 0xffff_ffff) as u32
    } else {
        attempt::load_u32(XAPIC_PAGE + register).unwrap_or(0)
    }
}

/// Writes a register.
pub(crate) fn write(register: u64, value: u32) {
    if is_x2apic() {
        write_msr(msr(register), u64::from(value));
    } else {
        // The page is mapped from boot on, so the store cannot fault.
        let _ = attempt::store_u32(XAPIC_PAGE + register, value);
    }
}

fn msr(register: u64) -> u32 {
    0x800 + (register >> 4 & 0xff) as u32
}

/// This CPU's id as the APIC gives it.
pub(crate) fn id() -> u32 {
    if is_x2apic() { read(ID) } else { read(ID) >> 24 }
}

/// Gives an xAPIC its id back, where the machine lets it be written.
pub(crate) fn restore_id(apic_id: u32) {
    if !is_x2apic() {
        write(ID, apic_id << 24);
    }
}

/// Ends the interrupt in service.
pub(crate) fn end_of_interrupt(_: u8) {
    write(EOI, 0);
}

/// Whether `vector` is in service on this CPU.
pub(crate) fn is_in_service(vector: u8) -> bool {
    read(IN_SERVICE + bank(vector)) >> (vector & 31) & 1 != 0
}

/// Whether `vector` is requested and not yet delivered on this CPU.
pub(crate) fn is_requested(vector: u8) -> bool {
    read(REQUESTED + bank(vector)) >> (vector & 31) & 1 != 0
}

fn bank(vector: u8) -> u64 {
    u64::from(vector >> 5) << 4
}

/// Sends a fixed interrupt to one CPU.
pub(crate) fn send(apic_id: u32, vector: u8) {
    command(apic_id, 0x4000 | u32::from(vector));
}

/// Sends a fixed interrupt to this CPU, by the shorthand.
pub(crate) fn send_self(vector: u8) {
    command(0, 0x4_4000 | u32::from(vector));
}

/// Sends an NMI to this CPU. (The shorthand is for fixed interrupts only.)
pub(crate) fn send_self_nmi() {
    command(id(), 0x4400);
}

/// Where the command register is.
pub(crate) fn command_place() -> Place {
    if is_x2apic() { Place::Msr(msr(COMMAND)) } else { Place::Memory(XAPIC_PAGE + COMMAND) }
}

/// Where a register is.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// An MSR, to which both halves are written at once.
    Msr(u32),
    /// In memory; the upper half is written before the lower.
    Memory(u64),
}

/// The values of the command register that send this CPU `vector`, or an NMI: the upper and the lower half.
pub(crate) fn command_to_self(vector: Option<u8>) -> (u32, u32) {
    let destination = if is_x2apic() { id() } else { id() << 24 };
    (destination, vector.map_or(0x4400, |vector| 0x4000 | u32::from(vector)))
}

/// Sends a fixed interrupt to every CPU but this one, by the shorthand.
pub(crate) fn send_others(vector: u8) {
    command(0, 0xc_4000 | u32::from(vector));
}

/// Enables or disables interrupts on this CPU. A disabled APIC loses those that arrive.
pub(crate) fn accept(on: bool) {
    write(SPURIOUS, if on { 0x1ff } else { 0xff });
}

/// Sends INIT to one CPU.
pub(crate) fn send_init(apic_id: u32) {
    command(apic_id, 0xc500);
}

/// Sends SIPI to one CPU; it starts at `page`, below 1 MiB.
pub(crate) fn send_startup(apic_id: u32, page: u64) {
    command(apic_id, 0x4600 | (page >> 12 & 0xff) as u32);
}

fn command(destination: u32, low: u32) {
    if is_x2apic() {
        write_msr(msr(COMMAND), u64::from(destination) << 32 | u64::from(low));
        return;
    }
    // An interrupt between the two halves could send one of its own.
    interrupts::held_off(|| {
        write(COMMAND_HIGH, destination << 24);
        write(COMMAND, low);
        // Delivery status; bounded, because a machine may leave it set.
        for _ in 0..100_000 {
            if read(COMMAND) >> 12 & 1 == 0 {
                break;
            }
        }
    });
}

/// How this interrupt controller is called.
pub(crate) fn name() -> &'static str {
    if is_x2apic() { "x2apic" } else { "xapic" }
}

/// Whether the timer takes an absolute TSC value. CPUID exits, so it is asked once.
pub(crate) fn has_deadline() -> bool {
    static ANSWER: Once<bool> = Once::new();
    *ANSWER.call_once(control::has_tsc_deadline)
}

/// The timer's interrupt has been taken: it asks for nothing.
pub(crate) fn timer_was_taken() {}

/// Arms the timer for TSC value `deadline`. The CPU must offer it.
pub(crate) fn arm_deadline(vector: u8, deadline: u64) {
    write(LVT_TIMER, DEADLINE | u32::from(vector));
    // The mode must be set before the deadline is (xAPIC: a store, which WRMSR does not wait for).
    fence();
    write_msr(TSC_DEADLINE, deadline);
}

/// Sets the timer to fire once, `ticks` of the TSC from now. Returns the ticks that the rounded count stands for.
pub(crate) fn arm_once(vector: u8, ticks: u64) -> u64 {
    let rate = TIMER_RATE.load(Ordering::Relaxed).max(1);
    let count = u32::try_from(ticks.saturating_mul(rate) >> 20).unwrap_or(u32::MAX).max(1);
    write(LVT_TIMER, u32::from(vector));
    write(INITIAL_COUNT, count);
    (u64::from(count) << 20) / rate
}

/// Lets the timer fire every `count` of its own counts, each being one of its input clock.
pub(crate) fn arm_periodic(vector: u8, count: u32) {
    write(LVT_TIMER, PERIODIC | u32::from(vector));
    write(INITIAL_COUNT, count);
}

/// Stops the timer in each mode.
pub(crate) fn disarm() {
    write(LVT_TIMER, MASKED | 0xff);
    write(INITIAL_COUNT, 0);
}

/// Measures the timer's rate against the TSC. Of several tries it uses the one with the least delay between the two
/// readings.
fn calibrate_timer() {
    const TRIES: u32 = 8;
    write(LVT_TIMER, MASKED | 0xff);
    let mut least = u64::MAX;
    for _ in 0..TRIES {
        let (rate, doubt) = timer_rate();
        if rate > 0 && doubt < least {
            least = doubt;
            TIMER_RATE.store(rate, Ordering::Relaxed);
        }
        if doubt < tsc::ticks(50) {
            break;
        }
    }
    write(INITIAL_COUNT, 0);
}

/// Timer counts per 2^20 TSC ticks, over 10 ms. Also the possible error, in ticks, of the moments at which the timer
/// was started and read: a preempted vCPU delays only one of the two clocks.
fn timer_rate() -> (u64, u64) {
    let before = tsc::now();
    write(INITIAL_COUNT, u32::MAX);
    let start = tsc::now();
    tsc::pause_until(start + tsc::ticks(10_000));
    let end = tsc::now();
    let counted = u64::from(u32::MAX - read(CURRENT_COUNT));
    let after = tsc::now();
    let rate = (counted << 20).checked_div(end.saturating_sub(start)).unwrap_or_default();
    (rate, start.saturating_sub(before) + after.saturating_sub(end))
}

/// Frequency of the timer's input in kHz, as calibrated.
pub(crate) fn timer_khz() -> u64 {
    TIMER_RATE.load(Ordering::Relaxed).saturating_mul(tsc::khz()) >> 20
}

fn fence() {
    core::sync::atomic::fence(Ordering::SeqCst);
}
