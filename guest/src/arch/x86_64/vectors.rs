//! Vectors of the interrupts.

/// The local APIC's timer.
pub(crate) const TIMER: u8 = 0x40;
/// Only wakes a CPU that sleeps.
pub(crate) const WAKE: u8 = 0x41;
/// A CPU wants others to flush translations.
pub(crate) const SHOOTDOWN: u8 = 0x42;
/// Only counted.
pub(crate) const COUNTED: u8 = 0x43;
/// First vector of the messages between CPUs in `mixed`. The vector is this plus the sender's index modulo
/// [`MAILBOXES`].
pub(crate) const MAILBOX: u8 = 0x50;
/// Number of such vectors from [`MAILBOX`] on.
pub(crate) const MAILBOXES: u8 = 16;
/// The last of them.
pub(crate) const LAST_MAILBOX: u8 = MAILBOX + MAILBOXES - 1;
/// What the APIC delivers for an interrupt that is no longer pending (APM vol. 2, 16.4.7).
pub(super) const SPURIOUS: u8 = 0xff;
