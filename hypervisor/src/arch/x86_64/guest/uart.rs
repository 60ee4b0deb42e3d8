//! The serial port that guests of this architecture have.

pub(crate) use crate::device::uart::{FIFO_BYTES, Uart};

/// What a register holds.
pub(crate) type Register = u8;
