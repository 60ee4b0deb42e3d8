//! What exits mean, where that is not the architecture's own business.

#[cfg(any(test, machine = "pc"))]
pub(crate) mod hypercall;
