//! Designs that a VM can choose instead of the product's, kept so that anyone can measure both again.
//!
//! | file | setting | instead of | where the product asks |
//! |---|---|---|---|
//! | `first_touch` | `populate = "touch-4K"`, `"touch-2M"` | memory that is mapped at creation | `fault.rs`, at an unmapped page |
//! | `write_protect` | `decode_cache = "write-protect"`, `"write-protect-tables"` | a cache of each vCPU, by bytes | `fault.rs`, at a denied access; `memory.rs`, at a write of the hypervisor |
//!
//! Others are where their algorithm is: schemes of tags in `tlb_tag` (`rivals.rs`, `by_vm/rivals.rs`), and
//! `split = "eager"` in `dirty/session/eager.rs`. Three stay among the product's code:
//!
//! * `split = "lazy"` and `dirty_source = "write-protect"` are values of [`Granularity`](stage2::Granularity). Each
//!   takes an arm of a match that the product needs anyway, and the word that a fault reads is the same.
//! * `tags = "flush-always"` has no code: no entry under it is current.
//! * [`Memory`](super::memory::Memory) holds the shared cache of `write_protect` itself, in lines that nobody writes. A
//!   product's VM reads one word of it, whether there is a cache, and a pointer to it would be read as often.

pub(crate) mod first_touch;
pub(crate) mod write_protect;
