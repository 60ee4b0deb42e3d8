//! The guests' serial port on this architecture.

pub(crate) use crate::device::uart::{FIFO_BYTES, Uart};

/// Value of a register.
pub(crate) type Register = u8;
