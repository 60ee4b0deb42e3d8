//! Pages that the hypervisor and a guest share.
//!
//! | page | set up by | layout |
//! |---|---|---|
//! | hypercall page | MSR HYPERCALL | [`crate::hypercall::CallInstruction`] |
//! | reference TSC page | MSR REFERENCE_TSC | [`crate::ReferenceTsc`] |
//! | VP assist page | MSR VP_ASSIST_PAGE | [`VpAssist`] (Linux' `hv_vp_assist_page`) |
//! | message page (SIMP) | MSR SIMP | 16 messages ([`crate::message`]) |
//! | event flags page (SIEFP) | MSR SIEFP | 16 arrays of 2048 flags |
//! | event ring page (SIRBP) | MSR SIRBP | 16 [`EventRing`] (Linux' `hv_synic_event_ring_page`) |
//! | register page of a child's VP | HvCallMapVpStatePage | [`RegisterPage`] (Linux' `hv_vp_register_page`) |
//! | intercept page of a child's VP | HvCallMapVpStatePage | one message |
//! | page of statistics | HvCallMapStatsPage2 | 512 counters (Linux' `hv_stats_page`) |

use crate::register::SegmentRegister;
use crate::wire::{U16, U32, U64, wire};

wire! {
    /// The registers of a suspended VP, for its parent to read and write without a hypercall.
    pub struct RegisterPage: 696 {
        /// [`Self::VERSION`].
        pub version: U16,
        /// 1: the rest is true.
        pub is_valid: u8,
        /// Zero.
        pub reserved: u8,
        /// Bits of [`register_class`]: the classes that the parent has written. The hypervisor copies them into the VP
        /// when it resumes.
        pub dirty: U32,
        /// General registers, in the order of [`crate::register::Register::Gpr`].
        pub gprs: [U64; 16],
        /// Instruction pointer.
        pub rip: U64,
        /// Flags.
        pub rflags: U64,
        /// Zero.
        pub reserved_too: U64,
        /// XMM0 to XMM5.
        pub xmm: [[u8; 16]; 6],
        /// ES, CS, SS, DS, FS, GS.
        pub segments: [SegmentRegister; 6],
        /// CR0. This and all below cannot be written here.
        pub cr0: U64,
        /// CR3.
        pub cr3: U64,
        /// CR4.
        pub cr4: U64,
        /// CR8.
        pub cr8: U64,
        /// EFER.
        pub efer: U64,
        /// DR7.
        pub dr7: U64,
        /// A [`crate::register::PendingInterruption`].
        pub pending_interruption: U64,
        /// As [`crate::register::Register::InterruptState`].
        pub interrupt_state: U64,
        /// As [`crate::register::Register::InstructionEmulationHints`].
        pub emulation_hints: U64,
        /// XCR0.
        pub xfem: U64,
        /// Zero.
        pub reserved_end: [u8; 0x100],
        /// A count and up to 7 vectors. Only used if the parent schedules VPs.
        pub interrupt_vectors: [u8; 8],
    }

    /// A ring of events that notifies one SINT of a parent's VP of doorbells. The parent keeps the read position, and
    /// clears the events that it has read.
    pub struct EventRing: 256 {
        /// The parent polls: it needs no interrupt.
        pub signal_masked: u8,
        /// An event was dropped because the ring was full.
        pub is_full: u8,
        /// Zero.
        pub reserved: U16,
        /// Numbers of ports. Zero: no event.
        pub ports: [U32; EVENTS],
    }

    /// The VP assist page, without its last part, which is about virtual trust levels.
    pub struct VpAssist: 64 {
        /// Bit 0: the next EOI can be left out.
        pub apic_assist: U32,
        /// Zero.
        pub reserved: U32,
        /// Of virtual trust levels.
        pub vtl_control: [u8; 24],
        /// Of nested virtualization.
        pub nested_control: U64,
        /// Of nested virtualization.
        pub enlighten_vmentry: u8,
        /// Zero.
        pub reserved_too: [u8; 7],
        /// Of nested virtualization.
        pub current_nested_vmcs: U64,
        /// A timer has expired while the VP was halted.
        pub timer_expired: u8,
        /// Zero.
        pub reserved_end: [u8; 7],
    }

    /// State of a synthetic timer ([`crate::vp::StateKind::SyntheticTimers`]; Linux' `hv_stimer_state`).
    pub struct TimerState: 40 {
        /// Bit 0: its message is not delivered yet.
        pub flags: U32,
        /// Zero.
        pub reserved: U32,
        /// Its configuration.
        pub config: U64,
        /// Its count.
        pub count: U64,
        /// Adjustment of a periodic timer.
        pub adjustment: U64,
        /// When the expiry of an undelivered message was.
        pub undelivered_expiry: U64,
    }

    /// State of a VP's synthetic timers (Linux' `hv_synthetic_timers_state`).
    pub struct TimersState: 200 {
        /// The timers.
        pub timers: [TimerState; 4],
        /// Zero.
        pub reserved: [U64; 5],
    }

    /// State of a VP's local APIC ([`crate::vp::StateKind::LocalApic`]; Linux' `hv_local_interrupt_controller_state`).
    /// Registers as the VP would read them.
    pub struct LocalApicState: 176 {
        /// Id.
        pub id: U32,
        /// Version.
        pub version: U32,
        /// Logical destination.
        pub logical_destination: U32,
        /// Destination format.
        pub destination_format: U32,
        /// Spurious vector.
        pub spurious: U32,
        /// In service.
        pub isr: [U32; 8],
        /// Trigger modes.
        pub tmr: [U32; 8],
        /// Requested.
        pub irr: [U32; 8],
        /// Error status.
        pub esr: U32,
        /// Interrupt command, high half.
        pub icr_high: U32,
        /// Interrupt command, low half.
        pub icr_low: U32,
        /// LVT: timer.
        pub lvt_timer: U32,
        /// LVT: thermal sensor.
        pub lvt_thermal: U32,
        /// LVT: performance counters.
        pub lvt_performance: U32,
        /// LVT: LINT0.
        pub lvt_lint0: U32,
        /// LVT: LINT1.
        pub lvt_lint1: U32,
        /// LVT: error.
        pub lvt_error: U32,
        /// LVT: corrected machine checks.
        pub lvt_cmci: U32,
        /// Errors that a write to ESR would show.
        pub error_status: U32,
        /// Timer: initial count.
        pub initial_count: U32,
        /// Timer: current count.
        pub current_count: U32,
        /// Timer: divider.
        pub divide: U32,
        /// Remote read.
        pub remote_read: U32,
    }
}

/// Entries of an event ring.
pub const EVENTS: usize = 63;

impl RegisterPage {
    /// The only version.
    pub const VERSION: u16 = 1;
}

/// Bits of [`RegisterPage::dirty`] (Linux' `HV_X64_REGISTER_CLASS_*`).
pub mod register_class {
    /// General registers.
    pub const GENERAL: u32 = 1 << 0;
    /// RIP.
    pub const IP: u32 = 1 << 1;
    /// XMM registers.
    pub const XMM: u32 = 1 << 2;
    /// Segment registers.
    pub const SEGMENT: u32 = 1 << 3;
    /// RFLAGS.
    pub const FLAGS: u32 = 1 << 4;
}
