//! Properties of a partition (TLFS, HV_PARTITION_PROPERTY_CODE; Linux' `HV_PARTITION_PROPERTY_*`), and the words of
//! feature bits that some properties contain.

use bitflags::bitflags;

use crate::hypercall::Status;
use crate::wire::{U16, U64, wire};

/// When a property may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Never.
    Never,
    /// Until the partition is initialized.
    Early,
    /// Until the partition is finalized.
    Always,
}

macro_rules! properties {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $write:ident;)*) => {
        /// A property.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Property {
            $($(#[$doc])* $name = $code,)*
        }

        impl Property {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// When it may be written.
            #[must_use]
            pub const fn write(self) -> Write {
                match self {
                    $(Self::$name => Write::$write,)*
                }
            }
        }

        impl TryFrom<u32> for Property {
            type Error = Status;

            fn try_from(code: u32) -> Result<Self, Status> {
                match code {
                    $($code => Ok(Self::$name),)*
                    _ => Err(Status::UnknownProperty),
                }
            }
        }
    };
}

properties! {
    /// The partition's privileges: CPUID leaf 4000_0003, EBX in the upper half and EAX in the lower.
    PrivilegeFlags = 0x0001_0000, Early;
    /// [`SyntheticFeatures`] that the partition is offered.
    SyntheticProcessorFeatures = 0x0001_0001, Early;
    /// Whether the parent schedules the partition. Zero.
    IntegratedSchedulerEnabled = 0x0002_0005, Never;
    /// 1 stops the partition's time.
    TimeFreeze = 0x0003_0003, Always;
    /// The partition's time, in units of 100 ns.
    ReferenceTime = 0x0003_0005, Always;
    /// Processors in a socket.
    ProcessorsPerSocket = 0x0005_0003, Always;
    /// 1 tracks which pages are accessed and written to.
    GpaPageAccessTracking = 0x0005_0005, Always;
    /// The effect of an access to an unknown MSR: 0 #GP, 1 reads as zero and ignores writes.
    UnimplementedMsrAction = 0x0005_0017, Always;
    /// [`XsaveFeatures`] that the partition has.
    ProcessorXsaveFeatures = 0x0006_0002, Never;
    /// Bits of a physical address.
    PhysicalAddressWidth = 0x0006_0006, Early;
    /// Components of the XSAVE state: XCR0 and XSS.
    XsaveStates = 0x0006_0007, Never;
    /// Bytes of the largest XSAVE state.
    MaxXsaveDataSize = 0x0006_0008, Never;
    /// Frequency of the TSC in Hz.
    ProcessorClockFrequency = 0x0006_0009, Never;
    /// [`ProcessorFeatures`], bank 0.
    ProcessorFeatures0 = 0x0006_000a, Never;
    /// [`ProcessorFeatures`], bank 1.
    ProcessorFeatures1 = 0x0006_000b, Never;
    /// Features for nested virtualization. Zero.
    VirtualizationFeatures = 0x0008_0000, Never;
    /// [`FeatureBank`] of [`VmmCapabilities`]. Only for the caller itself, and only by HvCallGetPartitionPropertyEx.
    VmmCapabilities = 0x0009_0007, Never;
    /// [`FeatureBank`] of [`SyntheticFeatures`]: those that a child can be offered. As the one above.
    AssignableSyntheticFeatures = 0x0009_0009, Never;
}

impl Property {
    /// Whether it is longer than 64 bits, so that only HvCallGetPartitionPropertyEx can read it.
    #[must_use]
    pub const fn is_large(self) -> bool {
        matches!(self, Self::VmmCapabilities | Self::AssignableSyntheticFeatures)
    }

    /// Whether this value is valid.
    ///
    /// # Errors
    ///
    /// [`Status::OperationDenied`] for a property that cannot be written, [`Status::PropertyValueOutOfRange`].
    pub const fn check_value(self, value: u64) -> Result<(), Status> {
        let is_valid = match self {
            Self::TimeFreeze | Self::GpaPageAccessTracking | Self::UnimplementedMsrAction => value <= 1,
            Self::PhysicalAddressWidth => value >= 32 && value <= 52,
            Self::SyntheticProcessorFeatures => SyntheticFeatures::from_bits(value).is_some(),
            Self::ProcessorsPerSocket => value <= u32::MAX as u64,
            _ => true,
        };
        match self.write() {
            Write::Never => Err(Status::OperationDenied),
            _ if is_valid => Ok(()),
            _ => Err(Status::PropertyValueOutOfRange),
        }
    }
}

wire! {
    /// A property with a list of words of feature bits. There is one such word today (Linux'
    /// `hv_partition_property_vmm_capabilities`).
    pub struct FeatureBank: 16 {
        /// Number of words that follow: 1.
        pub bank_count: U16,
        /// Zero.
        pub reserved: [u8; 6],
        /// The features.
        pub features: U64,
    }
}

impl FeatureBank {
    /// The property with these features.
    #[must_use]
    pub const fn new(features: u64) -> Self {
        Self { bank_count: U16::new(1), reserved: [0; 6], features: U64::new(features) }
    }
}

bitflags! {
    /// What a virtual machine monitor in the parent may do (Linux' `hv_partition_property_vmm_capabilities`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct VmmCapabilities: u64 {
        /// Maps keep whether a page's access may be adjusted.
        const MAP_GPA_PRESERVE_ADJUSTABLE = 1 << 0;
        /// It provides the pages that show state of VPs and statistics.
        const CAN_PROVIDE_OVERLAY_GPFN = 1 << 1;
        /// VPs can be bound to processors.
        const VP_AFFINITY = 1 << 2;
        /// [`Property::AssignableSyntheticFeatures`] exists.
        const ASSIGNABLE_SYNTHETIC_FEATURES = 1 << 4;
        /// It may schedule its children.
        const INTEGRATED_SCHEDULER = 1 << 6;
    }
}

bitflags! {
    /// The parts of the interface that a child is offered (Linux' `hv_partition_synthetic_processor_features`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SyntheticFeatures: u64 {
        /// CPUID shows a hypervisor.
        const HYPERVISOR_PRESENT = 1 << 0;
        /// CPUID leaves 4000_0000 to 4000_0006.
        const HV1 = 1 << 1;
        /// VP_RUNTIME.
        const VP_RUNTIME = 1 << 2;
        /// TIME_REF_COUNT.
        const REFERENCE_COUNTER = 1 << 3;
        /// The synthetic interrupt controller.
        const SYNIC = 1 << 4;
        /// Synthetic timers.
        const SYNTHETIC_TIMERS = 1 << 5;
        /// EOI, ICR and TPR, and the VP assist page.
        const APIC = 1 << 6;
        /// GUEST_OS_ID and HYPERCALL.
        const HYPERCALL = 1 << 7;
        /// VP_INDEX.
        const VP_INDEX = 1 << 8;
        /// REFERENCE_TSC.
        const REFERENCE_TSC = 1 << 9;
        /// GUEST_IDLE.
        const GUEST_IDLE = 1 << 10;
        /// TSC_FREQUENCY and APIC_FREQUENCY.
        const FREQUENCIES = 1 << 11;
        /// Lists of addresses to flush in the extended format.
        const EXTENDED_GVA_RANGES = 1 << 15;
        /// Output of fast hypercalls in registers.
        const FAST_OUTPUT = 1 << 18;
        /// VPs can be started by hypercall.
        const START_VIRTUAL_PROCESSOR = 1 << 20;
        /// Synthetic timers in direct mode.
        const DIRECT_TIMERS = 1 << 22;
        /// The Ex forms of calls.
        const EX_PROCESSOR_MASKS = 1 << 24;
        /// Flushes by hypercall.
        const TB_FLUSH = 1 << 25;
        /// IPIs by hypercall.
        const CLUSTER_IPI = 1 << 26;
        /// Long spins can be told.
        const LONG_SPIN_WAIT = 1 << 27;
        /// Distances of NUMA nodes can be asked for.
        const NUMA_DISTANCE = 1 << 28;
        /// Events can be signalled.
        const SIGNAL_EVENTS = 1 << 29;
        /// Interrupts of devices can be retargeted.
        const RETARGET_DEVICE_INTERRUPT = 1 << 30;
        /// Time can be restored.
        const RESTORE_TIME = 1 << 31;
        /// Enlightened VMCS.
        const ENLIGHTENED_VMCS = 1 << 32;
        /// Registers of its VPs can be read and written by hypercall.
        const VP_REGISTERS = 1 << 38;
    }
}

bitflags! {
    /// Features of the processor, banks 0 and 1 (Linux' `hv_partition_processor_features`). As a property: those that a
    /// partition has. As an input of HvCallCreatePartition: those that the partition must not have.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ProcessorFeatures: u128 {
        /// SSE3.
        const SSE3 = 1 << 0;
        /// LAHF and SAHF in 64-bit mode.
        const LAHF_SAHF = 1 << 1;
        /// SSSE3.
        const SSSE3 = 1 << 2;
        /// SSE4.1.
        const SSE4_1 = 1 << 3;
        /// SSE4.2.
        const SSE4_2 = 1 << 4;
        /// SSE4a.
        const SSE4A = 1 << 5;
        /// XOP.
        const XOP = 1 << 6;
        /// POPCNT.
        const POPCNT = 1 << 7;
        /// CMPXCHG16B.
        const CMPXCHG16B = 1 << 8;
        /// LOCK MOV CR0 is MOV CR8.
        const ALTMOVCR8 = 1 << 9;
        /// LZCNT.
        const LZCNT = 1 << 10;
        /// Misaligned SSE accesses.
        const MISALIGNED_SSE = 1 << 11;
        /// AMD's extensions of MMX.
        const MMX_EXT = 1 << 12;
        /// 3DNow!.
        const AMD_3DNOW = 1 << 13;
        /// Extended 3DNow!.
        const EXTENDED_AMD_3DNOW = 1 << 14;
        /// Pages of 1 GiB.
        const PAGE_1G = 1 << 15;
        /// AES.
        const AES = 1 << 16;
        /// PCLMULQDQ.
        const PCLMULQDQ = 1 << 17;
        /// PCID.
        const PCID = 1 << 18;
        /// FMA4.
        const FMA4 = 1 << 19;
        /// F16C.
        const F16C = 1 << 20;
        /// RDRAND.
        const RDRAND = 1 << 21;
        /// FSGSBASE.
        const FSGSBASE = 1 << 22;
        /// SMEP.
        const SMEP = 1 << 23;
        /// ERMS.
        const ERMS = 1 << 24;
        /// BMI1.
        const BMI1 = 1 << 25;
        /// BMI2.
        const BMI2 = 1 << 26;
        /// MOVBE.
        const MOVBE = 1 << 29;
        /// RDSEED.
        const RDSEED = 1 << 32;
        /// ADX.
        const ADX = 1 << 33;
        /// PREFETCHW.
        const PREFETCHW = 1 << 34;
        /// SMAP.
        const SMAP = 1 << 35;
        /// RDTSCP.
        const RDTSCP = 1 << 38;
        /// CLFLUSHOPT.
        const CLFLUSHOPT = 1 << 39;
        /// CLWB.
        const CLWB = 1 << 40;
        /// SHA.
        const SHA = 1 << 41;
        /// INVPCID.
        const INVPCID = 1 << 43;
        /// IBRS. QEMU then reads and writes SPEC_CTRL.
        const IBRS = 1 << 44;
        /// STIBP.
        const STIBP = 1 << 45;
        /// IBPB.
        const IBPB = 1 << 46;
        /// Real mode without emulation.
        const UNRESTRICTED_GUEST = 1 << 47;
        /// Loads can be kept behind stores whose address is not known: SSBD.
        const MDD = 1 << 48;
        /// FSRM.
        const FSRM = 1 << 49;
        /// RDPID.
        const RDPID = 1 << 57;
        /// UMIP.
        const UMIP = 1 << 58;
        /// VERW clears buffers.
        const MB_CLEAR = 1 << 60;
        /// Invariant TSC.
        const TSC_INVARIANT = 1 << 65;
        /// CLZERO.
        const CLZERO = 1 << 66;
        /// RDPRU.
        const RDPRU = 1 << 67;
        /// LA57.
        const LA57 = 1 << 68;
        /// Nested virtualization.
        const NESTED_VIRTUALIZATION = 1 << 70;
        /// Stores are forwarded to loads by prediction, and that can be turned off.
        const PSFD = 1 << 71;
        /// Shadow stacks. QEMU then reads and writes the CET registers.
        const CET_SS = 1 << 72;
        /// Indirect branch tracking.
        const CET_IBT = 1 << 73;
        /// UMWAIT.
        const UMWAIT = 1 << 76;
        /// TSC deadline timer.
        const TSC_DEADLINE = 1 << 81;
        /// TSC_ADJUST. QEMU then reads and writes it.
        const TSC_ADJUST = 1 << 82;
        /// FZLRM.
        const FZLRM = 1 << 83;
        /// FSRS.
        const FSRS = 1 << 84;
        /// FSRC.
        const FSRC = 1 << 85;

        // A parent also disables features that it does not know.
        const _ = !0;
    }
}

bitflags! {
    /// Components and forms of XSAVE (Linux' `hv_partition_processor_xsave_features`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XsaveFeatures: u64 {
        /// XSAVE.
        const XSAVE = 1 << 0;
        /// XSAVEOPT.
        const XSAVEOPT = 1 << 1;
        /// AVX.
        const AVX = 1 << 2;

        // As with the features above.
        const _ = !0;
    }
}

impl ProcessorFeatures {
    /// The features of the two banks.
    #[must_use]
    pub const fn of_banks(banks: [u64; 2]) -> Self {
        Self::from_bits_retain((banks[1] as u128) << 64 | banks[0] as u128)
    }

    /// The two banks.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the halves are cut out on purpose")]
    pub const fn banks(self) -> [u64; 2] {
        [self.bits() as u64, (self.bits() >> 64) as u64]
    }
}
