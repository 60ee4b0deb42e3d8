//! Words of a hypercall: the control word, the result, and the page that a guest calls (TLFS, "Hypercall Interface").
//!
//! A call is *simple* (one input) or *rep* (a list of elements, done in order, from a start to a count). A call with a
//! *variable header* has more input between its fixed header and its list. [`crate::table`] has the form of each call.

use crate::table::{Code, Shape};

/// The control word: RCX for a 64-bit caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Control(pub u64);

impl Control {
    /// Bits that must be zero: 30:27, 47:44, 63:60, and bit 31, which addresses a hypervisor below this one.
    pub const RESERVED: u64 = 0xf << 27 | 1 << Self::NESTED_BIT | 0xf << 44 | 0xf << 60;

    const FAST_BIT: u32 = 16;
    const VARIABLE_SHIFT: u32 = 17;
    const VARIABLE_MASK: u64 = 0x3ff;
    const NESTED_BIT: u32 = 31;
    const REP_COUNT_SHIFT: u32 = 32;
    const REP_START_SHIFT: u32 = 48;
    const REP_MASK: u64 = 0xfff;

    /// A simple call with its input in memory.
    #[must_use]
    pub const fn new(code: Code) -> Self {
        Self(code as u64)
    }

    /// The same call with its input in registers.
    #[must_use]
    pub const fn with_fast(self) -> Self {
        Self(self.0 | 1 << Self::FAST_BIT)
    }

    /// The same call with a variable header of `words` (10 bits count).
    #[must_use]
    pub const fn with_variable_words(self, words: u16) -> Self {
        self.with_field(Self::VARIABLE_SHIFT, Self::VARIABLE_MASK, words)
    }

    /// The same call with a list of `count` elements (12 bits count).
    #[must_use]
    pub const fn with_rep_count(self, count: u16) -> Self {
        self.with_field(Self::REP_COUNT_SHIFT, Self::REP_MASK, count)
    }

    /// The same call from element `start` on (12 bits count): the caller's RCX after the first part was done.
    #[must_use]
    pub const fn with_rep_start(self, start: u16) -> Self {
        self.with_field(Self::REP_START_SHIFT, Self::REP_MASK, start)
    }

    const fn with_field(self, shift: u32, mask: u64, value: u16) -> Self {
        Self(self.0 & !(mask << shift) | (value as u64 & mask) << shift)
    }

    /// Bits 15:0: call code.
    #[must_use]
    pub const fn code(self) -> u16 {
        self.field(0, 0xffff)
    }

    /// Bit 16: the input is in registers.
    #[must_use]
    pub const fn is_fast(self) -> bool {
        self.0 & 1 << Self::FAST_BIT != 0
    }

    /// Bits 26:17: words in the variable header.
    #[must_use]
    pub const fn variable_words(self) -> u16 {
        self.field(Self::VARIABLE_SHIFT, Self::VARIABLE_MASK)
    }

    /// Bit 31: for the hypervisor below the called one.
    #[must_use]
    pub const fn is_nested(self) -> bool {
        self.0 & 1 << Self::NESTED_BIT != 0
    }

    /// Bits 43:32: elements in the list.
    #[must_use]
    pub const fn rep_count(self) -> u16 {
        self.field(Self::REP_COUNT_SHIFT, Self::REP_MASK)
    }

    /// Bits 59:48: the first element.
    #[must_use]
    pub const fn rep_start(self) -> u16 {
        self.field(Self::REP_START_SHIFT, Self::REP_MASK)
    }

    const fn field(self, shift: u32, mask: u64) -> u16 {
        #[expect(clippy::cast_possible_truncation, reason = "no field is wider than 16 bits")]
        let field = (self.0 >> shift & mask) as u16;
        field
    }

    /// Whether the word fits a call of this shape: no reserved bits, a list only for rep calls and with elements left
    /// to do, a variable header only where allowed.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidHypercallInput`].
    pub const fn check_shape(self, shape: &Shape) -> Result<(), Status> {
        let list_fits = match shape.rep {
            Some(_) => self.rep_start() < self.rep_count(),
            None => self.rep_count() == 0 && self.rep_start() == 0,
        };
        let header_fits = shape.variable || self.variable_words() == 0;
        if self.0 & Self::RESERVED == 0 && list_fits && header_fits {
            Ok(())
        } else {
            Err(Status::InvalidHypercallInput)
        }
    }
}

/// Result of a call (Linux' `HV_STATUS_*`). If several errors apply, any of them may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Success = 0x00,
    /// No such call.
    InvalidHypercallCode = 0x02,
    /// The control word does not fit the call, or the input cannot be read.
    InvalidHypercallInput = 0x03,
    /// The input is misaligned, crosses a page, or is beyond the guest's address space.
    InvalidAlignment = 0x04,
    /// A field of the input is invalid.
    InvalidParameter = 0x05,
    /// The guest was not granted this call.
    AccessDenied = 0x06,
    /// The partition is not in a state for this.
    InvalidPartitionState = 0x07,
    /// Not in this state.
    OperationDenied = 0x08,
    /// No such property.
    UnknownProperty = 0x09,
    /// The property cannot have this value.
    PropertyValueOutOfRange = 0x0a,
    /// The hypervisor has no memory for it. Linux deposits pages and calls again.
    InsufficientMemory = 0x0b,
    /// No such partition, or not a child of the caller.
    InvalidPartitionId = 0x0d,
    /// No such VP.
    InvalidVpIndex = 0x0e,
    /// There is nothing of this kind there.
    NotFound = 0x10,
    /// No such port.
    InvalidPortId = 0x11,
    /// No such connection.
    InvalidConnectionId = 0x12,
    /// No buffers for a message.
    InsufficientBuffers = 0x13,
    /// An earlier message was not acknowledged.
    NotAcknowledged = 0x14,
    /// The VP is not in a state for this.
    InvalidVpState = 0x15,
    /// No pages are left: the end of a withdrawal.
    NoResources = 0x1d,
    /// The feature exists but is not available now.
    FeatureUnavailable = 0x1e,
    /// A feature of the processor that does not exist here.
    ProcessorFeatureNotSupported = 0x20,
    /// The register cannot have this value.
    InvalidRegisterValue = 0x50,
    /// It was tried and failed.
    OperationFailed = 0x71,
}

/// The result word: RAX for a 64-bit caller. Status in bits 15:0, elements done in bits 43:32, counted from the list's
/// first element, not from the call's start. The rest is zero: FreeBSD tests the whole word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Answer(pub u64);

impl Answer {
    /// A result word.
    #[must_use]
    pub const fn new(status: Status, reps: u16) -> Self {
        Self(status as u64 | (reps as u64 & Control::REP_MASK) << Control::REP_COUNT_SHIFT)
    }

    /// The status as a number.
    #[must_use]
    pub const fn status(self) -> u16 {
        Control(self.0).code()
    }

    /// Elements done.
    #[must_use]
    pub const fn reps(self) -> u16 {
        Control(self.0).rep_count()
    }
}

impl From<Status> for Answer {
    /// The answer to a call that did nothing.
    fn from(status: Status) -> Self {
        Self::new(status, 0)
    }
}

/// Bytes in the hypercall page.
pub const PAGE_BYTES: usize = 4096;

/// The instruction that exits to the hypervisor, and RET: the start of the hypercall page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallInstruction {
    /// VMMCALL, on AMD.
    Vmmcall,
    /// VMCALL, on Intel.
    Vmcall,
}

impl CallInstruction {
    /// The instruction and a RET.
    #[must_use]
    pub const fn code(self) -> [u8; 4] {
        match self {
            Self::Vmmcall => [0x0f, 0x01, 0xd9, 0xc3],
            Self::Vmcall => [0x0f, 0x01, 0xc1, 0xc3],
        }
    }

    /// The whole page: [`Self::code`], then INT3, so that a stray jump into the page is noticed at once.
    #[must_use]
    pub const fn page(self) -> [u8; PAGE_BYTES] {
        const INT3: u8 = 0xcc;
        let mut page = [INT3; PAGE_BYTES];
        let [a, b, c, d] = self.code();
        page[0] = a;
        page[1] = b;
        page[2] = c;
        page[3] = d;
        page
    }
}
