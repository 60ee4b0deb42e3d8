//! Events: those that an entry delivers, and those whose delivery an exit has interrupted (SDM vol. 3C, tables 25-14,
//! 25-17 and 25-18).

use crate::registers::vector;
use crate::vmcb::{EventKind, VmcbEvent};

const VALID: u32 = 1 << 31;
const HAS_CODE: u32 = 1 << 11;
const INTERRUPT: u32 = 0;
const NMI: u32 = 2;
const EXCEPTION: u32 = 3;
const SOFTWARE_INTERRUPT: u32 = 4;
const PRIVILEGED_SOFTWARE_EXCEPTION: u32 = 5;
const SOFTWARE_EXCEPTION: u32 = 6;

/// Information about an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Information(pub u32);

impl Information {
    /// The event to deliver. An error code has a field of its own.
    #[must_use]
    pub const fn to_deliver(event: VmcbEvent) -> Self {
        let is_own_instruction = matches!(event.vector(), vector::BREAKPOINT | vector::OVERFLOW);
        let kind = match event.kind() {
            EventKind::Interrupt | EventKind::Reserved => INTERRUPT,
            EventKind::Nmi => NMI,
            // INT3 and INTO.
            EventKind::Exception | EventKind::SoftwareInterrupt if is_own_instruction => SOFTWARE_EXCEPTION,
            EventKind::Exception => EXCEPTION,
            EventKind::SoftwareInterrupt => SOFTWARE_INTERRUPT,
        };
        let code = if event.error_code().is_some() { HAS_CODE } else { 0 };
        Self(VALID | code | kind << 8 | event.vector() as u32)
    }

    /// Whether there is an event.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.0 & VALID != 0
    }

    /// The vector.
    #[must_use]
    pub const fn vector(self) -> u8 {
        (self.0 & 0xff) as u8
    }

    /// Whether an instruction raised it: INT n, INT1, INT3 or INTO. Its return address is behind that instruction, and
    /// an entry that delivers it needs the instruction's length (28.2.4).
    #[must_use]
    pub const fn is_by_instruction(self) -> bool {
        matches!(self.0 >> 8 & 7, SOFTWARE_INTERRUPT | PRIVILEGED_SOFTWARE_EXCEPTION | SOFTWARE_EXCEPTION)
    }

    /// Whether it is a #DB by a trap or a fault.
    #[must_use]
    pub const fn is_debug(self) -> bool {
        self.0 >> 8 & 7 == EXCEPTION && self.vector() == vector::DEBUG
    }

    /// The event whose delivery was interrupted, with its error `code` if it has one.
    #[must_use]
    pub const fn interrupted(self, code: u32) -> VmcbEvent {
        let vector = self.vector();
        if !self.is_valid() {
            return VmcbEvent::NONE;
        }
        match self.0 >> 8 & 7 {
            INTERRUPT => VmcbEvent::interrupt(vector),
            NMI => VmcbEvent::nmi(),
            EXCEPTION if self.0 & HAS_CODE != 0 => VmcbEvent::exception_with_code(vector, code),
            EXCEPTION | PRIVILEGED_SOFTWARE_EXCEPTION => VmcbEvent::exception(vector),
            SOFTWARE_INTERRUPT | SOFTWARE_EXCEPTION => VmcbEvent::software_interrupt(vector),
            _ => VmcbEvent::NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Information;
    use crate::vmcb::VmcbEvent;

    #[test]
    fn each_kind_of_event_is_spelled_as_the_manual_says() {
        for (event, information) in [
            (VmcbEvent::interrupt(0x41), 0x8000_0041),
            (VmcbEvent::nmi(), 0x8000_0202),
            (VmcbEvent::exception(6), 0x8000_0306),
            (VmcbEvent::exception_with_code(14, 5), 0x8000_0b0e),
            (VmcbEvent::software_interrupt(0x80), 0x8000_0480),
            (VmcbEvent::software_interrupt(3), 0x8000_0603),
            (VmcbEvent::software_interrupt(4), 0x8000_0604),
            (VmcbEvent::exception(3), 0x8000_0603),
        ] {
            assert_eq!(Information::to_deliver(event).0, information);
        }
    }

    #[test]
    fn event_that_was_interrupted_can_be_delivered_again() {
        for event in [
            VmcbEvent::interrupt(0xef),
            VmcbEvent::nmi(),
            VmcbEvent::exception(1),
            VmcbEvent::exception_with_code(13, 0x58),
            VmcbEvent::software_interrupt(0x2e),
            VmcbEvent::software_interrupt(3),
        ] {
            assert_eq!(Information::to_deliver(event).interrupted(event.error_code().unwrap_or(0)), event);
        }
        assert_eq!(Information(0x0000_0b0e).interrupted(7), VmcbEvent::NONE, "not valid");
        assert_eq!(Information(0x8000_0701).interrupted(0), VmcbEvent::NONE, "a kind that events do not have");
    }

    #[test]
    fn int1_comes_again_as_the_exception_that_it_raises() {
        let information = Information(0x8000_0501);
        assert!(information.is_by_instruction() && !information.is_debug());
        assert_eq!(information.interrupted(0), VmcbEvent::exception(1));
        assert!(Information(0x8000_0301).is_debug());
    }
}
