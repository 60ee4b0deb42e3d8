//! x86-64 and AMD SVM as the manuals have them: data, and rules that depend on nothing else.
//!
//! * [`vmcb`]: the virtual machine control block (APM vol. 2, appendix B), layout proven at compile time.
//! * [`exit_code`]: why a guest was left (APM vol. 2, appendix C).
//! * [`msr`]: numbers of the model-specific registers that a guest may meet.
//! * [`cpuid`]: CPUID leaves and the feature bits that we speak of by name.
//! * [`control`]: what may be written to control registers.
//! * [`machine_check`]: what banks of errors say, and who can go on.
//! * [`registers`]: bits of RFLAGS, CR0, CR4, EFER; exception vectors.
//!
//! Compiles on any host, so that everything built on it can be tested on any host.

#![no_std]
#![forbid(unsafe_code)]

pub mod control;
pub mod cpuid;
pub mod exit_code;
pub mod machine_check;
pub mod msr;
pub mod registers;
pub mod vmcb;
