//! The PCI bus of a PC: its functions, and the two ways to their configuration spaces.
//!
//! | way | where | names a register by |
//! |---|---|---|
//! | configuration mechanism #1 | ports 0xcf8 (address) and 0xcfc (data) | bus, device, function and register in the address |
//! | ECAM | memory, announced by ACPI's MCFG | the same in the bits of the memory address |
//!
//! Both access the same bytes. A function is data, a `ConfigSpace`. There is one bus, number 0, with only the host
//! bridge. Where there is no function, reads give ones and writes are dropped, like a real bridge without a device.
//!
//! Functions are accessed byte by byte. So an access of any width at any address has a result, and one that crosses
//! registers, or the end of either way, needs no special rule.

mod config_space;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;

use config_space::ConfigSpace;
use x86_boot::layout::{PCI_ADDRESS_PORT, PCI_DATA_PORT};

/// The last port of configuration mechanism #1.
pub const LAST_PORT: u16 = PCI_DATA_PORT + 3;

/// Writable bits of the address register. The other bits are reserved, or the two lowest of a register number, and read
/// zero (PCI Local Bus Specification 3.0, 3.2.2.3.2).
const ADDRESS_FIELDS: u32 = ADDRESS_ENABLE | 0x00ff_fffc;
/// Address register: accesses to the data ports are for a configuration space.
const ADDRESS_ENABLE: u32 = 1 << 31;

/// A read from an empty bus.
const EMPTY: u8 = 0xff;

/// A bus, and the address register that belongs to its bridge.
#[derive(Debug)]
pub struct Pci {
    address: u32,
    functions: Vec<(Place, ConfigSpace)>,
}

/// Where a function is: bus, device (5 bits) and function (3 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(u16);

/// A byte of a configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Register {
    place: Place,
    number: u16,
}

impl Register {
    /// The register that the data ports lead to.
    fn from_address(address: u32) -> Self {
        let [number, device_and_function, bus, _] = address.to_le_bytes();
        Self { place: Place(u16::from_be_bytes([bus, device_and_function])), number: number.into() }
    }

    /// The register at `offset` in the ECAM (PCI Express Base Specification 5.0, 7.2.2). `None` after the last bus.
    fn from_offset(offset: u64) -> Option<Self> {
        let place = u16::try_from(offset >> 12).ok()?;
        let number = u16::try_from(offset & 0xfff).ok()?;
        Some(Self { place: Place(place), number })
    }
}

impl Default for Pci {
    fn default() -> Self {
        Self::new()
    }
}

impl Pci {
    /// A bus with its bridge at device 0, function 0, where software looks for it.
    pub fn new() -> Self {
        Self { address: 0, functions: Vec::from([(Place(0), ConfigSpace::host_bridge())]) }
    }

    /// A read of `bytes` bytes at `port`, from [`PCI_ADDRESS_PORT`] to [`LAST_PORT`]. Upper bits are ones.
    ///
    /// The address register answers only accesses to all of it. Others go to the bus behind the bridge, where nothing
    /// has these ports. An access that begins before the data ports, or ends after them, accesses its part of them: a
    /// CPU splits a misaligned access in two.
    pub fn read_port(&self, port: u16, bytes: u8) -> u32 {
        if port == PCI_ADDRESS_PORT && bytes == 4 {
            return self.address;
        }
        let mut value = [EMPTY; 4];
        for (byte, port) in value.iter_mut().zip(port..).take(bytes.into()) {
            if let Some(register) = self.data_register(port) {
                *byte = self.read(register);
            }
        }
        u32::from_le_bytes(value)
    }

    /// A write of the low `bytes` bytes of `value`, as [`Self::read_port`].
    pub fn write_port(&mut self, port: u16, bytes: u8, value: u32) {
        if port == PCI_ADDRESS_PORT && bytes == 4 {
            self.address = value & ADDRESS_FIELDS;
            return;
        }
        for (byte, port) in value.to_le_bytes().into_iter().zip(port..).take(bytes.into()) {
            if let Some(register) = self.data_register(port) {
                self.write(register, byte);
            }
        }
    }

    /// The byte of a configuration space that `port` is now, if it is one.
    fn data_register(&self, port: u16) -> Option<Register> {
        let within = port.checked_sub(PCI_DATA_PORT).filter(|within| *within < 4)?;
        if self.address & ADDRESS_ENABLE == 0 {
            return None;
        }
        Some(Register::from_address(self.address & !ADDRESS_ENABLE | u32::from(within)))
    }

    /// A read of `bytes` bytes at `offset` in the ECAM. Bits above are ones.
    pub fn read_memory(&self, offset: u64, bytes: u64) -> u64 {
        let mut value = [EMPTY; 8];
        for (byte, within) in value.iter_mut().zip(0..bytes) {
            if let Some(register) = Register::from_offset(offset.wrapping_add(within)) {
                *byte = self.read(register);
            }
        }
        u64::from_le_bytes(value)
    }

    /// A write of the low `bytes` bytes of `value` at `offset` in the ECAM.
    pub fn write_memory(&mut self, offset: u64, bytes: u64, value: u64) {
        for (byte, within) in value.to_le_bytes().into_iter().zip(0..bytes) {
            if let Some(register) = Register::from_offset(offset.wrapping_add(within)) {
                self.write(register, byte);
            }
        }
    }

    fn read(&self, register: Register) -> u8 {
        let function = self.functions.iter().find(|(place, _)| *place == register.place);
        function.map_or(EMPTY, |(_, space)| space.read(register.number))
    }

    fn write(&mut self, register: Register, value: u8) {
        let function = self.functions.iter_mut().find(|(place, _)| *place == register.place);
        if let Some((_, space)) = function {
            space.write(register.number, value);
        }
    }
}
