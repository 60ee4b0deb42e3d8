//! Vectors of the interrupts.

/// The local APIC's timer.
pub(crate) const TIMER: u8 = 0x40;
/// Only wakes a CPU that sleeps.
pub(crate) const WAKE: u8 = 0x41;
/// A CPU wants others to flush translations.
pub(crate) const SHOOTDOWN: u8 = 0x42;
/// Only counted.
pub(crate) const COUNTED: u8 = 0x43;
/// First of those by which CPUs message each other in `mixed`: the sender's index modulo [`MAILBOXES`] is added.
pub(crate) const MAILBOX: u8 = 0x50;
/// How many there are from [`MAILBOX`] on.
pub(crate) const MAILBOXES: u8 = 16;
/// The last of them.
pub(crate) const LAST_MAILBOX: u8 = MAILBOX + MAILBOXES - 1;
/// What the APIC delivers when the reason for an interrupt has gone (APM vol. 2, 16.4.7).
pub(super) const SPURIOUS: u8 = 0xff;
