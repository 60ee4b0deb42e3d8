//! Bits of the registers that decide how a guest runs, and exception vectors (APM vol. 2, chapters 3 and 8).

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

/// CR0.
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1 << 0;
    /// Extension type, always one.
    pub const ET: u64 = 1 << 4;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
}

/// CR4.
pub mod cr4 {
    /// Pages of 4 MiB without PAE.
    pub const PSE: u64 = 1 << 4;
    /// Physical address extension.
    pub const PAE: u64 = 1 << 5;
    /// Five levels of page tables.
    pub const LA57: u64 = 1 << 12;
    /// The system uses XSAVE; CPUID shows it as OSXSAVE.
    pub const OSXSAVE: u64 = 1 << 18;
    /// Protection keys; CPUID shows it as OSPKE.
    pub const PKE: u64 = 1 << 22;
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
}

/// Exception vectors.
pub mod vector {
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
    /// #GP, general protection.
    pub const GENERAL_PROTECTION: u8 = 13;
    /// #PF, page fault.
    pub const PAGE_FAULT: u8 = 14;
    /// #MC, machine check.
    pub const MACHINE_CHECK: u8 = 18;
}
