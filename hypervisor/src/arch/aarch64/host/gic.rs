//! The host's interrupt controller: GICv3 (Arm IHI 0069).
//!
//! A host interrupt carries no information. Each only ends a guest's run or a pCPU's sleep; the work is in memory.
//! [`acknowledge_all`] acknowledges, counts and deactivates them. There are two exceptions: the guest's own timer, and
//! interrupts of devices that a VM has. They stay active, and the guest's end of interrupt deactivates them (EOImode 1,
//! list registers with HW).

#![expect(unsafe_code, reason = "registers of the interrupt controller and of the timer")]

use core::fmt;
use core::ptr::NonNull;

use aarch64_defs::its::FIRST_LPI;
use addr::{Hpa, HpaRange, Hva};
use arm_gic::gicv3::registers::{Gicd, GicrSgi};
use arm_gic::gicv3::{GicDistributor, GicRedistributor};
use arm_gic::{IntId, Trigger, UniqueMmioPointer};
use shootdown::CpuSet;
use spin::Mutex;
use vcpu_layout::Proof;

use super::device_tree::{MAX_REDISTRIBUTOR_REGIONS, Machine};
use super::paging::map_mmio;
use super::power;
use crate::arch::aarch64::guest::own_machine;
use crate::arch::aarch64::register::{isb, read_register, write_register};
use crate::cpu::{self, CpuId};
use crate::device::gic::{FIRST_SPI, Order};
use crate::layout::OwnPages;
use crate::{panic, trace};

/// SGI of a kick: another pCPU has something for this one.
const KICK: u32 = 0;
/// PPI of a condition of the guest's list registers.
const MAINTENANCE: u32 = 25;
/// PPI of EL2's physical timer.
const TIMER: u32 = 26;
/// PPI of the guest's virtual timer.
pub(in crate::arch::aarch64) const GUEST_TIMER: u32 = 27;
/// PPI of the guest's physical timer, which is emulated: there is no such interrupt of the host's.
pub(in crate::arch::aarch64) const GUEST_PHYSICAL_TIMER: u32 = 30;
/// From here on, numbers mean that there is nothing, up to the LPIs'.
const SPECIAL: u32 = 1020;

/// ICC_SRE_EL2: system registers, for EL1 too, and no bypass.
const SRE_ALL: u64 = 0xf;
/// ICC_PMR_EL1: lets everything through.
const ANY_PRIORITY: u64 = 0xff;
/// ICC_CTLR_EL1.EOImode: the end of an interrupt drops its priority only.
const EOI_MODE: u64 = 1 << 1;

/// Bytes from one redistributor to the next: two frames, four where virtual LPIs exist.
const FRAME_BYTES: u64 = 0x1_0000;

/// Why the interrupt controller cannot be used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unusable {
    /// The device tree names no GICv3.
    None,
    /// The processor has no system registers for it.
    NoSystemRegisters,
    /// No redistributor belongs to this pCPU.
    NoRedistributor,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "the device tree names no GICv3 (on QEMU: `-machine virt,gic-version=3`)",
            Self::NoSystemRegisters => "the processor has no system registers for it",
            Self::NoRedistributor => "no redistributor belongs to this pCPU",
        })
    }
}

/// Where redistributors are.
static REDISTRIBUTORS: Mutex<[Option<HpaRange>; MAX_REDISTRIBUTOR_REGIONS]> =
    Mutex::new([None; MAX_REDISTRIBUTOR_REGIONS]);

/// The distributor, once it is set up: its driver, and where its registers are mapped.
static DISTRIBUTOR: Mutex<Option<(GicDistributor<'static>, Hva)>> = Mutex::new(None);

/// Sets up the distributor, and the boot pCPU's own part.
pub(super) fn init_boot(machine: &Machine) -> Result<(), Unusable> {
    let distributor = machine.distributor.ok_or(Unusable::None)?;
    let at = map_mmio(distributor.start, size_of::<Gicd>() as u64);
    // SAFETY: the distributor's registers, from the device tree, never unmapped; this is the only driver, and only this
    // file uses it.
    let registers = unsafe { UniqueMmioPointer::new(pointer::<Gicd>(at)) };
    let mut distributor = GicDistributor::new(registers);
    distributor.configure_default_settings();
    *DISTRIBUTOR.lock() = Some((distributor, at));
    *REDISTRIBUTORS.lock() = machine.redistributors;
    init()
}

/// Sets up each pCPU's own part.
pub(super) fn init() -> Result<(), Unusable> {
    const GIC: u64 = 0xf << 24;
    if read_register!("id_aa64pfr0_el1") & GIC == 0 {
        return Err(Unusable::NoSystemRegisters);
    }
    let mine = cpu::this();
    let registers = find_redistributor(mine.arch.affinity).ok_or(Unusable::NoRedistributor)?;
    let at = map_mmio(registers.start, registers.bytes());
    mine.arch.redistributor.set(Proof::by_place(), at.0);
    // SAFETY: this pCPU's redistributor, never unmapped, and used by this pCPU only.
    let mut redistributor = GicRedistributor::new(unsafe { UniqueMmioPointer::new(pointer::<GicrSgi>(at)) });
    // Fails when the firmware has woken it already.
    let _ = redistributor.mark_core_awake();
    redistributor.configure_default_settings();
    for private in [KICK, MAINTENANCE, TIMER, GUEST_TIMER] {
        if let Ok(id) = IntId::try_from(private) {
            // All of them are private.
            let _ = redistributor.enable_interrupt(id, true);
        }
    }

    // SAFETY: EL2's own interface of the controller; interrupts are masked. The timer is off until it is armed.
    unsafe { write_register!("icc_sre_el2", SRE_ALL) };
    isb();
    // SAFETY: as above.
    unsafe { write_register!("icc_pmr_el1", ANY_PRIORITY) };
    // SAFETY: as above.
    unsafe { write_register!("icc_ctlr_el1", EOI_MODE) };
    // SAFETY: as above.
    unsafe { write_register!("icc_igrpen1_el1", 1u64) };
    // SAFETY: as above.
    unsafe { write_register!("cnthp_ctl_el2", 0u64) };
    // SAFETY: guests have system registers for the controller, and nothing else.
    unsafe { write_register!("icc_sre_el1", SRE_ALL & 7) };
    // SAFETY: there is no guest yet.
    unsafe { write_register!("ich_hcr_el2", 0u64) };
    // SAFETY: the guest's timer; there is no guest yet.
    unsafe { write_register!("cntv_ctl_el0", 0u64) };
    isb();
    Ok(())
}

/// Does what a guest has ordered that has devices. An interrupt for a vCPU goes to the pCPU with the affinity that
/// `affinity_of` tells.
///
/// A deactivation is by the distributor, because the pCPU that took the interrupt may be another one.
pub(in crate::arch::aarch64) fn carry_out(order: Order, affinity_of: impl Fn(u32) -> u64) {
    /// Offset of GICD_ICACTIVER.
    const CLEAR_ACTIVE: u64 = 0x380;
    let mut distributor = DISTRIBUTOR.lock();
    let Some((distributor, at)) = &mut *distributor else { return };
    match order {
        Order::Configure { intid, enabled, edge, vcpu } => {
            let Ok(id) = IntId::try_from(intid) else { return };
            // A shared interrupt that the distributor does not have reads as zero, and ignores writes.
            let trigger = if edge { Trigger::Edge } else { Trigger::Level };
            let configured = distributor
                .enable_interrupt(id, false)
                .and_then(|()| distributor.set_trigger(id, trigger))
                .and_then(|()| distributor.set_routing(id, Some(vcpu.map_or(0, affinity_of))))
                .and_then(|()| distributor.enable_interrupt(id, enabled));
            debug_assert!(configured.is_ok(), "all are shared interrupts");
        }
        // Not this controller's.
        Order::Route { .. } => {}
        Order::Deactivate { intid } => {
            let register = (at.0 + CLEAR_ACTIVE + u64::from(intid / 32) * 4) as *mut u32;
            // SAFETY: a register of the distributor for this shared interrupt, never unmapped. Zeros change nothing.
            unsafe { register.write_volatile(1 << (intid % 32)) };
        }
    }
}

/// Registers of every pCPU at the same address: none, redistributors have addresses of their own.
pub(crate) fn own_page() -> Option<OwnPages> {
    None
}

/// Finds the redistributor of the pCPU with this affinity.
pub(super) fn find_redistributor(affinity: u64) -> Option<HpaRange> {
    let regions = *REDISTRIBUTORS.lock();
    for region in regions.iter().flatten() {
        let mut at = region.start.0;
        while at + size_of::<GicrSgi>() as u64 <= region.end().0 {
            let registers = HpaRange::new(Hpa(at), size_of::<GicrSgi>() as u64)?;
            let mapped = map_mmio(registers.start, registers.bytes());
            // SAFETY: a redistributor's registers, from the device tree; these reads have no effect.
            let redistributor = GicRedistributor::new(unsafe { UniqueMmioPointer::new(pointer(mapped)) });
            let typer = redistributor.typer();
            if typer.core_mpidr() == affinity {
                return Some(registers);
            }
            if typer.last_redistributor() {
                break;
            }
            at += if typer.virtual_lpis_supported() { 4 * FRAME_BYTES } else { 2 * FRAME_BYTES };
        }
    }
    None
}

fn pointer<T>(at: Hva) -> NonNull<T> {
    NonNull::new(at.0 as *mut T).expect("device registers are not at address 0")
}

/// Interrupts a pCPU. Its work must be in memory before.
#[inline]
pub(crate) fn kick(cpu: CpuId) {
    trace::kicked(1, cpu.0);
    send(cpu::by_id(cpu).arch.affinity, 0);
}

/// Interrupts several pCPUs.
pub(crate) fn kick_all(cpus: CpuSet) {
    cpus.iter().for_each(|cpu| kick(CpuId(cpu)));
}

/// Stops all other pCPUs, for a panic. Each stops when it next acknowledges an interrupt.
pub(crate) fn stop_others() {
    const ALL_BUT_SELF: u64 = 1 << 40;
    if cpu::try_this().is_some() {
        send(0, ALL_BUT_SELF);
    }
}

/// ICC_SGI1R_EL1: the kick, for one affinity.
#[inline]
fn send(affinity: u64, mode: u64) {
    let [target, aff1, aff2, _, aff3, ..] = affinity.to_le_bytes();
    let command = u64::from(aff3) << 48
        | u64::from(target >> 4) << 44
        | mode
        | u64::from(aff2) << 32
        | u64::from(KICK) << 24
        | u64::from(aff1) << 16
        | 1 << (target & 15);
    // SAFETY: barriers, and an interrupt that only counts. The interrupted pCPU sees the earlier stores.
    unsafe {
        core::arch::asm!("dsb ishst", "msr icc_sgi1r_el1, {}", "isb", in(reg) command, options(nostack, preserves_flags))
    };
}

/// Sees to it that the timer interrupts this pCPU not later than at `deadline`, in ticks of the counter.
#[inline]
pub(crate) fn arm_timer(deadline: u64) {
    // SAFETY: EL2's own timer.
    unsafe { write_register!("cnthp_cval_el2", deadline) };
    // SAFETY: its interrupt only counts.
    unsafe { write_register!("cnthp_ctl_el2", 1u64) };
}

/// Acknowledges all that waits.
pub(in crate::arch::aarch64) fn acknowledge_all() {
    loop {
        let number = read_register!("icc_iar1_el1");
        #[expect(clippy::cast_possible_truncation, reason = "numbers have 24 bits")]
        let id = number as u32;
        if (SPECIAL..FIRST_LPI).contains(&id) {
            return;
        }
        let mine = cpu::this();
        let counter = match id {
            KICK => &mine.taken.kick,
            TIMER => {
                // SAFETY: EL2's own timer; off until it is armed again, so that its level falls.
                unsafe { write_register!("cnthp_ctl_el2", 0u64) };
                &mine.taken.timer
            }
            GUEST_TIMER => &mine.taken.timer,
            _ => &mine.taken.device,
        };
        counter.add(Proof::by_place(), 1);
        isb();
        // SAFETY: ends an acknowledged interrupt: its priority no longer blocks others.
        unsafe { write_register!("icc_eoir1_el1", number) };
        if id >= FIRST_LPI {
            // It is never active, so it has no further end.
            own_machine::message(id);
        } else if id == GUEST_TIMER {
            mine.arch.guest_timer_fired.set(Proof::by_place(), 1);
        } else if id < FIRST_SPI || !own_machine::interrupt(id) {
            if id >= FIRST_SPI {
                // The VM that had its device has ended. A line that nobody releases would interrupt for ever.
                carry_out(Order::Configure { intid: id, enabled: false, edge: false, vcpu: None }, |_| 0);
            }
            // SAFETY: it may come again.
            unsafe { write_register!("icc_dir_el1", number) };
        }
        isb();
        if panic::in_progress() {
            power::stop_this_cpu();
        }
    }
}

/// Whether the guest's timer has interrupted this pCPU, and this was not reported yet.
#[inline]
pub(in crate::arch::aarch64) fn has_guest_timer_fired() -> bool {
    cpu::this().arch.guest_timer_fired.get() != 0
}

/// Whether the guest's timer has interrupted this pCPU since it was asked last.
#[inline]
pub(in crate::arch::aarch64) fn guest_timer_fired() -> bool {
    let fired = &cpu::this().arch.guest_timer_fired;
    let has_fired = fired.get() != 0;
    if has_fired {
        fired.set(Proof::by_place(), 0);
    }
    has_fired
}

/// Makes the physical interrupt of the guest's timer active on this pCPU, so that it does not come, or ends it.
pub(in crate::arch::aarch64) fn set_guest_timer_active(active: bool) {
    /// Offsets of GICR_ISACTIVER0 and GICR_ICACTIVER0, in the second frame.
    const SET: u64 = 0x300;
    const CLEAR: u64 = 0x380;
    let at = cpu::this().arch.redistributor.get() + FRAME_BYTES + if active { SET } else { CLEAR };
    let register = at as *mut u32;
    // SAFETY: this pCPU's redistributor, never unmapped. The barrier makes the write arrive before a guest is entered.
    unsafe { register.write_volatile(1 << GUEST_TIMER) };
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("dsb sy", options(nostack, preserves_flags)) };
}

/// Number of list registers.
pub(in crate::arch::aarch64) fn list_registers() -> usize {
    usize::from(read_register!("ich_vtr_el2").to_le_bytes()[0] & 0x1f) + 1
}

macro_rules! list_registers {
    ($($number:literal)*) => {
        /// Reads a list register.
        pub(in crate::arch::aarch64) fn read_list(index: usize) -> u64 {
            match index {
                $($number => read_register!(concat!("ich_lr", $number, "_el2")),)*
                _ => 0,
            }
        }

        /// Writes a list register.
        pub(in crate::arch::aarch64) fn write_list(index: usize, value: u64) {
            match index {
                // SAFETY: list registers are the guest's; their physical interrupts are its timer's and its devices'.
                $($number => unsafe { write_register!(concat!("ich_lr", $number, "_el2"), value) },)*
                _ => {}
            }
        }
    };
}
list_registers!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
