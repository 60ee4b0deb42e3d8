//! A vCPU on SVM: its registers, its local APIC, and its next event.
//!
//! Everything here belongs to the pCPU that runs the vCPU. Others reach it through its mailbox and through
//! [`crate::arch::x86_64::guest::routing::Posted`].

#![expect(unsafe_code, reason = "loads debug registers and TSC_AUX, and enters the guest")]

use abi::payload::{ApicMode, VmConfig};
use addr::{Hpa, Hva};
use alloc::boxed::Box;
use core::arch::asm;
use hyperv_defs::msr::VpAssistMsr;
use shootdown::Pages;
use tlb_tag::{CpuTags, Flush, VcpuTags};
use x86_64::registers::model_specific::Msr;
use x86_boot::{Entry, Mode, long64, protected32};
use x86_defs::cpuid::leaf_8000_0001_edx;
use x86_defs::registers::{cr0, dr6, efer, rflags, vector};
use x86_defs::vmcb::{ControlArea, Event, IntCtl, Intercept1, Intercept2, Intercept3, Segment, TlbControl, Vmcb};
use x86_defs::{exit_code, msr};
use x86_events::{Events, Flags};

use super::entry::{self, Gprs, gpr};
use super::events::{self, Armed};
use crate::arch::trace::{self, Event as Trace};
use crate::arch::x86_64::guest::emulate::{self, Emulator};
use crate::arch::x86_64::guest::fpu::FpuState;
use crate::arch::x86_64::guest::msr::MISC_ENABLE_RESET;
use crate::arch::x86_64::guest::synic::VcpuSynic;
use crate::arch::x86_64::host::tsc;
use crate::arch::x86_64::svm::{self, HostContext};
use crate::device::local_apic::{self, LocalApic};
use crate::device::memory_types::MemoryTypes;
use crate::layout::OwnPages;
use crate::vcpu::Tally;

/// Registers, interrupt state and save areas of one vCPU.
pub(crate) struct ArchVcpu {
    /// General registers but RAX and RSP.
    pub(in crate::arch::x86_64) gprs: Gprs,
    /// The control block, and its host physical address.
    pub(in crate::arch::x86_64) vmcb: Box<Vmcb>,
    vmcb_hpa: Hpa,
    /// The vCPU's activity.
    pub(super) activity: Activity,
    /// The local APIC, this pCPU's half of it.
    pub(in crate::arch::x86_64) apic: LocalApic,
    /// Exceptions and NMIs that wait.
    pub(super) events: Events,
    /// The entry's request for control.
    pub(super) armed: Armed,
    /// What the next single-stepped instruction does with RFLAGS.
    pub(super) at_flags: Flags,
    /// The PUSHF that was stepped over has saved the hypervisor's TF.
    pub(super) shows_trap_flag: bool,
    /// This machine's VMRUN does not restore an interrupt shadow.
    pub(super) loses_shadow: bool,
    /// When the guest was last left, by this pCPU's counter.
    pub(super) left_at: u64,
    /// Memory-type registers, stored for the guest without effect.
    pub(in crate::arch::x86_64) memory_types: MemoryTypes,
    /// MISC_ENABLE, the same.
    pub(in crate::arch::x86_64) misc_enable: u64,
    fpu: FpuState,
    debug_addresses: [u64; 4],
    tsc_aux: u64,
    /// Where the guest has its Hyper-V assist page. Nothing is written there after its first word was cleared.
    pub(in crate::arch::x86_64) vp_assist: VpAssistMsr,
    /// Its synthetic interrupt controller and timers.
    pub(in crate::arch::x86_64) synic: VcpuSynic,
    /// The ASID of its TLB entries, and its debts.
    tags: VcpuTags,
    /// State and caches of instruction emulation.
    pub(in crate::arch::x86_64) emulator: Emulator,
    /// INTN if INT instructions must be checked, see [`svm::may_keep_old_code`]; else nothing.
    looks_at: Intercept1,
}

/// A vCPU's activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Runs instructions.
    Active,
    /// The same, but traced: the loop's slow path runs before each entry.
    Watched,
    /// Halted until an interrupt that it takes.
    Halted,
    /// Was reset and waits for a start-up message.
    WaitsForStartup,
}

/// The fastest periodic timer that a guest gets: 20 µs.
const SHORTEST_PERIODS_PER_SECOND: u64 = 50_000;

/// PAT at reset (APM vol. 2, 7.8.2).
const PAT_RESET: u64 = 0x0007_0406_0007_0406;
/// DR6 and DR7 at reset.
const DR6_RESET: u64 = 0xffff_0ff0;
const DR7_RESET: u64 = 0x400;

/// Attributes in the VMCB's packed form.
mod attributes {
    /// Present, code, execute and read, accessed.
    pub(super) const CODE: u16 = 0x09b;
    /// Present, data, read and write, accessed.
    pub(super) const DATA: u16 = 0x093;
    /// Present, LDT.
    pub(super) const LDT: u16 = 0x082;
    /// Present, busy TSS.
    pub(super) const TSS: u16 = 0x08b;
}

fn hva_of<T>(object: &T) -> Hva {
    Hva(core::ptr::from_ref(object).addr() as u64)
}

/// A segment over the whole address space.
fn flat(selector: u16, attributes: u16) -> Segment {
    Segment { selector, attributes, limit: u32::MAX, base: 0 }
}

impl ArchVcpu {
    /// A vCPU after power-on that waits for a start-up message. `stage2_root` is the HPA of the VM's nested page table.
    #[inline(never)]
    pub(crate) fn new(index: u32, config: &VmConfig, stage2_root: Hpa, tags: VcpuTags) -> Self {
        let mut vmcb = Box::new(Vmcb::zeroed());
        let control = &mut vmcb.control;
        control.intercept_1 = Intercept1::INTR
            | Intercept1::NMI
            | Intercept1::INIT
            | Intercept1::CR0_SEL_WRITE
            | Intercept1::CPUID
            | Intercept1::RDPMC
            | Intercept1::INVD
            | Intercept1::HLT
            | Intercept1::INVLPGA
            | Intercept1::IOIO
            | Intercept1::MSR
            | Intercept1::TASK_SWITCH
            | Intercept1::SHUTDOWN;
        control.intercept_cr_write = CR4;
        control.intercept_2 = Intercept2::all();
        control.intercept_3 = Intercept3::empty();
        control.intercept_exceptions = events::EXCEPTIONS;
        let maps = svm::permission_maps();
        control.msrpm_base = maps.msrs().0;
        control.iopm_base = maps.ports().0;
        control.int_ctl = IntCtl(IntCtl::V_INTR_MASKING);
        control.np_control = 1;
        control.n_cr3 = stage2_root.0;

        let vmcb_hpa = svm::hpa_of(&*vmcb);
        let mut vcpu = Self {
            gprs: [0; 16],
            vmcb,
            vmcb_hpa,
            activity: Activity::WaitsForStartup,
            apic: LocalApic::new(local_apic::Config {
                id: index,
                x2apic_offered: config.apic == ApicMode::X2Apic,
                bootstrap: index == 0,
                shortest_period: tsc::hz() / SHORTEST_PERIODS_PER_SECOND,
            }),
            events: Events::new(),
            armed: Armed::Nothing,
            at_flags: Flags::Kept,
            shows_trap_flag: false,
            loses_shadow: svm::loses_interrupt_shadow(),
            left_at: 0,
            memory_types: MemoryTypes::new(),
            misc_enable: MISC_ENABLE_RESET,
            fpu: FpuState::new(),
            debug_addresses: [0; 4],
            tsc_aux: 0,
            vp_assist: VpAssistMsr::default(),
            synic: VcpuSynic::new(),
            tags,
            emulator: emulate::new(index, config.decode_cache),
            looks_at: if svm::may_keep_old_code() { Intercept1::INTN } else { Intercept1::empty() },
        };
        vcpu.reset_registers();
        vcpu
    }

    /// Pages that only the pCPU that runs the vCPU writes.
    pub(crate) fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        let vmcb = OwnPages { what: "VMCB", hva: hva_of(&*self.vmcb), bytes: size_of::<Vmcb>() };
        [vmcb, self.fpu.own_pages()].into_iter().chain(emulate::own_pages(&self.emulator))
    }

    /// Registers as after INIT (APM vol. 2, table 14-1).
    fn reset_registers(&mut self) {
        let save = &mut self.vmcb.save;
        let data = Segment { selector: 0, attributes: attributes::DATA, limit: 0xffff, base: 0 };
        save.cs = Segment { selector: 0xf000, attributes: attributes::CODE, limit: 0xffff, base: 0xffff_0000 };
        (save.ds, save.es, save.fs, save.gs, save.ss) = (data, data, data, data, data);
        save.gdtr = Segment { limit: 0xffff, ..Segment::default() };
        save.idtr = save.gdtr;
        save.ldtr = Segment { attributes: attributes::LDT, limit: 0xffff, ..Segment::default() };
        save.tr = Segment { attributes: attributes::TSS, limit: 0xffff, ..Segment::default() };
        save.cpl = 0;
        save.efer = efer::SVME;
        (save.cr0, save.cr2, save.cr3, save.cr4) = (cr0::CD | cr0::NW | cr0::ET, 0, 0, 0);
        (save.dr6, save.dr7) = (DR6_RESET, DR7_RESET);
        save.rflags = rflags::RESERVED_ONE;
        save.rip = 0xfff0;
        (save.rsp, save.rax) = (0, 0);
        save.g_pat = PAT_RESET;
        self.gprs = [0; 16];
        self.gprs[gpr::RDX] = u64::from(svm::leaf(1).eax);
        self.debug_addresses = [0; 4];

        let control = &mut self.vmcb.control;
        control.interrupt_shadow = 0;
        control.exit_int_info = Event::NONE;
        control.int_ctl = control.int_ctl.with_v_tpr(0);
        control.intercept_1.remove(Intercept1::IRET);
        self.events.reset();
        self.at_flags = Flags::Kept;
    }

    /// Starts the vCPU as a kernel's boot protocol wants it.
    pub(crate) fn start_at(&mut self, entry: &Entry) {
        self.reset_registers();
        let save = &mut self.vmcb.save;
        match entry.mode {
            Mode::Long64 { rip, rsi, cr3, gdt } => {
                let data = flat(long64::DS, long64::DS_ATTRIBUTES);
                save.cs = flat(long64::CS, long64::CS_ATTRIBUTES);
                (save.ds, save.es, save.ss, save.fs, save.gs) = (data, data, data, data, data);
                save.tr = Segment { limit: long64::TR_LIMIT, ..flat(long64::TR, long64::TR_ATTRIBUTES) };
                save.gdtr = Segment { limit: gdt.limit.into(), base: gdt.base.0, ..Segment::default() };
                (save.cr0, save.cr3, save.cr4) = (long64::CR0, cr3.0, long64::CR4);
                save.efer |= long64::EFER;
                save.rip = rip.0;
                self.gprs[gpr::RSI] = rsi.0;
            }
            Mode::Protected32 { eip, ebx, esi, gdt } => {
                let data = flat(protected32::DS, protected32::DS_ATTRIBUTES);
                save.cs = flat(protected32::CS, protected32::CS_ATTRIBUTES);
                (save.ds, save.es, save.ss) = (data, data, data);
                save.tr = Segment { limit: protected32::TR_LIMIT, ..flat(0, protected32::TR_ATTRIBUTES) };
                save.gdtr = Segment { limit: gdt.limit.into(), base: gdt.base.0, ..Segment::default() };
                (save.cr0, save.cr4) = (protected32::CR0, protected32::CR4);
                save.rip = eip.into();
                (self.gprs[gpr::RBX], self.gprs[gpr::RSI]) = (ebx.into(), esi.into());
            }
        }
        self.gprs[gpr::RDX] = 0;
        self.activity = Activity::Active;
    }

    /// INIT: reset, then wait for a start-up message (APM vol. 2, 14.1.1). The vector registers keep their state, as on
    /// hardware.
    pub(crate) fn init(&mut self) {
        self.reset_registers();
        self.apic.init();
        self.synic = VcpuSynic::new();
        self.activity = Activity::WaitsForStartup;
    }

    /// Start-up IPI: begin in real mode at page `page`. No effect unless the vCPU waits for it.
    pub(crate) fn start_up(&mut self, page: u8) {
        if self.activity == Activity::WaitsForStartup {
            let save = &mut self.vmcb.save;
            save.cs.selector = u16::from(page) << 8;
            save.cs.base = u64::from(page) << 12;
            save.rip = 0;
            self.activity = Activity::Active;
        }
    }

    /// NMIs were posted.
    pub(crate) fn request_nmis(&mut self, count: u8) {
        self.events.request_nmis(count);
    }

    /// The vCPU comes to this pCPU; `came_back` if it ran here last, and nowhere else since.
    pub(crate) fn load(&mut self, cpu: &HostContext, tags: &mut CpuTags, came_back: bool) {
        self.fpu.load(cpu, came_back);
        if has_tsc_aux() {
            // SAFETY: the MSR exists; the hypervisor uses neither RDTSCP nor RDPID. The value came from the same MSR.
            unsafe { Msr::new(msr::TSC_AUX).write(self.tsc_aux) };
        }
        write_debug_addresses(&self.debug_addresses);

        // Entries cached here before the vCPU ran on another pCPU are stale: the guest may have flushed them there.
        self.tags.arrive(tags, came_back);
        // A VMCB that another pCPU wrote to memory is read afresh.
        self.vmcb.control.clean = 0;
        self.vmcb.control.tsc_offset = tsc::offset();
        self.left_at = tsc::raw();
    }

    /// The vCPU leaves this pCPU.
    pub(crate) fn unload(&mut self, _: &mut CpuTags) {
        self.fpu.save();
        if has_tsc_aux() {
            // SAFETY: the MSR exists; reading it has no effect.
            self.tsc_aux = unsafe { Msr::new(msr::TSC_AUX).read() };
        }
        self.debug_addresses = read_debug_addresses();
    }

    /// Sets the intercepts that are only sometimes needed: PAUSE, while others wait for the pCPU, and INT, for one exit
    /// per call.
    pub(crate) fn renew_intercepts(&mut self, others_wait: bool) {
        let intercepts = &mut self.vmcb.control.intercept_1;
        intercepts.set(Intercept1::PAUSE, others_wait);
        intercepts.insert(self.looks_at);
    }

    /// INT does not leave the guest until [`renew_intercepts`](Self::renew_intercepts).
    pub(super) fn let_interrupt_itself(&mut self) {
        self.vmcb.control.intercept_1.remove(Intercept1::INTN);
    }

    /// Runs the guest until its next exit. `epoch` is the VM's: entries of the TLB from before it are not used.
    #[inline]
    pub(crate) fn enter(&mut self, cpu: &HostContext, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>) {
        self.prepare_event(tally);
        // CR8 is a view of the task priority. The guest may change either side: a write of the APIC's register exits,
        // one of CR8 does not.
        self.vmcb.control.int_ctl = self.vmcb.control.int_ctl.with_v_tpr(self.apic.cr8());

        let tags_entry = match self.tags.is_current(tags, epoch) {
            true => None,
            false => Some(prepare_tag(self.tags.enter(tags, epoch), &mut self.vmcb.control, tally)),
        };
        let entered_at = tsc::raw();
        tally.add(|count| &count.host_ticks, entered_at.wrapping_sub(self.left_at));
        tally.add(|count| &count.entries, 1);

        note_entry(&self.vmcb.control);
        // SAFETY: the vCPU loop keeps GIF clear and IF set (`gate::hold`). The VMCB is only ours. Its intercepts were
        // set in `new`; later changes only add to that set or return to it. Its nested table maps only the VM's own
        // memory. `HostContext::host_state` was saved on this pCPU, whose FS, GS, TR and LDTR do not change any more.
        unsafe { entry::enter(&mut self.gprs, self.vmcb_hpa, cpu.host_state()) };
        trace::note(|| Trace::Leave { tag: self.vmcb.control.guest_asid, root: Hpa(self.vmcb.control.n_cr3) });

        self.left_at = tsc::raw();
        tally.add(|count| &count.guest_ticks, self.left_at.wrapping_sub(entered_at));
        if let Some(entry) = tags_entry {
            complete(entry, &mut self.vmcb.control);
        }
        if self.vmcb.control.int_ctl.v_tpr() != self.apic.cr8() {
            self.apic.set_cr8(self.vmcb.control.int_ctl.v_tpr());
        }
    }

    /// When the guest was last left.
    pub(crate) fn left_at(&self) -> u64 {
        tsc::at(self.left_at)
    }

    /// Ticks that the vCPU has had: in the guest, and in the hypervisor on its behalf.
    pub(in crate::arch::x86_64) fn runtime(&self, tally: Tally<'_>) -> u64 {
        tally.guest_ticks.get() + tally.host_ticks.get() + tsc::raw().wrapping_sub(self.left_at)
    }

    /// Whether all TLB entries of the VM are still good since the vCPU's last entry, if its epoch is `epoch` now.
    pub(in crate::arch::x86_64) fn has_seen(&self, epoch: u64) -> bool {
        self.tags.has_seen(epoch)
    }

    /// All TLB entries of the guest go before its next instruction.
    pub(crate) fn flush_whole(&mut self) {
        self.tags.void();
    }

    /// Flushes the TLB entries for `pages` of the guest's address space, unless all entries will be flushed anyway.
    /// Returns how many pages were flushed one by one.
    pub(crate) fn flush_pages(&mut self, pages: Pages) -> u64 {
        if self.tags.is_void() {
            return 0;
        }
        let asid = self.tags.tag().get();
        for page in 0..pages.count() {
            let address = pages.first().wrapping_add(page << 12);
            // SAFETY: INVLPGA drops TLB entries, which are only copies (APM vol. 3, INVLPGA). SVM is on: this pCPU has
            // loaded the vCPU.
            unsafe { asm!("invlpga rax, ecx", in("rax") address, in("ecx") asid, options(nostack, preserves_flags)) };
        }
        pages.count()
    }

    /// The tags to give back when the vCPU is removed.
    pub(crate) fn into_tags(self) -> VcpuTags {
        self.tags
    }

    /// Asks for an exit when the guest changes its task priority, if that is all that holds an interrupt back.
    #[cold]
    pub(super) fn watch_task_priority(&mut self) {
        if self.apic.is_held_by_task_priority() {
            self.vmcb.control.intercept_cr_write |= CR8;
        }
    }

    /// The guest writes CR8, the class of its task priority.
    pub(in crate::arch::x86_64) fn write_cr8(&mut self, class: u8) {
        self.apic.set_cr8(class);
        self.vmcb.control.intercept_cr_write &= !CR8;
    }

    /// Whether the guest takes an interrupt at its next instruction.
    #[inline]
    pub(super) fn takes_interrupts(&self) -> bool {
        self.vmcb.save.rflags & rflags::IF != 0 && self.vmcb.control.interrupt_shadow & 1 == 0
    }

    /// Whether a halted vCPU has something that ends its halt; if so it is active again.
    pub(crate) fn try_wake(&mut self) -> bool {
        let wakes = self.activity == Activity::Halted
            && (self.events.wakes() || (self.takes_interrupts() && self.apic.pending().is_some()));
        if wakes {
            self.activity = Activity::Active;
        }
        wakes
    }

    /// Whether the vCPU runs instructions.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.activity == Activity::Active
    }

    /// Whether it runs, watched or not.
    pub(crate) fn is_awake(&self) -> bool {
        matches!(self.activity, Activity::Active | Activity::Watched)
    }

    /// Turns tracing of each entry on or off. A watched vCPU is awake, but not [active](Self::is_active).
    pub(crate) fn watch(&mut self, is_watched: bool) {
        if self.is_awake() {
            self.activity = if is_watched { Activity::Watched } else { Activity::Active };
        }
    }

    /// Whether nothing but an NMI, an INIT or a start-up message from another vCPU can ever make this one run again.
    pub(crate) fn is_parked(&self) -> bool {
        match self.activity {
            Activity::Active | Activity::Watched => false,
            Activity::Halted => self.vmcb.save.rflags & rflags::IF == 0,
            Activity::WaitsForStartup => true,
        }
    }

    /// When the vCPU's own timer is due, in host TSC ticks.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<u64> {
        match (self.apic.deadline(), self.synic.due()) {
            (deadline, u64::MAX) => deadline,
            (deadline, due) => Some(deadline.map_or(due, |deadline| deadline.min(due))),
        }
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
        let Vmcb { control, save, .. } = &*self.vmcb;
        self.skip_to(if control.next_rip != 0 { control.next_rip } else { save.rip.wrapping_add(length) });
    }

    /// Goes on at `rip`, behind an instruction that was emulated.
    #[inline]
    pub(in crate::arch::x86_64) fn skip_to(&mut self, rip: u64) {
        let Vmcb { control, save, .. } = &mut *self.vmcb;
        save.rip = rip;
        control.interrupt_shadow = 0;
        if save.rflags & (rflags::TF | rflags::RF) != 0 {
            self.complete_with_flags();
        }
    }

    /// An instruction was emulated with TF or RF set: TF traps behind it, RF is cleared (APM vol. 2, 13.1.4, 3.1.6).
    #[cold]
    fn complete_with_flags(&mut self) {
        let save = &mut self.vmcb.save;
        save.rflags &= !rflags::RF;
        if save.rflags & rflags::TF != 0 {
            save.dr6 |= dr6::SINGLE_STEP;
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
        self.gprs[gpr::RDX] << 32 | self.vmcb.save.rax & 0xffff_ffff
    }

    /// Sets EDX:EAX; the upper halves of RDX and RAX become zero.
    #[inline]
    pub(in crate::arch::x86_64) fn set_edx_eax(&mut self, value: u64) {
        self.vmcb.save.rax = value & 0xffff_ffff;
        self.gprs[gpr::RDX] = value >> 32;
    }
}

/// CR4 and CR8 among the intercepts of control registers.
const CR4: u16 = 1 << 4;
pub(super) const CR8: u16 = 1 << 8;

/// The next entry has another tag, or something to flush.
#[cold]
fn prepare_tag<'a>(entry: tlb_tag::Entry<'a>, control: &mut ControlArea, tally: Tally<'_>) -> tlb_tag::Entry<'a> {
    control.guest_asid = entry.tag().get();
    control.tlb_control = match entry.flush() {
        Flush::Nothing => TlbControl::DoNothing,
        Flush::Tag => TlbControl::FlushThisAsid,
        Flush::Everything => TlbControl::FlushAll,
    };
    tally.add(|count| &count.tlb_flushes, (entry.flush() != Flush::Nothing).into());
    tally.add(|count| &count.tlb_flushes_all, (entry.flush() == Flush::Everything).into());
    tally.add(|count| &count.tag_assignments, entry.assigned().into());
    tally.add(|count| &count.tag_generations, entry.new_generation().into());
    entry
}

/// Records the entry in the trace.
#[inline(always)]
fn note_entry(control: &ControlArea) {
    let (tag, root) = (control.guest_asid, Hpa(control.n_cr3));
    trace::step(
        || (),
        |()| {
            let what = match control.tlb_control {
                TlbControl::DoNothing => return None,
                TlbControl::FlushAll => "all",
                _ => "tag",
            };
            Some(Trace::EntryFlushes { what })
        },
    );
    trace::note(|| Trace::Enter { tag, root });
}

/// The guest exited after such an entry, or could not be entered: a rejected VMRUN flushes nothing.
#[cold]
fn complete(entry: tlb_tag::Entry<'_>, control: &mut ControlArea) {
    control.tlb_control = TlbControl::DoNothing;
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the exit code, see x86_defs::exit_code")]
    let reason = control.exit_code as u32;
    if reason != exit_code::INVALID {
        entry.completed();
    }
}

fn has_tsc_aux() -> bool {
    svm::leaf(0x8000_0001).edx & leaf_8000_0001_edx::RDTSCP != 0
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
        let Vmcb { control, save, .. } = &*self.0.vmcb;
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the exit code")]
        let code = control.exit_code as u32;
        if code == exit_code::INVALID {
            // On this path some implementations overwrite the save area; nothing in it can be believed.
            return write!(f, "with a state that the CPU refuses to enter");
        }
        write!(
            f,
            "at rip {:#x} cs {:#x} rsp {:#x} rflags {:#x} cr0 {:#x} cr2 {:#x} cr3 {:#x} cr4 {:#x} efer {:#x}, exit {code:#x} info {:#x} {:#x}",
            save.rip,
            save.cs.selector,
            save.rsp,
            save.rflags,
            save.cr0,
            save.cr2,
            save.cr3,
            save.cr4,
            save.efer & !efer::SVME,
            control.exit_info_1,
            control.exit_info_2,
        )
    }
}
