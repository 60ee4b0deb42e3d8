//! A vCPU at EL2: its registers, its timer, its part of the interrupt controller.
//!
//! The pCPU that runs the vCPU owns all of this. Others reach it through its mailbox and through
//! [`crate::arch::aarch64::guest::delivery::Posted`].

#![expect(unsafe_code, reason = "loads what decides about the guest")]

mod saved;

use alloc::sync::Arc;

use aarch64_defs::features::IdRegisters;
use aarch64_defs::registers::{cnthctl_el2, hcr_el2, mpidr, sctlr, spsr, timer_control};
use aarch64_defs::syndrome::{Rest, Syndrome, class_name};
use abi::control::StopReason;
use abi::payload::VmConfig;
use addr::Hpa;
use serde::{Deserialize, Serialize};
use shootdown::Pages;
use tlb_tag::by_vm::Flush;

use super::debug::Debug;
use super::el1::{self, El1};
use super::entry::Registers;
use super::tags::{self, CpuTags, VcpuTags};
use crate::arch::aarch64::el2;
use crate::arch::aarch64::el2::HostContext;
use crate::arch::aarch64::guest::delivery::Start;
use crate::arch::aarch64::guest::fpu::FpuState;
use crate::arch::aarch64::guest::id_registers;
use crate::arch::aarch64::guest::loader::KernelEntry;
use crate::arch::aarch64::host::counter;
use crate::arch::aarch64::host::gic::{self as host_gic, GUEST_PHYSICAL_TIMER, GUEST_TIMER};
use crate::arch::aarch64::register::{isb, read_register, write_register};
use crate::arch::trace;
use crate::arch::{Machine, VcpuState};
use crate::device::affinity::affinity;
use crate::device::generic_timer::{GenericTimer, Register};
use crate::device::gic::{self, MAX_LISTS, VcpuGic};
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};

pub(in crate::arch::aarch64) use saved::SavedVcpu;

/// Registers, interrupt state and timer of one vCPU.
pub(crate) struct ArchVcpu {
    /// The registers that each exit stores.
    pub(in crate::arch::aarch64) registers: Registers,
    /// The vCPU's activity.
    pub(in crate::arch::aarch64) activity: Activity,
    /// Time of the last exit, in ticks of the host's clock.
    pub(super) left_at: u64,
    /// When it continues without an interrupt, if it waits: the time of a WFIT, in CNTVCT_EL0.
    wait_ends_at: Option<u64>,
    el1: El1,
    fpu: FpuState,
    /// Breakpoints and similar.
    pub(in crate::arch::aarch64) debug: Debug,
    /// VMPIDR_EL2: the affinity that the guest sees.
    affinity: u64,
    /// The ID registers that the guest reads: those that it was told of at its boot, perhaps by another host.
    pub(in crate::arch::aarch64) id_registers: Arc<IdRegisters>,
    pub(super) stage2_root: Hpa,
    /// HCR_EL2.
    hcr: u64,
    /// CNTVOFF_EL2: how far the host's counter is ahead of the guest's. All vCPUs of a VM have the same. Zero, unless
    /// the VM was saved: its time stood still then.
    counter_offset: i64,
    timer: Timer,
    /// Its physical timer (CNTP), which traps.
    physical_timer: GenericTimer,
    /// The vCPU's private interrupts, and the interrupts in list registers.
    pub(in crate::arch::aarch64) gic: VcpuGic,
    /// The guest's side of the interrupt controller while it is not in the pCPU.
    interface: Interface,
    /// The list registers of this pCPU are known to be empty.
    pub(super) lists_are_clear: bool,
    /// The machine has reported an error that is this guest's, after the guest was left.
    pub(super) has_erred: bool,
    /// Whether registers of EL1 and timer are in the pCPU, not here.
    is_loaded: bool,
    pub(super) tags: VcpuTags,
}

/// The guest's virtual timer while it is not in the pCPU.
#[derive(Clone, Copy, Debug, Default)]
struct Timer {
    control: u64,
    deadline: u64,
}

impl Timer {
    /// The guest's count at which its interrupt comes, if the timer is on.
    fn due(self) -> Option<u64> {
        (self.control & (timer_control::ENABLE | timer_control::IMASK) == timer_control::ENABLE)
            .then_some(self.deadline)
    }
}

/// The guest's side of the interrupt controller: the state behind its ICC registers.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Interface {
    /// ICH_VMCR_EL2: priority mask, enables.
    control: u64,
    /// ICH_AP0R0_EL2 and ICH_AP1R0_EL2: priorities of the active interrupts. With five bits of priority there are no
    /// more registers.
    active: [u64; 2],
}

impl Interface {
    fn load(&self) {
        // SAFETY: the guest's side of the interrupt controller.
        unsafe { write_register!("ich_vmcr_el2", self.control) };
        // SAFETY: as above.
        unsafe { write_register!("ich_ap0r0_el2", self.active[0]) };
        // SAFETY: as above.
        unsafe { write_register!("ich_ap1r0_el2", self.active[1]) };
    }

    fn save(&mut self) {
        self.control = read_register!("ich_vmcr_el2");
        self.active = [read_register!("ich_ap0r0_el2"), read_register!("ich_ap1r0_el2")];
    }
}

/// PSTATE at start: EL1 with its own stack, everything masked.
const PSTATE_AT_START: u64 = spsr::EL1H | spsr::D | spsr::A | spsr::I | spsr::F;

impl VcpuState<Machine> for ArchVcpu {
    /// A vCPU that is off. `stage2_root` is the HPA of the VM's stage-2 root.
    fn new(index: u32, config: &VmConfig, stage2_root: Hpa, tags: VcpuTags) -> Self {
        Self {
            registers: Registers::default(),
            activity: Activity::Off,
            left_at: 0,
            wait_ends_at: None,
            el1: El1::new(),
            fpu: FpuState::new(),
            debug: Debug::new(),
            affinity: affinity(index) | mpidr::RES1,
            id_registers: id_registers::offered().clone(),
            stage2_root,
            hcr: el2::hcr(),
            counter_offset: 0,
            timer: Timer::default(),
            physical_timer: GenericTimer::default(),
            gic: VcpuGic::new(gic_config(index, config.vcpus)),
            interface: Interface::default(),
            lists_are_clear: false,
            has_erred: false,
            is_loaded: false,
            tags,
        }
    }

    /// Pages that only the pCPU that runs the vCPU writes: none, everything is in its block.
    fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        core::iter::empty()
    }

    /// Starts the first vCPU as the kernel's boot protocol wants it.
    fn start_at(&mut self, entry: &KernelEntry) {
        self.start(Start { entry: entry.pc.0, context: entry.device_tree.0 });
    }

    /// The vCPU comes to this pCPU; `came_back` if it ran here last, and nowhere else since.
    fn load(&mut self, cpu: &HostContext, tags: &mut CpuTags, came_back: bool) {
        self.tags.arrive(tags, came_back);
        // SAFETY: the VM's own tables, which exist as long as the vCPU, under the VM's own tag until it departs.
        unsafe { write_register!("vttbr_el2", tags::vttbr(self.stage2_root, self.tags.tag())) };
        trace::note(|| tags::load_of(tags::vttbr(self.stage2_root, self.tags.tag())));
        // SAFETY: the guest's affinity does not affect EL2.
        unsafe { write_register!("vmpidr_el2", self.affinity) };
        // SAFETY: made by `el2::hcr`: stage 2 is on, interrupts go to EL2.
        unsafe { write_register!("hcr_el2", self.hcr) };
        // SAFETY: EL2 reads the physical counter.
        unsafe { write_register!("cntvoff_el2", self.counter_offset) };
        // The physical counter is the host's, so with an offset its reads trap, as the physical timer always does.
        let untrapped = if self.counter_offset == 0 { cnthctl_el2::EL1PCTEN } else { 0 };
        // SAFETY: gives the guest at most the physical counter.
        unsafe { write_register!("cnthctl_el2", untrapped) };
        isb();
        self.el1.load();
        el2::clear_hidden(cpu);
        self.fpu.arrive(cpu, came_back);
        self.debug.arrive();
        self.load_timer();
        self.interface.load();
        self.lists_are_clear = false;
        // The physical interrupt of the guest's timer must not come again before the guest has ended the virtual one.
        if self.gic.holds_linked(GUEST_TIMER) {
            host_gic::set_guest_timer_active(true);
        }
        self.is_loaded = true;
        self.left_at = counter::now();
    }

    /// The vCPU leaves this pCPU.
    fn unload(&mut self, tags: &mut CpuTags) {
        tags::complete_guests_flushes();
        self.has_erred |= take_error();
        self.tags.depart(tags);
        self.timer = Timer { control: read_register!("cntv_ctl_el0"), deadline: read_register!("cntv_cval_el0") };
        // SAFETY: the guest's timer, which must not fire while its guest is away.
        unsafe { write_register!("cntv_ctl_el0", 0u64) };
        self.note_timer();
        if self.gic.holds_linked(GUEST_TIMER) {
            host_gic::set_guest_timer_active(false);
        }
        self.interface.save();
        self.el1.save();
        self.fpu.depart();
        self.debug.depart();
        self.is_loaded = false;
    }

    /// Enables the trap of WFE only while others wait for the pCPU.
    fn renew_intercepts(&mut self, others_wait: bool) {
        let hcr = if others_wait { self.hcr | hcr_el2::TWE } else { self.hcr & !hcr_el2::TWE };
        if hcr != self.hcr {
            self.hcr = hcr;
            // SAFETY: as in `load`, and WFE traps or does not.
            unsafe { write_register!("hcr_el2", hcr) };
        }
    }

    /// All TLB entries of the guest on this pCPU go before its next instruction.
    fn flush_whole(&mut self) {
        self.tags.void();
    }

    /// As [`Self::flush_whole`]: no guest requests single pages, because its own instructions flush them. Returns that
    /// no pages were flushed one by one.
    fn flush_pages(&mut self, _: Pages) -> u64 {
        self.flush_whole();
        0
    }

    /// Time of the last exit, in ticks of the host's clock.
    fn left_at(&self) -> u64 {
        self.left_at
    }

    /// Makes a waiting vCPU active if something ends its wait. Returns whether it is active.
    fn try_wake(&mut self) -> bool {
        let wakes = self.activity == Activity::Halted
            && (self.wait_ends_at.is_some_and(|end| end <= self.count())
                || self.gic.interrupts(self.priority_mask())
                || (!self.gic.holds_linked(GUEST_TIMER) && self.timer_is_due()));
        if wakes {
            self.activity = Activity::Active;
            self.wait_ends_at = None;
        }
        wakes
    }

    #[inline]
    fn activity(&mut self) -> &mut Activity {
        &mut self.activity
    }

    /// Whether only another vCPU can make this one run again.
    fn is_dormant(&self) -> bool {
        match self.activity {
            Activity::Active | Activity::Traced => false,
            Activity::Off => true,
            Activity::Halted if self.wait_ends_at.is_some() => false,
            Activity::Halted => {
                let timer = if self.timer_is_on() { 1 << GUEST_TIMER } else { 0 };
                let physical = if self.physical_timer.interrupts() { 1 << GUEST_PHYSICAL_TIMER } else { 0 };
                !self.gic.hears(self.priority_mask(), timer | physical)
            }
        }
    }

    /// When the vCPU's own timer expires, or its wait is over, in host ticks. While the vCPU is on a pCPU, that pCPU
    /// handles the timer.
    #[inline]
    fn deadline(&self) -> Option<u64> {
        let timer = if self.is_loaded || self.gic.holds_linked(GUEST_TIMER) { None } else { self.timer.due() };
        let count = earliest(earliest(timer, self.physical_timer.deadline()), self.wait_ends_at)?;
        // A count that is never reached stays that.
        Some(count.saturating_add_signed(self.counter_offset))
    }

    /// The tags, to be freed when the vCPU is removed.
    fn into_tags(self) -> VcpuTags {
        self.tags
    }
}

impl ArchVcpu {
    /// Turns the vCPU on: registers as after reset.
    pub(in crate::arch::aarch64) fn start(&mut self, start: Start) {
        self.registers = Registers { pc: start.entry, pstate: PSTATE_AT_START, ..Registers::default() };
        self.registers.x[0] = start.context;
        self.el1 = El1::new();
        self.timer = Timer::default();
        self.write_physical_timer(Register::Control, 0);
        self.physical_timer = GenericTimer::default();
        self.interface = Interface::default();
        if self.is_loaded {
            self.debug.depart();
            el1::disable_walks();
            self.el1.load();
            self.load_timer();
            self.interface.load();
        }
        self.debug = Debug::new();
        self.activity = Activity::Active;
        self.wait_ends_at = None;
    }

    /// The guest's counter now: CNTVCT_EL0, and CNTPCT_EL0 as the guest reads it.
    #[inline]
    pub(in crate::arch::aarch64) fn count(&self) -> u64 {
        self.count_at(counter::now())
    }

    /// The guest's counter at a tick of the host's.
    #[inline]
    pub(in crate::arch::aarch64) fn count_at(&self, tick: u64) -> u64 {
        tick.wrapping_sub(self.counter_offset.cast_unsigned())
    }

    /// The guest's counter is `count` at a tick of the host's. The vCPU is on no pCPU.
    pub(in crate::arch::aarch64) fn set_count(&mut self, count: u64, tick: u64) {
        self.counter_offset = tick.wrapping_sub(count).cast_signed();
    }

    /// Whether it is on.
    pub(in crate::arch::aarch64) fn is_on(&self) -> bool {
        self.activity != Activity::Off
    }

    fn load_timer(&self) {
        // SAFETY: the guest's timer; its interrupt goes to EL2.
        unsafe { write_register!("cntv_cval_el0", self.timer.deadline) };
        // SAFETY: as above.
        unsafe { write_register!("cntv_ctl_el0", self.timer.control) };
    }

    /// Whether the condition of the guest's timer holds, and it may interrupt.
    fn timer_is_due(&self) -> bool {
        if self.is_loaded {
            const CONDITION: u64 = timer_control::ENABLE | timer_control::ISTATUS;
            read_register!("cntv_ctl_el0") & (CONDITION | timer_control::IMASK) == CONDITION
        } else {
            self.timer.due().is_some_and(|due| due <= self.count())
        }
    }

    /// Whether the guest's timer interrupts it at some time.
    fn timer_is_on(&self) -> bool {
        if self.is_loaded {
            let control = read_register!("cntv_ctl_el0");
            control & (timer_control::ENABLE | timer_control::IMASK) == timer_control::ENABLE
        } else {
            self.timer.due().is_some()
        }
    }

    /// Fires a timer that has expired at the host's tick `now`: the physical one. The virtual one fires by itself when
    /// the vCPU is back on a pCPU.
    #[inline]
    pub(crate) fn expire_timer(&mut self, now: u64) {
        if let Some(level) = self.physical_timer.settle(self.count_at(now)) {
            self.gic.set_line(GUEST_PHYSICAL_TIMER, level);
        }
    }

    /// The guest reads its physical timer. The guest has one counter, by both names.
    pub(in crate::arch::aarch64) fn read_physical_timer(&self, register: Register) -> u64 {
        self.physical_timer.read(register, self.count())
    }

    /// The guest writes its physical timer.
    pub(in crate::arch::aarch64) fn write_physical_timer(&mut self, register: Register, value: u64) {
        let now = counter::now();
        self.physical_timer.write(register, value, self.count_at(now));
        self.expire_timer(now);
    }

    /// The guest wants its vector registers. False when it has them.
    #[must_use]
    pub(super) fn open_fpu(&mut self, cpu: &HostContext) -> bool {
        self.fpu.open(cpu)
    }

    /// After an exit: reads how the guest has changed its interrupts.
    #[inline]
    pub(super) fn fold_interrupts(&mut self, tally: Tally<'_>) {
        // With empty list registers the interface has no news, and does not change.
        if !self.gic.is_idle() {
            const SPLITS_END: u64 = 1 << 9;
            let splits_end = read_register!("ich_vmcr_el2") & SPLITS_END != 0;
            let taken = self.gic.fold(host_gic::read_list, read_register!("ich_hcr_el2"), splits_end);
            tally.add(|count| &count.irq_injections, taken);
            // The requests of the guest's interrupts were read; off, so that they do not come again. SAFETY: until the
            // next entry no code uses the list registers.
            unsafe { write_register!("ich_hcr_el2", 0u64) };
            isb();
            self.lists_are_clear = false;
        }
    }

    /// Whether there is work on interrupts before the next entry.
    #[inline]
    pub(in crate::arch::aarch64) fn has_interrupt_news(&self) -> bool {
        self.gic.has_changed() || self.gic.holds_linked(GUEST_TIMER) || host_gic::has_guest_timer_fired()
    }

    /// The guest's timer may have interrupted this pCPU.
    #[inline]
    fn note_timer(&mut self) {
        if host_gic::guest_timer_fired() {
            self.gic.set_line(GUEST_TIMER, true);
        }
    }

    /// The guest's timer has interrupted this pCPU. Or it had, and the guest has set it again before it took the
    /// interrupt, which then is none. Returns whether the latter is possible.
    #[inline]
    pub(in crate::arch::aarch64) fn take_timer(&mut self) -> bool {
        self.note_timer();
        let is_gone = self.gic.holds_linked(GUEST_TIMER) && !self.timer_is_due();
        if is_gone {
            self.gic.set_line(GUEST_TIMER, false);
        }
        is_gone
    }

    /// The guest has written registers of its interrupt controller, or set its timer again. If this ended the timer's
    /// interrupt, the physical one must end as well, or there would never be another. If this made it pending, the
    /// guest's end of it will be an end of the physical one, which must be active then.
    pub(in crate::arch::aarch64) fn check_timer_link(&mut self) {
        host_gic::set_guest_timer_active(self.gic.holds_linked(GUEST_TIMER));
    }

    /// Only interrupts of higher priority than this interrupt the guest: because of its mask, or its active interrupt.
    fn priority_mask(&self) -> u8 {
        const ENABLED: u64 = 1 << 1;
        let mut interface = self.interface;
        if self.is_loaded {
            interface.save();
        }
        if interface.control & ENABLED == 0 {
            return 0;
        }
        let [_, _, _, mask, ..] = interface.control.to_le_bytes();
        // A bit for each of the 32 priorities with an active interrupt, the highest priority lowest.
        let handled = (interface.active[0] | interface.active[1]).trailing_zeros();
        u8::try_from(handled * 8).map_or(mask, |handled| mask.min(handled))
    }

    /// Where the guest is, for a log line.
    pub(crate) fn whereabouts(&self) -> Whereabouts<'_> {
        Whereabouts(self)
    }

    /// What to do for the guest's wait instruction.
    #[inline]
    pub(super) fn rest(&self, syndrome: Syndrome) -> Rest {
        syndrome.wait().rest(self.count(), |number| self.general(number))
    }

    /// The vCPU waits for an interrupt, at most until its counter reaches `until`.
    #[inline]
    pub(super) fn sleep(&mut self, until: Option<u64>) {
        self.activity = Activity::Halted;
        self.wait_ends_at = until;
    }

    /// Why the guest was left.
    #[inline]
    pub(super) fn syndrome(&self) -> Syndrome {
        Syndrome(self.registers.esr)
    }

    /// A general register; number 31 is zero.
    #[inline]
    pub(in crate::arch::aarch64) fn general(&self, number: u8) -> u64 {
        self.registers.x.get(usize::from(number)).copied().unwrap_or(0)
    }

    /// Sets a general register; number 31 takes nothing.
    #[inline]
    pub(in crate::arch::aarch64) fn set_general(&mut self, number: u8, value: u64) {
        if let Some(register) = self.registers.x.get_mut(usize::from(number)) {
            *register = value;
        }
    }

    /// Goes on behind the instruction that was emulated.
    #[inline]
    pub(in crate::arch::aarch64) fn skip(&mut self) {
        self.registers.pc = self.registers.pc.wrapping_add(if self.syndrome().is_long() { 4 } else { 2 });
        if self.registers.pstate & spsr::SS != 0 {
            // The step is done.
            self.registers.pstate &= !spsr::SS;
        }
    }

    /// The guest gets an undefined-instruction exception.
    #[cold]
    pub(in crate::arch::aarch64) fn undefined(&mut self) {
        self.raise(IL);
    }

    /// The guest gets a synchronous external abort for the access that was left.
    #[cold]
    pub(in crate::arch::aarch64) fn external_abort(&mut self, is_fetch: bool) {
        const INSTRUCTION: u64 = 0x20 << 26;
        const DATA: u64 = 0x24 << 26;
        /// The same class, from the same level.
        const SAME_LEVEL: u64 = 1 << 26;
        const EXTERNAL: u64 = 0x10;
        let class = if is_fetch { INSTRUCTION } else { DATA };
        let level = if self.registers.pstate & spsr::MODE == 0 || self.is_in_aarch32() { 0 } else { SAME_LEVEL };
        // SAFETY: a register of the guest's.
        unsafe { write_register!("far_el1", self.registers.far) };
        self.raise(class | level | IL | EXTERNAL);
    }

    fn is_in_aarch32(&self) -> bool {
        self.registers.pstate & 0x10 != 0
    }

    /// Takes a synchronous exception to EL1 (Arm ARM, D1.3.6).
    fn raise(&mut self, esr: u64) {
        const SP_EL0_VECTORS: u64 = 0;
        const SAME_LEVEL: u64 = 0x200;
        const LOWER_64: u64 = 0x400;
        const LOWER_32: u64 = 0x600;
        /// SCTLR_EL1.SPAN: PAN does not change.
        const SPAN: u64 = 1 << 23;
        let pstate = self.registers.pstate;
        let offset = match pstate & spsr::MODE {
            spsr::EL1H => SAME_LEVEL,
            0b0100 => SP_EL0_VECTORS,
            0b0000 => LOWER_64,
            _ => LOWER_32,
        };
        debug_assert!(self.is_loaded, "only a vCPU that just left its guest raises exceptions");
        let control = read_register!("sctlr_el1");
        // SAFETY: registers of the guest's.
        unsafe { write_register!("esr_el1", esr) };
        // SAFETY: as above.
        unsafe { write_register!("elr_el1", self.registers.pc) };
        // SAFETY: as above.
        unsafe { write_register!("spsr_el1", pstate) };
        let has_pan = read_register!("id_aa64mmfr1_el1") >> 20 & 0xf != 0;
        let pan = if has_pan && control & SPAN == 0 { spsr::PAN } else { pstate & spsr::PAN };
        let has_ssbs = read_register!("id_aa64pfr1_el1") >> 4 & 0xf != 0;
        let bypass = if has_ssbs && control & sctlr::DSSBS != 0 { spsr::SSBS } else { 0 };
        /// What an exception does not change: the flags, and DIT.
        const KEPT: u64 = 0xf << 28 | spsr::DIT;
        self.registers.pstate = pstate & KEPT | pan | bypass | PSTATE_AT_START;
        self.registers.pc = read_register!("vbar_el1").wrapping_add(offset);
    }
}

/// Constants of a vCPU's interrupt state, on this machine.
fn gic_config(number: u32, vcpus: u32) -> gic::Config {
    let lists = host_gic::list_registers().clamp(2, MAX_LISTS);
    gic::Config { number, vcpus, lists, linked: 1 << GUEST_TIMER }
}

/// The earlier of two times.
fn earliest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

/// ESR_EL1.IL: an instruction of 32 bits; class zero is "unknown reason".
const IL: u64 = 1 << 25;

/// Whether the machine has an unreported error (SError). It came from code that ran here, and the next guest must not
/// get it. Without the RAS extension this cannot be queried: there the next guest that is entered gets it.
fn take_error() -> bool {
    const ERROR: u64 = 1 << 31;
    if !el2::features().has_ras {
        return false;
    }
    // SAFETY: ESB, a barrier: a pending error becomes a bit of DISR_EL1.
    unsafe { core::arch::asm!("hint #16", options(nostack, preserves_flags)) };
    // DISR_EL1, by its encoding.
    let has_error = read_register!("s3_0_c12_c1_1") & ERROR != 0;
    if has_error {
        // SAFETY: it was seen.
        unsafe { write_register!("s3_0_c12_c1_1", 0u64) };
    }
    has_error
}

/// Does the flush that an entry needs on this pCPU's TLB.
#[cold]
pub(super) fn flush(entry: tlb_tag::by_vm::GuestEntry<'_>, tally: Tally<'_>) {
    let what = entry.flush();
    tags::flush(what);
    tally.add(|count| &count.tlb_flushes, (what != Flush::Nothing).into());
    tally.add(|count| &count.tlb_flushes_all, (what == Flush::Everything).into());
    tally.add(|count| &count.tag_assignments, entry.assigned().into());
    tally.add(|count| &count.tag_generations, entry.new_generation().into());
    // From here to the guest nothing can go wrong.
    entry.completed();
}

/// Ends the VM because of this vCPU's action.
#[cold]
pub(in crate::arch::aarch64) fn stop(run: &mut Running<'_>, reason: StopReason, what: &str) -> Next {
    run.vm.stop_by(run.index, reason, format_args!("vCPU {}: {what}, {}", run.index, run.owner.arch.whereabouts()));
    Next::Resume
}

/// See [`ArchVcpu::whereabouts`].
pub(crate) struct Whereabouts<'a>(&'a ArchVcpu);

impl core::fmt::Display for Whereabouts<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Registers { pc, pstate, esr, far, hpfar, x, .. } = &self.0.registers;
        write!(
            f,
            "at pc {pc:#x} pstate {pstate:#x} x30 {:#x}, {}, syndrome {esr:#x} far {far:#x} hpfar {hpfar:#x}",
            x[30],
            class_name(Syndrome(*esr).class()),
        )
    }
}
