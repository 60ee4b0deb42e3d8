//! The Hyper-V guest interface as data, from the Hypervisor Top Level Functional Specification (TLFS), and the parser
//! of its inputs. It has no behaviour of a hypervisor.
//!
//! * [`cpuid`]: the leaves by which a guest finds the interface.
//! * [`msr`]: the synthetic registers, and views of those that have fields.
//! * [`hypercall`]: control word, status, result, and the page that holds the call instruction. [`table`]: all calls,
//!   with the parts of their inputs and outputs.
//! * [`call`]: parses a hypercall from control word to [`Call`], in two steps. [`check`] needs no input and returns its
//!   length; [`Checked::parse`] parses it.
//! * [`flush`], [`ipi`]: the requests of the parsed calls. [`targets`]: their virtual processors (VPs; here vCPUs),
//!   [`gva_range`]: their addresses.
//! * [`partition`], [`memory`], [`vp`], [`interrupt`]: the requests of a *parent*, a guest that may create VMs of its
//!   own (*partitions*), as [`Request`]. [`property`], [`register`], [`message`] and [`page`]: what those are about.
//! * [`vmbus`]: what a guest says to the bus of Hyper-V's devices, and what it hears.
//! * [`reference_tsc`]: the page from which a guest computes time without an exit.
//!
//! Every input comes from a guest and may be anything. For all bytes the result is a call or a [`Refusal`], never a
//! panic. A VP index in an input may be wrong too: the iterators of [`Targets`] take the number of vCPUs and never
//! return one above it.
//!
//! The hypervisor copies an input into its own memory before it parses it, because another vCPU may write to it.
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
pub mod interrupt;
pub mod ipi;
pub mod memory;
pub mod message;
pub mod msr;
pub mod page;
pub mod partition;
pub mod property;
pub mod reference_tsc;
pub mod register;
mod request;
pub mod stats;
pub mod table;
pub mod targets;
pub mod vmbus;
pub mod vp;
pub mod wire;

pub use call::{Call, Checked, Offered, Refusal, check, fast_input, parse};
pub use flush::{FlushCall, FlushFlags, Scope};
pub use gva_range::{GvaPages, GvaRange, GvaRanges};
pub use hypercall::{Answer, Control, Status};
pub use ipi::IpiCall;
pub use message::MessageType;
pub use partition::PartitionId;
pub use property::Property;
pub use reference_tsc::ReferenceTsc;
pub use register::{Register, RegisterValue};
pub use request::Request;
pub use table::{Code, Continuation, Row, Shape};
pub use targets::{SparseSet, Targets};

#[cfg(test)]
extern crate alloc;
#[cfg(test)]
mod tests;
