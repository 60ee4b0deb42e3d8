//! Parses a hypercall from control word to typed request.
//!
//! ```text
//! control word --check--> Checked --(input is copied)--> parse --> Call
//!                  |                     |                 |
//!               Refusal              placement           Status
//! ```
//!
//! Errors are checked in this order: unknown code; call not granted; control word does not fit the call; input too long
//! for registers. Then [`Checked::check_placement`] checks the input's address, and then the input itself is checked.

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
    /// The calls that CPUID offers to a VM. Long-spin notifications are always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Offered: u8 {
        /// Flushes.
        const FLUSH = 1 << 0;
        /// IPIs.
        const CLUSTER_IPI = 1 << 1;
        /// The Ex forms of the offered flushes and IPIs.
        const EX = 1 << 2;
        /// Fast calls with input in XMM registers. Clear for a 32-bit caller, which has no such form.
        const XMM_INPUT = 1 << 3;
        /// Lists in the extended format.
        const EXTENDED_RANGES = 1 << 4;
    }
}

impl Offered {
    /// The value that matches the CPUID leaves, so that both always agree.
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

/// Why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// #UD: the call uses registers that the VM was not offered.
    InvalidOpcode,
    /// The call ends with this status, and does nothing.
    Status(Status),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// An allowed call with a valid control word. Its input is not parsed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    control: Control,
    code: Code,
    offered: Offered,
}

/// A guest's request.
#[derive(Clone, Debug)]
pub enum Call<'a> {
    /// Flush TLBs.
    Flush(FlushCall<'a>),
    /// Send an interrupt.
    Ipi(IpiCall<'a>),
    /// A spin lock was tried this many times without success: let another vCPU run.
    SpinWait(u32),
}

/// Checks everything that does not need the input.
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

/// Both steps at once, for an input in memory.
///
/// # Errors
///
/// As [`check`] and [`Checked::parse`].
pub fn parse(control: Control, input: &[u8], offered: Offered) -> Result<Call<'_>, Refusal> {
    Ok(check(control, offered)?.parse(input)?)
}

/// The input of a fast call, in the format of an input in memory.
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

    /// The call code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// Whether the input is in registers; otherwise it is in memory.
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

    /// Whether an input in memory may be at `input`: at a multiple of 8, within one page, and below `limit`, the end of
    /// the guest's physical address space. The reader checks whether there is memory. A fast call needs no check.
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

    /// Parses the input: [`Self::input_bytes`] bytes, in memory that no guest can write to; the rest is ignored.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] for an invalid field; [`Status::InvalidHypercallInput`] if the input is shorter
    /// than the call or does not agree with the control word.
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
                // 32 bits of count, and 32 that should be zero. They are not checked: the call is only a hint.
                #[expect(clippy::cast_possible_truncation, reason = "the count is the lower half")]
                let count = input.get(0) as u32;
                Ok(Call::SpinWait(count))
            }
        }
    }

    /// The answer when everything is done.
    #[must_use]
    pub const fn success(&self) -> Answer {
        Answer::new(Status::Success, self.control.rep_count())
    }

    /// The answer when nothing of this part is done. Elements before its start count as done, which they were.
    #[must_use]
    pub const fn failure(&self, status: Status) -> Answer {
        Answer::new(status, self.control.rep_start())
    }
}
