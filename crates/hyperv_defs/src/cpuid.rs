//! CPUID leaves 4000_0000 to 4000_0006 (TLFS, "Feature and Interface Discovery").
//!
//! Linux checks only the vendor string, Windows only the interface's signature, FreeBSD both.

use bitflags::bitflags;

/// Vendor string, and the highest leaf in EAX.
pub const VENDOR_AND_MAX: u32 = 0x4000_0000;
/// Signature of the interface in EAX; the rest is zero.
pub const INTERFACE: u32 = 0x4000_0001;
/// Version: build number in EAX, major and minor in EBX, service pack in ECX, service branch and number in EDX.
pub const VERSION: u32 = 0x4000_0002;
/// What the guest may use: [`Privileges`] in EAX, [`PrivilegesHigh`] in EBX, [`Features`] in EDX.
pub const FEATURES: u32 = 0x4000_0003;
/// What the guest should use: [`Recommendations`] in EAX, [`SPIN_NEVER_NOTIFY`] or a count in EBX.
pub const RECOMMENDATIONS: u32 = 0x4000_0004;
/// Maximum number of virtual processors in EAX, of logical processors in EBX, of remappable interrupt vectors in ECX.
pub const LIMITS: u32 = 0x4000_0005;
/// [`HardwareFeatures`] in EAX.
pub const HARDWARE: u32 = 0x4000_0006;

/// The highest leaf that this crate describes, for EAX of [`VENDOR_AND_MAX`].
pub const MAX_LEAF: u32 = HARDWARE;
/// The vendor "Microsoft Hv" as EBX, ECX and EDX of [`VENDOR_AND_MAX`].
pub const VENDOR: [u32; 3] = [0x7263_694d, 0x666f_736f, 0x7648_2074];
/// The signature "Hv#1": EAX of [`INTERFACE`].
pub const SIGNATURE: u32 = 0x3123_7648;
/// EBX of [`RECOMMENDATIONS`]: never report a long wait for a spin lock. Otherwise a number of attempts.
pub const SPIN_NEVER_NOTIFY: u32 = 0xffff_ffff;

bitflags! {
    /// EAX of [`FEATURES`]: the low half of the partition privilege mask. An MSR whose bit is clear gives #GP.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Privileges: u32 {
        /// VP_RUNTIME.
        const VP_RUNTIME = 1 << 0;
        /// TIME_REF_COUNT.
        const REFERENCE_COUNTER = 1 << 1;
        /// The synthetic interrupt controller. FreeBSD's flush needs it, and a VMBus.
        const SYNIC = 1 << 2;
        /// Synthetic timers.
        const SYNTHETIC_TIMERS = 1 << 3;
        /// EOI, ICR and TPR, and the VP assist page.
        const APIC = 1 << 4;
        /// GUEST_OS_ID and HYPERCALL. Linux and FreeBSD require it.
        const HYPERCALL = 1 << 5;
        /// VP_INDEX. Linux requires it.
        const VP_INDEX = 1 << 6;
        /// The reset register.
        const RESET = 1 << 7;
        /// Statistics pages.
        const STATISTICS = 1 << 8;
        /// REFERENCE_TSC.
        const REFERENCE_TSC = 1 << 9;
        /// GUEST_IDLE.
        const GUEST_IDLE = 1 << 10;
        /// TSC_FREQUENCY and APIC_FREQUENCY, together with [`Features::FREQUENCIES`].
        const FREQUENCIES = 1 << 11;
        /// Debug registers.
        const DEBUG = 1 << 12;
        /// Reenlightenment controls.
        const REENLIGHTENMENT = 1 << 13;
        /// TSC_INVARIANT_CONTROL. Without it Linux calls its TSC unstable.
        const TSC_INVARIANT = 1 << 15;
    }
}

bitflags! {
    /// EBX of [`FEATURES`]: the high half of the partition privilege mask. An ordinary guest has none of these.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct PrivilegesHigh: u32 {
        /// Creating partitions.
        const CREATE_PARTITIONS = 1 << 0;
        /// Asking for its own partition id. Linux 6.1 panics if the call then fails.
        const ACCESS_PARTITION_ID = 1 << 1;
        /// Memory pools.
        const ACCESS_MEMORY_POOL = 1 << 2;
        /// Posting messages.
        const POST_MESSAGES = 1 << 4;
        /// Signalling events.
        const SIGNAL_EVENTS = 1 << 5;
        /// Creating ports.
        const CREATE_PORT = 1 << 6;
        /// Connecting to ports.
        const CONNECT_PORT = 1 << 7;
        /// Statistics.
        const STATISTICS = 1 << 8;
        /// Debugging.
        const DEBUGGING = 1 << 11;
        /// Managing CPUs: marks the root partition; Linux then behaves as one.
        const CPU_MANAGEMENT = 1 << 12;
        /// Virtual secure mode.
        const VSM = 1 << 16;
        /// Registers of VPs by hypercall.
        const VP_REGISTERS = 1 << 17;
        /// Extended hypercalls. Linux then asks for their list.
        const EXTENDED_HYPERCALLS = 1 << 20;
        /// Starting VPs by hypercall.
        const START_VIRTUAL_PROCESSOR = 1 << 21;
        /// Isolated partition.
        const ISOLATION = 1 << 22;
    }
}

bitflags! {
    /// EDX of [`FEATURES`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u32 {
        /// Guest debugging.
        const GUEST_DEBUGGING = 1 << 1;
        /// CPUs may be added and removed.
        const DYNAMIC_PARTITIONING = 1 << 3;
        /// Fast hypercalls may take XMM0 to XMM5 as further input.
        const XMM_INPUT = 1 << 4;
        /// An idle state for guests.
        const GUEST_IDLE = 1 << 5;
        /// TSC_FREQUENCY and APIC_FREQUENCY, together with [`Privileges::FREQUENCIES`].
        const FREQUENCIES = 1 << 8;
        /// Crash registers.
        const CRASH = 1 << 10;
        /// Lists of addresses to flush may be in the extended format
        /// ([`FlushFlags::USE_EXTENDED_RANGE_FORMAT`](crate::FlushFlags)).
        const EXTENDED_GVA_RANGES = 1 << 14;
        /// Fast hypercalls may give output in XMM registers.
        const XMM_OUTPUT = 1 << 15;
        /// SINTs can be polled.
        const SINT_POLLING = 1 << 17;
        /// HYPERCALL can be locked.
        const HYPERCALL_LOCK = 1 << 18;
        /// Synthetic timers can raise a vector without the SynIC.
        const DIRECT_TIMERS = 1 << 19;
    }
}

bitflags! {
    /// EAX of [`RECOMMENDATIONS`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Recommendations: u32 {
        /// Switch address spaces by hypercall: useful only without nested paging.
        const ADDRESS_SPACE_SWITCH = 1 << 0;
        /// Flush the own TLB by hypercall: useful only without nested paging.
        const LOCAL_FLUSH = 1 << 1;
        /// Flush other vCPUs' TLBs by hypercall.
        const REMOTE_FLUSH = 1 << 2;
        /// EOI, ICR and TPR by MSR.
        const APIC_MSRS = 1 << 3;
        /// Reset by MSR.
        const RESET_MSR = 1 << 4;
        /// Watchdogs should be patient: a vCPU may not run for a long time.
        const RELAXED_TIMING = 1 << 5;
        /// DMA remapping. Deprecated.
        const DMA_REMAPPING = 1 << 6;
        /// Interrupt remapping. Deprecated.
        const INTERRUPT_REMAPPING = 1 << 7;
        /// x2APIC registers.
        const X2APIC_MSRS = 1 << 8;
        /// Do not use AutoEOI.
        const DEPRECATE_AUTO_EOI = 1 << 9;
        /// Send IPIs by hypercall.
        const CLUSTER_IPI = 1 << 10;
        /// The Ex forms exist, whose processor sets reach beyond 64 VPs. Guests prefer the plain forms anyway.
        const EX_PROCESSOR_MASKS = 1 << 11;
        /// The hypervisor itself runs nested.
        const NESTED = 1 << 12;
        /// Enlightened VMCS.
        const ENLIGHTENED_VMCS = 1 << 14;
        /// Flush the whole own TLB by toggling CR4.PGE.
        const PGE_TOGGLE = 1 << 17;
        /// Sibling threads never run another guest.
        const NO_NONARCH_CORE_SHARING = 1 << 18;
    }
}

bitflags! {
    /// EAX of [`HARDWARE`]: informative.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HardwareFeatures: u32 {
        /// APIC overlay assist.
        const APIC_OVERLAY_ASSIST = 1 << 0;
        /// MSR bitmaps.
        const MSR_BITMAPS = 1 << 1;
        /// Second-level address translation.
        const SECOND_LEVEL_TRANSLATION = 1 << 3;
    }
}
