//! SPIs of the machine's devices that are forwarded to a guest.
//!
//! The machine's own controller delivers such an interrupt to the hypervisor, which acknowledges it and leaves it
//! active: it does not come again, whatever its line does. It is pending for the guest then. The list register that
//! takes it names the physical interrupt (`ICH_LR<n>_EL2.HW`, IHI 0069 12.4.6), so the guest's end of the one is the
//! end of the other, without an exit; if the line is still asserted, it comes again.
//!
//! If the guest's interrupt ends in another way (the guest clears it, or the hypervisor drops it), an [`Order`] ends
//! the machine's. One end too many does no harm: the interrupt comes again if its line is asserted, and two that came
//! are one for the guest.
//!
//! An active interrupt can be pending again only if the guest makes it so. A list register must not have both with a
//! physical interrupt, so it has none then, and the end is an exit and an order.
//!
//! An interrupt that the guest disables is disabled in the machine. If it is level-triggered, what came before is
//! dropped: its line tells whether it comes again.

use super::private::assign;
use super::{WORDS, bits, join};

/// What the machine's interrupt controller has to do for the guest, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The guest has configured an interrupt.
    Configure {
        /// Its number, here and there.
        intid: u32,
        /// It may come.
        enabled: bool,
        /// It is edge-triggered.
        edge: bool,
        /// The vCPU that will get it, if there is one.
        vcpu: Option<u32>,
    },
    /// The guest has configured an interrupt that is a message.
    Route {
        /// Its number.
        intid: u32,
        /// The vCPU that will get it, if there is one.
        vcpu: Option<u32>,
    },
    /// An active interrupt ends.
    Deactivate {
        /// Its number.
        intid: u32,
    },
}

/// Which SPIs are forwarded, and which of them need orders: a bit each.
#[derive(Debug)]
pub(super) struct Forwarded {
    spis: [u32; WORDS],
    /// Those that are messages of the machine's devices: they have no state there.
    messages: [u32; WORDS],
    changed: [u32; WORDS],
    ended: [u32; WORDS],
    /// Of those in list registers: the guest's end is the machine's.
    linked: [u32; WORDS],
    has_orders: bool,
}

impl Forwarded {
    /// None are.
    pub(super) const fn none() -> Self {
        const NONE: [u32; WORDS] = [0; WORDS];
        Self { spis: NONE, messages: NONE, changed: NONE, ended: NONE, linked: NONE, has_orders: false }
    }

    /// These are from now on.
    pub(super) fn add(&mut self, word: usize, spis: u32) {
        self.spis[word] |= spis;
    }

    /// These are messages from now on.
    pub(super) fn add_messages(&mut self, word: usize, spis: u32) {
        self.messages[word] |= spis;
    }

    /// Whether one is a message.
    pub(super) const fn is_message(&self, word: usize, spi: u32) -> bool {
        self.messages[word] & spi != 0
    }

    /// Which of a word's are.
    pub(super) const fn of(&self, word: usize) -> u32 {
        self.spis[word]
    }

    /// One goes into a list register, with the physical interrupt's number or without.
    pub(super) fn set_linked(&mut self, word: usize, spi: u32, linked: bool) {
        assign(&mut self.linked[word], spi, linked);
    }

    /// Whether one in a list register has the physical interrupt's number there.
    pub(super) const fn is_linked(&self, word: usize, spi: u32) -> bool {
        self.linked[word] & spi != 0
    }

    /// The guest has configured some.
    pub(super) fn configured(&mut self, word: usize, spis: u32) {
        let told = spis & (self.spis[word] | self.messages[word]);
        self.changed[word] |= told;
        self.has_orders |= told != 0;
    }

    /// Some are neither pending nor active for the guest any more, and the machine does not know.
    pub(super) fn ended(&mut self, word: usize, spis: u32) {
        self.ended[word] |= spis & self.spis[word];
        self.has_orders |= spis & self.spis[word] != 0;
    }

    /// The next interrupt that was configured.
    pub(super) fn next_configured(&mut self) -> Option<u32> {
        if self.has_orders { take_first(&mut self.changed) } else { None }
    }

    /// The next interrupt that has ended; asked when none was configured.
    pub(super) fn next_ended(&mut self) -> Option<u32> {
        if !self.has_orders {
            return None;
        }
        let next = take_first(&mut self.ended);
        self.has_orders = next.is_some();
        next
    }
}

fn take_first(set: &mut [u32; WORDS]) -> Option<u32> {
    let (word, first) = set.iter().enumerate().find_map(|(word, set)| Some((word, bits(*set).next()?)))?;
    set[word] &= !(1 << first);
    Some(join(word, first))
}
