//! Tags that belong to VMs, and are the same on all pCPUs.
//!
//! On some processors a guest can flush the TLBs of all its vCPUs by one instruction. The processor then uses the tag
//! of the executing vCPU (Arm: TLBI with IS, by VMID). So all vCPUs of a VM must run under the same tag at any time, on
//! every pCPU; no pCPU may choose tags by itself. And vCPUs that share a tag and take turns on a pCPU share a TLB. But
//! a kernel may map the same address differently on each of its CPUs, and flush it on one CPU only.
//!
//! So there are two questions, with two answers:
//!
//! * *Which tag does a VM have?* [`Scheme::Epoch`]: one for life. If there are more VMs than tags, some share one; then
//!   a pCPU flushes when it changes from one to the other. [`Scheme::Generation`]: one per generation, like Linux for
//!   Arm (2021). A VM gets a tag when it arrives; when no tag is left, a new generation begins. VMs that run at that
//!   moment keep their tags; all other tags become void. [`Scheme::FlushAlways`]: one for all VMs.
//! * *Whose entries are under this tag on this pCPU?* Each pCPU remembers, per tag, the last vCPU that it entered and
//!   the epoch of its VM. The same vCPU, if it was nowhere else since, flushes nothing. After another vCPU of the VM,
//!   the guest's own translations are flushed ([`Flush::OwnTables`]). After another VM, or in another epoch, the whole
//!   tag is flushed ([`Flush::Tag`]). A pCPU that meets a new generation flushes everything, once.
//!
//! A vCPU's time on a pCPU begins with [`VcpuTags::arrive`] and ends with [`VcpuTags::depart`]. In between the vCPU
//! keeps its tag, whatever others do. So an entry only compares the epoch of its VM. Debts work as in the rest of the
//! crate: only [`GuestEntry::completed`] clears them.
//!
//! ```
//! use tlb_tag::by_vm::{Flush, Pool};
//! use tlb_tag::{Scheme, TagRange};
//!
//! let pool = Pool::new(Scheme::Epoch, TagRange::new(1, 255), 2);
//! let (mut here, vm) = (pool.cpu(0), pool.vm());
//! let (mut first, mut second) = (vm.vcpu(), vm.vcpu());
//!
//! for (vcpu, flush) in [(&mut first, Flush::Nothing), (&mut second, Flush::OwnTables)] {
//!     vcpu.arrive(&mut here, false);
//!     let entry = vcpu.enter(&mut here, 0);
//!     assert_eq!(entry.flush(), flush);
//!     entry.completed();
//!     vcpu.depart(&mut here);
//! }
//! assert_eq!(first.tag(), second.tag());
//! ```

mod cpu;
mod pool;
mod rivals;
#[cfg(test)]
mod tests;
mod vcpu;

pub use cpu::{Counts, CpuTags};
pub use pool::{Pool, VmTags};
pub use vcpu::{Flush, GuestEntry, VcpuTags};

#[cfg(doc)]
use crate::Scheme;
