//! The part of a vCPU's state that decides the effect of an instruction.

/// Bits of CR0, CR4, EFER and RFLAGS that matter here (APM vol. 2, 3.1).
pub(crate) mod bits {
    pub(crate) const CR0_PE: u64 = 1 << 0;
    pub(crate) const CR0_WP: u64 = 1 << 16;
    pub(crate) const CR0_PG: u64 = 1 << 31;
    pub(crate) const CR4_PSE: u64 = 1 << 4;
    pub(crate) const CR4_PAE: u64 = 1 << 5;
    pub(crate) const CR4_LA57: u64 = 1 << 12;
    pub(crate) const CR4_SMEP: u64 = 1 << 20;
    pub(crate) const CR4_SMAP: u64 = 1 << 21;
    pub(crate) const CR4_PKE: u64 = 1 << 22;
    pub(crate) const EFER_LMA: u64 = 1 << 10;
    pub(crate) const EFER_NXE: u64 = 1 << 11;

    pub(crate) const CF: u64 = 1 << 0;
    pub(crate) const PF: u64 = 1 << 2;
    pub(crate) const AF: u64 = 1 << 4;
    pub(crate) const ZF: u64 = 1 << 6;
    pub(crate) const SF: u64 = 1 << 7;
    pub(crate) const TF: u64 = 1 << 8;
    pub(crate) const DF: u64 = 1 << 10;
    pub(crate) const OF: u64 = 1 << 11;
    pub(crate) const RF: u64 = 1 << 16;
    pub(crate) const VM: u64 = 1 << 17;
    pub(crate) const AC: u64 = 1 << 18;
}

use crate::walk::Access;
use crate::{Vendor, Width};
use bits::{
    AC, CR0_PE, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PKE, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE, VM,
};

/// The vCPU state that the emulator reads and changes.
pub trait Cpu {
    /// General registers in the order of their encoding: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    fn gprs(&self) -> &[u64; 16];
    /// The same, mutable.
    fn gprs_mut(&mut self) -> &mut [u64; 16];
    /// Address of the instruction, relative to CS.
    fn rip(&self) -> u64;
    /// Moves RIP.
    fn set_rip(&mut self, rip: u64);
    /// Flags.
    fn rflags(&self) -> u64;
    /// Changes the flags.
    fn set_rflags(&mut self, rflags: u64);
    /// The hidden part of a segment register.
    fn segment(&self, segment: Segment) -> SegmentRegister;
    /// Current privilege level, 0 to 3.
    fn cpl(&self) -> u8;
    /// Control register 0.
    fn cr0(&self) -> u64;
    /// Control register 3.
    fn cr3(&self) -> u64;
    /// Control register 4.
    fn cr4(&self) -> u64;
    /// Extended feature enables.
    fn efer(&self) -> u64;
    /// Rights by protection key. Only read if CR4.PKE is set.
    fn pkru(&self) -> u32;
    /// Width of the guest's physical addresses in bits, from its CPUID 8000_0008. It never changes: cached walks do not
    /// compare it.
    fn physical_bits(&self) -> u8;
    /// Whose rules apply where processors differ: those of the processor that runs the guest between two emulations.
    fn vendor(&self) -> Vendor;

    /// The mode in which code is decoded.
    #[inline]
    fn mode(&self) -> Mode {
        let code = self.segment(Segment::Cs).attributes;
        if self.efer() & EFER_LMA != 0 && code & SegmentRegister::LONG != 0 {
            Mode::Bits64
        } else if code & SegmentRegister::BIG != 0 {
            Mode::Bits32
        } else {
            Mode::Bits16
        }
    }
}

/// The hidden part of a segment register, in the format of SVM's VMCB (APM vol. 2, 15.5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentRegister {
    /// Linear address of the segment's first byte.
    pub base: u64,
    /// The segment's last byte; for an expand-down segment the last byte before it.
    pub limit: u32,
    /// Bits 55:52 and 47:40 of the segment's descriptor.
    pub attributes: u16,
}

impl SegmentRegister {
    /// Writable (data), or readable (code).
    const WRITE_OR_READ: u16 = 1 << 1;
    /// Expand-down data.
    const DOWN: u16 = 1 << 2;
    /// Code.
    const CODE: u16 = 1 << 3;
    /// Present; clear in an unusable register.
    const PRESENT: u16 = 1 << 7;
    /// 64-bit code.
    pub const LONG: u16 = 1 << 9;
    /// 32-bit code or stack.
    pub const BIG: u16 = 1 << 10;

    /// Whether `bytes` at `offset` may be accessed outside 64-bit mode (APM vol. 2, 4.12).
    fn allows(&self, offset: u64, bytes: u64, access: Access, is_protected: bool) -> bool {
        let last = offset + bytes - 1;
        let limit = u64::from(self.limit);
        if !is_protected {
            return last <= limit;
        }
        let has = |bit| self.attributes & bit != 0;
        let in_limit = if !has(Self::CODE) && has(Self::DOWN) {
            let top = if has(Self::BIG) { 0xffff_ffff } else { 0xffff };
            offset > limit && last <= top
        } else {
            last <= limit
        };
        let right = match access {
            Access::Read => !has(Self::CODE) || has(Self::WRITE_OR_READ),
            Access::Write => !has(Self::CODE) && has(Self::WRITE_OR_READ),
            Access::Execute => true,
        };
        has(Self::PRESENT) && in_limit && right
    }
}

/// The state that all addresses of one instruction depend on: computed once per instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Regime {
    /// How code is decoded.
    pub(crate) mode: Mode,
    /// Mask of the address bits above the translated ones.
    unused: u32,
    /// The bits of control registers and flags that walks depend on, the protection keys, and the mode.
    pub(crate) walks: u64,
}

impl Regime {
    #[inline(always)]
    pub(crate) fn of(cpu: &impl Cpu) -> Self {
        let (cr4, efer) = (cpu.cr4(), cpu.efer());
        let cr0 = cpu.cr0() & (CR0_PG | CR0_WP);
        let features = cr4 & (CR4_PSE | CR4_PAE | CR4_LA57 | CR4_SMEP | CR4_SMAP | CR4_PKE);
        let keys = if cr4 & CR4_PKE != 0 { u64::from(cpu.pkru()) << 32 } else { 0 };
        // No two of these bits overlap; two bits are left for the kind of an access.
        let mode = cpu.mode();
        let low = u64::from(cpu.cpl()) | (mode as u64) << MODE_SHIFT;
        let walks = cr0 | features | efer & (EFER_LMA | EFER_NXE) | cpu.rflags() & AC | low | keys;
        Self { mode, unused: if cr4 & CR4_LA57 != 0 { 64 - 57 } else { 64 - 48 }, walks }
    }
}

/// Position of the access kind, and of the mode, in a walk's key.
pub(crate) const ACCESS_SHIFT: u32 = 2;
const MODE_SHIFT: u32 = 6;

const _: () = {
    let control = CR0_PG
        ^ CR0_WP
        ^ CR4_PSE
        ^ CR4_PAE
        ^ CR4_LA57
        ^ CR4_SMEP
        ^ CR4_SMAP
        ^ CR4_PKE
        ^ EFER_LMA
        ^ EFER_NXE
        ^ AC
        ^ 3
        ^ 3 << ACCESS_SHIFT
        ^ 3 << MODE_SHIFT;
    assert!(control.count_ones() == 11 + 2 + 2 + 2, "two bits share a place");
    assert!(control >> 32 == 0, "the upper half is the protection keys'");
};

/// The linear address of `bytes` at `offset` in `segment`.
///
/// # Errors
/// #GP(0), or #SS(0) for the stack segment: the operand's address is not canonical, or the segment does not allow the
/// access.
#[inline(always)]
pub(crate) fn linear(
    cpu: &impl Cpu,
    regime: &Regime,
    segment: Segment,
    offset: u64,
    bytes: u64,
    access: Access,
) -> Result<u64, Exception> {
    let error = || if segment == Segment::Ss { Exception::STACK } else { Exception::GENERAL_PROTECTION };
    if regime.mode == Mode::Bits64 {
        let linear = match segment {
            Segment::Fs | Segment::Gs => linear_by_base(cpu, regime, segment, offset, bytes).ok_or_else(error)?,
            _ => offset,
        };
        return if are_canonical(regime, linear, bytes) { Ok(linear) } else { Err(error()) };
    }
    linear_by_segment(cpu, segment, offset, bytes, access).ok_or_else(error)
}

/// Like [`linear`], through FS or GS in 64-bit mode, but without the check that the linear address is canonical. `None`
/// if the effective address must be canonical and is not.
#[inline(never)]
fn linear_by_base(cpu: &impl Cpu, regime: &Regime, segment: Segment, offset: u64, bytes: u64) -> Option<u64> {
    let is_allowed = !cpu.vendor().checks_effective_address() || are_canonical(regime, offset, bytes);
    is_allowed.then(|| cpu.segment(segment).base.wrapping_add(offset))
}

/// Like [`linear`], outside 64-bit mode; `None` if the segment does not allow the access.
#[inline(never)]
fn linear_by_segment(cpu: &impl Cpu, segment: Segment, offset: u64, bytes: u64, access: Access) -> Option<u64> {
    let register = cpu.segment(segment);
    let is_protected = cpu.cr0() & CR0_PE != 0 && cpu.rflags() & VM == 0;
    let allowed = register.allows(offset & 0xffff_ffff, bytes, access, is_protected);
    allowed.then(|| register.base.wrapping_add(offset) & 0xffff_ffff)
}

/// Whether the addresses of `bytes`, at most a page, from `first` on are canonical: all bits above the translated ones
/// are equal (APM vol. 2, 5.3.1).
#[inline(always)]
fn are_canonical(regime: &Regime, first: u64, bytes: u64) -> bool {
    let is_canonical = |address: u64| {
        let extended = (address << regime.unused).cast_signed() >> regime.unused;
        extended.cast_unsigned() == address
    };
    is_canonical(first) && is_canonical(first.wrapping_add(bytes - 1))
}

/// The value of RIP after `length` more bytes.
#[inline(always)]
pub(crate) fn rip_after(cpu: &impl Cpu, mode: Mode, length: u8) -> u64 {
    let next = cpu.rip().wrapping_add(u64::from(length));
    if mode == Mode::Bits64 { next } else { next & 0xffff_ffff }
}

/// Width of the stack pointer: that of the stack segment, not of the code segment.
pub(crate) fn stack_width(cpu: &impl Cpu) -> Width {
    if cpu.mode() == Mode::Bits64 {
        Width::Qword
    } else if cpu.segment(Segment::Ss).attributes & SegmentRegister::BIG != 0 {
        Width::Dword
    } else {
        Width::Word
    }
}

/// A vCPU's state as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuState {
    /// See [`Cpu::gprs`].
    pub gprs: [u64; 16],
    /// See [`Cpu::rip`].
    pub rip: u64,
    /// See [`Cpu::rflags`].
    pub rflags: u64,
    /// In the order of [`Segment`].
    pub segments: [SegmentRegister; 6],
    /// See [`Cpu::cpl`].
    pub cpl: u8,
    /// See [`Cpu::cr0`].
    pub cr0: u64,
    /// See [`Cpu::cr3`].
    pub cr3: u64,
    /// See [`Cpu::cr4`].
    pub cr4: u64,
    /// See [`Cpu::efer`].
    pub efer: u64,
    /// See [`Cpu::pkru`].
    pub pkru: u32,
    /// See [`Cpu::physical_bits`].
    pub physical_bits: u8,
    /// See [`Cpu::vendor`].
    pub vendor: Vendor,
}

impl CpuState {
    /// An AMD vCPU at `rip`, without paging, whose segments cover the whole address space.
    #[must_use]
    pub fn flat(mode: Mode, rip: u64) -> Self {
        const PRESENT_READ_WRITE: u16 = 0x93;
        const PRESENT_CODE_READ: u16 = 0x9b;
        let size = match mode {
            Mode::Bits16 => 0,
            Mode::Bits32 => SegmentRegister::BIG,
            Mode::Bits64 => SegmentRegister::LONG,
        };
        let data = SegmentRegister {
            base: 0,
            limit: u32::MAX,
            attributes: PRESENT_READ_WRITE | if mode == Mode::Bits16 { 0 } else { SegmentRegister::BIG },
        };
        let mut segments = [data; 6];
        segments[Segment::Cs as usize].attributes = PRESENT_CODE_READ | size;
        Self {
            gprs: [0; 16],
            rip,
            rflags: 2,
            segments,
            cpl: 0,
            cr0: CR0_PE,
            cr3: 0,
            cr4: 0,
            efer: if mode == Mode::Bits64 { EFER_LMA } else { 0 },
            pkru: 0,
            physical_bits: 40,
            vendor: Vendor::Amd,
        }
    }
}

impl Cpu for CpuState {
    fn gprs(&self) -> &[u64; 16] {
        &self.gprs
    }
    fn gprs_mut(&mut self) -> &mut [u64; 16] {
        &mut self.gprs
    }
    fn rip(&self) -> u64 {
        self.rip
    }
    fn set_rip(&mut self, rip: u64) {
        self.rip = rip;
    }
    fn rflags(&self) -> u64 {
        self.rflags
    }
    fn set_rflags(&mut self, rflags: u64) {
        self.rflags = rflags;
    }
    fn segment(&self, segment: Segment) -> SegmentRegister {
        self.segments[segment as usize]
    }
    fn cpl(&self) -> u8 {
        self.cpl
    }
    fn cr0(&self) -> u64 {
        self.cr0
    }
    fn cr3(&self) -> u64 {
        self.cr3
    }
    fn cr4(&self) -> u64 {
        self.cr4
    }
    fn efer(&self) -> u64 {
        self.efer
    }
    fn pkru(&self) -> u32 {
        self.pkru
    }
    fn physical_bits(&self) -> u8 {
        self.physical_bits
    }
    fn vendor(&self) -> Vendor {
        self.vendor
    }
}

/// Default operand and address size of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Real mode, virtual-8086 mode and 16-bit segments.
    Bits16,
    /// 32-bit segments, with or without long mode.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

/// A segment register, numbered as in instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Segment {
    /// Destination of string instructions.
    Es,
    /// Code.
    Cs,
    /// Stack.
    Ss,
    /// Data.
    Ds,
    /// Free use; has a base in 64-bit mode too.
    Fs,
    /// Free use; has a base in 64-bit mode too.
    Gs,
}

impl Segment {
    /// All of them, in the order of their numbers.
    pub const ALL: &[Self] = &[Self::Es, Self::Cs, Self::Ss, Self::Ds, Self::Fs, Self::Gs];
}

/// An exception for the guest (APM vol. 2, 8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Vector number.
    pub vector: u8,
    /// What is pushed on the stack.
    pub error_code: u32,
    /// The new value of CR2; only a page fault changes it.
    pub cr2: Option<u64>,
}

impl Exception {
    /// #GP(0).
    pub(crate) const GENERAL_PROTECTION: Self = Self { vector: 13, error_code: 0, cr2: None };
    /// #SS(0).
    pub(crate) const STACK: Self = Self { vector: 12, error_code: 0, cr2: None };

    /// #PF at a linear address.
    pub(crate) const fn page_fault(error_code: u32, address: u64) -> Self {
        Self { vector: 14, error_code, cr2: Some(address) }
    }
}
