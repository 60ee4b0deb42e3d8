//! x86-64, AMD SVM and Intel VT-x from the manuals: data, and rules that depend on nothing else.
//!
//! * [`vmcb`]: the virtual machine control block (APM vol. 2, appendix B), layout proven at compile time.
//! * [`exit_code`]: why a guest exited (APM vol. 2, appendix C).
//! * [`msr`]: numbers of the model-specific registers that guests use.
//! * [`cpuid`]: CPUID leaves and named feature bits.
//! * [`features`]: CPUID as guests see it.
//! * [`control`]: rules for writes of control registers.
//! * [`machine_check`]: decodes the error banks, and decides who may continue.
//! * [`registers`]: bits of RFLAGS, CR0, CR4, EFER; segment registers; exception vectors.
//! * [`vmx`]: a VMCS: fields, controls, exit reasons, and what is encoded otherwise than in a VMCB.
//! * [`xsave`]: the two formats of an XSAVE area.
//!
//! The crate compiles on any host, so everything built on it can be tested on any host.

#![no_std]
#![forbid(unsafe_code)]

pub mod control;
pub mod cpuid;
pub mod exit_code;
pub mod features;
pub mod machine_check;
pub mod msr;
pub mod registers;
pub mod vmcb;
pub mod vmx;
pub mod xsave;
