//! CPUID leaves and feature bits by name (APM vol. 3, appendix E).

/// The output of one leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// Leaf 1, ECX.
pub mod leaf_1_ecx {
    /// MONITOR and MWAIT.
    pub const MONITOR: u32 = 1 << 3;
    /// VT-x.
    pub const VMX: u32 = 1 << 5;
    /// Process-context identifiers.
    pub const PCID: u32 = 1 << 17;
    /// x2APIC.
    pub const X2APIC: u32 = 1 << 21;
    /// The APIC timer has a TSC-deadline mode.
    pub const TSC_DEADLINE: u32 = 1 << 24;
    /// XSAVE.
    pub const XSAVE: u32 = 1 << 26;
    /// CR4.OSXSAVE is set.
    pub const OSXSAVE: u32 = 1 << 27;
    /// A hypervisor is present.
    pub const HYPERVISOR: u32 = 1 << 31;
}

/// Leaf 1, EDX.
pub mod leaf_1_edx {
    /// Machine checks are exceptions.
    pub const MCE: u32 = 1 << 7;
    /// Machine-check architecture: banks.
    pub const MCA: u32 = 1 << 14;
}

/// Leaf 7, ECX.
pub mod leaf_7_ecx {
    /// Protection keys for user pages.
    pub const PKU: u32 = 1 << 3;
    /// CR4.PKE is set.
    pub const OSPKE: u32 = 1 << 4;
}

/// Leaf 8000_0001, ECX.
pub mod leaf_8000_0001_ecx {
    /// Secure virtual machine.
    pub const SVM: u32 = 1 << 2;
}

/// Leaf 8000_0001, EDX.
pub mod leaf_8000_0001_edx {
    /// 1 GiB pages.
    pub const PAGE_1G: u32 = 1 << 26;
    /// RDTSCP.
    pub const RDTSCP: u32 = 1 << 27;
}

/// Leaf 8000_0007, EBX.
pub mod leaf_8000_0007_ebx {
    /// An error that was lost because its bank was in use was no worse than the error in the bank.
    pub const MCA_OVERFLOW_RECOV: u32 = 1 << 0;
    /// Banks have 16 registers each, from C000_2000 on.
    pub const SCALABLE_MCA: u32 = 1 << 3;
}

/// Leaf 8000_0007, EDX.
pub mod leaf_8000_0007_edx {
    /// The TSC runs at one rate.
    pub const TSC_INVARIANT: u32 = 1 << 8;
}

/// Leaf 8000_000A, EDX: features of SVM (APM vol. 3, E.4.9).
pub mod svm_feature {
    /// Nested paging.
    pub const NP: u32 = 1 << 0;
    /// The VMCB's next RIP is saved at an exit.
    pub const NRIP_SAVE: u32 = 1 << 3;
    /// The VMCB's clean bits are honoured.
    pub const VMCB_CLEAN: u32 = 1 << 5;
    /// TLB_CONTROL can flush one ASID.
    pub const FLUSH_BY_ASID: u32 = 1 << 6;
    /// Decode assists.
    pub const DECODE_ASSISTS: u32 = 1 << 7;
    /// PAUSE filter.
    pub const PAUSE_FILTER: u32 = 1 << 10;
    /// Virtual interrupt controller.
    pub const AVIC: u32 = 1 << 13;
    /// Virtual GIF.
    pub const VGIF: u32 = 1 << 16;
}
