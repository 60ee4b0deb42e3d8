//! Messages of the hypervisor to a partition (TLFS, HV_MESSAGE; Linux' `hv_message`).
//!
//! A message has 256 bytes: a header of 16, and up to 240 of payload. Messages about an event in a child (*intercept
//! messages*) go to the page that the parent has mapped for it ([`page_of`]). The parent then finds a message of type
//! [`MessageType::OpaqueIntercept`] in slot 0 of its SynIC, which contains only the VP's index.

use crate::register::SegmentRegister;
use crate::wire::{U16, U32, U64, wire};

/// Bytes of a message.
pub const MESSAGE_BYTES: usize = 256;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 16;
/// Most bytes of a payload.
pub const PAYLOAD_BYTES: usize = MESSAGE_BYTES - HEADER_BYTES;
/// Most bytes of an instruction in a message.
pub const INSTRUCTION_BYTES: usize = 16;

/// What a message is about (TLFS, HV_MESSAGE_TYPE; Linux' `HVMSG_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MessageType {
    /// The VP accessed a GPA where nothing is mapped: a device's register. [`MemoryIntercept`].
    UnmappedGpa = 0x8000_0000,
    /// The VP accessed a page without the right to, or a page that is not there now. [`MemoryIntercept`].
    GpaIntercept = 0x8000_0001,
    /// A synthetic timer has expired.
    TimerExpired = 0x8000_0010,
    /// A register has a value with which the VP cannot run. [`InvalidRegister`].
    InvalidVpRegisterValue = 0x8000_0020,
    /// Triple fault. [`InterceptHeader`].
    UnrecoverableException = 0x8000_0021,
    /// The guest uses something that does not exist here. [`UnsupportedFeature`].
    UnsupportedFeature = 0x8000_0022,
    /// A VP's intercept page has a message. [`OpaqueIntercept`].
    OpaqueIntercept = 0x8000_003f,
    /// An event ring has new entries. [`SintIntercept`].
    SynicSintIntercept = 0x8000_0061,
    /// A SINT can be delivered. [`SintDeliverable`].
    SynicSintDeliverable = 0x8000_0062,
    /// The VP accessed a port. [`PortIntercept`].
    X64IoPortIntercept = 0x8001_0000,
    /// The VP accessed an MSR. [`MsrIntercept`].
    X64MsrIntercept = 0x8001_0001,
    /// The VP executed CPUID. [`CpuidIntercept`].
    X64CpuidIntercept = 0x8001_0002,
    /// The VP raised an exception. [`ExceptionIntercept`].
    X64ExceptionIntercept = 0x8001_0003,
    /// The VP has ended a level-triggered interrupt. [`ApicEoi`].
    X64ApicEoi = 0x8001_0004,
    /// The VP halted. [`InterceptHeader`]. Cloud Hypervisor takes it for a reset.
    X64Halt = 0x8001_0007,
    /// The VP can take an interrupt. [`InterruptionDeliverable`].
    X64InterruptionDeliverable = 0x8001_0008,
}

impl MessageType {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::UnmappedGpa,
        Self::GpaIntercept,
        Self::TimerExpired,
        Self::InvalidVpRegisterValue,
        Self::UnrecoverableException,
        Self::UnsupportedFeature,
        Self::OpaqueIntercept,
        Self::SynicSintIntercept,
        Self::SynicSintDeliverable,
        Self::X64IoPortIntercept,
        Self::X64MsrIntercept,
        Self::X64CpuidIntercept,
        Self::X64ExceptionIntercept,
        Self::X64ApicEoi,
        Self::X64Halt,
        Self::X64InterruptionDeliverable,
    ];

    /// Whether Linux' driver takes this message from slot 0. Any other message stays in the slot and blocks it.
    #[must_use]
    pub const fn is_for_slot_0(self) -> bool {
        matches!(self, Self::OpaqueIntercept | Self::SynicSintIntercept)
    }
}

/// The kind of a denied access (TLFS, HV_INTERCEPT_ACCESS_TYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum InterceptAccess {
    /// It read.
    Read = 0,
    /// It wrote.
    Write = 1,
    /// It fetched an instruction.
    Execute = 2,
}

wire! {
    /// Start of most messages (TLFS, HV_X64_INTERCEPT_MESSAGE_HEADER).
    pub struct InterceptHeader: 40 {
        /// The VP.
        pub vp_index: U32,
        /// See [`Self::length_and_cr8`].
        pub length_and_cr8: u8,
        /// An [`InterceptAccess`].
        pub access: u8,
        /// Bits of [`execution`].
        pub execution_state: U16,
        /// CS.
        pub cs: SegmentRegister,
        /// Where the instruction is.
        pub rip: U64,
        /// Flags.
        pub rflags: U64,
    }

    /// Payload of [`MessageType::UnmappedGpa`] and [`MessageType::GpaIntercept`] (HV_X64_MEMORY_INTERCEPT_MESSAGE).
    pub struct MemoryIntercept: 80 {
        /// Who and where.
        pub header: InterceptHeader,
        /// 0 uncached, 1 write combining, 4 write through, 5 write protected, 6 write back.
        pub cache_type: U32,
        /// Bytes in `instruction`, or 0 if they are not known.
        pub instruction_length: u8,
        /// Bits of [`memory_access`].
        pub access_info: u8,
        /// Task priority.
        pub tpr_priority: u8,
        /// Zero.
        pub reserved: u8,
        /// The address that the instruction used, if [`memory_access::GVA_VALID`].
        pub gva: U64,
        /// What it is in guest physical memory.
        pub gpa: U64,
        /// The instruction.
        pub instruction: [u8; INSTRUCTION_BYTES],
    }

    /// Payload of [`MessageType::X64IoPortIntercept`] (HV_X64_IO_PORT_INTERCEPT_MESSAGE).
    pub struct PortIntercept: 128 {
        /// The VP and its state. The instruction length must be right, because the parent adds it to RIP.
        pub header: InterceptHeader,
        /// The port.
        pub port: U16,
        /// See [`Self::info`].
        pub access_info: u8,
        /// Bytes in `instruction`.
        pub instruction_length: u8,
        /// Zero.
        pub reserved: U32,
        /// RAX: the written value; a value that is read goes there.
        pub rax: U64,
        /// The instruction.
        pub instruction: [u8; INSTRUCTION_BYTES],
        /// DS, for a string instruction.
        pub ds: SegmentRegister,
        /// ES, for a string instruction.
        pub es: SegmentRegister,
        /// RCX, for a repeated one.
        pub rcx: U64,
        /// RSI, for a string instruction.
        pub rsi: U64,
        /// RDI, for a string instruction.
        pub rdi: U64,
    }

    /// Payload of [`MessageType::X64MsrIntercept`] (HV_X64_MSR_INTERCEPT_MESSAGE).
    pub struct MsrIntercept: 64 {
        /// Who and where.
        pub header: InterceptHeader,
        /// The MSR.
        pub msr: U32,
        /// Zero.
        pub reserved: U32,
        /// RDX.
        pub rdx: U64,
        /// RAX.
        pub rax: U64,
    }

    /// Payload of [`MessageType::X64CpuidIntercept`] (HV_X64_CPUID_INTERCEPT_MESSAGE).
    pub struct CpuidIntercept: 104 {
        /// Who and where.
        pub header: InterceptHeader,
        /// RAX, RCX, RDX and RBX at the instruction.
        pub before: [U64; 4],
        /// RAX, RCX, RDX and RBX as the hypervisor would answer.
        pub default_result: [U64; 4],
    }

    /// Payload of [`MessageType::X64ExceptionIntercept`] (HV_X64_EXCEPTION_INTERCEPT_MESSAGE).
    pub struct ExceptionIntercept: 240 {
        /// Who and where.
        pub header: InterceptHeader,
        /// The exception.
        pub vector: U16,
        /// Bit 0: it has an error code. Bit 1: software raised it.
        pub info: u8,
        /// Bytes in `instruction`.
        pub instruction_length: u8,
        /// The error code.
        pub error_code: U32,
        /// CR2 or DR6.
        pub parameter: U64,
        /// Zero.
        pub reserved: U64,
        /// The instruction.
        pub instruction: [u8; INSTRUCTION_BYTES],
        /// DS.
        pub ds: SegmentRegister,
        /// SS.
        pub ss: SegmentRegister,
        /// General registers, in the order of [`crate::register::Register::Gpr`].
        pub gprs: [U64; 16],
    }

    /// Payload of [`MessageType::X64ApicEoi`] (Linux' `hv_x64_apic_eoi_message`).
    pub struct ApicEoi: 8 {
        /// The VP.
        pub vp_index: U32,
        /// The vector that it ended.
        pub vector: U32,
    }

    /// Payload of [`MessageType::UnsupportedFeature`] (TLFS, HV_UNSUPPORTED_FEATURE_MESSAGE).
    pub struct UnsupportedFeature: 56 {
        /// Who and where.
        pub header: InterceptHeader,
        /// The unsupported feature: 1 an intercept, 2 a task switch in hardware.
        pub code: U32,
        /// Zero.
        pub reserved: U32,
        /// More about it.
        pub parameter: U64,
    }

    /// Payload of [`MessageType::InvalidVpRegisterValue`] (TLFS, HV_INVALID_VP_REGISTER_MESSAGE).
    pub struct InvalidRegister: 32 {
        /// The VP.
        pub vp_index: U32,
        /// Zero.
        pub reserved: U32,
        /// The register's number.
        pub name: U32,
        /// Zero.
        pub reserved_too: U32,
        /// Its value.
        pub value: crate::register::RegisterValue,
    }

    /// Payload of [`MessageType::X64InterruptionDeliverable`] (HV_X64_INTERRUPTION_DELIVERABLE_MESSAGE).
    pub struct InterruptionDeliverable: 48 {
        /// Who and where.
        pub header: InterceptHeader,
        /// As [`crate::register::PendingInterruption::kind`].
        pub kind: u8,
        /// Zero.
        pub reserved: [u8; 7],
    }

    /// Payload of [`MessageType::SynicSintDeliverable`] (HV_X64_SYNIC_SINT_DELIVERABLE_MESSAGE).
    pub struct SintDeliverable: 48 {
        /// Who and where.
        pub header: InterceptHeader,
        /// One bit for each SINT.
        pub sints: U16,
        /// Zero.
        pub reserved: [u8; 6],
    }

    /// Payload of [`MessageType::SynicSintIntercept`] to a parent (Linux' `hv_synic_event_ring` and its driver).
    pub struct SintIntercept: 4 {
        /// The SINT whose event ring has new entries.
        pub sint: U32,
    }

    /// Payload of [`MessageType::OpaqueIntercept`] (Linux' `hv_opaque_intercept_message`). The message's sender is the
    /// partition.
    pub struct OpaqueIntercept: 4 {
        /// The VP whose intercept page has a message.
        pub vp_index: U32,
    }
}

/// Bits of [`InterceptHeader::execution_state`] (TLFS, HV_X64_VP_EXECUTION_STATE). The privilege level is in bits 1:0.
pub mod execution {
    /// CR0.PE.
    pub const CR0_PE: u16 = 1 << 2;
    /// CR0.AM.
    pub const CR0_AM: u16 = 1 << 3;
    /// EFER.LMA.
    pub const EFER_LMA: u16 = 1 << 4;
    /// A debug register is in use.
    pub const DEBUG_ACTIVE: u16 = 1 << 5;
    /// The delivery of an event was interrupted.
    pub const INTERRUPTION_PENDING: u16 = 1 << 6;
    /// Interrupts wait for the end of the next instruction.
    pub const INTERRUPT_SHADOW: u16 = 1 << 12;
}

/// Bits of [`MemoryIntercept::access_info`] (TLFS, HV_X64_MEMORY_ACCESS_INFO).
pub mod memory_access {
    /// The virtual address is valid.
    pub const GVA_VALID: u8 = 1 << 0;
    /// The physical address is valid: the parent need not translate the virtual one.
    pub const GVA_GPA_VALID: u8 = 1 << 1;
}

impl InterceptHeader {
    /// Byte 4: the instruction's length, or 0 if it is not known, and the task priority in the form of CR8. A value
    /// that does not fit becomes 0.
    #[must_use]
    pub const fn length_and_cr8(length: u8, cr8: u8) -> u8 {
        let length = if length < 16 { length } else { 0 };
        length | (cr8 & 0xf) << 4
    }
}

impl PortIntercept {
    /// Byte 42: bytes of the access, whether it is a string instruction, whether it is repeated.
    #[must_use]
    pub const fn info(bytes: u8, is_string: bool, is_repeated: bool) -> u8 {
        (bytes & 0x7) | (is_string as u8) << 3 | (is_repeated as u8) << 4
    }
}

/// The page or slot with this message. A longer payload would be cut off; this crate has none.
#[must_use]
pub fn page_of(kind: MessageType, sender: u64, payload: &[u8]) -> [u8; MESSAGE_BYTES] {
    let payload = payload.get(..PAYLOAD_BYTES).unwrap_or(payload);
    let mut page = [0; MESSAGE_BYTES];
    page[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    page[4] = payload.len().to_le_bytes()[0];
    page[8..HEADER_BYTES].copy_from_slice(&sender.to_le_bytes());
    page[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
    page
}
