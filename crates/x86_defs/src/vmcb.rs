//! The virtual machine control block (APM vol. 2, appendix B): one page that VMRUN reads and #VMEXIT writes.

use core::mem::{offset_of, size_of};

use bitflags::bitflags;

use crate::registers::Segment;

/// The VMCB: control area, then state save area. Page-aligned, in write-back memory.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub struct Vmcb {
    /// Intercepts, the injected event, and the exit reason.
    pub control: ControlArea,
    /// The guest's registers that VMRUN loads and #VMEXIT saves.
    pub save: SaveArea,
    reserved: [u8; 0x1000 - 0x400 - size_of::<SaveArea>()],
}

impl Vmcb {
    /// All zero: not valid for a guest yet.
    #[must_use]
    pub const fn zeroed() -> Self {
        Self {
            control: ControlArea::zeroed(),
            save: SaveArea::zeroed(),
            reserved: [0; 0x1000 - 0x400 - size_of::<SaveArea>()],
        }
    }
}

/// Control area (APM vol. 2, table B-1).
#[derive(Clone, Debug)]
#[repr(C)]
pub struct ControlArea {
    /// Intercepted reads of CR0 to CR15, one bit each.
    pub intercept_cr_read: u16,
    /// Intercepted writes of CR0 to CR15.
    pub intercept_cr_write: u16,
    /// Intercepted reads of DR0 to DR15.
    pub intercept_dr_read: u16,
    /// Intercepted writes of DR0 to DR15.
    pub intercept_dr_write: u16,
    /// Intercepted exceptions, one bit per vector.
    pub intercept_exceptions: u32,
    /// Intercepts of vector 3.
    pub intercept_1: Intercept1,
    /// Intercepts of vector 4.
    pub intercept_2: Intercept2,
    /// Intercepts of vector 5.
    pub intercept_3: Intercept3,
    reserved_018: [u8; 0x3c - 0x18],
    /// PAUSE filter threshold.
    pub pause_filter_threshold: u16,
    /// PAUSE filter count.
    pub pause_filter_count: u16,
    /// HPA of the I/O permission map, 12 KiB.
    pub iopm_base: u64,
    /// HPA of the MSR permission map, 8 KiB.
    pub msrpm_base: u64,
    /// Added to the TSC that the guest reads.
    pub tsc_offset: u64,
    /// ASID of this guest's TLB entries. Zero is the host's.
    pub guest_asid: u32,
    /// Whether VMRUN flushes the TLB.
    pub tlb_control: TlbControl,
    reserved_05d: [u8; 3],
    /// Virtual interrupt control.
    pub int_ctl: IntCtl,
    /// Bit 0: the guest is in an interrupt shadow. Bit 1: value of IF while V_INTR_MASKING.
    pub interrupt_shadow: u64,
    /// The exit reason; only the low half has a meaning (see [`crate::exit_code`]).
    pub exit_code: u64,
    /// First detail of the exit.
    pub exit_info_1: u64,
    /// Second detail of the exit.
    pub exit_info_2: u64,
    /// The event whose delivery the exit interrupted.
    pub exit_int_info: VmcbEvent,
    /// Bit 0: nested paging.
    pub np_control: u64,
    /// AVIC APIC page.
    pub avic_apic_bar: u64,
    /// GHCB of an encrypted guest.
    pub ghcb: u64,
    /// Event to inject at the next VMRUN.
    pub event_inj: VmcbEvent,
    /// HPA of the nested page table's root.
    pub n_cr3: u64,
    /// LBR virtualization.
    pub lbr_control: u64,
    /// Parts of the VMCB that did not change since the last VMRUN on this pCPU.
    pub clean: u32,
    reserved_0c4: u32,
    /// RIP of the next instruction, if [`crate::cpuid::svm_feature::NRIP_SAVE`] is reported.
    pub next_rip: u64,
    /// Number of bytes in `instruction_bytes`, with decode assists.
    pub instruction_length: u8,
    /// Bytes of the instruction, with decode assists.
    pub instruction_bytes: [u8; 15],
    reserved_0e0: [u8; 0x3e0 - 0xe0],
    /// For the hypervisor's own use: the processor ignores it (APM vol. 2, table B-1, offset 3E0h).
    pub host_use: [u64; 4],
}

impl ControlArea {
    const fn zeroed() -> Self {
        Self {
            intercept_cr_read: 0,
            intercept_cr_write: 0,
            intercept_dr_read: 0,
            intercept_dr_write: 0,
            intercept_exceptions: 0,
            intercept_1: Intercept1::empty(),
            intercept_2: Intercept2::empty(),
            intercept_3: Intercept3::empty(),
            reserved_018: [0; 0x3c - 0x18],
            pause_filter_threshold: 0,
            pause_filter_count: 0,
            iopm_base: 0,
            msrpm_base: 0,
            tsc_offset: 0,
            guest_asid: 0,
            tlb_control: TlbControl::DoNothing,
            reserved_05d: [0; 3],
            int_ctl: IntCtl(0),
            interrupt_shadow: 0,
            exit_code: 0,
            exit_info_1: 0,
            exit_info_2: 0,
            exit_int_info: VmcbEvent::NONE,
            np_control: 0,
            avic_apic_bar: 0,
            ghcb: 0,
            event_inj: VmcbEvent::NONE,
            n_cr3: 0,
            lbr_control: 0,
            clean: 0,
            reserved_0c4: 0,
            next_rip: 0,
            instruction_length: 0,
            instruction_bytes: [0; 15],
            reserved_0e0: [0; 0x3e0 - 0xe0],
            host_use: [0; 4],
        }
    }
}

bitflags! {
    /// Intercepts at offset 00C.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept1: u32 {
        /// Physical interrupts.
        const INTR = 1 << 0;
        /// NMI.
        const NMI = 1 << 1;
        /// SMI.
        const SMI = 1 << 2;
        /// INIT.
        const INIT = 1 << 3;
        /// A virtual interrupt is about to be taken.
        const VINTR = 1 << 4;
        /// Writes of CR0 that change more than TS and MP, and LMSW.
        const CR0_SEL_WRITE = 1 << 5;
        /// RDPMC.
        const RDPMC = 1 << 15;
        /// PUSHF.
        const PUSHF = 1 << 16;
        /// POPF.
        const POPF = 1 << 17;
        /// CPUID.
        const CPUID = 1 << 18;
        /// IRET.
        const IRET = 1 << 20;
        /// INT n and INT3.
        const INTN = 1 << 21;
        /// INVD.
        const INVD = 1 << 22;
        /// PAUSE.
        const PAUSE = 1 << 23;
        /// HLT.
        const HLT = 1 << 24;
        /// INVLPGA.
        const INVLPGA = 1 << 26;
        /// Ports named by the I/O permission map.
        const IOIO = 1 << 27;
        /// MSRs named by the MSR permission map.
        const MSR = 1 << 28;
        /// Task switches.
        const TASK_SWITCH = 1 << 29;
        /// Triple fault.
        const SHUTDOWN = 1 << 31;
    }
}

bitflags! {
    /// Intercepts at offset 010.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept2: u32 {
        /// VMRUN; VMRUN itself requires this bit.
        const VMRUN = 1 << 0;
        /// VMMCALL.
        const VMMCALL = 1 << 1;
        /// VMLOAD.
        const VMLOAD = 1 << 2;
        /// VMSAVE.
        const VMSAVE = 1 << 3;
        /// STGI.
        const STGI = 1 << 4;
        /// CLGI.
        const CLGI = 1 << 5;
        /// SKINIT.
        const SKINIT = 1 << 6;
        /// WBINVD.
        const WBINVD = 1 << 9;
        /// MONITOR.
        const MONITOR = 1 << 10;
        /// MWAIT.
        const MWAIT = 1 << 11;
        /// MWAIT with an armed monitor.
        const MWAIT_ARMED = 1 << 12;
        /// XSETBV.
        const XSETBV = 1 << 13;
        /// RDPRU.
        const RDPRU = 1 << 14;
    }
}

bitflags! {
    /// Intercepts at offset 014.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept3: u32 {
        /// INVLPGB.
        const INVLPGB = 1 << 0;
        /// INVLPGB with an illegal operand.
        const INVLPGB_ILLEGAL = 1 << 1;
        /// INVPCID.
        const INVPCID = 1 << 2;
        /// MCOMMIT.
        const MCOMMIT = 1 << 3;
        /// TLBSYNC.
        const TLBSYNC = 1 << 4;
    }
}

/// Whether VMRUN flushes the TLB (offset 05C).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TlbControl {
    /// Keep all entries.
    DoNothing = 0,
    /// Flush all entries of all ASIDs.
    FlushAll = 1,
    /// Flush this guest's ASID, if [`crate::cpuid::svm_feature::FLUSH_BY_ASID`] is reported.
    FlushThisAsid = 3,
}

/// Virtual interrupt control (offset 060).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct IntCtl(pub u64);

impl IntCtl {
    /// A virtual interrupt is pending.
    pub const V_IRQ: u64 = 1 << 8;
    /// Highest priority for the virtual interrupt.
    pub const V_INTR_PRIO_MAX: u64 = 0xf << 16;
    /// The virtual interrupt ignores V_TPR.
    pub const V_IGN_TPR: u64 = 1 << 20;
    /// All that describes a virtual interrupt: the three above, its priority and its vector.
    pub const VIRTUAL_INTERRUPT: u64 =
        Self::V_IRQ | Self::V_INTR_PRIO_MAX | Self::V_IGN_TPR | 0xff << Self::VECTOR_SHIFT;

    const PRIO_SHIFT: u32 = 16;
    const VECTOR_SHIFT: u32 = 32;

    /// Physical interrupts follow the host's IF; the guest's CR8 is V_TPR.
    pub const V_INTR_MASKING: u64 = 1 << 24;

    /// With a virtual interrupt that the guest takes by itself as soon as RFLAGS.IF, the interrupt shadow and V_TPR
    /// allow it. Its priority is its vector's upper half, as that of the local APIC (APM vol. 2, 15.21.4).
    #[must_use]
    pub const fn with_interrupt(self, vector: u8) -> Self {
        let priority = (vector >> 4) as u64;
        Self(
            self.0 & !Self::VIRTUAL_INTERRUPT
                | Self::V_IRQ
                | priority << Self::PRIO_SHIFT
                | (vector as u64) << Self::VECTOR_SHIFT,
        )
    }

    /// Without a virtual interrupt.
    #[must_use]
    pub const fn without_interrupt(self) -> Self {
        Self(self.0 & !Self::VIRTUAL_INTERRUPT)
    }

    /// The guest's CR8.
    #[must_use]
    pub const fn v_tpr(self) -> u8 {
        (self.0 & 0xf) as u8
    }

    /// With the guest's CR8 replaced.
    #[must_use]
    pub const fn with_v_tpr(self, cr8: u8) -> Self {
        Self(self.0 & !0xff | (cr8 & 0xf) as u64)
    }
}

/// An event: injected by EVENTINJ or reported by EXITINTINFO (APM vol. 2, 15.20).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct VmcbEvent(pub u64);

impl VmcbEvent {
    /// No event.
    pub const NONE: Self = Self(0);

    const VALID: u64 = 1 << 31;
    const ERROR_CODE_VALID: u64 = 1 << 11;

    /// An external interrupt.
    #[must_use]
    pub const fn interrupt(vector: u8) -> Self {
        Self(Self::VALID | vector as u64)
    }

    /// An NMI.
    #[must_use]
    pub const fn nmi() -> Self {
        Self(Self::VALID | (2 << 8) | 2)
    }

    /// An exception without an error code.
    #[must_use]
    pub const fn exception(vector: u8) -> Self {
        Self(Self::VALID | (3 << 8) | vector as u64)
    }

    /// An exception with an error code.
    #[must_use]
    pub const fn exception_with_code(vector: u8, code: u32) -> Self {
        Self(Self::exception(vector).0 | Self::ERROR_CODE_VALID | ((code as u64) << 32))
    }

    /// INT n, INT3 or INTO, as raised by the instruction itself.
    #[must_use]
    pub const fn software_interrupt(vector: u8) -> Self {
        Self(Self::VALID | (4 << 8) | vector as u64)
    }

    /// The error code, if the event has one.
    #[must_use]
    pub const fn error_code(self) -> Option<u32> {
        if self.0 & Self::ERROR_CODE_VALID == 0 { None } else { Some((self.0 >> 32) as u32) }
    }

    /// Whether there is an event. After a successful delivery the other bits may be stale.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.0 & Self::VALID != 0
    }

    /// The vector.
    #[must_use]
    pub const fn vector(self) -> u8 {
        (self.0 & 0xff) as u8
    }

    /// The kind of event.
    #[must_use]
    pub const fn kind(self) -> EventKind {
        match (self.0 >> 8) & 7 {
            0 => EventKind::Interrupt,
            2 => EventKind::Nmi,
            3 => EventKind::Exception,
            4 => EventKind::SoftwareInterrupt,
            _ => EventKind::Reserved,
        }
    }
}

/// Kinds of [`VmcbEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// External or virtual interrupt.
    Interrupt,
    /// NMI.
    Nmi,
    /// Exception.
    Exception,
    /// INTn.
    SoftwareInterrupt,
    /// A value that the manual reserves.
    Reserved,
}

/// State save area (APM vol. 2, table B-2).
#[derive(Clone, Debug)]
#[repr(C)]
pub struct SaveArea {
    /// ES.
    pub es: Segment,
    /// CS.
    pub cs: Segment,
    /// SS.
    pub ss: Segment,
    /// DS.
    pub ds: Segment,
    /// FS.
    pub fs: Segment,
    /// GS.
    pub gs: Segment,
    /// GDTR.
    pub gdtr: Segment,
    /// LDTR.
    pub ldtr: Segment,
    /// IDTR.
    pub idtr: Segment,
    /// TR.
    pub tr: Segment,
    reserved_0a0: [u8; 0xcb - 0xa0],
    /// Current privilege level.
    pub cpl: u8,
    reserved_0cc: u32,
    /// EFER.
    pub efer: u64,
    reserved_0d8: [u8; 0x148 - 0xd8],
    /// CR4.
    pub cr4: u64,
    /// CR3.
    pub cr3: u64,
    /// CR0.
    pub cr0: u64,
    /// DR7.
    pub dr7: u64,
    /// DR6.
    pub dr6: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// RIP.
    pub rip: u64,
    reserved_180: [u8; 0x1d8 - 0x180],
    /// RSP.
    pub rsp: u64,
    reserved_1e0: [u8; 0x1f8 - 0x1e0],
    /// RAX.
    pub rax: u64,
    /// STAR.
    pub star: u64,
    /// LSTAR.
    pub lstar: u64,
    /// CSTAR.
    pub cstar: u64,
    /// SFMASK.
    pub sfmask: u64,
    /// KERNEL_GS_BASE.
    pub kernel_gs_base: u64,
    /// SYSENTER_CS.
    pub sysenter_cs: u64,
    /// SYSENTER_ESP.
    pub sysenter_esp: u64,
    /// SYSENTER_EIP.
    pub sysenter_eip: u64,
    /// CR2.
    pub cr2: u64,
    reserved_248: [u8; 0x268 - 0x248],
    /// The guest's PAT, with nested paging.
    pub g_pat: u64,
    /// DEBUGCTL, with LBR virtualization.
    pub debug_ctl: u64,
    reserved_278: [u8; 0x2e0 - 0x278],
    /// The guest's SPEC_CTRL, where SVM virtualizes it.
    pub spec_ctrl: u64,
}

impl SaveArea {
    const fn zeroed() -> Self {
        const NONE: Segment = Segment { selector: 0, attributes: 0, limit: 0, base: 0 };
        Self {
            es: NONE,
            cs: NONE,
            ss: NONE,
            ds: NONE,
            fs: NONE,
            gs: NONE,
            gdtr: NONE,
            ldtr: NONE,
            idtr: NONE,
            tr: NONE,
            reserved_0a0: [0; 0xcb - 0xa0],
            cpl: 0,
            reserved_0cc: 0,
            efer: 0,
            reserved_0d8: [0; 0x148 - 0xd8],
            cr4: 0,
            cr3: 0,
            cr0: 0,
            dr7: 0,
            dr6: 0,
            rflags: 0,
            rip: 0,
            reserved_180: [0; 0x1d8 - 0x180],
            rsp: 0,
            reserved_1e0: [0; 0x1f8 - 0x1e0],
            rax: 0,
            star: 0,
            lstar: 0,
            cstar: 0,
            sfmask: 0,
            kernel_gs_base: 0,
            sysenter_cs: 0,
            sysenter_esp: 0,
            sysenter_eip: 0,
            cr2: 0,
            reserved_248: [0; 0x268 - 0x248],
            g_pat: 0,
            debug_ctl: 0,
            reserved_278: [0; 0x2e0 - 0x278],
            spec_ctrl: 0,
        }
    }
}

const _: () = {
    assert!(size_of::<Vmcb>() == 0x1000);
    assert!(size_of::<ControlArea>() == 0x400);
    assert!(offset_of!(Vmcb, save) == 0x400);
    assert!(offset_of!(ControlArea, pause_filter_threshold) == 0x3c);
    assert!(offset_of!(ControlArea, iopm_base) == 0x40);
    assert!(offset_of!(ControlArea, guest_asid) == 0x58);
    assert!(offset_of!(ControlArea, tlb_control) == 0x5c);
    assert!(offset_of!(ControlArea, int_ctl) == 0x60);
    assert!(offset_of!(ControlArea, exit_code) == 0x70);
    assert!(offset_of!(ControlArea, exit_int_info) == 0x88);
    assert!(offset_of!(ControlArea, np_control) == 0x90);
    assert!(offset_of!(ControlArea, event_inj) == 0xa8);
    assert!(offset_of!(ControlArea, n_cr3) == 0xb0);
    assert!(offset_of!(ControlArea, clean) == 0xc0);
    assert!(offset_of!(ControlArea, next_rip) == 0xc8);
    assert!(offset_of!(ControlArea, instruction_length) == 0xd0);
    assert!(offset_of!(SaveArea, gdtr) == 0x60);
    assert!(offset_of!(SaveArea, tr) == 0x90);
    assert!(offset_of!(SaveArea, cpl) == 0xcb);
    assert!(offset_of!(SaveArea, efer) == 0xd0);
    assert!(offset_of!(SaveArea, cr4) == 0x148);
    assert!(offset_of!(SaveArea, rflags) == 0x170);
    assert!(offset_of!(SaveArea, rsp) == 0x1d8);
    assert!(offset_of!(SaveArea, rax) == 0x1f8);
    assert!(offset_of!(SaveArea, star) == 0x200);
    assert!(offset_of!(SaveArea, cr2) == 0x240);
    assert!(offset_of!(SaveArea, g_pat) == 0x268);
    assert!(offset_of!(SaveArea, spec_ctrl) == 0x2e0);
};
