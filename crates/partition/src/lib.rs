//! What a parent VM has told about its children: the state behind the calls of [`hyperv_defs::Request`].
//!
//! A *parent* is a VM that creates other VMs, its *children*, out of its own memory. This crate keeps what it has said,
//! and answers what it may say next. It touches no page table, no processor and no TLB: what has to happen there, it
//! returns, as a value that must be used.
//!
//! * [`Parent`]: the children of one parent, its ports, and the answers that only depend on the host ([`Host`]).
//! * [`Partition`]: one child. Its life is `Created -> Initialized -> Finalized`, then it is deleted.
//! * [`Ledger`]: one word for each page of the parent: deposited, or how often in use by children. No page is ever
//!   both.
//! * [`Deposits`]: the pages that the parent has given for what the hypervisor keeps for a child. The list of free ones
//!   is threaded through the pages themselves, so it needs no memory.
//! * [`GpaMap`]: the child's guest physical address space: which page of the parent is where, and where memory is that
//!   is not there now. It consists of deposited pages.
//!
//! # What takes a page away
//!
//! A page that a child cannot reach any more is not free yet: TLBs may still have it. So the calls that change a map
//! return [`Released`], and the pages stay in use until that is [settled](Partition::settle), after the flush:
//!
//! ```text
//!   map or unmap --> Released --> change stage 2, flush all TLBs, wait --> settle --> the parent may use the page
//! ```
//!
//! # What pays for what
//!
//! What can grow without limit, the map, is in deposited pages. What is limited by a constant ([`limits`]) is on the
//! hypervisor's heap. A VP must be paid for with pages when it is created. So a parent cannot exhaust the hypervisor;
//! it is told to deposit more ([`Status::InsufficientMemory`](hyperv_defs::Status)).

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod deposits;
mod gpa_map;
mod ledger;
mod parent;
mod partition;
mod port;
mod vp;

pub use deposits::{Deposits, Store, Use};
pub use gpa_map::{Entry, GpaMap, Leaf, Old, PAGE_LIMIT};
pub use ledger::{Ledger, PageUse};
pub use parent::{Host, Parent, Value};
pub use partition::{Change, Partition, Progress, Released, State};
pub use port::Ports;
pub use vp::{Cpuid, Vp};

/// Numbers that a parent cannot exceed, however much it deposits.
pub mod limits {
    /// Children of a parent.
    pub const CHILDREN: usize = 1024;
    /// Results of CPUID that are registered for a VP.
    pub const CPUID_RESULTS: usize = 256;
    /// Ports of a parent.
    pub const PORTS: usize = 16 * 1024;
    /// Doorbells of a child.
    pub const DOORBELLS: usize = 4096;
}

#[cfg(test)]
mod tests;
