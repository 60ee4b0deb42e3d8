//! The serial port that guests of this architecture have.

pub(crate) use crate::device::pl011::{FIFO_BYTES, Pl011 as Uart};

/// What a register holds.
pub(crate) type Register = u32;
