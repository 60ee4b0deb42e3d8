//! The guests' serial port on this architecture.

pub(crate) use crate::device::pl011::{FIFO_BYTES, Pl011 as Uart};

/// Value of a register.
pub(crate) type Register = u32;
