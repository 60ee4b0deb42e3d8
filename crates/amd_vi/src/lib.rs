//! AMD's IOMMU (AMD-Vi) as data: what firmware says about it, and what a driver writes and reads.
//!
//! The IOMMU translates the addresses that devices use. It finds everything in memory that a driver has set up:
//!
//! ```text
//!  device 00:04.0 writes to 0x1000
//!     │
//!     └─> device table ──> entry 0x0020: domain 3, root ──> I/O page tables ──> host address, or an event
//!
//!  command buffer ──> IOMMU          "forget domain 3's page 0x1000"   (Command)
//!                     IOMMU ──> event log   "00:04.0 was stopped"      (Event)
//! ```
//!
//! | module | from the manual |
//! |---|---|
//! | [`ivrs`] | firmware's table that lists the IOMMUs and their devices; hostile until checked |
//! | [`DeviceTableEntry`] | what a device may do |
//! | [`InterruptEntry`] | which interrupt a device may raise |
//! | [`Command`] | what the driver tells the IOMMU: above all, to forget cached translations |
//! | [`Event`] | what the IOMMU reports |
//! | [`Ring`] | heads and tails of both buffers |
//! | [`registers`] | offsets and bits of the registers |
//!
//! The crate touches no memory and no register; a driver does. I/O page tables are not here either: an NPT whose
//! entries also carry the bits that only the IOMMU reads is one (`dunlin-stage2`, `npt.rs`).
//!
//! Section numbers are those of AMD's I/O Virtualization Technology Specification, publication 48882, revision 3.

#![no_std]
#![forbid(unsafe_code)]

mod command;
mod device_id;
mod device_table;
mod event;
mod interrupt_table;
pub mod ivrs;
pub mod registers;
mod ring;

pub use command::{Command, Pages};
pub use device_id::DeviceId;
pub use device_table::{DeviceTableEntry, Interrupts};
pub use event::{Event, Kind};
pub use interrupt_table::InterruptEntry;
pub use ring::Ring;

#[cfg(test)]
extern crate std;
