//! The local APIC of the host: kicks, the timer, starting and stopping other pCPUs.
//!
//! Registers are MSRs if the CPU has x2APIC, otherwise uncached memory. Single destinations are physical ids, sets of
//! them logical ones. One command reaches 16 neighbours with x2APIC, and all CPUs of a machine with up to eight without
//! (APM vol. 2, chapter 16).
//!
//! The timer counts in TSC ticks if the CPU supports it. Otherwise it runs in periodic mode and never stops: it fires
//! again at the latest 10 ms later, whatever it was armed for ([`TICKS_PER_SECOND`]).

#![expect(unsafe_code, reason = "registers of the local APIC, as memory and as MSRs")]

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use addr::{Hpa, Hva};
use vcpu_layout::Proof;
use x86_64::registers::model_specific::Msr;

use super::irq::{KICK, SPURIOUS, TIMER};
use super::quirks::{self, TICKS_PER_SECOND};
use super::{paging, port, power, tsc};
use crate::cpu::{self, CpuId};
use crate::layout::OwnPages;
use crate::trace;
use shootdown::CpuSet;

/// Address of the registers in memory; a machine whose firmware has moved them is rejected.
const REGISTERS: u64 = 0xfee0_0000;
/// The EOI register as mapped.
pub(super) const MMIO_EOI: u64 = paging::MMIO + REGISTERS + EOI as u64;
/// The EOI register as an MSR.
pub(super) const MSR_EOI: u32 = MSR_BASE + (EOI >> 4);

/// The word of the in-service register that has a vector, as mapped.
pub(super) const fn mmio_in_service(vector: u8) -> u64 {
    paging::MMIO + REGISTERS + in_service(vector) as u64
}

/// The same as an MSR.
pub(super) const fn msr_in_service(vector: u8) -> u32 {
    MSR_BASE + (in_service(vector) >> 4)
}

/// Eight words, 16 bytes apart (APM vol. 2, 16.6.3).
const fn in_service(vector: u8) -> u32 {
    IN_SERVICE + (vector as u32 >> 5) * 0x10
}

const MSR_BASE: u32 = 0x800;
const APIC_BASE_MSR: u32 = 0x1b;
const APIC_BASE_X2APIC: u64 = 1 << 10;
const APIC_BASE_ENABLE: u64 = 1 << 11;
const TSC_DEADLINE_MSR: u32 = 0x6e0;

const TPR: u32 = 0x80;
const EOI: u32 = 0xb0;
const LOGICAL_DESTINATION: u32 = 0xd0;
const SPURIOUS_VECTOR: u32 = 0xf0;
const IN_SERVICE: u32 = 0x100;
const ICR_LOW: u32 = 0x300;
const ICR_HIGH: u32 = 0x310;
const LVT_TIMER: u32 = 0x320;
const LVT_LINT0: u32 = 0x350;
const LVT_LINT1: u32 = 0x360;
const TIMER_INITIAL: u32 = 0x380;
const TIMER_CURRENT: u32 = 0x390;
const TIMER_DIVIDE: u32 = 0x3e0;

const SOFTWARE_ENABLE: u32 = 1 << 8;
const MASKED: u32 = 1 << 16;
const MODE_PERIODIC: u32 = 1 << 17;
const MODE_DEADLINE: u32 = 2 << 17;
const DELIVER_NMI: u32 = 4 << 8;
const DELIVER_INIT: u32 = 5 << 8;
const DELIVER_STARTUP: u32 = 6 << 8;
const LOGICAL: u32 = 1 << 11;
const DELIVERY_PENDING: u32 = 1 << 12;
const ASSERT: u32 = 1 << 14;
const ALL_BUT_SELF: u32 = 3 << 18;
const DIVIDE_BY_1: u32 = 0b1011;

/// The shortest time that the timer is armed for is this part of a tick: 20 µs. It repeats until it is attended to.
const SHORTEST: u32 = 500;
/// The initial count, relative to the EOI register.
pub(super) const TIMER_INITIAL_FROM_EOI: u32 = TIMER_INITIAL - EOI;
/// Distance of the last word of the in-service register from there.
pub(super) const LAST_IN_SERVICE_FROM_EOI: u32 = in_service(0xff) - EOI;
/// The initial count as an MSR.
pub(super) const MSR_TIMER_INITIAL: u32 = MSR_BASE + (TIMER_INITIAL >> 4);

static X2APIC: AtomicBool = AtomicBool::new(false);
static DEADLINE_TIMER: AtomicBool = AtomicBool::new(false);
/// Set once the registers can be used at all.
static READY: AtomicBool = AtomicBool::new(false);
/// Timer counts per TSC tick, as a fraction of 2^32.
static COUNTS_PER_TICK: AtomicU64 = AtomicU64::new(0);
/// Timer counts per second.
static TIMER_HZ: AtomicU64 = AtomicU64::new(0);

/// Interrupts a pCPU with the vector [`KICK`]. Its work must be in memory before.
#[inline]
pub(crate) fn kick(cpu: CpuId) {
    trace::kicked(1, cpu.0);
    send_kick(cpu.0);
}

#[inline]
fn send_kick(cpu: u32) {
    send(apic_id(cpu), ASSERT | u32::from(KICK));
}

/// Interrupts several pCPUs with the vector [`KICK`], with as few commands as the machine allows.
pub(crate) fn kick_all(cpus: CpuSet) {
    trace::kicked(cpus.len(), cpus.first().unwrap_or(0));
    if X2APIC.load(Ordering::Relaxed) {
        // The logical id of an x2APIC is its cluster, the upper bits of its id, and one of 16 bits (APM vol. 2,
        // 16.14.2).
        let mut rest = cpus;
        while let Some(first) = rest.first() {
            let cluster = apic_id(first) >> 4;
            let mut members = 0;
            for cpu in rest.iter().filter(|&cpu| apic_id(cpu) >> 4 == cluster) {
                members |= 1 << (apic_id(cpu) & 15);
                rest.remove(cpu);
            }
            send(cluster << 16 | members, LOGICAL | ASSERT | u32::from(KICK));
        }
    } else if cpu::count() <= FLAT_CPUS && cpus.len() > 1 {
        let members = cpus.iter().fold(0, |members, cpu| members | 1 << cpu);
        send(members, LOGICAL | ASSERT | u32::from(KICK));
    } else {
        cpus.iter().for_each(send_kick);
    }
}

fn apic_id(cpu: u32) -> u32 {
    cpu::by_id(CpuId(cpu)).arch.apic_id
}

/// Without x2APIC, a logical id has one bit for each of this many CPUs.
const FLAT_CPUS: usize = 8;

/// Gives this pCPU its logical id, one bit, where ids are not fixed and bits suffice for all.
pub(super) fn take_logical_id(cpu: CpuId) {
    if !X2APIC.load(Ordering::Relaxed) && cpu.index() < FLAT_CPUS {
        write(LOGICAL_DESTINATION, 1 << (24 + cpu.0));
    }
}

/// Sees to it that the timer interrupts this pCPU not later than at `deadline`, in TSC ticks.
///
/// It may fire earlier, for a deadline that was asked for before or for its own tick, and then knows nothing of later
/// deadlines: after each timer interrupt, arm it again.
#[inline]
pub(crate) fn arm_timer(deadline: u64) {
    let (mine, here) = (&cpu::this().arch, Proof::by_place());
    if mine.armed.get() <= deadline {
        return;
    }
    if DEADLINE_TIMER.load(Ordering::Relaxed) {
        mine.armed.set(here, deadline);
        // It is compared with the counter as it is. 0 would disarm it.
        write_msr(TSC_DEADLINE_MSR, deadline.wrapping_sub(tsc::offset()).max(1));
        return;
    }
    let ticks = deadline.saturating_sub(tsc::now());
    let counts = (u128::from(ticks) * u128::from(COUNTS_PER_TICK.load(Ordering::Relaxed))) >> 32;
    let tick = u32::try_from(mine.tick.get()).unwrap_or(u32::MAX);
    // One that is no nearer than the tick needs nothing.
    if let Ok(counts) = u32::try_from(counts)
        && counts < tick
    {
        mine.armed.set(here, deadline);
        write(TIMER_INITIAL, counts.max(tick / SHORTEST));
    }
}

/// Ends the interrupt of highest priority that this pCPU has taken, of this vector. Interrupts are masked.
pub(super) fn end_of_interrupt(vector: u8) {
    write(EOI, 0);
    while quirks::loses_writes_to_registers() && is_in_service(vector) {
        write(EOI, 0);
    }
}

/// Whether an interrupt was taken and not ended.
#[inline(never)]
fn is_in_service(vector: u8) -> bool {
    read(in_service(vector)) >> (vector & 31) & 1 != 0
}

/// Kind of the timer, for the log.
pub(in crate::arch::x86_64) fn timer_name() -> &'static str {
    if DEADLINE_TIMER.load(Ordering::Relaxed) { "by TSC deadline" } else { "by count" }
}

/// Stops all other pCPUs, by NMI. For a panic: it works as soon as there are other pCPUs.
pub(crate) fn stop_others() {
    if READY.load(Ordering::Acquire) {
        send(0, ALL_BUT_SELF | ASSERT | DELIVER_NMI);
    }
}

/// Resets a pCPU, which then waits for [`send_startup`].
pub(super) fn send_init(apic_id: u32) {
    send(apic_id, ASSERT | DELIVER_INIT);
}

/// Starts a waiting pCPU in real mode at `page` * 4096.
pub(super) fn send_startup(apic_id: u32, page: u8) {
    send(apic_id, ASSERT | DELIVER_STARTUP | u32::from(page));
}

/// Whether the CPU has x2APIC (CPUID 1 ECX 21), which is then used.
pub(super) fn has_x2apic() -> bool {
    __cpuid(1).ecx & (1 << 21) != 0
}

/// Id of this pCPU's local APIC, asked of the CPU: leaf 0Bh has all 32 bits, leaf 1 eight.
pub(super) fn id_by_cpuid() -> u32 {
    if __cpuid(0).eax >= 0xb {
        let topology = __cpuid_count(0xb, 0);
        if topology.ebx != 0 {
            return topology.edx;
        }
    }
    __cpuid(1).ebx >> 24
}

/// Prepares the boot pCPU's local APIC, and silences the older interrupt controllers.
pub(super) fn init_boot() {
    // Both 8259s: all inputs masked. Firmware's timer tick would otherwise arrive as an exception.
    port::write_u8(0x21, 0xff);
    port::write_u8(0xa1, 0xff);

    let base = read_msr(APIC_BASE_MSR) & 0x000f_ffff_ffff_f000;
    if base != REGISTERS {
        log::error!("the local APIC's registers are at {base:#x}, only {REGISTERS:#x} is supported");
        power::exit(abi::exit_code::REFUSED)
    }
    paging::map_mmio(Hpa(REGISTERS), 4096);
    X2APIC.store(has_x2apic(), Ordering::Relaxed);
    init();
    READY.store(true, Ordering::Release);
}

/// Sets up this pCPU's local APIC; the timer stays off.
pub(super) fn init() {
    let mode = if X2APIC.load(Ordering::Relaxed) { APIC_BASE_X2APIC } else { 0 };
    write_msr(APIC_BASE_MSR, read_msr(APIC_BASE_MSR) | APIC_BASE_ENABLE | mode);
    write(TPR, 0);
    write(LVT_LINT0, MASKED);
    write(LVT_LINT1, DELIVER_NMI);
    write(LVT_TIMER, MASKED);
    write(SPURIOUS_VECTOR, SOFTWARE_ENABLE | u32::from(SPURIOUS));
}

/// Lets the timer count down from the largest value without interrupting, for calibration.
pub(super) fn start_count() {
    write(TIMER_DIVIDE, DIVIDE_BY_1);
    write(TIMER_INITIAL, u32::MAX);
}

/// Counts since [`start_count`].
pub(super) fn count() -> u32 {
    u32::MAX - read(TIMER_CURRENT)
}

/// Takes the result of the calibration.
pub(super) fn set_rate(timer_hz: u64, clock_hz: u64) {
    let rate = (u128::from(timer_hz) << 32) / u128::from(clock_hz.max(1));
    COUNTS_PER_TICK.store(u64::try_from(rate).unwrap_or(u64::MAX), Ordering::Relaxed);
    TIMER_HZ.store(timer_hz, Ordering::Relaxed);
    DEADLINE_TIMER.store(has_deadline_timer(), Ordering::Relaxed);
}

/// Whether the timer counts in TSC ticks (CPUID 1 ECX 24), which is then used.
pub(super) fn has_deadline_timer() -> bool {
    __cpuid(1).ecx & (1 << 24) != 0
}

/// Readies this pCPU's timer for [`arm_timer`].
pub(super) fn start_timer() {
    if DEADLINE_TIMER.load(Ordering::Relaxed) {
        write(LVT_TIMER, MODE_DEADLINE | u32::from(TIMER));
        // The mode must be in place before the first deadline is written (Intel SDM vol. 3, 11.5.4.1).
        // SAFETY: orders memory accesses, nothing else.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) };
    } else {
        let tick = u32::try_from(TIMER_HZ.load(Ordering::Relaxed) / TICKS_PER_SECOND).unwrap_or(u32::MAX).max(SHORTEST);
        cpu::this().arch.tick.set(Proof::by_place(), tick.into());
        write(TIMER_DIVIDE, DIVIDE_BY_1);
        write(LVT_TIMER, MODE_PERIODIC | u32::from(TIMER));
        write(TIMER_INITIAL, tick);
    }
}

#[inline]
fn send(apic_id: u32, command: u32) {
    if X2APIC.load(Ordering::Relaxed) {
        // SAFETY: only orders memory accesses. The target's work is visible before the IPI, because the MSR write
        // itself waits for nothing (Intel SDM vol. 3, 11.12.3).
        unsafe { asm!("mfence", "lfence", options(nostack, preserves_flags)) };
        write_msr(MSR_BASE + (ICR_LOW >> 4), u64::from(apic_id) << 32 | u64::from(command));
    } else {
        while read(ICR_LOW) & DELIVERY_PENDING != 0 {
            core::hint::spin_loop();
        }
        write(ICR_HIGH, apic_id << 24);
        write(ICR_LOW, command);
    }
}

#[inline]
fn read(register: u32) -> u32 {
    if X2APIC.load(Ordering::Relaxed) {
        (read_msr(MSR_BASE + (register >> 4)) & 0xffff_ffff) as u32
    } else {
        // SAFETY: `init_boot` has mapped the registers, of which `register` is one.
        unsafe { register_pointer(register).read_volatile() }
    }
}

#[inline]
fn write(register: u32, value: u32) {
    if X2APIC.load(Ordering::Relaxed) {
        write_msr(MSR_BASE + (register >> 4), u64::from(value));
    } else {
        // SAFETY: as in `read`.
        unsafe { register_pointer(register).write_volatile(value) };
    }
}

/// Where each pCPU reaches its own.
pub(crate) fn own_page() -> Option<OwnPages> {
    Some(OwnPages { what: "local APIC", hva: Hva(paging::MMIO + REGISTERS), bytes: 4096 })
}

#[inline(always)]
fn register_pointer(register: u32) -> *mut u32 {
    (paging::MMIO + REGISTERS + u64::from(register)) as *mut u32
}

fn read_msr(number: u32) -> u64 {
    // SAFETY: called for registers of the local APIC that the CPU has.
    unsafe { Msr::new(number).read() }
}

#[inline]
fn write_msr(number: u32, value: u64) {
    // SAFETY: called for registers of the local APIC that the CPU has; vectors that it delivers have handlers.
    unsafe { Msr::new(number).write(value) };
}
