//! The part of a vCPU for SVM: its VMCB, which VMRUN reads and #VMEXIT writes (APM vol. 2, appendix B).

#![expect(unsafe_code, reason = "drops TLB entries, and writes CR2")]

use alloc::boxed::Box;
use core::arch::asm;
use core::ops::{Deref, DerefMut};

use addr::{Hpa, Hva};
use tlb_tag::{Flush, Tag};
use vmx_image::Scope;
use x86_defs::exit_code;
use x86_defs::registers::{cr0, cr4, efer};
use x86_defs::vmcb::{IntCtl, Intercept1, Intercept2, Intercept3, TlbControl, Vmcb};
use x86_emulate::{Segment, SegmentRegister};

use super::repeated::Disguised;
use super::{events, hpa_of, open_ports, permission_maps};
use crate::arch::x86_64::backend::{self, Exit, Passed, WorldSwitch};
use crate::arch::x86_64::guest::state::{Registers, State, SystemCalls};
use crate::arch::x86_64::host::quirks;
use crate::arch::x86_64::vmx::{self, Vmx};
use crate::layout::OwnPages;

/// A VMCB and what goes with it.
pub(crate) struct Vcpu {
    /// The control block, and its host physical address.
    pub(super) vmcb: Box<Vmcb>,
    pub(super) vmcb_hpa: Hpa,
    /// This machine's VMRUN does not restore an interrupt shadow.
    pub(super) loses_shadow: bool,
    /// INTN if INT instructions must be checked, see [`old_code`](super::old_code); else empty.
    looks_at: Intercept1,
    /// This machine may deliver an interrupt twice, see [`repeated`](super::repeated).
    pub(super) repeats_interrupts: bool,
    /// The last interrupt that went in, if it did so as a software interrupt.
    pub(super) disguised: Option<Disguised>,
    /// Registers of speculation that do not exit.
    passed: Passed,
    /// On a machine of Intel, the VMCS that the control block is the image of.
    vmx: Option<Box<Vmx>>,
}

/// Places among those that the VMCB has for us.
pub(in crate::arch::x86_64) mod place {
    /// Bits of EFER that this machine cannot have in the VMCB now: see [`quirks::loses_paging_at_exit`]. LME, or none.
    ///
    /// [`quirks::loses_paging_at_exit`]: super::quirks::loses_paging_at_exit
    pub(super) const HIDDEN_EFER: usize = 0;
    /// LME, if this machine ever needs that.
    pub(super) const MAY_BE_HIDDEN: usize = 1;
    /// Not zero if registers were written that VT-x carries into its VMCS only then.
    pub(in crate::arch::x86_64) const CHANGED: usize = 2;
    /// All registers were, but those of system calls.
    pub(in crate::arch::x86_64) const CHANGED_ALL: u64 = 1 << 1;
    /// Those of system calls.
    pub(in crate::arch::x86_64) const CHANGED_CALLS: u64 = 1 << 2;
    /// Control registers, or the like.
    pub(super) const CHANGED_SOME: u64 = 1 << 0;
    /// Not zero if another than the guest has written a register that decides about paging.
    pub(in crate::arch::x86_64) const PAGING_WRITTEN: usize = 3;
}

/// CR4 and CR8 among the intercepts of control registers.
const CR4: u16 = 1 << 4;
pub(super) const CR8: u16 = 1 << 8;

impl WorldSwitch for Vcpu {
    #[inline(never)]
    fn new(stage2_root: Hpa) -> Self {
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
        let maps = permission_maps();
        control.msrpm_base = maps.msrs(Passed::Nothing).0;
        control.iopm_base = maps.ports().0;
        control.int_ctl = IntCtl(IntCtl::V_INTR_MASKING);
        control.np_control = 1;
        control.n_cr3 = stage2_root.0;
        control.host_use[place::MAY_BE_HIDDEN] = if quirks::loses_paging_at_exit() { efer::LME } else { 0 };

        let vmcb_hpa = hpa_of(&*vmcb);
        let vmx = backend::is_vmx().then(|| Box::new(Vmx::new(stage2_root)));
        let looks_at = if quirks::may_keep_old_code() { Intercept1::INTN } else { Intercept1::empty() };
        Self {
            vmcb,
            vmcb_hpa,
            loses_shadow: quirks::loses_interrupt_shadow(),
            looks_at,
            repeats_interrupts: quirks::repeats_interrupts(),
            disguised: None,
            passed: Passed::Nothing,
            vmx,
        }
    }

    fn open_ports(&mut self, closed: impl Iterator<Item = u16>) {
        self.vmcb.control.iopm_base = open_ports(closed).0;
    }

    fn passed(&self) -> Passed {
        self.passed
    }

    fn pass(&mut self, passed: Passed) {
        self.passed = passed;
        let control = &mut self.vmcb.control;
        control.msrpm_base = permission_maps().msrs(passed).0;
        control.host_use[place::CHANGED] |= place::CHANGED_SOME;
        if let Some(vmx) = &mut self.vmx {
            vmx.passed = passed;
        }
    }

    fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
        let hva = Hva(core::ptr::from_ref(&*self.vmcb).addr() as u64);
        let vmcb = OwnPages { what: "VMCB", hva, bytes: size_of::<Vmcb>() };
        [vmcb].into_iter().chain(self.vmx.iter().flat_map(|vmx| vmx.own_pages()))
    }

    fn arrive(&mut self, tsc_offset: u64) {
        // A VMCB that another pCPU wrote to memory is read afresh.
        self.vmcb.control.clean = 0;
        self.vmcb.control.tsc_offset = tsc_offset;
        match self.parts() {
            (image, Some(vmx)) => vmx.arrive(image),
            // VMRUN loads it, but not in every emulator (`quirks`).
            (image, None) => write_cr2(image.save.cr2),
        }
    }

    fn leave(&mut self) {
        if let (image, Some(vmx)) = self.parts() {
            vmx.leave(image);
        }
    }

    fn root(&self) -> Hpa {
        Hpa(self.vmcb.control.n_cr3)
    }

    fn note_written_paging(&mut self) {
        self.vmcb.control.host_use[place::PAGING_WRITTEN] = 1;
    }

    fn has_written_paging(&self) -> bool {
        self.vmcb.control.host_use[place::PAGING_WRITTEN] != 0
    }

    fn renew_intercepts(&mut self, others_wait: bool) {
        let intercepts = &mut self.vmcb.control.intercept_1;
        intercepts.set(Intercept1::PAUSE, others_wait);
        intercepts.insert(self.looks_at);
    }

    fn set_tag(&mut self, tag: Tag, flush: Flush) {
        let control = &mut self.vmcb.control;
        control.guest_asid = tag.get();
        control.tlb_control = match flush {
            Flush::Nothing => TlbControl::DoNothing,
            Flush::Tag => TlbControl::FlushThisAsid,
            Flush::Everything => TlbControl::FlushAll,
        };
    }

    fn end_flush(&mut self) -> bool {
        self.vmcb.control.tlb_control = TlbControl::DoNothing;
        self.reason() != exit_code::INVALID
    }

    fn flush_page(tag: Tag, address: u64) {
        let asid = tag.get();
        if backend::is_vmx() {
            return vmx::flush(Scope::Address { vpid: asid, gva: address });
        }
        // SAFETY: INVLPGA drops TLB entries, which are only copies (APM vol. 3, INVLPGA). SVM is on: this pCPU has
        // loaded the vCPU.
        unsafe { asm!("invlpga rax, ecx", in("rax") address, in("ecx") asid, options(nostack, preserves_flags)) };
    }

    #[inline]
    fn task_priority(&self) -> u8 {
        self.vmcb.control.int_ctl.v_tpr()
    }

    #[inline]
    fn set_task_priority(&mut self, class: u8) {
        self.vmcb.control.int_ctl = self.vmcb.control.int_ctl.with_v_tpr(class);
    }

    fn exit(&self) -> Option<Exit> {
        let control = &self.vmcb.control;
        let reason = self.reason();
        // After a VMRUN that was refused some implementations overwrite the save area; nothing in it can be believed.
        (reason != exit_code::INVALID).then_some(Exit { reason, details: [control.exit_info_1, control.exit_info_2] })
    }

    #[inline]
    fn next_rip(&self) -> Option<u64> {
        let next = self.vmcb.control.next_rip;
        (next != 0).then_some(next)
    }

    #[inline]
    fn instruction_bytes(&self) -> &[u8] {
        let control = &self.vmcb.control;
        match control.instruction_length {
            0 => &[],
            count => &control.instruction_bytes[..usize::from(count.min(15))],
        }
    }
}

impl Vcpu {
    /// The control block, and the VMCS that it is the image of, on a machine of Intel.
    #[inline]
    pub(in crate::arch::x86_64) fn parts(&mut self) -> (&mut Vmcb, Option<&mut Vmx>) {
        (&mut self.vmcb, self.vmx.as_deref_mut())
    }

    /// The exit code.
    #[inline]
    pub(super) fn reason(&self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the exit code, see x86_defs::exit_code")]
        let reason = self.vmcb.control.exit_code as u32;
        reason
    }

    /// INT does not leave the guest until the [intercepts are renewed](WorldSwitch::renew_intercepts).
    pub(super) fn let_interrupt_itself(&mut self) {
        self.vmcb.control.intercept_1.remove(Intercept1::INTN);
    }
}

impl Deref for Vcpu {
    type Target = Vmcb;

    #[inline]
    fn deref(&self) -> &Vmcb {
        &self.vmcb
    }
}

impl DerefMut for Vcpu {
    #[inline]
    fn deref_mut(&mut self) -> &mut Vmcb {
        &mut self.vmcb
    }
}

impl State for Vmcb {
    #[inline]
    fn rax(&self) -> u64 {
        self.save.rax
    }
    #[inline]
    fn set_rax(&mut self, value: u64) {
        self.save.rax = value;
    }
    #[inline]
    fn rsp(&self) -> u64 {
        self.save.rsp
    }
    #[inline]
    fn set_rsp(&mut self, value: u64) {
        self.save.rsp = value;
    }
    #[inline]
    fn rip(&self) -> u64 {
        self.save.rip
    }
    #[inline]
    fn set_rip(&mut self, value: u64) {
        self.save.rip = value;
    }
    #[inline]
    fn rflags(&self) -> u64 {
        self.save.rflags
    }
    #[inline]
    fn set_rflags(&mut self, value: u64) {
        self.save.rflags = value;
    }
    #[inline]
    fn segment(&self, name: Segment) -> SegmentRegister {
        let save = &self.save;
        let found = match name {
            Segment::Es => save.es,
            Segment::Cs => save.cs,
            Segment::Ss => save.ss,
            Segment::Ds => save.ds,
            Segment::Fs => save.fs,
            Segment::Gs => save.gs,
        };
        SegmentRegister { base: found.base, limit: found.limit, attributes: found.attributes }
    }
    #[inline]
    fn cpl(&self) -> u8 {
        self.save.cpl & 3
    }
    #[inline]
    fn control(&self) -> x86_defs::control::State {
        let save = &self.save;
        x86_defs::control::State {
            cr0: save.cr0,
            cr4: save.cr4,
            efer: save.efer & !efer::SVME | self.control.host_use[place::HIDDEN_EFER],
        }
    }
    #[inline]
    fn set_control(&mut self, state: x86_defs::control::State) {
        let Vmcb { save, control, .. } = self;
        // Neither changes without an exit, and without paging LME has no effect (APM vol. 2, 14.6.1).
        let hides = state.cr0 & cr0::PG == 0 && state.cr4 & cr4::PAE == 0;
        let hidden = if hides { state.efer & control.host_use[place::MAY_BE_HIDDEN] } else { 0 };
        control.host_use[place::HIDDEN_EFER] = hidden;
        // APM vol. 2, 15.5.1 wants SVME set while a guest runs.
        let efer = state.efer & !hidden | efer::SVME;
        (save.cr0, save.cr4, save.efer) = (state.cr0, state.cr4, efer);
        control.host_use[place::CHANGED] |= place::CHANGED_SOME;
    }
    #[inline]
    fn cr3(&self) -> u64 {
        self.save.cr3
    }
    #[inline]
    fn set_cr2(&mut self, value: u64) {
        self.save.cr2 = value;
    }
    #[inline]
    fn dr6(&self) -> u64 {
        self.save.dr6
    }
    #[inline]
    fn set_dr6(&mut self, value: u64) {
        self.save.dr6 = value;
    }
    #[inline]
    fn dr7(&self) -> u64 {
        self.save.dr7
    }
    #[inline]
    fn pat(&self) -> u64 {
        self.save.g_pat
    }
    #[inline]
    fn set_pat(&mut self, value: u64) {
        self.save.g_pat = value;
        self.control.host_use[place::CHANGED] |= place::CHANGED_SOME;
    }
    #[inline]
    fn spec_ctrl(&self) -> u64 {
        self.save.spec_ctrl
    }
    #[inline]
    fn set_spec_ctrl(&mut self, value: u64) {
        self.save.spec_ctrl = value;
    }
    #[inline]
    fn is_in_shadow(&self) -> bool {
        self.control.interrupt_shadow & 1 != 0
    }
    #[inline]
    fn set_shadow(&mut self, is_in_shadow: bool) {
        self.control.interrupt_shadow = is_in_shadow.into();
    }

    fn system_calls(&self) -> SystemCalls {
        let save = &self.save;
        SystemCalls {
            star: save.star,
            lstar: save.lstar,
            cstar: save.cstar,
            sfmask: save.sfmask,
            kernel_gs_base: save.kernel_gs_base,
            sysenter_cs: save.sysenter_cs,
            sysenter_esp: save.sysenter_esp,
            sysenter_eip: save.sysenter_eip,
        }
    }

    fn set_system_calls(&mut self, calls: &SystemCalls) {
        let save = &mut self.save;
        (save.star, save.lstar, save.cstar, save.sfmask) = (calls.star, calls.lstar, calls.cstar, calls.sfmask);
        save.kernel_gs_base = calls.kernel_gs_base;
        (save.sysenter_cs, save.sysenter_esp, save.sysenter_eip) =
            (calls.sysenter_cs, calls.sysenter_esp, calls.sysenter_eip);
        self.control.host_use[place::CHANGED] |= place::CHANGED_CALLS;
    }

    fn registers(&self) -> Registers {
        let save = &self.save;
        Registers {
            rax: save.rax,
            rsp: save.rsp,
            rip: save.rip,
            rflags: save.rflags,
            es: save.es,
            cs: save.cs,
            ss: save.ss,
            ds: save.ds,
            fs: save.fs,
            gs: save.gs,
            gdtr: save.gdtr,
            ldtr: save.ldtr,
            idtr: save.idtr,
            tr: save.tr,
            cpl: save.cpl,
            control: self.control(),
            cr2: save.cr2,
            cr3: save.cr3,
            dr6: save.dr6,
            dr7: save.dr7,
            pat: save.g_pat,
        }
    }

    fn set_registers(&mut self, registers: &Registers) {
        self.set_control(registers.control);
        self.control.host_use[place::CHANGED] |= place::CHANGED_ALL;
        let save = &mut self.save;
        (save.rax, save.rsp, save.rip, save.rflags) = (registers.rax, registers.rsp, registers.rip, registers.rflags);
        (save.es, save.cs, save.ss, save.ds) = (registers.es, registers.cs, registers.ss, registers.ds);
        (save.fs, save.gs) = (registers.fs, registers.gs);
        (save.gdtr, save.ldtr, save.idtr, save.tr) = (registers.gdtr, registers.ldtr, registers.idtr, registers.tr);
        (save.cpl, save.cr2, save.cr3) = (registers.cpl, registers.cr2, registers.cr3);
        (save.dr6, save.dr7, save.g_pat) = (registers.dr6, registers.dr7, registers.pat);
    }
}

/// Writes CR2, which is the guest's all the time.
#[inline(always)]
pub(in crate::arch::x86_64) fn write_cr2(value: u64) {
    // SAFETY: the hypervisor's own page faults are bugs, so it has no use for CR2.
    unsafe { asm!("mov cr2, {}", in(reg) value, options(nomem, nostack, preserves_flags)) };
}
