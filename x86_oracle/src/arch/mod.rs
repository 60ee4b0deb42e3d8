//! The processor: executes one instruction with given registers, and returns the result.
//!
//! All unsafe code is here.

#![expect(unsafe_code, reason = "maps memory at fixed addresses, handles signals, and executes arbitrary instructions")]

mod x86_64;

pub use x86_64::{Processor, Unavailable};
