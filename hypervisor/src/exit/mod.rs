//! What exits mean, where that is not the architecture's own business.

#[cfg(machine = "pc")]
pub(crate) mod hypercall;
