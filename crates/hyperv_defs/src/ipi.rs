//! Interrupts to many VPs at once: HvCallSendSyntheticClusterIpi and its Ex form.
//!
//! | byte | plain | Ex |
//! |---|---|---|
//! | 0 | vector, 32 bits | vector |
//! | 4 | target trust level, flags, reserved: zero | zero |
//! | 8 | mask of VPs 0 to 63 | format of the set |
//! | 16 | | mask of banks, then banks |
//!
//! Fixed delivery, edge-triggered. The sender may be among the targets; no target at all is no error.

use crate::call::Checked;
use crate::hypercall::Status;
use crate::input::Words;
use crate::table::Code;
use crate::targets::Targets;

/// The lowest vector that can be sent: those below belong to exceptions.
pub const FIRST_VECTOR: u8 = 0x10;

/// A request to send an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpiCall<'a> {
    /// The vector, [`FIRST_VECTOR`] or above.
    pub vector: u8,
    /// The targets.
    pub targets: Targets<'a>,
}

impl<'a> IpiCall<'a> {
    /// `input` has the length of the call's shape.
    pub(crate) fn parse(checked: &Checked, input: Words<'a>) -> Result<Self, Status> {
        let set = input.skip(1);
        let targets = if checked.code() == Code::SendSyntheticClusterIpiEx {
            Targets::parse(set, checked.control().variable_words())?
        } else {
            Targets::Mask(set.get(0))
        };

        // One comparison checks the vector's range and the zeros behind it: there are no trust levels here.
        match u8::try_from(input.get(0)) {
            Ok(vector) if vector >= FIRST_VECTOR => Ok(Self { vector, targets }),
            _ => Err(Status::InvalidParameter),
        }
    }
}
