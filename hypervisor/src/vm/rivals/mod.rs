//! Designs that a VM can choose instead of the product's, kept so that anyone can measure both again.
//!
//! | file | setting | instead of | where the product asks |
//! |---|---|---|---|
//! | `first_touch` | `populate = "touch-4K"`, `"touch-2M"` | memory that is mapped at creation | `fault.rs`, at an unmapped page |
//! | `write_protect` | `decode_cache = "write-protect"`, `"write-protect-tables"` | a cache of each vCPU, by bytes | `fault.rs`, at a denied access; `memory.rs`, at a write of the hypervisor |
//!
//! Others are in the crates whose algorithm they vary: schemes of tags in `tlb_tag`, policies of splits in `stage2`.

pub(crate) mod first_touch;
pub(crate) mod write_protect;
