//! The PCI bus of a PC: its functions, and the two ways to their configuration spaces.
//!
//! | way | where | names a register by |
//! |---|---|---|
//! | configuration mechanism #1 | ports 0xcf8 (address) and 0xcfc (data) | bus, device, function and register in the address |
//! | ECAM | memory, announced by ACPI's MCFG | the same in the bits of the memory address |
//!
//! Both access the same bytes. A function is data, a [`ConfigSpace`]. There is one bus, number 0, with the host bridge
//! in slot 0. Functions of the machine that the VM was given follow it, one in each slot: the guest changes the bytes
//! here, and [`io::function`](crate::io::function) says what that means for the function. Where there is no function,
//! reads give ones and writes are dropped, like a real bridge without a device.
//!
//! Functions are accessed byte by byte. So an access of any width at any address has a result, and one that crosses
//! registers, or the end of either way, needs no special rule.

pub mod config_space;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;

use config_space::ConfigSpace;
use serde::{Deserialize, Serialize};
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
/// Slots of a bus.
const SLOTS: u16 = 32;

/// A bus, and the address register that belongs to its bridge.
#[derive(Debug)]
pub struct Pci {
    address: u32,
    functions: Vec<(Place, ConfigSpace)>,
}

/// What a file keeps of a bus without functions of the machine: the address register, and the bridge's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    address: u32,
    bridge: Vec<u8>,
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

/// Functions that a write has touched: eight bytes touch two at most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written([Option<usize>; 2]);

impl Written {
    fn add(&mut self, index: usize) {
        let place = self.0.iter_mut().find(|place| place.is_none_or(|other| other == index));
        if let Some(place) = place {
            *place = Some(index);
        }
    }

    /// Those behind the bridge, by their numbers among [them](Pci::with_functions).
    pub fn behind_bridge(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().flatten().filter_map(|index| index.checked_sub(1))
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

    /// The same, with these functions in the slots from 1 on. Those for which there is no slot are left out.
    pub fn with_functions(spaces: impl IntoIterator<Item = ConfigSpace>) -> Self {
        let mut pci = Self::new();
        let slots = (1..SLOTS).map(|slot| Place(slot << 3));
        pci.functions.extend(slots.zip(spaces));
        pci
    }

    /// The state of the bus and its bridge.
    #[must_use]
    pub fn state(&self) -> State {
        let bridge = (0..).take(config_space::BYTES);
        State { address: self.address, bridge: bridge.map(|at| self.functions[0].1.read(at)).collect() }
    }

    /// A bus with only its bridge, in this state. Bits that are not writable are ignored.
    #[must_use]
    pub fn with_state(state: &State) -> Self {
        let mut pci = Self::new();
        pci.address = state.address & ADDRESS_FIELDS;
        for (at, byte) in (0..).zip(&state.bridge).take(config_space::BYTES) {
            pci.functions[0].1.write(at, *byte);
        }
        pci
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

    /// A write of the low `bytes` bytes of `value`, as [`Self::read_port`]. Returns what was written to.
    pub fn write_port(&mut self, port: u16, bytes: u8, value: u32) -> Written {
        if port == PCI_ADDRESS_PORT && bytes == 4 {
            self.address = value & ADDRESS_FIELDS;
            return Written::default();
        }
        let registers = (port..).map(|port| self.data_register(port)).take(bytes.into());
        let registers: [Option<Register>; 4] = collect(registers);
        self.write_all(&registers, &value.to_le_bytes())
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

    /// A write of the low `bytes` bytes of `value` at `offset` in the ECAM, as [`Self::write_port`].
    pub fn write_memory(&mut self, offset: u64, bytes: u64, value: u64) -> Written {
        let registers = (0..bytes).map(|within| Register::from_offset(offset.wrapping_add(within)));
        let registers: [Option<Register>; 8] = collect(registers);
        self.write_all(&registers, &value.to_le_bytes())
    }

    /// Writes each byte. Only then the functions settle: what a register is taken for depends on all of its bytes.
    fn write_all(&mut self, registers: &[Option<Register>], bytes: &[u8]) -> Written {
        let mut touched = Written::default();
        for (register, byte) in registers.iter().zip(bytes) {
            let Some(register) = register else { continue };
            let found = self.functions.iter_mut().enumerate().find(|(_, (place, _))| *place == register.place);
            if let Some((index, (_, space))) = found {
                space.write(register.number, *byte);
                touched.add(index);
            }
        }
        for index in touched.0.into_iter().flatten() {
            self.functions[index].1.settle();
        }
        touched
    }

    /// The configuration space of a function behind the bridge, by its number among
    /// [those](Self::with_functions).
    pub fn space(&self, behind: usize) -> Option<&ConfigSpace> {
        self.functions.get(behind + 1).map(|(_, space)| space)
    }

    fn read(&self, register: Register) -> u8 {
        let function = self.functions.iter().find(|(place, _)| *place == register.place);
        function.map_or(EMPTY, |(_, space)| space.read(register.number))
    }
}

/// The first items, and `None` for those that are missing.
fn collect<const N: usize>(registers: impl Iterator<Item = Option<Register>>) -> [Option<Register>; N] {
    let mut all = [None; N];
    all.iter_mut().zip(registers).for_each(|(place, register)| *place = register);
    all
}
