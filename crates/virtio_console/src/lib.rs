//! The device side of a virtio console with one port, which carries bytes between a program in a guest and its host.
//!
//! Unmodified guests have the driver. Linux shows the port as a file (`/dev/vport0p1`) that one process at a time can
//! open. The device tells the host when that happens, and when the process closes the file or dies.
//!
//! ```text
//!   guest                                 Console                                  host
//!     writes a register of the page   ->   write: a state machine of the transport
//!     notifies queue 3                ->   control messages: ready, open, close
//!     notifies queue 5                ->   "look at the port"                  ->   receive: from the guest's buffers
//!     reads buffers of queue 4        <-   used buffers, interrupt             <-   transmit: into the guest's buffers
//! ```
//!
//! The device has no buffers. Bytes that the host does not take stay in the guest's buffers, and its process waits.
//! Bytes for which the guest has no buffer stay with the host.
//!
//! The rings are guest memory, which the guest may change at any moment. So each value is read once and checked before
//! it is used. A call does a limited amount of work, whatever is in the rings: it uses at most as many chains as a
//! queue has descriptors ([`QUEUE_SIZE`]), and a chain has no more descriptors than that. A driver that violates the
//! protocol gets DEVICE_NEEDS_RESET, and the device leaves its memory alone until the reset.
//!
//! Section numbers are those of Virtio 1.2.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "driver"))]
extern crate alloc;

mod console;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod memory;
mod queue;
mod transport;

pub use console::{Console, NAME, Session};
pub use memory::{Absent, GuestMemory};
pub use queue::QUEUE_SIZE;

#[cfg(test)]
mod tests;
