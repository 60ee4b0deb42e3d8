//! x86-64 and AMD SVM as data: what the manuals say, with no behaviour of our own.
//!
//! * [`vmcb`]: the virtual machine control block (APM vol. 2, appendix B), layout proven at compile time.
//! * [`exit_code`]: why a guest was left (APM vol. 2, appendix C).
//! * [`msr`]: numbers of the model-specific registers that a guest may meet.
//! * [`cpuid`]: CPUID leaves and the feature bits that we speak of by name.
//! * [`registers`]: bits of RFLAGS, CR0, CR4, EFER; exception vectors.
//!
//! Compiles on any host, so that everything built on it can be tested on any host.

#![no_std]
#![forbid(unsafe_code)]

pub mod cpuid;
pub mod exit_code;
pub mod msr;
pub mod registers;
pub mod vmcb;
