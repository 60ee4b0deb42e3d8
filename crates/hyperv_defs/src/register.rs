//! Registers of a VP, by the names that HvCallGetVpRegisters and HvCallSetVpRegisters use (TLFS, HV_REGISTER_NAME;
//! Linux' `HV_REGISTER_*` and `HV_X64_REGISTER_*`).
//!
//! The list has the names that Linux, QEMU 11.1 and Cloud Hypervisor use, and whole arrays around them. All other names
//! are invalid.
//!
//! A value always has 16 bytes. Most registers use the first 8 of them; the others have a layout of their own.

use crate::hypercall::Status;
use crate::wire::{U16, U32, U64, wire};

macro_rules! registers {
    (
        single { $($(#[$doc:meta])* $name:ident = $number:literal,)* }
        arrays { $($(#[$array_doc:meta])* $array:ident = $first:literal, $count:literal;)* }
    ) => {
        /// The name of a register.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Register {
            $($(#[$doc])* $name,)*
            $($(#[$array_doc])* $array(u8),)*
        }

        impl Register {
            /// Its number. In an array, only elements below the array's length have valid numbers.
            #[must_use]
            pub const fn number(self) -> u32 {
                match self {
                    $(Self::$name => $number,)*
                    $(Self::$array(index) => $first + index as u32,)*
                }
            }

            /// All of them, in no order.
            pub fn all() -> impl Iterator<Item = Self> {
                let single = [$(Self::$name,)*].into_iter();
                let arrays = [$((Self::$array as fn(u8) -> Self, $count),)*].into_iter();
                single.chain(arrays.flat_map(|(array, count)| (0..count).map(array)))
            }
        }

        impl TryFrom<u32> for Register {
            type Error = Status;

            /// The register with this number.
            fn try_from(number: u32) -> Result<Self, Status> {
                match number {
                    $($number => return Ok(Self::$name),)*
                    _ => {}
                }
                // A number before the array becomes a very large index.
                $(
                    let index = u8::try_from(number.wrapping_sub($first)).unwrap_or(u8::MAX);
                    if index < $count {
                        return Ok(Self::$array(index));
                    }
                )*
                Err(Status::InvalidParameter)
            }
        }
    };
}

registers! {
    single {
        /// Bit 0: the parent has suspended the VP. Set when it is created.
        ExplicitSuspend = 0x0000_0000,
        /// Bit 0: the hypervisor has suspended the VP, because it has sent the parent a message about it.
        InterceptSuspend = 0x0000_0001,
        /// State that helps a parent to emulate an instruction.
        InstructionEmulationHints = 0x0000_0002,
        /// Bit 0: suspended by its scheduler. Only used if the parent schedules VPs.
        DispatchSuspend = 0x0000_0003,
        /// Whether the VP waits: see [`activity`].
        InternalActivityState = 0x0000_0004,
        /// Crash control.
        GuestCrashControl = 0x0000_0215,
        /// An event whose delivery was interrupted: see [`PendingInterruption`].
        PendingInterruption = 0x0001_0002,
        /// Bit 0: interrupt shadow. Bit 1: NMIs are masked.
        InterruptState = 0x0001_0003,
        /// An exception or event to deliver before the next instruction. 128 bits.
        PendingEvent0 = 0x0001_0004,
        /// Another one.
        PendingEvent1 = 0x0001_0005,
        /// Interrupts for which the parent wants a message as soon as the VP can take them.
        DeliverabilityNotifications = 0x0001_0006,
        /// Instruction pointer.
        Rip = 0x0002_0010,
        /// Flags.
        Rflags = 0x0002_0011,
        /// x87 control, status and tag words, opcode, instruction pointer: see [`FpControlStatus`].
        FpControlStatus = 0x0003_0018,
        /// x87 data pointer, MXCSR and its mask: see [`XmmControlStatus`].
        XmmControlStatus = 0x0003_0019,
        /// CR0.
        Cr0 = 0x0004_0000,
        /// CR2.
        Cr2 = 0x0004_0001,
        /// CR3.
        Cr3 = 0x0004_0002,
        /// CR4.
        Cr4 = 0x0004_0003,
        /// CR8: the task priority.
        Cr8 = 0x0004_0004,
        /// XCR0.
        Xfem = 0x0004_0005,
        /// CR0 between the halves of a task switch.
        IntermediateCr0 = 0x0004_1000,
        /// CR3 between the halves of a task switch.
        IntermediateCr3 = 0x0004_1002,
        /// CR4 between the halves of a task switch.
        IntermediateCr4 = 0x0004_1003,
        /// CR8 between the halves of a task switch.
        IntermediateCr8 = 0x0004_1004,
        /// DR6.
        Dr6 = 0x0005_0004,
        /// DR7.
        Dr7 = 0x0005_0005,
        /// Interrupt descriptor table. A table.
        Idtr = 0x0007_0000,
        /// Global descriptor table. A table.
        Gdtr = 0x0007_0001,
        /// Time stamp counter.
        Tsc = 0x0008_0000,
        /// EFER.
        Efer = 0x0008_0001,
        /// KERNEL_GS_BASE.
        KernelGsBase = 0x0008_0002,
        /// APIC_BASE.
        ApicBase = 0x0008_0003,
        /// PAT.
        Pat = 0x0008_0004,
        /// SYSENTER_CS.
        SysenterCs = 0x0008_0005,
        /// SYSENTER_EIP.
        SysenterEip = 0x0008_0006,
        /// SYSENTER_ESP.
        SysenterEsp = 0x0008_0007,
        /// STAR.
        Star = 0x0008_0008,
        /// LSTAR.
        Lstar = 0x0008_0009,
        /// CSTAR.
        Cstar = 0x0008_000a,
        /// SFMASK.
        Sfmask = 0x0008_000b,
        /// The local APIC's id after a reset.
        InitialApicId = 0x0008_000c,
        /// MTRRCAP.
        MtrrCap = 0x0008_000d,
        /// MTRR_DEF_TYPE.
        MtrrDefType = 0x0008_000e,
        /// TSC_AUX.
        TscAux = 0x0008_007b,
        /// BNDCFGS.
        Bndcfgs = 0x0008_007c,
        /// DEBUGCTL.
        DebugCtl = 0x0008_007d,
        /// SPEC_CTRL.
        SpecCtrl = 0x0008_0084,
        /// PRED_CMD.
        PredCmd = 0x0008_0085,
        /// VIRT_SPEC_CTRL.
        VirtSpecCtrl = 0x0008_0086,
        /// TSX_CTRL.
        TsxCtrl = 0x0008_0088,
        /// XSS.
        Xss = 0x0008_008b,
        /// U_CET.
        UCet = 0x0008_008c,
        /// S_CET.
        SCet = 0x0008_008d,
        /// SSP.
        Ssp = 0x0008_008e,
        /// INTERRUPT_SSP_TABLE_ADDR.
        InterruptSspTable = 0x0008_0093,
        /// TSC_DEADLINE.
        TscDeadline = 0x0008_0095,
        /// TSC_ADJUST.
        TscAdjust = 0x0008_0096,
        /// UMWAIT_CONTROL.
        UmwaitControl = 0x0008_0098,
        /// XFD.
        Xfd = 0x0008_0099,
        /// XFD_ERR.
        XfdErr = 0x0008_009a,
        /// Time for which the VP ran, in units of 100 ns.
        VpRuntime = 0x0009_0000,
        /// The MSR HYPERCALL.
        Hypercall = 0x0009_0001,
        /// The MSR GUEST_OS_ID.
        GuestOsId = 0x0009_0002,
        /// The VP's index.
        VpIndex = 0x0009_0003,
        /// The partition's time, in units of 100 ns.
        TimeRefCount = 0x0009_0004,
        /// The MSR VP_ASSIST_PAGE.
        VpAssistPage = 0x0009_0013,
        /// Number of signals to the parent about the VP. Only used if the parent schedules VPs.
        VpRootSignalCount = 0x0009_0014,
        /// The MSR REFERENCE_TSC.
        ReferenceTsc = 0x0009_0017,
        /// Where the register page is.
        RegisterPage = 0x0009_001c,
        /// The MSR SCONTROL.
        Scontrol = 0x000a_0010,
        /// The MSR SVERSION.
        Sversion = 0x000a_0011,
        /// The MSR SIEFP.
        Siefp = 0x000a_0012,
        /// The MSR SIMP.
        Simp = 0x000a_0013,
        /// The MSR EOM.
        Eom = 0x000a_0014,
        /// The MSR SIRBP.
        Sirbp = 0x000a_0015,
    }
    arrays {
        /// A parameter of a crash.
        GuestCrashParameter = 0x0000_0210, 5;
        /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15: the order of the processor's encoding.
        Gpr = 0x0002_0000, 16;
        /// An XMM register, 128 bits.
        Xmm = 0x0003_0000, 16;
        /// An x87 register, 80 bits.
        FpMmx = 0x0003_0010, 8;
        /// DR0 to DR3.
        Dr = 0x0005_0000, 4;
        /// ES, CS, SS, DS, FS, GS, LDTR, TR: see [`SegmentRegister`].
        Segment = 0x0006_0000, 8;
        /// MTRR_PHYS_BASE.
        MtrrPhysBase = 0x0008_0010, 16;
        /// MTRR_PHYS_MASK.
        MtrrPhysMask = 0x0008_0040, 16;
        /// The fixed MTRRs: 64K_00000, 16K_80000, 16K_A0000, 4K_C0000 to 4K_F8000.
        MtrrFixed = 0x0008_0070, 11;
        /// PL0_SSP to PL3_SSP.
        PlSsp = 0x0008_008f, 4;
        /// SINT0 to SINT15.
        Sint = 0x000a_0000, 16;
        /// Configuration and count of each synthetic timer, alternating.
        Stimer = 0x000b_0000, 8;
    }
}

/// Bits of [`Register::InternalActivityState`] (TLFS, HV_INTERNAL_ACTIVITY_REGISTER).
pub mod activity {
    /// The VP waits for INIT and SIPI.
    pub const STARTUP_SUSPEND: u64 = 1 << 0;
    /// It has executed HLT.
    pub const HALT_SUSPEND: u64 = 1 << 1;
    /// It waits in the guest's idle state.
    pub const IDLE_SUSPEND: u64 = 1 << 2;
}

wire! {
    /// A register's value (TLFS, HV_REGISTER_VALUE).
    pub struct RegisterValue: 16 {
        /// Bits 63:0.
        pub low: U64,
        /// Bits 127:64.
        pub high: U64,
    }

    /// A segment register (TLFS, HV_X64_SEGMENT_REGISTER).
    pub struct SegmentRegister: 16 {
        /// Base.
        pub base: U64,
        /// Limit, in bytes.
        pub limit: U32,
        /// Selector.
        pub selector: U16,
        /// Type in bits 3:0, S 4, DPL 6:5, P 7, AVL 12, L 13, D/B 14, G 15.
        pub attributes: U16,
    }

    /// IDTR or GDTR (TLFS, HV_X64_TABLE_REGISTER).
    pub struct TableRegister: 16 {
        /// Zero.
        pub padding: [u8; 6],
        /// Limit, in bytes.
        pub limit: U16,
        /// Base.
        pub base: U64,
    }

    /// State of the x87 unit beside its registers (TLFS, HV_X64_FP_CONTROL_STATUS_REGISTER).
    pub struct FpControlStatus: 16 {
        /// Control word.
        pub control: U16,
        /// Status word.
        pub status: U16,
        /// Tag word, in the short form of FXSAVE.
        pub tag: u8,
        /// Zero.
        pub reserved: u8,
        /// Last opcode.
        pub last_opcode: U16,
        /// Last instruction pointer.
        pub last_rip: U64,
    }

    /// State of the SSE unit beside its registers (TLFS, HV_X64_XMM_CONTROL_STATUS_REGISTER).
    pub struct XmmControlStatus: 16 {
        /// Last data pointer of the x87 unit.
        pub last_rdp: U64,
        /// MXCSR.
        pub mxcsr: U32,
        /// Which bits of MXCSR exist.
        pub mxcsr_mask: U32,
    }

    /// An element of HvCallSetVpRegisters (Linux' `hv_register_assoc`).
    pub struct RegisterAssociation: 32 {
        /// The register's number.
        pub name: U32,
        /// Not looked at.
        pub reserved: [u8; 12],
        /// Its value.
        pub value: RegisterValue,
    }
}

impl RegisterValue {
    /// The value's first 64 bits: all of it, for most registers.
    #[must_use]
    pub fn as_u64(self) -> u64 {
        self.low.get()
    }

    /// All 128 bits.
    #[must_use]
    pub fn as_u128(self) -> u128 {
        u128::from(self.high.get()) << 64 | u128::from(self.low.get())
    }
}

impl From<u64> for RegisterValue {
    fn from(value: u64) -> Self {
        Self { low: U64::new(value), high: U64::new(0) }
    }
}

impl From<u128> for RegisterValue {
    #[expect(clippy::cast_possible_truncation, reason = "the halves are cut out on purpose")]
    fn from(value: u128) -> Self {
        Self { low: U64::new(value as u64), high: U64::new((value >> 64) as u64) }
    }
}

impl SegmentRegister {
    /// The attributes without the gap in which a descriptor has a part of its limit: the form of SVM's VMCB.
    #[must_use]
    pub const fn pack(attributes: u16) -> u16 {
        attributes & 0xff | attributes >> 4 & 0xf00
    }

    /// The attributes of such a form.
    #[must_use]
    pub const fn unpack(packed: u16) -> u16 {
        packed & 0xff | (packed & 0xf00) << 4
    }
}

macro_rules! same_bytes {
    ($($name:ident),*) => {$(
        impl From<RegisterValue> for $name {
            fn from(value: RegisterValue) -> Self {
                zerocopy::transmute!(value)
            }
        }

        impl From<$name> for RegisterValue {
            fn from(value: $name) -> Self {
                zerocopy::transmute!(value)
            }
        }
    )*};
}
same_bytes!(SegmentRegister, TableRegister, FpControlStatus, XmmControlStatus);

/// Value of [`Register::PendingInterruption`] (TLFS, HV_X64_PENDING_INTERRUPTION_REGISTER).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingInterruption(pub u64);

impl PendingInterruption {
    /// One of this [kind](Self::kind), with RIP behind the instruction if software raised it.
    #[must_use]
    pub const fn new(kind: u8, vector: u8, error_code: Option<u32>) -> Self {
        let code = match error_code {
            Some(code) => 1 << 4 | (code as u64) << 32,
            None => 0,
        };
        Self(1 | (kind as u64 & 0x7) << 1 | code | (vector as u64) << 16)
    }

    /// There is one.
    #[must_use]
    pub const fn is_pending(self) -> bool {
        self.0 & 1 != 0
    }

    /// 0 interrupt, 2 NMI, 3 exception, 4 software interrupt, 5 privileged software exception, 6 software exception.
    #[must_use]
    pub const fn kind(self) -> u8 {
        self.0.to_le_bytes()[0] >> 1 & 0x7
    }

    /// The error code that is delivered with it.
    #[must_use]
    pub const fn error_code(self) -> Option<u32> {
        let [.., a, b, c, d] = self.0.to_le_bytes();
        if self.0 & 1 << 4 != 0 { Some(u32::from_le_bytes([a, b, c, d])) } else { None }
    }

    /// Length of the instruction that raised it, if software did.
    #[must_use]
    pub const fn instruction_length(self) -> u8 {
        let [low, ..] = (self.0 >> 5).to_le_bytes();
        low & 0xf
    }

    /// Its vector.
    #[must_use]
    pub const fn vector(self) -> u16 {
        let [_, _, low, high, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }
}
