//! Event rings: how a vCPU of a parent VM learns of doorbells, without a message for each.
//!
//! The *event ring page* (SIRBP) has a ring for each SINT, with room for 63 numbers of ports; 0 is a free place. The
//! hypervisor writes at its head, the parent reads and clears at its own tail:
//!
//! ```text
//!   hypervisor                             parent
//!     ring[head] == 0 ?                      port = ring[tail]
//!       no:  full = 1                          0 and full:  full = 0, tell the hypervisor, look again
//!            look at ring[head] again          still 0:     masked = 0, barrier, look again
//!     ring[head] = port, head += 1             still 0:     done
//!     barrier                                (a port came late: masked = 1)
//!     masked ? else signal                   ring[tail] = 0, tail += 1
//! ```
//!
//! As with messages, the second look at a full ring keeps an event from being stuck: the parent may have emptied the
//! ring before it could see the flag, and then tells nobody. An event that finds no place waits at its sender.

use core::num::NonZeroU32;

use hyperv_defs::page::EVENTS;

use crate::message::Absent;
use crate::registers::SINTS;

/// The event ring page of a vCPU, a page of guest memory.
///
/// All processors agree on the order of these accesses (sequential consistency), and none is torn.
pub trait RingPage {
    /// Reads a place of a ring.
    ///
    /// # Errors
    /// When the page is not there.
    fn port(&self, sint: usize, place: usize) -> Result<u32, Absent>;

    /// Writes a place of a ring.
    ///
    /// # Errors
    /// When the page is not there.
    fn set_port(&self, sint: usize, place: usize, port: u32) -> Result<(), Absent>;

    /// Sets the flag that there was no room.
    ///
    /// # Errors
    /// When the page is not there.
    fn set_full(&self, sint: usize) -> Result<(), Absent>;

    /// Whether the parent does not want to be told, because it looks anyway.
    ///
    /// # Errors
    /// When the page is not there.
    fn is_masked(&self, sint: usize) -> Result<bool, Absent>;
}

/// The result of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Rung {
    /// It is in the ring, and the parent must be told.
    Signal,
    /// It is in the ring, and the parent looks there anyway.
    Masked,
    /// There is no room. The parent tells when it has emptied the ring (HvCallNotifyPortRingEmpty).
    Full,
}

/// The heads of a vCPU's rings with `PLACES` places each.
#[derive(Clone, Debug)]
pub struct Rings<const PLACES: usize> {
    heads: [usize; SINTS],
}

/// Rings as parents have them.
pub type EventRings = Rings<EVENTS>;

impl<const PLACES: usize> Default for Rings<PLACES> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const PLACES: usize> Rings<PLACES> {
    /// All heads at the first place: as after a reset, and whenever the parent enables its page.
    #[must_use]
    pub const fn new() -> Self {
        Self { heads: [0; SINTS] }
    }

    /// Appends an event to the ring of `sint`.
    ///
    /// # Errors
    /// When the page is not there, or the SINT.
    pub fn ring(&mut self, page: &impl RingPage, sint: usize, port: NonZeroU32) -> Result<Rung, Absent> {
        let head = self.heads.get_mut(sint).ok_or(Absent)?;
        if page.port(sint, *head)? != 0 {
            page.set_full(sint)?;
            // The parent may have emptied the ring before it could see the flag. Then it does not tell.
            if page.port(sint, *head)? != 0 {
                return Ok(Rung::Full);
            }
        }
        page.set_port(sint, *head, port.get())?;
        *head = (*head + 1) % PLACES;
        // The event is there. A page that has gone since needs no signal, but one too many harms nobody.
        Ok(if page.is_masked(sint) == Ok(true) { Rung::Masked } else { Rung::Signal })
    }
}
