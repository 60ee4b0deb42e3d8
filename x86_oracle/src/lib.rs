//! Does the emulator do what a processor does? This asks the processor that it runs on.
//!
//! ```text
//! generate   an instruction, and a state in which its operands are worth looking at    generate.rs, assemble.rs
//! confine    will it touch nothing but what is set aside for it?                       operands.rs
//! run        on the processor, in a process without rights                             arch/
//! run        in the emulator, from the same state                                      emulator.rs
//! compare    registers, flags, RIP, memory, exception                                  compare.rs
//! ```
//!
//! Where an operand lies is computed here by way of `iced-x86`, not by the emulator: an address that the emulator gets
//! wrong shows as a difference.
//!
//! AMD and Intel differ here and there ([`Vendor`](x86_emulate::Vendor)): the emulator is asked for what the processor at
//! hand should do, which is found out by CPUID ([`Identity`]).
//!
//! What cannot be asked this way: port I/O, which a process may not do; paging structures and privilege, which are the
//! kernel's; real mode and virtual-8086 mode, for which 16-bit segments of protected mode have to stand in.
//!
//! The processor must be an x86-64 one, with Linux on it. Elsewhere this crate is empty.

#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod arch;
mod assemble;
mod campaign;
mod compare;
mod coverage;
mod emulator;
mod generate;
mod identity;
mod machine;
mod operands;
mod random;

pub use arch::{Processor, Unavailable};
pub use campaign::{Alteration, Campaign, Mismatch, Step};
pub use compare::{Difference, compare};
pub use coverage::{Class, Coverage};
pub use identity::Identity;
pub use machine::{Case, Ended, WINDOW, WINDOW_BYTES};
