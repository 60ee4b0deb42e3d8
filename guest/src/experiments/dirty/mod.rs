//! Guests that write, for somebody who logs their writes from outside:
//!
//! * [`stride`]: how fast writes go, moment by moment.
//! * [`scribble`]: random writes, so that a copy of the memory can be held against it.
//! * [`faults`]: how long a pass over pages takes, alone and repeatedly.
//!
//! All of them use the memory that nobody else uses, mapped by the guest with large pages of its own. The tool speaks
//! to them by bytes on the console: [`QUIT`] ends an experiment, [`NEXT`] lets `faults` begin another pass.

pub(super) mod faults;
pub(super) mod scribble;
pub(super) mod stride;

use super::Outcome;
use crate::arch::ram::Ram;
use crate::arch::serial;

/// Ends the experiment.
const QUIT: u8 = b'q';
/// Begins the next pass.
const NEXT: u8 = b'n';

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Whether [`QUIT`] was typed meanwhile. Everything else that was typed is forgotten.
pub(super) fn is_to_quit() -> bool {
    core::iter::from_fn(serial::receive).any(|byte| byte == QUIT)
}

/// `mebibytes` of the memory, from `offset` on; all of it without; as much as there is if there is less.
pub(super) fn memory(offset: u64, mebibytes: Option<u64>) -> Option<Ram> {
    let ram = Ram::all().part(offset, mebibytes.map_or(u64::MAX, |count| count.saturating_mul(1 << 20)));
    Some(ram).filter(|ram| ram.bytes() > 0)
}

pub(super) const NO_MEMORY: Outcome = Outcome::Unsupported("no memory is left beside the image");
