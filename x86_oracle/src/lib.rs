//! Checks the emulator against the processor that runs this program.
//!
//! ```text
//! generate   an instruction, and a state with interesting operands                     generate.rs, assemble.rs
//! confine    does it touch only memory that is reserved for it?                        operands.rs
//! run        on the processor, in a process without rights                             arch/
//! run        in the emulator, from the same state                                      emulator.rs
//! compare    registers, flags, RIP, memory, exception                                  compare.rs
//! ```
//!
//! `iced-x86` computes the operands' addresses, not the emulator: so a wrong address in the emulator shows as a
//! difference.
//!
//! AMD and Intel differ in some points ([`Vendor`](x86_emulate::Vendor)). The emulator follows the vendor of this
//! processor, which CPUID tells ([`Identity`]).
//!
//! Three things cannot be checked like this: port I/O, which a process may not do; paging structures and privilege,
//! which belong to the kernel; real mode and virtual-8086 mode, which 16-bit segments of protected mode replace.
//!
//! The processor must be x86-64, with Linux. Elsewhere this crate is empty.

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
