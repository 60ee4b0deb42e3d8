//! The processor: one instruction at a time, with given registers, and what became of it.
//!
//! All unsafe code is here.

#![expect(unsafe_code, reason = "maps memory at fixed addresses, handles signals, and executes arbitrary instructions")]

mod x86_64;

pub use x86_64::{Processor, Unavailable};
