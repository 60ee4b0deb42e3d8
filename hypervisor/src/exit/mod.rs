//! Portable handlers of exits.

#[cfg(any(test, machine = "pc"))]
pub(crate) mod hypercall;
