//! INTIDs of the interrupts (GIC, 2.2.1): CPUs send those below 16 to each other.

/// The virtual timer.
pub(crate) const TIMER: u8 = 27;
/// The physical timer of EL1.
pub(crate) const PHYSICAL_TIMER: u8 = 30;
/// Only wakes a CPU that sleeps.
pub(crate) const WAKE: u8 = 0;
/// A CPU wants others to flush translations.
pub(crate) const SHOOTDOWN: u8 = 1;
/// Only counted.
pub(crate) const COUNTED: u8 = 2;
/// Counted by the shortest possible handler, for measuring.
pub(crate) const MEASURED: u8 = 3;
/// First INTID of the messages between CPUs in `mixed`. The INTID is this plus the sender's index modulo [`MAILBOXES`].
pub(crate) const MAILBOX: u8 = 8;
/// Number of such INTIDs from [`MAILBOX`] on.
pub(crate) const MAILBOXES: u8 = 8;
/// The last of them.
pub(crate) const LAST_MAILBOX: u8 = MAILBOX + MAILBOXES - 1;
