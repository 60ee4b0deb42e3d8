//! Guests that write, for a tool that logs their writes from outside:
//!
//! * [`stride`]: the speed of writes, moment by moment.
//! * [`scribble`]: random writes, to compare the memory with a copy.
//! * [`faults`]: the duration of a pass over pages, alone and repeatedly.
//!
//! All of them use the unused memory, which the guest maps with large pages. The tool controls them by bytes on the
//! console: [`QUIT`] ends an experiment, [`NEXT`] starts another pass of `faults`.

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

/// Whether someone typed [`QUIT`] since the last call. Other input is dropped.
pub(super) fn is_to_quit() -> bool {
    core::iter::from_fn(serial::receive).any(|byte| byte == QUIT)
}

/// `mebibytes` of the memory, from `offset` on. Without a size, all of it; with too large a size, as much as there is.
pub(super) fn memory(offset: u64, mebibytes: Option<u64>) -> Option<Ram> {
    let ram = Ram::all().part(offset, mebibytes.map_or(u64::MAX, |count| count.saturating_mul(1 << 20)));
    Some(ram).filter(|ram| ram.bytes() > 0)
}

pub(super) const NO_MEMORY: Outcome = Outcome::Unsupported("no memory is left beside the image");
