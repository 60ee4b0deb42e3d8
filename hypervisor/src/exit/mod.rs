//! What exits mean, where that is not the architecture's own business.

pub(crate) mod hypercall;
