//! The neutral view of a vCPU's registers while it is outside its guest.
//!
//! Most general registers are in [`Gprs`]. The processor saves the others at an exit, and each back end has its own
//! place for them. [`State`] reads and writes them there one by one; [`Registers`] has all of them as values. All code
//! that accesses registers of a vCPU outside its guest uses this view.

use x86_boot::{KernelEntry, Mode, long64, protected32};
use x86_defs::control;
use x86_defs::registers::{Segment, cr0, rflags};
use x86_emulate::{Segment as SegmentName, SegmentRegister};

/// General registers in the order of their numbers: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
///
/// If the processor saves RAX and RSP itself, they are not here but in [`State`].
pub(crate) type Gprs = [u64; 16];

/// Places in [`Gprs`].
pub(crate) mod gpr {
    /// RAX; see [`super::State::rax`].
    pub(crate) const RAX: usize = 0;
    /// RCX.
    pub(crate) const RCX: usize = 1;
    /// RDX.
    pub(crate) const RDX: usize = 2;
    /// RBX.
    pub(crate) const RBX: usize = 3;
    /// RSP; see [`super::State::rsp`].
    pub(crate) const RSP: usize = 4;
    /// RSI.
    pub(crate) const RSI: usize = 6;
    /// RDI.
    pub(crate) const RDI: usize = 7;
    /// R8.
    pub(crate) const R8: usize = 8;
}

/// Registers of a vCPU that the processor loads at an entry and saves at an exit.
pub(crate) trait State {
    /// RAX.
    fn rax(&self) -> u64;
    /// Writes RAX.
    fn set_rax(&mut self, value: u64);
    /// RSP.
    fn rsp(&self) -> u64;
    /// Writes RSP.
    fn set_rsp(&mut self, value: u64);
    /// RIP.
    fn rip(&self) -> u64;
    /// Writes RIP.
    fn set_rip(&mut self, value: u64);
    /// RFLAGS.
    fn rflags(&self) -> u64;
    /// Writes RFLAGS.
    fn set_rflags(&mut self, value: u64);
    /// The hidden part of a segment register.
    fn segment(&self, name: SegmentName) -> SegmentRegister;
    /// Current privilege level.
    fn cpl(&self) -> u8;
    /// CR0, CR4 and EFER as the guest sees them.
    fn control(&self) -> control::State;
    /// Writes CR0, CR4 and EFER.
    fn set_control(&mut self, state: control::State);
    /// CR3.
    fn cr3(&self) -> u64;
    /// Writes CR2.
    fn set_cr2(&mut self, value: u64);
    /// DR6.
    fn dr6(&self) -> u64;
    /// Writes DR6.
    fn set_dr6(&mut self, value: u64);
    /// DR7.
    fn dr7(&self) -> u64;
    /// PAT.
    fn pat(&self) -> u64;
    /// Writes PAT.
    fn set_pat(&mut self, value: u64);
    /// SPEC_CTRL: see `guest/spec_ctrl.rs` for when it is here.
    fn spec_ctrl(&self) -> u64;
    /// Writes SPEC_CTRL.
    fn set_spec_ctrl(&mut self, value: u64);
    /// Whether the instruction at RIP is in an interrupt shadow.
    fn is_in_shadow(&self) -> bool;
    /// Begins or ends the interrupt shadow.
    fn set_shadow(&mut self, is_in_shadow: bool);

    /// The registers of system calls.
    fn system_calls(&self) -> SystemCalls;
    /// Writes them.
    fn set_system_calls(&mut self, calls: &SystemCalls);

    /// All of them, but those of system calls.
    fn registers(&self) -> Registers;
    /// Writes all of them.
    fn set_registers(&mut self, registers: &Registers);
}

/// The registers of [`State`] as values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    pub(crate) rax: u64,
    pub(crate) rsp: u64,
    pub(crate) rip: u64,
    pub(crate) rflags: u64,
    pub(crate) es: Segment,
    pub(crate) cs: Segment,
    pub(crate) ss: Segment,
    pub(crate) ds: Segment,
    pub(crate) fs: Segment,
    pub(crate) gs: Segment,
    pub(crate) gdtr: Segment,
    pub(crate) ldtr: Segment,
    pub(crate) idtr: Segment,
    pub(crate) tr: Segment,
    pub(crate) cpl: u8,
    pub(crate) control: control::State,
    pub(crate) cr2: u64,
    pub(crate) cr3: u64,
    pub(crate) dr6: u64,
    pub(crate) dr7: u64,
    pub(crate) pat: u64,
}

/// Registers that decide where system calls go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SystemCalls {
    pub(crate) star: u64,
    pub(crate) lstar: u64,
    pub(crate) cstar: u64,
    pub(crate) sfmask: u64,
    pub(crate) kernel_gs_base: u64,
    pub(crate) sysenter_cs: u64,
    pub(crate) sysenter_esp: u64,
    pub(crate) sysenter_eip: u64,
}

/// PAT at reset (APM vol. 2, 7.8.2).
const PAT_RESET: u64 = 0x0007_0406_0007_0406;
/// DR6 and DR7 at reset.
const DR6_RESET: u64 = 0xffff_0ff0;
const DR7_RESET: u64 = 0x400;

/// Attributes of segments, packed.
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

const fn segment(selector: u16, attributes: u16, limit: u32, base: u64) -> Segment {
    Segment { selector, attributes, limit, base }
}

/// A segment over the whole address space.
const fn flat(selector: u16, attributes: u16) -> Segment {
    segment(selector, attributes, u32::MAX, 0)
}

impl Registers {
    /// As after INIT (APM vol. 2, table 14-1).
    pub(crate) const RESET: Self = {
        let data = segment(0, attributes::DATA, 0xffff, 0);
        Self {
            rax: 0,
            rsp: 0,
            rip: 0xfff0,
            rflags: rflags::RESERVED_ONE,
            es: data,
            cs: segment(0xf000, attributes::CODE, 0xffff, 0xffff_0000),
            ss: data,
            ds: data,
            fs: data,
            gs: data,
            gdtr: segment(0, 0, 0xffff, 0),
            ldtr: segment(0, attributes::LDT, 0xffff, 0),
            idtr: segment(0, 0, 0xffff, 0),
            tr: segment(0, attributes::TSS, 0xffff, 0),
            cpl: 0,
            control: control::State { cr0: cr0::CD | cr0::NW | cr0::ET, cr4: 0, efer: 0 },
            cr2: 0,
            cr3: 0,
            dr6: DR6_RESET,
            dr7: DR7_RESET,
            pat: PAT_RESET,
        }
    };

    /// The values of a kernel's boot protocol. The protocol's general registers go into `gprs`.
    pub(crate) fn at_entry(entry: &KernelEntry, gprs: &mut Gprs) -> Self {
        match entry.mode {
            Mode::Long64 { rip, rsi, cr3, gdt } => {
                let data = flat(long64::DS, long64::DS_ATTRIBUTES);
                gprs[gpr::RSI] = rsi.0;
                Self {
                    cs: flat(long64::CS, long64::CS_ATTRIBUTES),
                    ds: data,
                    es: data,
                    ss: data,
                    fs: data,
                    gs: data,
                    tr: segment(long64::TR, long64::TR_ATTRIBUTES, long64::TR_LIMIT, 0),
                    gdtr: segment(0, 0, gdt.limit.into(), gdt.base.0),
                    control: control::State { cr0: long64::CR0, cr4: long64::CR4, efer: long64::EFER },
                    cr3: cr3.0,
                    rip: rip.0,
                    ..Self::RESET
                }
            }
            Mode::Protected32 { eip, ebx, esi, gdt } => {
                let data = flat(protected32::DS, protected32::DS_ATTRIBUTES);
                (gprs[gpr::RBX], gprs[gpr::RSI]) = (ebx.into(), esi.into());
                Self {
                    cs: flat(protected32::CS, protected32::CS_ATTRIBUTES),
                    ds: data,
                    es: data,
                    ss: data,
                    tr: segment(0, protected32::TR_ATTRIBUTES, protected32::TR_LIMIT, 0),
                    gdtr: segment(0, 0, gdt.limit.into(), gdt.base.0),
                    control: control::State { cr0: protected32::CR0, cr4: protected32::CR4, efer: 0 },
                    rip: eip.into(),
                    ..Self::RESET
                }
            }
        }
    }

    /// The values after a reset and a start-up message for `page`: real mode, at the first byte of the page.
    pub(crate) fn at_page(page: u8) -> Self {
        let cs = Segment { selector: u16::from(page) << 8, base: u64::from(page) << 12, ..Self::RESET.cs };
        Self { cs, rip: 0, ..Self::RESET }
    }
}
