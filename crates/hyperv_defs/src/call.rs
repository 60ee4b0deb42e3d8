//! A hypercall from control word to typed request.
//!
//! ```text
//! control word --check--> Checked --(input is copied)--> parse --> Call
//!                  |                     |                 |
//!               Refusal              placement           Status
//! ```
//!
//! Errors are looked for in this order: unknown code, not granted, control word that does not fit the call, too much
//! for registers; then, by [`Checked::check_placement`], where the input is; then what it says.

use addr::{Gpa, PageSize};
use bitflags::bitflags;

use crate::cpuid::{Features, Recommendations};
use crate::flush::FlushCall;
use crate::hypercall::{Answer, Code, Control, Status};
use crate::input::Words;
use crate::ipi::IpiCall;

/// Bytes of input that RDX and R8 hold.
pub const FAST_BYTES: usize = 16;
/// Words of input that registers hold: RDX, R8, then XMM0 to XMM5, low half first.
pub const FAST_WORDS: usize = 14;
/// Bytes of input that registers hold.
pub const FAST_XMM_BYTES: usize = FAST_WORDS * 8;

bitflags! {
    /// What a VM was told that it may use. Telling of long spins is for all.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Offered: u8 {
        /// Flushes.
        const FLUSH = 1 << 0;
        /// IPIs.
        const CLUSTER_IPI = 1 << 1;
        /// The Ex forms of whichever of the two is offered.
        const EX = 1 << 2;
        /// Fast calls with input in XMM registers. To be left out for a 32-bit caller, which has no such form.
        const XMM_INPUT = 1 << 3;
        /// Lists in the extended format.
        const EXTENDED_RANGES = 1 << 4;
    }
}

impl Offered {
    /// What CPUID tells, so that word and deed cannot differ.
    #[must_use]
    pub fn by_cpuid(recommendations: Recommendations, features: Features) -> Self {
        let mut offered = Self::empty();
        offered.set(Self::FLUSH, recommendations.contains(Recommendations::REMOTE_FLUSH));
        offered.set(Self::CLUSTER_IPI, recommendations.contains(Recommendations::CLUSTER_IPI));
        offered.set(Self::EX, recommendations.contains(Recommendations::EX_PROCESSOR_MASKS));
        offered.set(Self::XMM_INPUT, features.contains(Features::XMM_INPUT));
        offered.set(Self::EXTENDED_RANGES, features.contains(Features::EXTENDED_GVA_RANGES));
        offered
    }

    const fn needed_for(code: Code) -> Self {
        match code {
            Code::NotifyLongSpinWait => Self::empty(),
            Code::FlushVirtualAddressSpace | Code::FlushVirtualAddressList => Self::FLUSH,
            Code::FlushVirtualAddressSpaceEx | Code::FlushVirtualAddressListEx => Self::FLUSH.union(Self::EX),
            Code::SendSyntheticClusterIpi => Self::CLUSTER_IPI,
            Code::SendSyntheticClusterIpiEx => Self::CLUSTER_IPI.union(Self::EX),
        }
    }
}

/// Why a call is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// #UD: registers were used that the VM was not told of.
    InvalidOpcode,
    /// The call ends with this status, and nothing done.
    Status(Status),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// A call that may be made, with a control word that fits it. What its input says is not known yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    control: Control,
    code: Code,
    offered: Offered,
}

/// What a guest asks for.
#[derive(Clone, Debug)]
pub enum Call<'a> {
    /// Flush TLBs.
    Flush(FlushCall<'a>),
    /// Send an interrupt.
    Ipi(IpiCall<'a>),
    /// A spin lock was tried for so many times in vain: let another vCPU run.
    SpinWait(u32),
}

/// Checks what can be said about a call before its input is read.
///
/// # Errors
///
/// Code 2, 6 or 3 as a status, or #UD for a fast call that needs more registers than were offered.
pub fn check(control: Control, offered: Offered) -> Result<Checked, Refusal> {
    let code = Code::try_from(control.code())?;
    if !offered.contains(Offered::needed_for(code)) {
        return Err(Status::AccessDenied.into());
    }
    control.check_shape(&code.shape())?;

    let checked = Checked { control, code, offered };
    if checked.is_fast() {
        let bytes = checked.input_bytes();
        if bytes > FAST_BYTES && !offered.contains(Offered::XMM_INPUT) {
            return Err(Refusal::InvalidOpcode);
        }
        if bytes > FAST_XMM_BYTES {
            return Err(Status::InvalidHypercallInput.into());
        }
    }
    Ok(checked)
}

/// Both steps at once, for an input that is at hand.
///
/// # Errors
///
/// As [`check`] and [`Checked::parse`].
pub fn parse(control: Control, input: &[u8], offered: Offered) -> Result<Call<'_>, Refusal> {
    Ok(check(control, offered)?.parse(input)?)
}

/// The input of a fast call as the bytes that it would be in memory.
#[must_use]
pub fn fast_input(words: &[u64; FAST_WORDS]) -> [u8; FAST_XMM_BYTES] {
    let mut bytes = [0; FAST_XMM_BYTES];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

impl Checked {
    /// The control word.
    #[must_use]
    pub const fn control(&self) -> Control {
        self.control
    }

    /// Which call.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// Whether the input is in registers; otherwise in memory.
    #[must_use]
    pub const fn is_fast(&self) -> bool {
        self.control.is_fast()
    }

    /// Bytes of input, in registers or in memory. May exceed a page; then [`Self::check_placement`] refuses.
    #[must_use]
    pub const fn input_bytes(&self) -> usize {
        self.code.shape().input_bytes(self.control)
    }

    pub(crate) const fn header_bytes(&self) -> usize {
        self.code.shape().header_bytes(self.control)
    }

    pub(crate) const fn offered(&self) -> Offered {
        self.offered
    }

    /// Whether the input of a call by memory may be at `input`: a multiple of 8, within one page, and below `limit`, the
    /// end of the guest's physical address space. Whether there is memory is for the reader to find out. There is
    /// nothing to check for a fast call.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidAlignment`].
    pub fn check_placement(&self, input: Gpa, limit: Gpa) -> Result<(), Status> {
        let bytes = self.input_bytes() as u64;
        let aligned = input.0.is_multiple_of(8);
        let in_one_page = input.offset_in(PageSize::Size4K) + bytes <= PageSize::Size4K.bytes();
        let reachable = input.checked_add(bytes).is_some_and(|end| end <= limit);
        if self.is_fast() || aligned && in_one_page && reachable { Ok(()) } else { Err(Status::InvalidAlignment) }
    }

    /// Reads the input: [`Self::input_bytes`] of it, in memory that no guest can write to; what follows is ignored.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] for what a field may not say, [`Status::InvalidHypercallInput`] if the input is
    /// shorter than the call or does not agree with the control word.
    pub fn parse<'a>(&self, input: &'a [u8]) -> Result<Call<'a>, Status> {
        let input = Words::of(input.get(..self.input_bytes()).ok_or(Status::InvalidHypercallInput)?);
        match self.code {
            Code::FlushVirtualAddressSpace
            | Code::FlushVirtualAddressList
            | Code::FlushVirtualAddressSpaceEx
            | Code::FlushVirtualAddressListEx => Ok(Call::Flush(FlushCall::parse(self, input)?)),
            Code::SendSyntheticClusterIpi | Code::SendSyntheticClusterIpiEx => {
                Ok(Call::Ipi(IpiCall::parse(self, input)?))
            }
            Code::NotifyLongSpinWait => {
                // 32 bits of count, and 32 that should be zero: a hint is not worth an error.
                #[expect(clippy::cast_possible_truncation, reason = "the count is the lower half")]
                let count = input.get(0) as u32;
                Ok(Call::SpinWait(count))
            }
        }
    }

    /// The answer when everything asked for is done.
    #[must_use]
    pub const fn success(&self) -> Answer {
        Answer::new(Status::Success, self.control.rep_count())
    }

    /// The answer when nothing of this part is done: elements before its start count as done, which they were.
    #[must_use]
    pub const fn failure(&self, status: Status) -> Answer {
        Answer::new(status, self.control.rep_start())
    }
}
