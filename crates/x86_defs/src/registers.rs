//! Bits of the registers that decide how a guest runs, segment registers, and exception vectors (APM vol. 2, chapters 3
//! and 8).

/// RFLAGS.
pub mod rflags {
    /// Always one.
    pub const RESERVED_ONE: u64 = 1 << 1;
    /// Trap flag: single step.
    pub const TF: u64 = 1 << 8;
    /// Interrupts are taken.
    pub const IF: u64 = 1 << 9;
    /// Resume flag.
    pub const RF: u64 = 1 << 16;
}

/// DR6, the causes of a #DB (APM vol. 2, 13.1.1.3).
pub mod dr6 {
    /// B0 to B3: the breakpoints that were hit.
    pub const BREAKPOINTS: u64 = 0xf;
    /// BD: an access to a debug register while DR7.GD was set.
    pub const GENERAL_DETECT: u64 = 1 << 13;
    /// BS: a single step.
    pub const SINGLE_STEP: u64 = 1 << 14;
    /// BT: a task switch.
    pub const TASK_SWITCH: u64 = 1 << 15;
}

/// DR7, which breakpoints are enabled (APM vol. 2, 13.1.1.4).
pub mod dr7 {
    /// L and G of breakpoint `number`.
    #[must_use]
    pub const fn enables(number: u32) -> u64 {
        3 << (2 * number)
    }
}

/// CR0.
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1 << 0;
    /// Monitor the coprocessor.
    pub const MP: u64 = 1 << 1;
    /// Emulate x87.
    pub const EM: u64 = 1 << 2;
    /// Task switched.
    pub const TS: u64 = 1 << 3;
    /// Extension type, always one.
    pub const ET: u64 = 1 << 4;
    /// x87 errors are exceptions.
    pub const NE: u64 = 1 << 5;
    /// Read-only pages are read-only for the supervisor too.
    pub const WP: u64 = 1 << 16;
    /// Alignment checks are allowed.
    pub const AM: u64 = 1 << 18;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
}

/// CR4.
pub mod cr4 {
    /// Virtual-8086 mode extensions.
    pub const VME: u64 = 1 << 0;
    /// Virtual interrupts in protected mode.
    pub const PVI: u64 = 1 << 1;
    /// RDTSC for the supervisor only.
    pub const TSD: u64 = 1 << 2;
    /// Debugging extensions.
    pub const DE: u64 = 1 << 3;
    /// Pages of 4 MiB without PAE.
    pub const PSE: u64 = 1 << 4;
    /// Physical address extension.
    pub const PAE: u64 = 1 << 5;
    /// Machine checks raise exceptions instead of a shutdown.
    pub const MCE: u64 = 1 << 6;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// RDPMC at any privilege level.
    pub const PCE: u64 = 1 << 8;
    /// The system uses FXSAVE.
    pub const OSFXSR: u64 = 1 << 9;
    /// The system handles SIMD exceptions.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// SGDT, SIDT, SLDT, STR and SMSW for the supervisor only.
    pub const UMIP: u64 = 1 << 11;
    /// Five levels of page tables.
    pub const LA57: u64 = 1 << 12;
    /// RDFSBASE and similar.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// The system uses XSAVE; CPUID shows it as OSXSAVE.
    pub const OSXSAVE: u64 = 1 << 18;
    /// The supervisor does not execute user pages.
    pub const SMEP: u64 = 1 << 20;
    /// The supervisor does not access user pages.
    pub const SMAP: u64 = 1 << 21;
    /// Protection keys; CPUID shows it as OSPKE.
    pub const PKE: u64 = 1 << 22;
    /// Control-flow enforcement.
    pub const CET: u64 = 1 << 23;
}

/// EFER (MSR C000_0080).
pub mod efer {
    /// SYSCALL is enabled.
    pub const SCE: u64 = 1 << 0;
    /// Long mode is enabled.
    pub const LME: u64 = 1 << 8;
    /// Long mode is active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute pages.
    pub const NXE: u64 = 1 << 11;
    /// SVM. Must be set while a guest runs.
    pub const SVME: u64 = 1 << 12;
    /// Fast FXSAVE.
    pub const FFXSR: u64 = 1 << 14;
    /// Translation cache extension.
    pub const TCE: u64 = 1 << 15;
    /// MCOMMIT is enabled.
    pub const MCOMMIT: u64 = 1 << 17;
    /// WBINVD can be interrupted.
    pub const INTWB: u64 = 1 << 18;
    /// Upper addresses are ignored.
    pub const UAIE: u64 = 1 << 20;
    /// Automatic IBRS.
    pub const AIBRSE: u64 = 1 << 21;
}

/// Exception vectors.
pub mod vector {
    /// #DE, divide error.
    pub const DIVIDE_ERROR: u8 = 0;
    /// #DB, debug.
    pub const DEBUG: u8 = 1;
    /// Non-maskable interrupt.
    pub const NMI: u8 = 2;
    /// #BP, INT3.
    pub const BREAKPOINT: u8 = 3;
    /// #OF, INTO.
    pub const OVERFLOW: u8 = 4;
    /// #UD, invalid opcode.
    pub const INVALID_OPCODE: u8 = 6;
    /// #DF, double fault.
    pub const DOUBLE_FAULT: u8 = 8;
    /// #TS, invalid TSS: the first of four about segments (10 to 13).
    pub const INVALID_TSS: u8 = 10;
    /// #GP, general protection.
    pub const GENERAL_PROTECTION: u8 = 13;
    /// #PF, page fault.
    pub const PAGE_FAULT: u8 = 14;
    /// #AC, alignment check.
    pub const ALIGNMENT_CHECK: u8 = 17;
    /// #MC, machine check.
    pub const MACHINE_CHECK: u8 = 18;
}

/// A segment register, with its hidden part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Bits 55:52 and 47:40 of the descriptor, packed into 12 bits.
    pub attributes: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base, a GVA before paging.
    pub base: u64,
}

impl Segment {
    /// Attribute: long mode code.
    pub const LONG: u16 = 1 << 9;
    /// Attribute: default size 32 bits.
    pub const BIG: u16 = 1 << 10;
}
