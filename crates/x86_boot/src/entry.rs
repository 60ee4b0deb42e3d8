//! The start state of the first vCPU, as plain values for the code that fills the VMCB.

use addr::{Gpa, GpaRange};

/// Places in memory, and the start state of the first vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelEntry {
    /// Registers of the first vCPU.
    pub mode: Mode,
    /// The kernel's memory while it unpacks itself and starts.
    pub kernel: GpaRange,
    /// Place of the initrd.
    pub initrd: Option<GpaRange>,
}

/// Processor mode and registers at the first instruction.
///
/// All registers not named are zero, RFLAGS is 2 (interrupts off), and CPL is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// 64-bit mode with paging (Linux x86 boot protocol, "64-bit Boot Protocol"). Constants: [`crate::long64`].
    Long64 {
        /// First instruction; virtual and physical address are the same.
        rip: Gpa,
        /// RSI: the zero page.
        rsi: Gpa,
        /// CR3: identity map of the first 4 GiB.
        cr3: Gpa,
        /// GDTR. CS is selector 0x10, DS, ES, SS, FS and GS are 0x18, TR is 0x20.
        gdt: DescriptorTable,
    },
    /// 32-bit protected mode without paging (Xen `docs/misc/pvh.pandoc`, and Linux x86 boot protocol, "32-bit Boot
    /// Protocol"). Constants: [`crate::protected32`].
    Protected32 {
        /// First instruction; linear and physical address are the same.
        eip: u32,
        /// EBX: `hvm_start_info`, for a PVH kernel.
        ebx: u32,
        /// ESI: the zero page, for a bzImage.
        esi: u32,
        /// GDTR. CS is selector 0x10, DS, ES and SS are 0x18.
        gdt: DescriptorTable,
    },
}

/// Value of GDTR or IDTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorTable {
    /// First byte.
    pub base: Gpa,
    /// Length in bytes, less one.
    pub limit: u16,
}

/// Control registers and hidden segment registers for [`Mode::Long64`].
///
/// Segment attributes are in the VMCB's format: descriptor bits 40-47 in bits 0-7, bits 52-55 in bits 8-11 (AMD APM
/// vol. 2, section 15.5.1). They match the GDT in memory.
pub mod long64 {
    /// CR0: PG, NE, ET, PE.
    pub const CR0: u64 = 0x8000_0031;
    /// CR4: PAE.
    pub const CR4: u64 = 0x20;
    /// EFER: LMA, LME. (SVM needs SVME as well, which the guest must not see.)
    pub const EFER: u64 = 0x500;
    /// Selector in CS.
    pub const CS: u16 = 0x10;
    /// Selector in DS, ES, SS, FS and GS.
    pub const DS: u16 = 0x18;
    /// Selector in TR.
    pub const TR: u16 = 0x20;
    /// CS: 64-bit code, readable, accessed, 4 KiB granularity. Base 0, limit 0xffff_ffff.
    pub const CS_ATTRIBUTES: u16 = 0xa9b;
    /// Data segments: writable, accessed, 32-bit, 4 KiB granularity. Base 0, limit 0xffff_ffff.
    pub const DS_ATTRIBUTES: u16 = 0xc93;
    /// TR: busy 64-bit TSS. Base 0, limit [`TR_LIMIT`].
    pub const TR_ATTRIBUTES: u16 = 0x08b;
    /// Limit of TR in bytes, less one.
    pub const TR_LIMIT: u32 = 0x67;
}

/// Control registers and hidden segment registers for [`Mode::Protected32`]; attributes as in
/// [`long64`](mod@crate::long64).
///
/// Linux' protocol requires a GDT with these selectors; PVH requires none and accepts any selector. IDTR is zero.
pub mod protected32 {
    /// CR0: NE, ET, PE.
    pub const CR0: u64 = 0x31;
    /// CR4.
    pub const CR4: u64 = 0;
    /// EFER, as the guest sees it.
    pub const EFER: u64 = 0;
    /// Selector in CS.
    pub const CS: u16 = super::long64::CS;
    /// Selector in DS, ES and SS.
    pub const DS: u16 = super::long64::DS;
    /// CS: 32-bit code, readable, accessed, 4 KiB granularity. Base 0, limit 0xffff_ffff.
    pub const CS_ATTRIBUTES: u16 = 0xc9b;
    /// DS, ES, SS: writable, accessed, 32-bit, 4 KiB granularity. Base 0, limit 0xffff_ffff.
    pub const DS_ATTRIBUTES: u16 = 0xc93;
    /// TR: busy 32-bit TSS. Base 0, limit [`TR_LIMIT`].
    pub const TR_ATTRIBUTES: u16 = 0x08b;
    /// Limit of TR in bytes, less one.
    pub const TR_LIMIT: u32 = 0x67;
}
