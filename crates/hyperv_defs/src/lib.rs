//! The Hyper-V guest interface as data: what the Hypervisor Top Level Functional Specification (TLFS) says, and how an
//! input is to be read, with no behaviour of a hypervisor.
//!
//! * [`cpuid`]: the leaves by which a guest finds the interface.
//! * [`msr`]: the synthetic registers, and views of those that have fields.
//! * [`hypercall`]: control word, call codes, status, result, and the page that holds the call instruction.
//! * [`call`]: a hypercall on its way from control word to [`Call`], in two steps: [`check`] needs no input and
//!   tells how much of it there is, [`Checked::parse`] reads it.
//! * [`flush`], [`ipi`]: what the parsed calls ask for. [`targets`]: of which virtual processors (VPs; here vCPUs),
//!   [`gva_range`]: for which addresses.
//! * [`reference_tsc`]: the page from which a guest computes time by itself.
//!
//! Every input comes from a guest and may be anything: whatever bytes arrive, the answer is a call or a [`Refusal`],
//! never a panic. A VP index in an input is a claim too: the iterators of [`Targets`] are told how many vCPUs there are
//! and never yield one beyond.
//!
//! The hypervisor copies an input into memory of its own before it is parsed: another vCPU may be writing to it.
//!
//! ```
//! use hyperv_defs::{Call, Code, Control, Offered, Status, check, fast_input};
//!
//! // A cluster IPI in registers: vector 0xfd to the vCPUs 1 and 3, as Linux sends it.
//! let control = Control::new(Code::SendSyntheticClusterIpi).with_fast();
//! let checked = check(control, Offered::CLUSTER_IPI).expect("a well-formed control word");
//!
//! let mut words = [0; 14];
//! words[0] = 0xfd; // RDX
//! words[1] = 0b1010; // R8
//! let input = fast_input(&words);
//!
//! let Ok(Call::Ipi(ipi)) = checked.parse(&input) else { panic!("not an IPI") };
//! assert_eq!(ipi.vector, 0xfd);
//! assert_eq!(ipi.targets.indices(4).collect::<Vec<_>>(), [1, 3]);
//! assert_eq!(checked.success().0, 0);
//!
//! // The same with a vector that belongs to exceptions.
//! words[0] = 0x0e;
//! assert_eq!(checked.parse(&fast_input(&words)).unwrap_err(), Status::InvalidParameter);
//! ```

#![no_std]
#![forbid(unsafe_code)]

pub mod call;
pub mod cpuid;
pub mod flush;
pub mod gva_range;
pub mod hypercall;
mod input;
pub mod ipi;
pub mod msr;
pub mod reference_tsc;
pub mod targets;

pub use call::{Call, Checked, Offered, Refusal, check, fast_input, parse};
pub use flush::{FlushCall, FlushFlags, Scope};
pub use gva_range::{GvaPages, GvaRange, GvaRanges};
pub use hypercall::{Answer, Code, Control, Status};
pub use ipi::IpiCall;
pub use reference_tsc::ReferenceTsc;
pub use targets::{SparseSet, Targets};

#[cfg(test)]
extern crate alloc;
#[cfg(test)]
mod tests;
