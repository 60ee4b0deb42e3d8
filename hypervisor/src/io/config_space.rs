//! PCI's configuration mechanism #1 as the owner uses it (PCI Local Bus 3.0, 3.2.2.3.2): an address register at port
//! 0xcf8, and a window to the addressed register at 0xcfc.
//!
//! Functions that the hypervisor uses itself are hidden: they read as empty slots. Each function has a page of its own
//! in the memory window (ECAM), so there [`Reach`](super::reach::Reach) hides them.

use alloc::vec::Vec;

use abi::payload::PciFunction;

/// The address register, and the hidden functions.
#[derive(Debug)]
pub struct ConfigPorts {
    address: u32,
    hidden: Vec<PciFunction>,
}

/// The meaning of an access to one of the eight ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The address register, which is kept here. A read gives this value.
    Address(u32),
    /// The window, while the machine's address register has this value.
    Window(u32),
    /// Nothing: a hidden function, or no register.
    Nothing,
    /// Not of this mechanism: a port of its own.
    Other,
}

/// The address register's port, the first of eight.
pub const ADDRESS_PORT: u16 = 0xcf8;
/// The first port of the window.
pub const WINDOW_PORT: u16 = 0xcfc;
/// The last of the eight.
pub const LAST_PORT: u16 = WINDOW_PORT + 3;

/// Address register: the window is open.
const ENABLE: u32 = 1 << 31;

/// The function that an address register with this value names.
const fn addressed(address: u32) -> PciFunction {
    let [_, low, bus, _] = address.to_le_bytes();
    PciFunction::at(u16::from_le_bytes([low, bus]))
}

impl ConfigPorts {
    /// The mechanism with these functions hidden.
    #[must_use]
    pub const fn new(hidden: Vec<PciFunction>) -> Self {
        Self { address: 0, hidden }
    }

    /// An access of `bytes` at `port`, one of the eight; `written` if it is a write.
    pub fn access(&mut self, port: u16, bytes: u8, written: Option<u32>) -> Meaning {
        match port {
            // The address register takes accesses of 32 bits only.
            ADDRESS_PORT if bytes == 4 => {
                self.address = written.unwrap_or(self.address);
                Meaning::Address(self.address)
            }
            WINDOW_PORT..=LAST_PORT if self.address & ENABLE == 0 => Meaning::Nothing,
            WINDOW_PORT..=LAST_PORT if self.hidden.contains(&addressed(self.address)) => Meaning::Nothing,
            WINDOW_PORT..=LAST_PORT => Meaning::Window(self.address),
            _ => Meaning::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use abi::payload::PciFunction;

    use super::{ConfigPorts, LAST_PORT, Meaning};

    const HIDDEN: PciFunction = PciFunction { bus: 2, device: 4, function: 1 };

    #[test]
    fn hidden_functions_are_empty_slots_and_others_are_the_machines() {
        let mut ports = ConfigPorts::new(vec![HIDDEN]);
        let address = |bus: u32, device: u32, function: u32| 1 << 31 | bus << 16 | device << 11 | function << 8;
        for (address, is_hidden) in
            [(address(2, 4, 1), true), (address(2, 4, 0), false), (address(0, 4, 1), false), (address(2, 5, 1), false)]
        {
            assert_eq!(ports.access(0xcf8, 4, Some(address | 0x10)), Meaning::Address(address | 0x10));
            for port in 0xcfc..=LAST_PORT {
                let expected = if is_hidden { Meaning::Nothing } else { Meaning::Window(address | 0x10) };
                assert_eq!(ports.access(port, 1, None), expected);
                assert_eq!(ports.access(port, 1, Some(7)), expected);
            }
        }
    }

    #[test]
    fn closed_window_is_empty_and_narrow_accesses_of_the_address_go_elsewhere() {
        let mut ports = ConfigPorts::new(Vec::new());
        assert_eq!(ports.access(0xcfc, 4, None), Meaning::Nothing);
        assert_eq!(ports.access(0xcf8, 4, Some(0x7fff_fffc)), Meaning::Address(0x7fff_fffc));
        assert_eq!(ports.access(0xcfe, 2, Some(0xffff)), Meaning::Nothing);
        // The reset register, and others that chipsets have there.
        for (port, bytes) in [(0xcf8, 1), (0xcf8, 2), (0xcf9, 1), (0xcfa, 2), (0xcfb, 1)] {
            assert_eq!(ports.access(port, bytes, Some(6)), Meaning::Other);
        }
        assert_eq!(ports.access(0xcf8, 4, None), Meaning::Address(0x7fff_fffc));
    }
}
