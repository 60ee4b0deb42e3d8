//! The interrupt controller and the virtual timer. The controller is a GICv3 with system registers for its CPU
//! interface (GIC, chapters 4 and 12). Setting the timer never exits.

use core::sync::atomic::{AtomicU64, Ordering};

use super::attempt;
use super::boot::BootInfo;
use super::registers::{isb, read_register, write_register};
use super::vectors::{PHYSICAL_TIMER, TIMER};
use super::{boot, control, cpu_local, tsc};

/// Registers of the distributor.
pub(crate) const GICD_CTLR: u64 = 0;
pub(crate) const GICD_TYPER: u64 = 4;
/// Registers of a redistributor, and of its second frame.
pub(crate) const GICR_TYPER: u64 = 8;
const GICR_WAKER: u64 = 0x14;
const GICR_IGROUPR0: u64 = 0x1_0080;
const GICR_ISENABLER0: u64 = 0x1_0100;
const GICR_IPRIORITYR: u64 = 0x1_0400;
/// Bytes of a redistributor.
pub(crate) const REDISTRIBUTOR: u64 = 0x2_0000;

static DISTRIBUTOR: AtomicU64 = AtomicU64::new(0);

/// Where the distributor is.
pub(crate) fn distributor() -> u64 {
    DISTRIBUTOR.load(Ordering::Relaxed)
}

/// Address of the redistributors, and their size in bytes by the firmware tables.
pub(crate) fn redistributors() -> (u64, u64) {
    boot::machine().map_or((0, 0), |machine| machine.redistributors)
}

/// Affinity routing, group 1.
const ON: u32 = 1 << 4 | 1 << 1;

/// Turns the distributor on, and the first CPU's part.
pub(crate) fn prepare(info: &BootInfo, _: bool) {
    DISTRIBUTOR.store(info.machine().distributor.unwrap_or(0), Ordering::Relaxed);
    let _ = attempt::store_u32(distributor() + GICD_CTLR, ON);
    enable_this_cpu();
}

/// Turns on this CPU's redistributor and its interface: nothing masked by priority, the timer and all SGIs enabled.
pub(crate) fn enable_this_cpu() {
    if let Some(at) = own_redistributor() {
        cpu_local::own().redistributor.store(at, Ordering::Relaxed);
        prepare_redistributor(at);
    }
    disarm();
    prepare_interface();
}

fn prepare_redistributor(at: u64) {
    wake_redistributor(at);
    let _ = attempt::store_u32(at + GICR_IGROUPR0, u32::MAX);
    for word in 0..8 {
        let _ = attempt::store_u32(at + GICR_IPRIORITYR + 4 * word, 0x8080_8080);
    }
    let _ = attempt::store_u32(at + GICR_ISENABLER0, 0xffff | 1 << TIMER | 1 << PHYSICAL_TIMER);
}

fn prepare_interface() {
    // SAFETY: the interface by system registers, all priorities, group 1.
    unsafe { write_register!("icc_sre_el1", 7u64) };
    isb();
    // SAFETY: as above.
    unsafe { write_register!("icc_pmr_el1", 0xf0u64) };
    // SAFETY: as above.
    unsafe { write_register!("icc_bpr1_el1", 0u64) };
    // SAFETY: an interrupt is ended by one write.
    unsafe { write_register!("icc_ctlr_el1", 0u64) };
    // SAFETY: as above.
    unsafe { write_register!("icc_igrpen1_el1", 1u64) };
    isb();
}

/// The redistributor with this CPU's affinity.
fn own_redistributor() -> Option<u64> {
    let (start, bytes) = redistributors();
    let own = u64::from(control::hardware_id());
    (0..bytes / REDISTRIBUTOR)
        .map(|number| start + number * REDISTRIBUTOR)
        .find(|at| attempt::load_u64(at + GICR_TYPER).is_ok_and(|kind| kind >> 32 == own))
}

fn wake_redistributor(at: u64) {
    const SLEEPS: u32 = 1 << 1;
    const CHILDREN_SLEEP: u32 = 1 << 2;
    let waker = attempt::load_u32(at + GICR_WAKER).unwrap_or(0);
    let _ = attempt::store_u32(at + GICR_WAKER, waker & !SLEEPS);
    for _ in 0..100_000 {
        if attempt::load_u32(at + GICR_WAKER).is_ok_and(|waker| waker & CHILDREN_SLEEP == 0) {
            break;
        }
    }
}

/// This CPU's redistributor.
pub(crate) fn redistributor() -> u64 {
    cpu_local::own().redistributor.load(Ordering::Relaxed)
}

/// How this interrupt controller is called.
pub(crate) fn name() -> &'static str {
    "gicv3"
}

/// Acknowledges the most urgent interrupt; 1020 and above means none.
pub(super) fn acknowledge() -> u64 {
    let intid = read_register!("icc_iar1_el1") & 0x00ff_ffff;
    // SAFETY: orders later accesses after the acknowledgement.
    unsafe { core::arch::asm!("dsb sy", options(nostack, preserves_flags)) };
    intid
}

/// Ends the interrupt in service.
pub(crate) fn end_of_interrupt(vector: u8) {
    end_of_any(vector.into());
}

pub(super) fn end_of_any(intid: u64) {
    // SAFETY: ends the acknowledged interrupt.
    unsafe { write_register!("icc_eoir1_el1", intid) };
    isb();
}

/// Whether the interrupt that is being handled is in service: it was acknowledged, so it is.
pub(crate) fn is_in_service(_: u8) -> bool {
    true
}

/// Sends an SGI to one CPU.
pub(crate) fn send(affinity: u32, vector: u8) {
    let [aff0, aff1, aff2, _] = affinity.to_le_bytes().map(u64::from);
    let target = 1 << (aff0 & 15) | aff1 << 16 | aff2 << 32 | (aff0 >> 4) << 44;
    command(target | u64::from(vector) << 24);
}

/// Sends an SGI to every CPU but this one.
pub(crate) fn send_others(vector: u8) {
    command(1 << 40 | u64::from(vector) << 24);
}

/// Writes ICC_SGI1R_EL1, the register that sends SGIs.
pub(crate) fn command(value: u64) {
    // SAFETY: earlier stores are visible to the CPU that takes the interrupt.
    unsafe { core::arch::asm!("dsb ishst", options(nostack, preserves_flags)) };
    // SAFETY: sends an interrupt.
    unsafe { write_register!("icc_sgi1r_el1", value) };
    isb();
}

/// Counts of the shortest period that leaves time for other work. The timer's condition holds until the handler sets
/// the timer again, and the handler does that last.
pub(crate) const STORM: u32 = 6250;

/// Number of accesses that [`poke_interface`] knows.
pub(crate) const POKES: usize = 14;

/// Does something to the CPU interface that no kernel would do.
pub(crate) fn poke_interface(which: usize, value: u64) {
    macro_rules! write {
        ($name:literal, $value:expr) => {
            // SAFETY: `restore` resets how this kernel receives interrupts.
            unsafe { write_register!($name, $value) }
        };
    }
    // Interrupts for EL2 and the hypervisor, and a few that there cannot be.
    let intid = value & 0x3ff;
    match which {
        0 => write!("icc_sgi1r_el1", value),
        1 => write!("icc_asgi1r_el1", value),
        2 => write!("icc_sgi0r_el1", value),
        3 => write!("icc_eoir1_el1", intid),
        4 => write!("icc_eoir0_el1", intid),
        5 => write!("icc_dir_el1", intid),
        6 => write!("icc_pmr_el1", value & 0xff),
        7 => write!("icc_ctlr_el1", value),
        8 => write!("icc_bpr1_el1", value & 7),
        9 => write!("icc_igrpen1_el1", value & 1),
        10 => write!("icc_ap1r0_el1", value & 0xffff_ffff),
        11 => write!("icc_bpr0_el1", value & 7),
        12 => {
            let _ = read_register!("icc_iar1_el1");
        }
        _ => {
            let _ = (read_register!("icc_hppir1_el1"), read_register!("icc_rpr_el1"), read_register!("icc_iar0_el1"));
        }
    }
}

/// Resets the controller to the state after [`prepare`], for all CPUs: nothing pending, nothing active.
pub(crate) fn restore() {
    let _ = attempt::store_u32(distributor() + GICD_CTLR, ON);
    let clear = |at: u64, word: u64| {
        // Disable, not pending, not active.
        for register in [0x180, 0x280, 0x380] {
            let _ = attempt::store_u32(at + register + 4 * word, u32::MAX);
        }
    };
    (1..8).for_each(|word| clear(distributor(), word));
    let (start, bytes) = redistributors();
    for at in (0..bytes / REDISTRIBUTOR).map(|number| start + number * REDISTRIBUTOR) {
        clear(at + 0x1_0000, 0);
        prepare_redistributor(at);
    }
    // SAFETY: nothing is being handled.
    unsafe { write_register!("icc_ap1r0_el1", 0u64) };
    prepare_interface();
}

/// Interrupts of the physical timer: taken, and the number after which the handler masks it.
static PHYSICAL: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// The physical timer's registers: CNTPCT_EL0, CNTP_TVAL_EL0, CNTP_CTL_EL0, CNTP_CVAL_EL0.
pub(crate) fn physical_timer() -> [u64; 4] {
    isb();
    [
        read_register!("cntpct_el0"),
        read_register!("cntp_tval_el0"),
        read_register!("cntp_ctl_el0"),
        read_register!("cntp_cval_el0"),
    ]
}

/// CNTVCT_EL0.
pub(crate) fn virtual_count() -> u64 {
    isb();
    read_register!("cntvct_el0")
}

/// Sets CNTP_CVAL_EL0.
pub(crate) fn set_physical_compare(count: u64) {
    // SAFETY: no other code uses this timer.
    unsafe { write_register!("cntp_cval_el0", count) };
    isb();
}

/// Sets CNTP_TVAL_EL0.
pub(crate) fn set_physical_value(count: u64) {
    // SAFETY: as above.
    unsafe { write_register!("cntp_tval_el0", count) };
    isb();
}

/// Sets CNTP_CTL_EL0. Its interrupt is taken `times` times before the handler masks it.
pub(crate) fn set_physical_control(control: u64, times: u64) {
    PHYSICAL[0].store(0, Ordering::SeqCst);
    PHYSICAL[1].store(times, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { write_register!("cntp_ctl_el0", control) };
    isb();
}

/// Number of interrupts taken since then.
pub(crate) fn physical_interrupts() -> u64 {
    PHYSICAL[0].load(Ordering::SeqCst)
}

/// The physical timer's interrupt was acknowledged.
pub(super) fn physical_timer_was_taken() {
    if PHYSICAL[0].fetch_add(1, Ordering::SeqCst) + 1 >= PHYSICAL[1].load(Ordering::SeqCst) {
        // SAFETY: as above.
        unsafe { write_register!("cntp_ctl_el0", 3u64) };
        isb();
    }
    end_of_interrupt(PHYSICAL_TIMER);
}

const ENABLE: u64 = 1;
const FIRES: u64 = 7;
/// Enabled, not masked, and due.
const DUE: u64 = 5;

/// Whether the timer takes an absolute time: it does.
pub(crate) fn has_deadline() -> bool {
    true
}

/// Arms the timer for this time.
pub(crate) fn arm_deadline(_: u8, deadline: u64) {
    // SAFETY: this kernel's own timer.
    unsafe { write_register!("cntv_cval_el0", tsc::counts(deadline)) };
    // SAFETY: as above.
    unsafe { write_register!("cntv_ctl_el0", ENABLE) };
    isb();
}

/// Sets the timer to fire once, `ticks` from now. Returns the ticks that the rounded count stands for.
pub(crate) fn arm_once(_: u8, ticks: u64) -> u64 {
    let counts = tsc::counts(ticks).clamp(1, i32::MAX as u64);
    arm_in(counts);
    tsc::of_counts(counts)
}

/// Lets the timer fire every `count` of its own counts.
pub(crate) fn arm_periodic(_: u8, count: u32) {
    cpu_local::own().period.store(count.into(), Ordering::Relaxed);
    arm_in(count.into());
}

fn arm_in(counts: u64) {
    // SAFETY: this kernel's own timer.
    unsafe { write_register!("cntv_tval_el0", counts) };
    // SAFETY: as above.
    unsafe { write_register!("cntv_ctl_el0", ENABLE) };
    isb();
}

/// Stops the timer in each mode.
pub(crate) fn disarm() {
    cpu_local::own().period.store(0, Ordering::Relaxed);
    // SAFETY: this kernel's own timer.
    unsafe { write_register!("cntv_ctl_el0", 0u64) };
    isb();
}

/// Arms the timer with this in CNTV_TVAL_EL0: a signed count of 32 bits.
pub(crate) fn arm_count(count: u64) {
    arm_in(count);
}

/// Arms the timer for a time that is past, but masks its interrupt.
pub(crate) fn arm_masked() {
    const MASK: u64 = 1 << 1;
    // SAFETY: this kernel's own timer.
    unsafe { write_register!("cntv_cval_el0", 0u64) };
    // SAFETY: as above.
    unsafe { write_register!("cntv_ctl_el0", ENABLE | MASK) };
    isb();
}

/// Whether the timer's condition holds, so that its interrupt is no remainder.
pub(super) fn timer_is_due() -> bool {
    read_register!("cntv_ctl_el0") & FIRES == DUE
}

/// Handles a taken timer interrupt. Its condition still holds, so this stops the timer or sets it again.
pub(crate) fn timer_was_taken() {
    match cpu_local::own().period.load(Ordering::Relaxed) {
        0 => disarm(),
        period => arm_in(period),
    }
}

/// Frequency of the timer in kHz.
pub(crate) fn timer_khz() -> u64 {
    read_register!("cntfrq_el0") / 1000
}
