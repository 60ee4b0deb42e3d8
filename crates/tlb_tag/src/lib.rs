//! Tags of guests' TLB entries (ASID on SVM, VMID on Arm).
//!
//! The TLB tells the entries of many guests apart by a small number, the *tag*. While every vCPU has one of its own,
//! nothing needs to be flushed when a pCPU goes from one to the other. There may be fewer tags than vCPUs, and now and
//! then a guest's entries must go; how to hand tags out, and what to flush when, is what a [`Scheme`] decides:
//!
//! * [`Scheme::FlushAlways`]: one tag, and a flush at every entry. What was usual before tags were managed.
//! * [`Scheme::Generation`]: each pCPU hands out its tags round robin; when they run out it begins a new *generation*, which
//!   voids all old tags at once and flushes everything. To flush one vCPU is to give it the next tag. (Xen on AMD-V,
//!   2007; `docs/decisions/0006-epochs.md` compares.)
//! * [`Scheme::Epoch`]: each vCPU has a *home tag* for life while they last, the same on every pCPU. An entry compares one
//!   word: the VM's *epoch*, which counts how often everything of that VM became void, with the one that the vCPU has
//!   seen. A flush concerns the vCPU's own tag, never a neighbour's. With fewer tags than vCPUs, each pCPU keeps its tags
//!   as a cache of the vCPUs that it runs, down to a cache of one.
//!
//! A flush that is owed is a debt: [`VcpuTags::enter`] says what the entry has to flush, and only
//! [`Entry::completed`] pays. An entry that does not happen leaves the debt where it was, with whoever enters next:
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
//! What holds, whatever the scheme:
//!
//! * On one pCPU a tag names one vCPU's translations at a time, or the change is an entry that flushes.
//! * Generations are compared only on the pCPU that counts them; a change of pCPU voids.
//! * Tags are never 0, which is the host's, and never beyond the range.
//!
//! Here each vCPU has a tag of its own, and each pCPU hands tags out by itself. Where a guest can flush the TLBs of all
//! its vCPUs by one instruction, as on Arm, tags must be VMs' and the same on all pCPUs: that is [`by_vm`].

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod by_vm;
mod cpu;
mod pool;
mod sync;
mod tag;
#[cfg(test)]
mod tests;
mod vcpu;

pub use cpu::{Counts, CpuTags};
pub use pool::{Pool, Scheme};
pub use tag::{Tag, TagRange};
pub use vcpu::{Entry, Flush, VcpuTags};
