//! A parent VM's description of its children: the state behind the calls of [`hyperv_defs::Request`].
//!
//! A *parent* is a VM that creates other VMs, its *children*, out of its own memory. This crate stores the parent's
//! description and checks each change of it. It touches no page table, no processor and no TLB. Work that a change
//! requires there is returned as a value that must be used.
//!
//! * [`Parent`]: the children of one parent, its ports, and the answers that only depend on the host ([`Host`]).
//! * [`Partition`]: one child. Its life is `Created -> Initialized -> Finalized`, then it is deleted.
//! * [`Ledger`]: one word for each page of the parent: deposited, or the number of uses by children. No page is ever
//!   both.
//! * [`Deposits`]: the pages that the parent has deposited for the hypervisor's data about a child. The list of free
//!   pages is in the pages themselves, so it needs no memory.
//! * [`GpaMap`]: the child's guest physical address space: which page of the parent is at which address, and which
//!   memory is not accessible now. It consists of deposited pages.
//! * [`Written`]: a bit for each page that was written while the child's memory is tracked, where stage 2 has no leaf
//!   to record it.
//!
//! # When a page is free again
//!
//! A page that a child can no longer reach is not free yet: TLBs may still hold it. So the calls that change a map
//! return [`Released`], and the pages stay in use until they are [settled](Partition::settle), after the flush:
//!
//! ```text
//!   map or unmap --> Released --> change stage 2, flush all TLBs, wait --> settle --> the parent may use the page
//! ```
//!
//! # Whose memory is used
//!
//! Data that can grow without limit, the map, is in deposited pages. Data that is limited by a constant ([`limits`]) is
//! on the hypervisor's heap. The creation of a VP requires deposited pages. So a parent cannot exhaust the hypervisor;
//! it must deposit more ([`Status::InsufficientMemory`](hyperv_defs::Status)).

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod cpuid;
mod deposits;
mod gpa_map;
mod ledger;
mod parent;
mod partition;
mod port;
mod stats;
mod vp;
mod written;

pub use cpuid::{Cpuid, CpuidResults};
pub use deposits::{Deposits, Store, Use};
pub use gpa_map::{Entry, GpaMap, Leaf, Old, PAGE_LIMIT};
pub use ledger::{Ledger, PageUse};
pub use parent::{Host, Parent, Value};
pub use partition::{Change, Features, Partition, Progress, Released, State};
pub use port::Ports;
pub use stats::OwnStats;
pub use vp::Vp;
pub use written::{PAGES_OF_A_WORD, Written};

/// Numbers that a parent cannot exceed, however much it deposits.
pub mod limits {
    /// Children of a parent.
    pub const CHILDREN: usize = 1024;
    /// Parts of a child's memory, of 128 MiB each, with pages in them.
    pub const TRACKED_PARTS: usize = 32 * 1024;
    /// Results of CPUID that are registered for a VP.
    pub const CPUID_RESULTS: usize = 256;
    /// Ports of a parent.
    pub const PORTS: usize = 16 * 1024;
    /// Doorbells of a child.
    pub const DOORBELLS: usize = 4096;
}

#[cfg(test)]
mod tests;
