//! Tags that belong to VMs, and are the same on all pCPUs.
//!
//! Where a guest flushes the TLBs of all its vCPUs by one instruction, the processor does so for the tag of the one that
//! asks (Arm: TLBI with IS, by VMID). So all vCPUs of a VM must run under the same tag at any time, wherever they are;
//! tags that each pCPU hands out by itself will not do. And vCPUs that share a tag share a TLB where they take turns on a
//! pCPU, though a kernel may map the same address differently on each of its CPUs, and flush it on that CPU alone.
//!
//! So there are two questions, and two answers:
//!
//! * *Which tag has a VM?* [`Scheme::Epoch`]: one for life. There may be more VMs than tags; then some share one, which
//!   is right as long as a pCPU that goes from one to the other flushes. [`Scheme::Generation`]: one for a generation, as
//!   Linux has it for Arm (2021): tags are handed out as VMs arrive, and when there is none left a new generation begins.
//!   What runs at that moment keeps its tag; of all other VMs the tags are void. [`Scheme::FlushAlways`]: one for all.
//! * *Whose entries are under this tag here?* Each pCPU remembers for each tag which vCPU was last entered with it, and in
//!   which epoch of its VM. A vCPU that is still the last one, and has been nowhere else since, flushes nothing. After
//!   another vCPU of the VM, what belongs to the guest's own tables goes ([`Flush::OwnTables`]); after another VM, or
//!   in another epoch, all of the tag ([`Flush::Tag`]). A pCPU that meets a new generation flushes everything, once.
//!
//! A stay on a pCPU begins with [`VcpuTags::arrive`] and ends with [`VcpuTags::depart`]. Between the two the tag is the
//! vCPU's whatever others do, so that an entry has nothing to look at but the epoch of its VM. Debts are as in
//! the rest of the crate: [`Entry::completed`] pays, nothing else does.
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
#[cfg(test)]
mod tests;
mod vcpu;

pub use cpu::{Counts, CpuTags};
pub use pool::{Pool, VmTags};
pub use vcpu::{Entry, Flush, VcpuTags};

#[cfg(doc)]
use crate::Scheme;
