//! Tags of guests' TLB entries (ASID on SVM, VMID on Arm).
//!
//! The TLB separates the entries of many guests by a small number, the *tag*. While every vCPU has a tag of its own, a
//! pCPU flushes nothing when it changes from one vCPU to another. But there may be fewer tags than vCPUs, and sometimes
//! a guest's entries must be flushed. A [`Scheme`] decides how to assign tags, and what to flush when:
//!
//! * [`Scheme::FlushAlways`]: one tag, and a flush at every entry. This was usual before hypervisors managed tags.
//! * [`Scheme::Generation`]: each pCPU assigns its tags round robin. When none is left it begins a new *generation*,
//!   which makes all old tags void and flushes everything. To flush one vCPU, it assigns the next tag. (Xen on AMD-V,
//!   2007; `docs/decisions/0006-epochs.md` compares.)
//! * [`Scheme::Epoch`]: each vCPU has a *home tag* for life, the same on every pCPU, while there are enough. An entry
//!   compares one word: the VM's *epoch* with the epoch that the vCPU has seen. A new epoch makes all entries of that
//!   VM void. A flush affects the vCPU's own tag, never another one's. With fewer tags than vCPUs, each pCPU uses its
//!   tags as a cache of the vCPUs that it runs, down to a cache of one.
//!
//! A required flush is a debt. [`VcpuTags::enter`] says what the entry must flush, and only [`GuestEntry::completed`]
//! clears the debt. If the entry does not happen, the next entry has the same debt:
//!
//! ```
//! use tlb_tag::{Flush, Pool, Scheme, TagRange};
//!
//! let pool = Pool::new(Scheme::Epoch, TagRange::new(1, 63), true);
//! let (mut cpu, mut vcpu) = (pool.cpu(), pool.vcpu());
//!
//! vcpu.arrive(&mut cpu, false);
//! let refused = vcpu.enter(&mut cpu, 0);
//! assert_eq!(refused.flush(), Flush::Tag, "it was never here before");
//! drop(refused);
//!
//! let entry = vcpu.enter(&mut cpu, 0);
//! assert_eq!(entry.flush(), Flush::Tag, "nothing was paid yet");
//! entry.completed();
//! assert_eq!(vcpu.enter(&mut cpu, 0).flush(), Flush::Nothing);
//! ```
//!
//! These rules hold for every scheme:
//!
//! * On one pCPU a tag names one vCPU's translations at a time. The entry that changes this flushes.
//! * Generations are compared only on the pCPU that counts them; a change of pCPU makes the tag void.
//! * Tags are never 0, which is the host's, and always in the range.
//!
//! Here each vCPU has a tag of its own, and each pCPU assigns tags by itself. If a guest can flush the TLBs of all its
//! vCPUs by one instruction, as on Arm, tags must belong to VMs and be the same on all pCPUs: see [`by_vm`].

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod by_vm;
mod cpu;
mod pool;
mod rivals;
mod seen;
mod sync;
mod tag;
#[cfg(test)]
mod tests;
mod vcpu;

pub use cpu::{Counts, CpuTags};
pub use pool::{Pool, Scheme};
pub use tag::{Tag, TagRange};
pub use vcpu::{Flush, GuestEntry, VcpuTags};
