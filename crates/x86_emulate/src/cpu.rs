//! The part of a vCPU's state that decides what an instruction does.

/// Bits of CR0, CR4, EFER and RFLAGS that matter here (APM vol. 2, 3.1).
pub(crate) mod bits {
    pub(crate) const CR0_WP: u64 = 1 << 16;
    pub(crate) const CR0_PG: u64 = 1 << 31;
    pub(crate) const CR4_PSE: u64 = 1 << 4;
    pub(crate) const CR4_PAE: u64 = 1 << 5;
    pub(crate) const CR4_LA57: u64 = 1 << 12;
    pub(crate) const CR4_SMEP: u64 = 1 << 20;
    pub(crate) const CR4_SMAP: u64 = 1 << 21;
    pub(crate) const EFER_LMA: u64 = 1 << 10;
    pub(crate) const EFER_NXE: u64 = 1 << 11;

    pub(crate) const CF: u64 = 1 << 0;
    pub(crate) const PF: u64 = 1 << 2;
    pub(crate) const AF: u64 = 1 << 4;
    pub(crate) const ZF: u64 = 1 << 6;
    pub(crate) const SF: u64 = 1 << 7;
    pub(crate) const OF: u64 = 1 << 11;
    pub(crate) const RF: u64 = 1 << 16;
    pub(crate) const AC: u64 = 1 << 18;
}

use bits::{CR4_LA57, EFER_LMA};

/// What the emulator needs to know of a vCPU, and may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuState {
    /// General registers in the order of their encoding: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gprs: [u64; 16],
    /// Address of the instruction, relative to CS.
    pub rip: u64,
    /// Flags.
    pub rflags: u64,
    /// Bases of ES, CS, SS, DS, FS, GS: the order of [`Segment`] and of their encoding.
    pub segment_bases: [u64; 6],
    /// CS.L: 64-bit code, if EFER.LMA is set as well.
    pub cs_long: bool,
    /// CS.D: 32-bit code, otherwise 16-bit. Clear in real mode.
    pub cs_default_32: bool,
    /// Current privilege level, 0 to 3.
    pub cpl: u8,
    /// Control register 0.
    pub cr0: u64,
    /// Control register 3.
    pub cr3: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended feature enables.
    pub efer: u64,
    /// Width of the guest's physical addresses in bits, as its CPUID 8000_0008 says.
    pub physical_bits: u8,
}

impl CpuState {
    /// The mode that decides how code is decoded.
    #[must_use]
    pub fn mode(&self) -> Mode {
        if self.efer & EFER_LMA != 0 && self.cs_long {
            Mode::Bits64
        } else if self.cs_default_32 {
            Mode::Bits32
        } else {
            Mode::Bits16
        }
    }

    /// The linear address of `offset` in `segment`, or `None` when it is not canonical.
    pub(crate) fn linear(&self, segment: Segment, offset: u64) -> Option<u64> {
        let base = self.segment_bases[segment as usize];
        if self.mode() != Mode::Bits64 {
            return Some(base.wrapping_add(offset) & 0xffff_ffff);
        }
        let base = if matches!(segment, Segment::Fs | Segment::Gs) { base } else { 0 };
        let linear = base.wrapping_add(offset);

        // Canonical: all bits above the translated ones are equal (APM vol. 2, 5.3.1).
        let unused = if self.cr4 & CR4_LA57 != 0 { 64 - 57 } else { 64 - 48 };
        let extended = (linear << unused).cast_signed() >> unused;
        (extended.cast_unsigned() == linear).then_some(linear)
    }

    /// The value of RIP after `length` more bytes.
    pub(crate) fn rip_after(&self, length: u8) -> u64 {
        let next = self.rip.wrapping_add(u64::from(length));
        if self.mode() == Mode::Bits64 { next } else { next & 0xffff_ffff }
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
