//! Intel's IOMMU (VT-d) as data: what firmware says about it, and what a driver writes and reads.
//!
//! The IOMMU translates the addresses that devices use. It finds everything in memory that a driver has set up:
//!
//! ```text
//!  device 00:04.0 writes to 0x1000
//!     │
//!     └─> root table ──> context table of bus 0 ──> entry 0x20: domain 3, root ──> tables ──> host address, or a fault
//!
//!  invalidation queue ──> IOMMU      "forget domain 3's page 0x1000"   (Descriptor)
//!                         IOMMU ──> fault recording registers   "00:04.0 was stopped"   (Fault)
//! ```
//!
//! | module | from the manual |
//! |---|---|
//! | [`dmar`] | firmware's table that lists the IOMMUs; hostile until checked |
//! | [`ContextEntry`], [`root_entry`] | what a device may do |
//! | [`InterruptEntry`] | which interrupt a device may raise |
//! | [`Descriptor`] | what the driver tells the IOMMU: above all, to forget cached translations |
//! | [`Fault`] | what the IOMMU reports |
//! | [`registers`] | offsets and bits of the registers |
//!
//! The crate touches no memory and no register; a driver does. The tables that translate are not here either: a VM's
//! stage-2 tables have their format (`dunlin-stage2`, `npt.rs`).
//!
//! Section numbers are those of Intel Virtualization Technology for Directed I/O, Architecture Specification,
//! document D51397, revision 4. Only its legacy mode is here: translation by requester, in one stage.

#![no_std]
#![forbid(unsafe_code)]

mod descriptor;
pub mod dmar;
mod fault;
mod interrupt_table;
pub mod registers;
mod tables;

pub use descriptor::{Descriptor, Pages};
pub use fault::Fault;
pub use interrupt_table::{InterruptEntry, interrupt_table};
pub use tables::{ContextEntry, root_entry};

#[cfg(test)]
extern crate std;
