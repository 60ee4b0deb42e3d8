//! Instructions that may fault, as functions that return the fault.
//!
//! The section `.fixup` lists each such instruction, with the address at which to continue. The exception handler looks
//! there first. If the faulting address is in the list, it puts the fault into X17 and continues at that address. X17
//! is zero otherwise.

use core::fmt;

/// An exception that an instruction raised.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// ESR_EL1: class in bits 26 to 31, details of the class below.
    pub(crate) syndrome: u32,
}

impl Fault {
    /// Classes of exceptions (Arm ARM, ESR_EL1).
    pub(crate) const UNDEFINED: u32 = 0;
    pub(crate) const SYSTEM: u32 = 0x18;
    pub(crate) const ILLEGAL_STATE: u32 = 0x0e;
    pub(crate) const FETCH: u32 = 0x21;
    pub(crate) const ALIGNED_PC: u32 = 0x22;
    pub(crate) const DATA: u32 = 0x25;
    pub(crate) const BREAKPOINT: u32 = 0x3c;

    /// As it is left in X17: never zero.
    pub(super) const fn encode(syndrome: u64) -> u64 {
        1 << 63 | syndrome & 0xffff_ffff
    }

    #[expect(clippy::cast_possible_truncation, reason = "a field cut out of a word")]
    pub(super) fn decode(x17: u64) -> Result<(), Self> {
        if x17 == 0 { Ok(()) } else { Err(Self { syndrome: x17 as u32 }) }
    }

    /// The class.
    pub(crate) const fn class(self) -> u32 {
        self.syndrome >> 26
    }

    /// Of an abort: why (DFSC, IFSC).
    pub(crate) const fn status(self) -> u32 {
        self.syndrome & 0x3f
    }

    /// Whether it is an external abort: the memory system or a device reported it, not the guest's own tables.
    pub(crate) const fn is_external(self) -> bool {
        matches!(self.class(), Self::FETCH | Self::DATA) && matches!(self.status(), 0x10 | 0x13..=0x17)
    }

    /// Whether it is an abort because of the guest's own tables or of alignment.
    pub(crate) const fn is_own(self) -> bool {
        matches!(self.class(), Self::FETCH | Self::DATA) && !self.is_external()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.class() {
            Self::UNDEFINED => f.write_str("undefined"),
            Self::SYSTEM => f.write_str("trapped"),
            Self::ILLEGAL_STATE => f.write_str("illegal-state"),
            Self::FETCH | Self::DATA if self.is_external() => f.write_str("external-abort"),
            Self::FETCH | Self::DATA if self.status() == 0x21 => f.write_str("alignment"),
            Self::FETCH | Self::DATA => f.write_str("own-tables"),
            Self::ALIGNED_PC => f.write_str("pc-alignment"),
            Self::BREAKPOINT => f.write_str("breakpoint"),
            other => write!(f, "class-{other:#x}"),
        }
    }
}

/// One instruction with its operands; answers `Result<(), Fault>`.
///
/// The instruction must fault before it changes anything, and must not use X17.
macro_rules! attempt {
    ($instruction:expr $(, $($operand:tt)*)?) => {{
        let fault: u64;
        // SAFETY: by the module's rule, the experiment wants the instruction's effect on the machine. The operands
        // declare all registers that it changes.
        unsafe {
            core::arch::asm!(
                "mov x17, xzr",
                "2:",
                $instruction,
                "3:",
                ".pushsection .fixup, \"a\"",
                ".quad 2b",
                ".quad 3b",
                ".popsection",
                out("x17") fault,
                $($($operand)*)?
            );
        }
        $crate::arch::attempt::Fault::decode(fault)
    }};
}

unsafe extern "C" {
    #[link_name = "fixup_start"]
    static FIXUP_START: [u64; 2];
    #[link_name = "fixup_end"]
    static FIXUP_END: [u64; 2];
}

/// Where to continue after a fault at `pc`, if the instruction there is in the list.
pub(super) fn resume_after(pc: u64) -> Option<u64> {
    let start = &raw const FIXUP_START;
    let bytes = (&raw const FIXUP_END) as usize - start as usize;
    // SAFETY: the linker script puts both symbols around the list, whose entries are pairs of 64-bit addresses.
    let list = unsafe { core::slice::from_raw_parts(start, bytes / 16) };
    list.iter().find(|[at, _]| *at == pc).map(|[_, resume]| *resume)
}

macro_rules! load {
    ($(#[$doc:meta])* $name:ident, $type:ty, $instruction:literal) => {
        $(#[$doc])*
        pub(crate) fn $name(at: u64) -> Result<$type, Fault> {
            let value: u64;
            attempt!(concat!($instruction, ", [{at}]"), inlateout("x0") 0u64 => value, at = in(reg) at)?;
            #[expect(clippy::allow_attributes, reason = "not of all types")]
            #[allow(clippy::cast_possible_truncation, reason = "the instruction leaves no more in the register")]
            Ok(value as $type)
        }
    };
}

load!(
    /// Loads a byte.
    load_u8, u8, "ldrb w0");
load!(
    /// Loads 16 bits.
    load_u16, u16, "ldrh w0");
load!(
    /// Loads 32 bits.
    load_u32, u32, "ldr w0");
load!(
    /// Loads 64 bits.
    load_u64, u64, "ldr x0");

macro_rules! store {
    ($(#[$doc:meta])* $name:ident, $type:ty, $instruction:literal) => {
        $(#[$doc])*
        pub(crate) fn $name(at: u64, value: $type) -> Result<(), Fault> {
            attempt!(concat!($instruction, ", [{at}]"), in("x0") u64::from(value), at = in(reg) at)
        }
    };
}

store!(
    /// Stores a byte.
    store_u8, u8, "strb w0");
store!(
    /// Stores 16 bits.
    store_u16, u16, "strh w0");
store!(
    /// Stores 32 bits.
    store_u32, u32, "str w0");
store!(
    /// Stores 64 bits.
    store_u64, u64, "str x0");

macro_rules! call {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        pub(crate) fn $name(function: u64, [a, b, c]: [u64; 3]) -> Result<u64, Fault> {
            let answer;
            attempt!(
                $instruction,
                inout("x0") function => answer, inout("x1") a => _, inout("x2") b => _, inout("x3") c => _,
                out("x4") _, out("x5") _, out("x6") _, out("x7") _, out("x8") _, out("x9") _, out("x10") _, out("x11") _,
                out("x12") _, out("x13") _, out("x14") _, out("x15") _, out("x16") _
            )?;
            Ok(answer)
        }
    };
}

call!(
    /// Calls the hypervisor or the firmware by HVC.
    hvc, "hvc #0");
call!(
    /// Calls the firmware by SMC.
    smc, "smc #0");
