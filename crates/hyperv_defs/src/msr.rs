//! Numbers of the synthetic MSRs, and views of those with fields (TLFS, appendix "Hypervisor Synthetic MSRs").
//!
//! An MSR whose privilege bit ([`crate::cpuid::Privileges`]) is clear gives #GP, with two exceptions that guests need.
//! Linux 6.1 writes [`VP_ASSIST_PAGE`] on every CPU without a check, and [`REFERENCE_TSC`] before it starts another
//! kernel.

use core::ops::RangeInclusive;

use addr::Gpa;

/// All numbers that may be synthetic MSRs.
pub const RANGE: RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// The guest's identity. R/W, one for the VM, 0 at first; see [`GuestOsId`].
pub const GUEST_OS_ID: u32 = 0x4000_0000;
/// Address of the hypercall page. R/W, one for the VM; see [`HypercallMsr`].
pub const HYPERCALL: u32 = 0x4000_0001;
/// The vCPU's index in masks and sets of hypercalls. Read-only.
pub const VP_INDEX: u32 = 0x4000_0002;
/// Time for which the vCPU ran, in units of 100 ns. Read-only.
pub const VP_RUNTIME: u32 = 0x4000_0010;
/// Time since the VM was created, in units of 100 ns; monotonic across vCPUs. Read-only.
pub const TIME_REF_COUNT: u32 = 0x4000_0020;
/// Address of the reference TSC page. R/W, one for the VM; see [`ReferenceTscMsr`].
pub const REFERENCE_TSC: u32 = 0x4000_0021;
/// Frequency of the TSC in Hz. Read-only.
pub const TSC_FREQUENCY: u32 = 0x4000_0022;
/// Frequency of the APIC timer's input in Hz, before its divider. Read-only.
pub const APIC_FREQUENCY: u32 = 0x4000_0023;
/// End of interrupt. Write-only.
pub const EOI: u32 = 0x4000_0070;
/// Interrupt command, in the xAPIC's layout: ICR high in bits 63:32, ICR low in 31:0.
pub const ICR: u32 = 0x4000_0071;
/// Task priority.
pub const TPR: u32 = 0x4000_0072;
/// Address of the VP assist page. R/W, one for each vCPU; see [`VpAssistMsr`].
pub const VP_ASSIST_PAGE: u32 = 0x4000_0073;
/// Control of the synthetic interrupt controller.
pub const SCONTROL: u32 = 0x4000_0080;
/// Version of the synthetic interrupt controller. Read-only.
pub const SVERSION: u32 = 0x4000_0081;
/// Address of the event flags page.
pub const SIEFP: u32 = 0x4000_0082;
/// Address of the message page.
pub const SIMP: u32 = 0x4000_0083;
/// End of message. Write-only.
pub const EOM: u32 = 0x4000_0084;
/// Address of the event ring page, through which a parent is notified of doorbells.
pub const SIRBP: u32 = 0x4000_0085;
/// First of 16 synthetic interrupt sources.
pub const SINT0: u32 = 0x4000_0090;
/// Last of 16 synthetic interrupt sources.
pub const SINT15: u32 = 0x4000_009f;
/// First synthetic timer's configuration; counts and configurations alternate from here.
pub const STIMER0_CONFIG: u32 = 0x4000_00b0;
/// Last synthetic timer's count.
pub const STIMER3_COUNT: u32 = 0x4000_00b7;
/// A read idles the vCPU until an interrupt arrives, even with interrupts disabled.
pub const GUEST_IDLE: u32 = 0x4000_00f0;
/// First of five crash parameters.
pub const CRASH_P0: u32 = 0x4000_0100;
/// Crash control.
pub const CRASH_CTL: u32 = 0x4000_0105;
/// Reenlightenment control.
pub const REENLIGHTENMENT_CONTROL: u32 = 0x4000_0106;
/// Whether the TSC is emulated after a migration.
pub const TSC_EMULATION_CONTROL: u32 = 0x4000_0107;
/// Whether TSC emulation is active.
pub const TSC_EMULATION_STATUS: u32 = 0x4000_0108;
/// Bit 0 shows the TSC as invariant, and stays set once it is set. All other bits give #GP.
pub const TSC_INVARIANT_CONTROL: u32 = 0x4000_0118;

/// The one valid bit of [`TSC_INVARIANT_CONTROL`]: show CPUID 8000_0007 EDX bit 8.
pub const TSC_INVARIANT_EXPOSE: u64 = 1 << 0;

const ENABLE: u64 = 1 << 0;
const LOCKED: u64 = 1 << 1;
const PAGE: u64 = !0xfff;

/// Value of [`GUEST_OS_ID`]. Zero: no guest has identified itself, and there are no hypercalls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestOsId(pub u64);

impl GuestOsId {
    /// Whether a guest has identified itself.
    #[must_use]
    pub const fn is_set(self) -> bool {
        self.0 != 0
    }

    /// The type of an open-source system: 1 Linux, 2 FreeBSD. Vendors' systems have none.
    #[must_use]
    pub const fn open_source_type(self) -> Option<u8> {
        let [.., high] = self.0.to_le_bytes();
        if high & 0x80 != 0 { Some(high & 0x7f) } else { None }
    }
}

macro_rules! page_register {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub u64);

        impl $name {
            #[doc = concat!("Whether ", $what, " is to be there.")]
            #[must_use]
            pub const fn is_enabled(self) -> bool {
                self.0 & ENABLE != 0
            }

            #[doc = concat!("Where ", $what, " is to be. A guest's claim, and often beyond its memory.")]
            #[must_use]
            pub const fn page(self) -> Gpa {
                Gpa(self.0 & PAGE)
            }

            /// The same register with this enable bit.
            #[must_use]
            pub const fn with_enable(self, enable: bool) -> Self {
                Self(if enable { self.0 | ENABLE } else { self.0 & !ENABLE })
            }
        }
    };
}

page_register!(
    /// [`HYPERCALL`]: bit 0 enable, bit 1 locked, bits 11:2 kept as written, bits 63:12 the page.
    HypercallMsr, "the hypercall page"
);
page_register!(
    /// [`REFERENCE_TSC`]: bit 0 enable, bits 11:1 kept as written, bits 63:12 the page. A page without memory is no
    /// error: the guest then reads [`TIME_REF_COUNT`].
    ReferenceTscMsr, "the reference TSC page"
);
page_register!(
    /// [`VP_ASSIST_PAGE`]: bit 0 enable, bits 11:1 kept as written, bits 63:12 the page. Its first 32 bits must be zero
    /// when it is enabled: bit 0 would mean "no EOI needed".
    VpAssistMsr, "the VP assist page"
);

impl HypercallMsr {
    /// Whether the register stays as it is until the VM is reset.
    #[must_use]
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }
}
