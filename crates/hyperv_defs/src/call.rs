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

use crate::cpuid::{Features, PrivilegesHigh, Recommendations};
use crate::flush::FlushCall;
use crate::hypercall::{Answer, Control, Status};
use crate::input::Words;
use crate::ipi::IpiCall;
use crate::request::Request;
use crate::table::{Code, Row};

/// Bytes of input that RDX and R8 hold.
pub const FAST_BYTES: usize = 16;
/// Words of input that registers hold: RDX, R8, then XMM0 to XMM5, low half first.
pub const FAST_WORDS: usize = 14;
/// Bytes of input that registers hold.
pub const FAST_XMM_BYTES: usize = FAST_WORDS * 8;

bitflags! {
    /// The calls that CPUID offers to a VM. Long-spin notifications are always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Offered: u16 {
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
        /// Calls about child partitions: the caller is a parent.
        const PARTITIONS = 1 << 5;
        /// Deposits of memory.
        const MEMORY_POOL = 1 << 6;
        /// Ports, on which it receives.
        const CREATE_PORT = 1 << 7;
        /// Connections to ports.
        const CONNECT_PORT = 1 << 8;
        /// Pages of statistics.
        const STATISTICS = 1 << 9;
        /// Messages to the host.
        const POST_MESSAGES = 1 << 10;
    }
}

impl Offered {
    /// The value that matches the CPUID leaves, so that both always agree.
    #[must_use]
    pub fn by_cpuid(recommendations: Recommendations, features: Features, privileges: PrivilegesHigh) -> Self {
        let mut offered = Self::empty();
        offered.set(Self::FLUSH, recommendations.contains(Recommendations::REMOTE_FLUSH));
        offered.set(Self::CLUSTER_IPI, recommendations.contains(Recommendations::CLUSTER_IPI));
        offered.set(Self::EX, recommendations.contains(Recommendations::EX_PROCESSOR_MASKS));
        offered.set(Self::XMM_INPUT, features.contains(Features::XMM_INPUT));
        offered.set(Self::EXTENDED_RANGES, features.contains(Features::EXTENDED_GVA_RANGES));
        offered.set(Self::PARTITIONS, privileges.contains(PrivilegesHigh::CREATE_PARTITIONS));
        offered.set(Self::MEMORY_POOL, privileges.contains(PrivilegesHigh::ACCESS_MEMORY_POOL));
        offered.set(Self::CREATE_PORT, privileges.contains(PrivilegesHigh::CREATE_PORT));
        offered.set(Self::CONNECT_PORT, privileges.contains(PrivilegesHigh::CONNECT_PORT));
        offered.set(Self::STATISTICS, privileges.contains(PrivilegesHigh::STATISTICS));
        offered.set(Self::POST_MESSAGES, privileges.contains(PrivilegesHigh::POST_MESSAGES));
        offered
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
    row: &'static Row,
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
    /// What a parent asks for.
    Partition(Request<'a>),
}

/// Checks everything that does not need the input.
///
/// # Errors
///
/// Code 2, 6 or 3 as a status, or #UD for a fast call that needs more registers than were offered.
pub fn check(control: Control, offered: Offered) -> Result<Checked, Refusal> {
    let code = Code::try_from(control.code())?;
    let row = code.row();
    if !offered.contains(row.needs) {
        return Err(Status::AccessDenied.into());
    }
    control.check_shape(&row.shape)?;

    let checked = Checked { control, code, row, offered };
    if checked.is_fast() {
        let bytes = checked.input_bytes();
        if bytes > FAST_BYTES && !offered.contains(Offered::XMM_INPUT) {
            return Err(Refusal::InvalidOpcode);
        }
        // Output in registers is not offered to anyone.
        if bytes > FAST_XMM_BYTES || row.shape.has_output() {
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
        self.row.shape.input_bytes(self.control)
    }

    /// Bytes of output, at most: the whole list from its first element. May exceed a page; then
    /// [`Self::check_output_placement`] refuses.
    #[must_use]
    pub const fn output_bytes(&self) -> usize {
        self.row.shape.output_bytes(self.control)
    }

    /// The call's row.
    #[must_use]
    pub const fn row(&self) -> &'static Row {
        self.row
    }

    pub(crate) const fn header_bytes(&self) -> usize {
        self.row.shape.header_bytes(self.control)
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
        if self.is_fast() || is_placed(input, self.input_bytes(), limit) {
            Ok(())
        } else {
            Err(Status::InvalidAlignment)
        }
    }

    /// Whether the output may be at `output`, by the rules for an input. A call without output may give any address.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidAlignment`].
    pub fn check_output_placement(&self, output: Gpa, limit: Gpa) -> Result<(), Status> {
        let bytes = self.output_bytes();
        if bytes == 0 || is_placed(output, bytes, limit) { Ok(()) } else { Err(Status::InvalidAlignment) }
    }

    /// Parses the input: [`Self::input_bytes`] bytes, in memory that no guest can write to; the rest is ignored.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidParameter`] for an invalid field; [`Status::InvalidHypercallInput`] if the input is shorter
    /// than the call or does not agree with the control word.
    pub fn parse<'a>(&self, input: &'a [u8]) -> Result<Call<'a>, Status> {
        let input = input.get(..self.input_bytes()).ok_or(Status::InvalidHypercallInput)?;
        let words = Words::of(input);
        match self.code {
            Code::FlushVirtualAddressSpace
            | Code::FlushVirtualAddressList
            | Code::FlushVirtualAddressSpaceEx
            | Code::FlushVirtualAddressListEx => Ok(Call::Flush(FlushCall::parse(self, words)?)),
            Code::SendSyntheticClusterIpi | Code::SendSyntheticClusterIpiEx => {
                Ok(Call::Ipi(IpiCall::parse(self, words)?))
            }
            Code::NotifyLongSpinWait => {
                // 32 bits of count, and 32 that should be zero. They are not checked: the call is only a hint.
                #[expect(clippy::cast_possible_truncation, reason = "the count is the lower half")]
                let count = words.get(0) as u32;
                Ok(Call::SpinWait(count))
            }
            _ => {
                let request = Request::parse(self, input).unwrap_or(Err(Status::InvalidHypercallCode));
                request.map(Call::Partition)
            }
        }
    }

    /// The answer when everything is done.
    #[must_use]
    pub const fn success(&self) -> Answer {
        Answer::new(Status::Success, self.control.rep_count())
    }

    /// Elements from the call's first to the last. At most 4095.
    #[must_use]
    pub const fn elements_left(&self) -> u16 {
        self.control.rep_count() - self.control.rep_start()
    }

    /// The answer when `done` elements of this part are done, and the next ended with `status`.
    #[must_use]
    pub const fn failure_after(&self, done: u16, status: Status) -> Answer {
        Answer::new(status, self.control.rep_start() + done)
    }

    /// The answer when nothing of this part is done. Elements before the call's first element count as done.
    #[must_use]
    pub const fn failure(&self, status: Status) -> Answer {
        Answer::new(status, self.control.rep_start())
    }
}

/// At a multiple of 8, within one page, and below `limit`.
fn is_placed(at: Gpa, bytes: usize, limit: Gpa) -> bool {
    let bytes = bytes as u64;
    let is_aligned = at.0.is_multiple_of(8);
    let is_in_one_page = at.offset_in(PageSize::Size4K) + bytes <= PageSize::Size4K.bytes();
    is_aligned && is_in_one_page && at.checked_add(bytes).is_some_and(|end| end <= limit)
}
