//! The synthetic interrupt controller (SynIC) of the Hyper-V interface, and the synthetic timers that use it.
//!
//! Each vCPU has 16 *synthetic interrupt sources* (SINTs). A SINT has a vector in the vCPU's local APIC and a *slot* in
//! the vCPU's *message page* (SIMP), a page of guest memory. The hypervisor writes a message into the slot, then raises
//! the vector. The guest reads the message and frees the slot:
//!
//! ```text
//!   hypervisor                          guest
//!     slot.type == 0 ?                    read the message
//!       yes: write it, raise vector       slot.type = 0
//!       no:  slot.pending = 1             barrier
//!            look at slot.type again      slot.pending ? then write EOM
//!
//!   EOM (end of message): the hypervisor tries again
//! ```
//!
//! The second look prevents a stuck message. The guest may free the slot after the hypervisor's first look and before
//! the hypervisor sets the flag. Then the guest reads the flag too early, and writes no EOM. The second look finds the
//! free slot.
//!
//! A message for an occupied slot waits in its sender's [`Outbox`], so no message is lost. A slot that the guest never
//! frees blocks no other SINT.
//!
//! A parent VM's vCPU gets messages from many senders, its children. They wait in a set that any pCPU adds to
//! ([`Posted`]). Doorbells of children do not need a message each: they go into an event ring ([`Rings`]).
//!
//! The pCPU that runs the vCPU owns all else. Only the pages are shared: other vCPUs of the guest, and its devices, may
//! write to them at any moment. So the pages are behind traits ([`MessagePage`], [`RingPage`]), each access may fail,
//! and the code trusts nothing that it reads there except "free or not".
//!
//! Sources: TLFS 11 (inter-partition communication), 12.5 and 12.6 (synthetic timers), chapter numbers of version 6.0b.

#![no_std]
#![forbid(unsafe_code)]

mod message;
mod posted;
mod registers;
mod ring;
mod sync;
mod timer;

pub use message::{Absent, Delivery, MESSAGE_BYTES, Message, MessagePage, PAYLOAD_BYTES, deliver};
pub use posted::{Posted, Senders};
pub use registers::{Interrupt, Notice, Outbox, Pumped, Refused, SINTS, Sint, Synic};
pub use ring::{EventRings, RingPage, Rings, Rung};
pub use timer::{Expiry, TIMERS, TimerConfig, Timers};

#[cfg(all(test, not(loom)))]
mod tests;
