//! A vCPU: its registers, its local APIC, and its next event.
//!
//! The pCPU that runs the vCPU owns all of this. Others reach it through its mailbox and through
//! [`Posted`](super::delivery::Posted). [`Hardware`] has the registers that the processor loads at an entry and saves
//! at an exit.

#![expect(unsafe_code, reason = "loads debug registers and TSC_AUX")]

use core::arch::asm;

use abi::control::StopReason;
use abi::payload::{ApicMode, Devices, VmConfig};
use addr::Hpa;
use hyperv_defs::msr::VpAssistMsr;
use partition::CpuidResults;
use shootdown::Pages;
use spin::Once;
use tlb_tag::{CpuTags, Flush, VcpuTags};
use x86_64::registers::model_specific::Msr;
use x86_boot::KernelEntry;
use x86_defs::cpuid::leaf_8000_0001_edx;
use x86_defs::msr;
use x86_defs::registers::{dr6, rflags, vector};
use x86_events::{Events, Flags};

use super::assist::Assist;
use super::emulate::{self, Emulator};
use super::events::Armed;
use super::fpu::FpuState;
use super::state::{Gprs, Registers, State as _, SystemCalls, gpr};
use super::synic::VcpuSynic;
use super::{intercept, own_machine, spec_ctrl};
use crate::arch::x86_64::backend::{Exit, Hardware, HostContext, Injection as _, WorldSwitch as _};
use crate::arch::x86_64::host::processor::leaf;
use crate::arch::x86_64::host::tsc;
use crate::arch::x86_64::speculation;
use crate::arch::{Machine, VcpuState};
use crate::device::interrupt::Pin;
use crate::device::local_apic::{self, LocalApic, Pinned};
use crate::device::msr::KeptMsrs;
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};

/// Registers, interrupt state and save areas of one vCPU.
pub(crate) struct ArchVcpu {
    /// General registers, except those in [`hardware`](Self::hardware).
    pub(in crate::arch::x86_64) gprs: Gprs,
    /// The registers that the processor loads at an entry and saves at an exit.
    pub(in crate::arch::x86_64) hardware: Hardware,
    /// The vCPU's activity.
    pub(in crate::arch::x86_64) activity: Activity,
    /// The local APIC, this pCPU's half of it.
    pub(in crate::arch::x86_64) apic: LocalApic,
    /// Exceptions and NMIs that wait.
    pub(super) events: Events,
    /// The entry's request for control.
    pub(super) armed: Armed,
    /// How the next single-stepped instruction uses RFLAGS.
    pub(super) at_flags: Flags,
    /// The PUSHF that was stepped over has saved the hypervisor's TF.
    pub(in crate::arch::x86_64) shows_trap_flag: bool,
    /// When the guest was last left, by this pCPU's counter.
    pub(in crate::arch::x86_64) left_at: u64,
    /// Results of CPUID that its parent has registered, if its VM is a child.
    pub(super) cpuid: CpuidResults,
    /// Model-specific registers that are stored for the guest without effect.
    pub(super) kept: KeptMsrs,
    pub(super) fpu: FpuState,
    debug_addresses: [u64; 4],
    tsc_aux: u64,
    /// Added to the host's counter. Only a parent changes it, for all vCPUs of its child.
    tsc_offset: i64,
    /// Where the guest has its Hyper-V assist page.
    pub(super) vp_assist: VpAssistMsr,
    /// What that page says of ends of interrupts. A child's says nothing: its parent may move it to another host.
    pub(super) assist: Assist,
    /// Its synthetic interrupt controller and timers.
    pub(super) synic: VcpuSynic,
    /// The tag of its TLB entries, and its owed flushes.
    pub(in crate::arch::x86_64) tags: VcpuTags,
    /// State and caches of instruction emulation.
    pub(super) emulator: Emulator,
}

/// The fastest periodic timer that a guest gets: 20 µs.
const SHORTEST_PERIODS_PER_SECOND: u64 = 50_000;

impl VcpuState<Machine> for ArchVcpu {
    /// A vCPU after power-on that waits for a start-up message. `stage2_root` is the HPA of the VM's stage-2 tables.
    #[inline(never)]
    fn new(index: u32, config: &VmConfig, stage2_root: Hpa, tags: VcpuTags) -> Self {
        let mut vcpu = Self {
            gprs: [0; 16],
            hardware: Hardware::new(stage2_root),
            activity: Activity::Off,
            apic: apic_of(index, config),
            events: Events::new(),
            armed: Armed::Nothing,
            at_flags: Flags::Kept,
            shows_trap_flag: false,
            left_at: 0,
            cpuid: CpuidResults::new(),
            kept: KeptMsrs::new(),
            fpu: FpuState::new(),
            debug_addresses: [0; 4],
            tsc_aux: 0,
            tsc_offset: 0,
            vp_assist: VpAssistMsr::default(),
            assist: Assist::default(),
            synic: VcpuSynic::new(index, config),
            tags,
            emulator: emulate::new(index, config.decode_cache),
        };
        if config.devices == Devices::All {
            vcpu.hardware.open_ports(own_machine::closed_ports());
        }
        vcpu.reset_registers();
        speculation::vcpu_made();
        vcpu
    }

    /// Pages that only the pCPU that runs the vCPU writes.
    fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        self.hardware.own_pages().chain([self.fpu.own_pages()]).chain(emulate::own_pages(&self.emulator))
    }

    /// Starts the vCPU as a kernel's boot protocol wants it.
    fn start_at(&mut self, entry: &KernelEntry) {
        self.reset_registers();
        self.gprs[gpr::RDX] = 0;
        self.hardware.set_registers(&Registers::at_entry(entry, &mut self.gprs));
        self.activity = Activity::Active;
    }

    /// The vCPU comes to this pCPU; `came_back` if it ran here last, and nowhere else since.
    fn load(&mut self, cpu: &HostContext, tags: &mut CpuTags, came_back: bool) {
        speculation::arrive(cpu, self.hardware.root());
        spec_ctrl::load(self);
        self.fpu.load(cpu, came_back);
        if has_tsc_aux() {
            // SAFETY: the MSR exists; the hypervisor uses neither RDTSCP nor RDPID. The value came from the same MSR.
            unsafe { Msr::new(msr::TSC_AUX).write(self.tsc_aux) };
        }
        write_debug_addresses(&self.debug_addresses);

        // Entries cached here before the vCPU ran on another pCPU are stale: the guest may have flushed them there.
        self.tags.arrive(tags, came_back);
        self.hardware.arrive(tsc::offset().wrapping_add_signed(self.tsc_offset));
        self.left_at = tsc::raw();
    }

    /// The vCPU leaves this pCPU.
    fn unload(&mut self, _: &mut CpuTags) {
        self.hardware.leave();
        spec_ctrl::unload(self);
        self.fpu.save();
        if has_tsc_aux() {
            // SAFETY: the MSR exists; reading it has no effect.
            self.tsc_aux = unsafe { Msr::new(msr::TSC_AUX).read() };
        }
        self.debug_addresses = read_debug_addresses();
    }

    /// Sets the intercepts that change at run time: PAUSE, only while another vCPU waits for the pCPU, and those of the
    /// back end.
    fn renew_intercepts(&mut self, others_wait: bool) {
        self.hardware.renew_intercepts(others_wait);
    }

    /// All TLB entries of the guest go before its next instruction.
    fn flush_whole(&mut self) {
        self.tags.void();
    }

    /// Flushes the TLB entries for `pages` of the guest's address space, unless all entries will be flushed anyway.
    /// Returns the number of pages that were flushed one by one.
    fn flush_pages(&mut self, pages: Pages) -> u64 {
        if self.tags.is_void() {
            return 0;
        }
        let tag = self.tags.tag();
        for page in 0..pages.count() {
            Hardware::flush_page(tag, pages.first().wrapping_add(page << 12));
        }
        pages.count()
    }

    /// When the guest was last left.
    fn left_at(&self) -> u64 {
        tsc::at(self.left_at)
    }

    /// Whether a halted vCPU has something that ends its halt; if so it is active again.
    fn try_wake(&mut self) -> bool {
        let wakes = self.activity == Activity::Halted
            && (self.events.wakes()
                || (self.takes_interrupts() && (self.apic.pending().is_some() || self.events.has_external())));
        if wakes {
            self.activity = Activity::Active;
        }
        wakes
    }

    #[inline]
    fn activity(&mut self) -> &mut Activity {
        &mut self.activity
    }

    /// Whether nothing but an NMI, an INIT or a start-up message from another vCPU can ever make this one run again.
    fn is_dormant(&self) -> bool {
        match self.activity {
            Activity::Active | Activity::Traced => false,
            Activity::Halted => self.hardware.rflags() & rflags::IF == 0,
            Activity::Off => true,
        }
    }

    /// When the vCPU's own timer is due, in host TSC ticks.
    #[inline]
    fn deadline(&self) -> Option<u64> {
        match (self.apic.deadline(), self.synic.due()) {
            (deadline, u64::MAX) => deadline,
            (deadline, due) => Some(deadline.map_or(due, |deadline| deadline.min(due))),
        }
    }

    /// The tags, to be freed when the vCPU is removed.
    fn into_tags(self) -> VcpuTags {
        self.tags
    }
}

fn apic_of(index: u32, config: &VmConfig) -> LocalApic {
    LocalApic::new(local_apic::Config {
        id: index,
        x2apic_offered: config.apic == ApicMode::X2Apic,
        bootstrap: index == 0,
        shortest_period: tsc::hz() / SHORTEST_PERIODS_PER_SECOND,
    })
}

impl ArchVcpu {
    /// Registers as after INIT (APM vol. 2, table 14-1).
    fn reset_registers(&mut self) {
        self.hardware.set_registers(&Registers::RESET);
        self.gprs = [0; 16];
        self.gprs[gpr::RDX] = u64::from(leaf(1).eax);
        self.debug_addresses = [0; 4];

        self.hardware.reset();
        self.events.reset();
        self.at_flags = Flags::Kept;
    }

    /// INIT: reset, then wait for a start-up message (APM vol. 2, 14.1.1). The vector registers keep their state, as on
    /// hardware.
    pub(crate) fn init(&mut self) {
        self.reset_registers();
        self.apic.init();
        self.synic.reset();
        self.activity = Activity::Off;
    }

    /// The state after power-on. Its tag, its pages and the counter that all vCPUs of its VM share stay.
    pub(super) fn power_on(&mut self, index: u32, config: &VmConfig) {
        self.reset_registers();
        self.hardware.set_system_calls(&SystemCalls::default());
        self.apic = apic_of(index, config);
        self.events = Events::new();
        self.armed = Armed::Nothing;
        self.shows_trap_flag = false;
        self.cpuid = CpuidResults::new();
        self.kept = KeptMsrs::new();
        spec_ctrl::place(self, 0);
        self.fpu.reset();
        self.tsc_aux = 0;
        self.vp_assist = VpAssistMsr::default();
        self.assist = Assist::default();
        self.synic = VcpuSynic::new(index, config);
        self.activity = Activity::Off;
    }

    /// Start-up IPI: begin in real mode at page `page`. No effect unless the vCPU waits for it.
    pub(crate) fn start_up(&mut self, page: u8) {
        if self.activity == Activity::Off {
            self.hardware.set_registers(&Registers::at_page(page));
            self.activity = Activity::Active;
        }
    }

    /// DR0 to DR3, of a vCPU that is on no pCPU.
    pub(super) fn debug_addresses(&mut self) -> &mut [u64; 4] {
        &mut self.debug_addresses
    }

    /// TSC_AUX, of a vCPU that is on no pCPU.
    pub(super) fn tsc_aux(&self) -> u64 {
        self.tsc_aux
    }

    /// Writes it.
    pub(super) fn set_tsc_aux(&mut self, value: u64) {
        self.tsc_aux = value;
    }

    /// The guest's time-stamp counter.
    pub(super) fn guest_tsc(&self) -> u64 {
        self.guest_tsc_at(tsc::now())
    }

    /// The same when the host's was `tick`.
    pub(super) fn guest_tsc_at(&self, tick: u64) -> u64 {
        tick.wrapping_add_signed(self.tsc_offset)
    }

    /// The deadline of a timer in deadline mode, by the guest's counter; zero if there is none.
    pub(super) fn tsc_deadline(&self) -> u64 {
        match self.apic.tsc_deadline(tsc::now()) {
            0 => 0,
            tick => tick.wrapping_add_signed(self.tsc_offset),
        }
    }

    /// The host's tick at which the guest's counter is `deadline`. Zero, which disarms a timer, stays zero.
    #[inline]
    pub(super) fn host_tick(&self, deadline: u64) -> u64 {
        if self.tsc_offset == 0 { deadline } else { self.moved_tick(deadline) }
    }

    /// A tick before the start of the host's counter has passed. A tick beyond its end never comes.
    #[cold]
    fn moved_tick(&self, deadline: u64) -> u64 {
        match deadline {
            0 => 0,
            _ => deadline.saturating_add_signed(self.tsc_offset.saturating_neg()).max(1),
        }
    }

    /// The parent moves the counter: the vCPU is on no pCPU. A timer in deadline mode keeps its deadline.
    pub(super) fn set_tsc_offset(&mut self, offset: i64) {
        self.apic.move_deadline(self.tsc_offset.wrapping_sub(offset));
        self.tsc_offset = offset;
    }

    /// NMIs were posted.
    pub(crate) fn request_nmis(&mut self, count: u8) {
        self.events.request_nmis(count);
    }

    /// An external interrupt was posted.
    pub(super) fn request_external(&mut self, vector: u8) {
        self.events.request_external(vector);
    }

    /// It was withdrawn.
    pub(super) fn withdraw_external(&mut self) {
        self.events.withdraw_external();
    }

    /// A pin of its local APIC is asserted. If it leads to an old interrupt controller, that has `vector`.
    pub(super) fn assert_pin(&mut self, pin: Pin, vector: u8) {
        match self.apic.assert_pin(pin) {
            Pinned::Nmi => self.events.request_nmis(1),
            Pinned::External => self.events.request_external(vector),
            Pinned::Done => {}
        }
    }

    /// Ticks that the vCPU has had: in the guest, and in the hypervisor on its behalf.
    pub(in crate::arch::x86_64) fn runtime(&self, tally: Tally<'_>) -> u64 {
        tally.guest_ticks.get() + tally.host_ticks.get() + tsc::raw().wrapping_sub(self.left_at)
    }

    /// Whether all TLB entries of the VM are still good since the vCPU's last entry, if its epoch is `epoch` now.
    pub(in crate::arch::x86_64) fn has_seen(&self, epoch: u64) -> bool {
        self.tags.has_seen(epoch)
    }

    /// Requests an exit at the guest's next change of its task priority, if only that priority delays an interrupt.
    #[cold]
    pub(super) fn watch_task_priority(&mut self) {
        if self.apic.is_held_by_task_priority() {
            self.hardware.intercept_task_priority(true);
        }
    }

    /// The guest writes CR8, the class of its task priority.
    pub(super) fn write_cr8(&mut self, class: u8) {
        self.apic.set_cr8(class);
        self.hardware.intercept_task_priority(false);
    }

    /// Whether the guest takes an interrupt at its next instruction.
    #[inline]
    pub(super) fn takes_interrupts(&self) -> bool {
        self.hardware.rflags() & rflags::IF != 0 && !self.hardware.is_in_shadow()
    }

    /// Lets a due timer fire.
    pub(crate) fn expire_timer(&mut self, now: u64) {
        self.apic.expire(now);
        if self.synic.due() <= now {
            self.synic.expire(&mut self.apic, now);
        }
    }

    /// Where the guest is, for a log line.
    pub(crate) fn whereabouts(&self) -> Whereabouts<'_> {
        Whereabouts(self)
    }

    /// Skips the intercepted instruction of `length` bytes.
    ///
    /// The CPU reports the length if it can. Otherwise it is the length of the instruction's shortest form: a guest
    /// that adds prefixes to CPUID and similar instructions affects only itself.
    #[inline]
    pub(in crate::arch::x86_64) fn skip(&mut self, length: u64) {
        self.skip_to(self.hardware.next_rip().unwrap_or_else(|| self.hardware.rip().wrapping_add(length)));
    }

    /// Continues at `rip`, behind an emulated instruction.
    #[inline]
    pub(in crate::arch::x86_64) fn skip_to(&mut self, rip: u64) {
        self.hardware.set_rip(rip);
        self.hardware.set_shadow(false);
        if self.hardware.rflags() & (rflags::TF | rflags::RF) != 0 {
            self.complete_with_flags();
        }
    }

    /// An instruction was emulated with TF or RF set: TF traps behind it, RF is cleared (APM vol. 2, 13.1.4, 3.1.6).
    #[cold]
    fn complete_with_flags(&mut self) {
        let flags = self.hardware.rflags();
        self.hardware.set_rflags(flags & !rflags::RF);
        if flags & rflags::TF != 0 {
            let causes = self.hardware.dr6();
            self.hardware.set_dr6(causes | dr6::SINGLE_STEP);
            self.raise(vector::DEBUG, 0);
        }
    }

    /// The guest gets #UD.
    #[cold]
    pub(in crate::arch::x86_64) fn undefined(&mut self) {
        self.raise(vector::INVALID_OPCODE, 0);
    }

    /// The guest gets #GP(0).
    #[cold]
    pub(in crate::arch::x86_64) fn general_protection(&mut self) {
        self.raise(vector::GENERAL_PROTECTION, 0);
    }

    /// EDX:EAX.
    #[inline]
    pub(in crate::arch::x86_64) fn edx_eax(&self) -> u64 {
        self.gprs[gpr::RDX] << 32 | self.hardware.rax() & 0xffff_ffff
    }

    /// Sets EDX:EAX; the upper halves of RDX and RAX become zero.
    #[inline]
    pub(in crate::arch::x86_64) fn set_edx_eax(&mut self, value: u64) {
        self.hardware.set_rax(value & 0xffff_ffff);
        self.gprs[gpr::RDX] = value >> 32;
    }
}

/// The next entry has another tag, or something to flush.
#[cold]
pub(in crate::arch::x86_64) fn prepare_tag<'a>(
    entry: tlb_tag::GuestEntry<'a>,
    hardware: &mut Hardware,
    tally: Tally<'_>,
) -> tlb_tag::GuestEntry<'a> {
    hardware.set_tag(entry.tag(), entry.flush());
    tally.add(|count| &count.tlb_flushes, (entry.flush() != Flush::Nothing).into());
    tally.add(|count| &count.tlb_flushes_all, (entry.flush() == Flush::Everything).into());
    tally.add(|count| &count.tag_assignments, entry.assigned().into());
    tally.add(|count| &count.tag_generations, entry.new_generation().into());
    entry
}

/// The guest was left after such an entry, or could not be entered: then nothing was flushed.
#[cold]
pub(in crate::arch::x86_64) fn complete(entry: tlb_tag::GuestEntry<'_>, hardware: &mut Hardware) {
    if hardware.end_flush() {
        entry.completed();
    }
}

/// Ends the VM because of this vCPU's action. If it is a child, its parent decides.
#[cold]
pub(in crate::arch::x86_64) fn stop(run: &mut Running<'_>, reason: StopReason, what: &str) -> Next {
    if run.vm.as_child().is_some() {
        return intercept::unrecoverable(run, what);
    }
    run.vm.stop_by(run.index, reason, format_args!("vCPU {}: {what}, {}", run.index, run.owner.arch.whereabouts()));
    Next::Resume
}

fn has_tsc_aux() -> bool {
    // CPUID is slow, and below another hypervisor an exit; this is asked at each switch of vCPUs.
    static HAS: Once<bool> = Once::new();
    *HAS.call_once(|| leaf(0x8000_0001).edx & leaf_8000_0001_edx::RDTSCP != 0)
}

fn write_debug_addresses(addresses: &[u64; 4]) {
    let [dr0, dr1, dr2, dr3] = *addresses;
    // SAFETY: the host's DR7 enables no breakpoint, so these addresses mean nothing to it.
    unsafe {
        asm!("mov dr0, {}", "mov dr1, {}", "mov dr2, {}", "mov dr3, {}", in(reg) dr0, in(reg) dr1, in(reg) dr2, in(reg) dr3, options(nomem, nostack, preserves_flags));
    }
}

fn read_debug_addresses() -> [u64; 4] {
    let (dr0, dr1, dr2, dr3): (u64, u64, u64, u64);
    // SAFETY: reading debug registers has no effect while DR7.GD is clear, as it is in the host.
    unsafe {
        asm!("mov {}, dr0", "mov {}, dr1", "mov {}, dr2", "mov {}, dr3", out(reg) dr0, out(reg) dr1, out(reg) dr2, out(reg) dr3, options(nomem, nostack, preserves_flags));
    }
    [dr0, dr1, dr2, dr3]
}

/// See [`ArchVcpu::whereabouts`].
pub(crate) struct Whereabouts<'a>(&'a ArchVcpu);

impl core::fmt::Display for Whereabouts<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Some(Exit { reason, details: [first, second] }) = self.0.hardware.exit() else {
            return write!(f, "with a state that the CPU refuses to enter");
        };
        let Registers { rip, rsp, rflags, cs, control, cr2, cr3, .. } = self.0.hardware.registers();
        write!(
            f,
            "at rip {rip:#x} cs {:#x} rsp {rsp:#x} rflags {rflags:#x} cr0 {:#x} cr2 {cr2:#x} cr3 {cr3:#x} cr4 {:#x} efer {:#x}, \
             exit {reason:#x} info {first:#x} {second:#x}",
            cs.selector, control.cr0, control.cr4, control.efer,
        )
    }
}
