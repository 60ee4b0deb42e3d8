//! The registers of the SynIC. Each vCPU has one set.

use hyperv_defs::msr;

use crate::message::{Absent, Delivery, Message, MessagePage, deliver};
use crate::posted::Posted;

/// Synthetic interrupt sources of a vCPU.
pub const SINTS: usize = 16;

/// The only version there is (TLFS, HV_X64_MSR_SVERSION).
const VERSION: u64 = 1;
const ENABLE: u64 = 1 << 0;
const PAGE: u64 = !0xfff;

/// The register does not exist, cannot be accessed this way, or not with this value: the guest gets #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// A synthetic interrupt source (HV_SYNIC_SINT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sint(pub u64);

impl Sint {
    const MASKED: u64 = 1 << 16;
    const AUTO_EOI: u64 = 1 << 17;
    const POLLING: u64 = 1 << 18;
    const AS_INTERCEPT: u64 = 1 << 19;
    /// Vectors below belong to exceptions.
    const FIRST_VECTOR: u8 = 16;

    /// As after a reset: masked, vector 0.
    pub const RESET: Self = Self(Self::MASKED);

    /// The vector that it raises.
    #[must_use]
    pub const fn vector(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// Whether it raises nothing.
    #[must_use]
    pub const fn is_masked(self) -> bool {
        self.0 & Self::MASKED != 0
    }

    /// Auto-EOI: the interrupt ends at its delivery, without an EOI of the guest.
    #[must_use]
    pub const fn is_auto_eoi(self) -> bool {
        self.0 & Self::AUTO_EOI != 0
    }

    /// Whether the guest polls for messages.
    #[must_use]
    pub const fn is_polled(self) -> bool {
        self.0 & Self::POLLING != 0
    }

    /// Whether its event ring tells of new entries by a message in slot 0, and not by its own interrupt.
    #[must_use]
    pub const fn is_as_intercept(self) -> bool {
        self.0 & Self::AS_INTERCEPT != 0
    }

    /// The interrupt for a new message, if any.
    #[must_use]
    pub const fn interrupt(self) -> Option<Interrupt> {
        if self.is_masked() || self.is_polled() {
            return None;
        }
        Some(Interrupt { vector: self.vector(), auto_eoi: self.is_auto_eoi() })
    }
}

/// An edge for the vCPU's local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// Its vector, 16 or above.
    pub vector: u8,
    /// The local APIC does not wait for an EOI.
    pub auto_eoi: bool,
}

/// Where messages for a SINT wait until their slot is free.
pub trait Outbox {
    /// The message that is next for this SINT, and whether another waits behind it.
    fn front(&self, sint: usize) -> Option<(Message, bool)>;

    /// The message that is next has been delivered.
    fn delivered(&mut self, sint: usize);
}

/// The SynIC of one vCPU.
#[derive(Clone, Debug)]
pub struct Synic {
    control: u64,
    /// Message page, event flags page, event ring page: bit 0 enables, bits 63:12 are the page's GPA.
    message_page: u64,
    flags_page: u64,
    ring_page: u64,
    sints: [Sint; SINTS],
}

impl Default for Synic {
    fn default() -> Self {
        Self::new()
    }
}

impl Synic {
    /// As after a reset: off, all sources masked.
    #[must_use]
    pub const fn new() -> Self {
        Self { control: 0, message_page: 0, flags_page: 0, ring_page: 0, sints: [Sint::RESET; SINTS] }
    }

    /// As after a reset, with pages that the hypervisor has chosen. Linux as a parent reads their addresses, and sets
    /// nothing but the enable bits.
    #[must_use]
    pub const fn with_pages(message_page: u64, flags_page: u64) -> Self {
        Self { message_page: message_page & PAGE, flags_page: flags_page & PAGE, ..Self::new() }
    }

    /// Reads a register.
    ///
    /// # Errors
    /// `number` is not a register of the SynIC, or is write-only.
    pub fn read(&self, number: u32) -> Result<u64, Refused> {
        Ok(match number {
            msr::SCONTROL => self.control,
            msr::SVERSION => VERSION,
            msr::SIEFP => self.flags_page,
            msr::SIMP => self.message_page,
            msr::SIRBP => self.ring_page,
            // Reads as zero: the guest only ever writes there.
            msr::EOM => 0,
            msr::SINT0..=msr::SINT15 => self.sints[sint_of(number)].0,
            _ => return Err(Refused),
        })
    }

    /// Writes a register. The write may free a slot, so [pump](Self::pump) waiting messages afterwards.
    ///
    /// # Errors
    /// `number` is not a register of the SynIC, or is read-only, or the value is not allowed.
    pub fn write(&mut self, number: u32, value: u64) -> Result<(), Refused> {
        match number {
            msr::SCONTROL => self.control = value,
            msr::SIEFP => self.flags_page = value,
            msr::SIMP => self.message_page = value,
            msr::SIRBP => self.ring_page = value,
            msr::EOM => {}
            msr::SINT0..=msr::SINT15 => {
                let sint = Sint(value);
                // A masked source may have any vector; after reset it is 0.
                if sint.vector() < Sint::FIRST_VECTOR && !sint.is_masked() {
                    return Err(Refused);
                }
                self.sints[sint_of(number)] = sint;
            }
            _ => return Err(Refused),
        }
        Ok(())
    }

    /// GPA of the message page, if messages can be delivered.
    #[must_use]
    pub fn message_page(&self) -> Option<u64> {
        self.enabled_page(self.message_page)
    }

    /// GPA of the event flags page, if events can be signalled.
    #[must_use]
    pub fn flags_page(&self) -> Option<u64> {
        self.enabled_page(self.flags_page)
    }

    /// GPA of the event ring page, if doorbells can be rung.
    #[must_use]
    pub fn ring_page(&self) -> Option<u64> {
        self.enabled_page(self.ring_page)
    }

    /// What a new entry in the event ring of `sint` asks for.
    #[must_use]
    pub fn notice(&self, sint: usize) -> Option<Notice> {
        let source = self.sint(sint)?;
        if source.is_as_intercept() { Some(Notice::Message) } else { source.interrupt().map(Notice::Interrupt) }
    }

    fn enabled_page(&self, register: u64) -> Option<u64> {
        (self.control & ENABLE != 0 && register & ENABLE != 0).then_some(register & PAGE)
    }

    /// A source. There are [`SINTS`].
    #[must_use]
    pub fn sint(&self, number: usize) -> Option<Sint> {
        self.sints.get(number).copied()
    }

    /// Delivers the message of one of the `senders` to `sint`, if its slot is free. The caller sends the returned
    /// interrupt to the vCPU's local APIC. `message_of` a sender that is gone is `None`.
    ///
    /// The sender is taken before its message is written: see [`Posted`]. If the slot is occupied, or the guest has no
    /// memory there, the sender waits on.
    pub fn pump_posted<const WORDS: usize>(
        &self,
        sint: usize,
        page: &impl MessagePage,
        senders: &Posted<WORDS>,
        mut message_of: impl FnMut(usize) -> Option<Message>,
    ) -> Option<Interrupt> {
        let source = self.sint(sint)?;
        loop {
            let sender = senders.take()?;
            let Some(message) = message_of(sender) else { continue };
            match deliver(page, sint, &message, senders.has_some()) {
                Ok(Delivery::Done) => return source.interrupt(),
                Ok(Delivery::Occupied) | Err(Absent) => {
                    senders.post(sender);
                    return None;
                }
            }
        }
    }

    /// Delivers the next message for `sint`, if there is one and its slot is free. The caller sends the returned
    /// interrupt to the vCPU's local APIC.
    ///
    /// # Errors
    /// The guest has no memory at the message page. The message stays in the outbox until it has.
    pub fn pump(&self, sint: usize, page: &impl MessagePage, outbox: &mut impl Outbox) -> Result<Pumped, Absent> {
        let (Some(source), Some((message, more))) = (self.sint(sint), outbox.front(sint)) else {
            return Ok(Pumped::Nothing);
        };
        Ok(match deliver(page, sint, &message, more)? {
            Delivery::Done => {
                outbox.delivered(sint);
                Pumped::Message(source.interrupt())
            }
            Delivery::Occupied => Pumped::Nothing,
        })
    }
}

/// The result of [`Synic::pump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pumped {
    /// No message waited, or its slot is occupied.
    Nothing,
    /// A message is in its slot. This interrupt tells the guest, if any does.
    Message(Option<Interrupt>),
}

/// How a vCPU is told of new entries in an event ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// By [`Message::sint_intercept`], in slot 0.
    Message,
    /// By this interrupt.
    Interrupt(Interrupt),
}

fn sint_of(number: u32) -> usize {
    (number - msr::SINT0) as usize
}
