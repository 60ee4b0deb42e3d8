//! The serial port that the firmware uses as its console: ACPI's Serial Port Console Redirection table (SPCR).
//!
//! On a server this is the port that the management controller shows (serial over LAN), often not COM1. Only UARTs like
//! a 16550 are supported. Offsets are from Microsoft's description of the table, revision 4.

use addr::Hpa;

use super::console::{Place, Uart};

const SIGNATURE: &[u8; 4] = b"SPCR";
/// Where the table's fields begin, in bytes from its start.
mod at {
    pub(super) const LENGTH: usize = 4;
    pub(super) const INTERFACE_TYPE: usize = 36;
    /// A generic address structure (ACPI 6.5, 5.2.3.2): address space, register width in bits, bit offset, access size,
    /// address.
    pub(super) const BASE_ADDRESS: usize = 40;
    pub(super) const REGISTER_BITS: usize = BASE_ADDRESS + 1;
    pub(super) const ACCESS_SIZE: usize = BASE_ADDRESS + 3;
    pub(super) const ADDRESS: usize = BASE_ADDRESS + 4;
}
/// The shortest table that has all fields of revision 1.
const SHORTEST: usize = 80;

/// Interface types: a 16550 with all of its registers, one with those of a 16450, and one whose registers the address
/// describes.
const INTERFACE_16550: u8 = 0x00;
const INTERFACE_16450: u8 = 0x01;
const INTERFACE_16550_BY_ADDRESS: u8 = 0x12;

const SPACE_MEMORY: u8 = 0;
const SPACE_PORTS: u8 = 1;

/// No registers are beyond this address (16 TiB).
const END: u64 = 1 << 44;

/// Content of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spcr {
    /// This UART is firmware's console.
    Uart(Uart),
    /// Firmware has no serial console.
    None,
    /// Firmware's console is a device of another kind, of this interface type.
    Other(u8),
    /// The table is damaged, or its address makes no sense.
    Damaged,
}

/// Parses the `bytes` of a table, from its header on. Ignores bytes after the length in the header.
pub fn read(bytes: &[u8]) -> Spcr {
    try_read(bytes).unwrap_or(Spcr::Damaged)
}

fn try_read(bytes: &[u8]) -> Option<Spcr> {
    let length = u32::from_le_bytes(field(bytes, at::LENGTH)?);
    let table = bytes.get(..usize::try_from(length).ok()?).filter(|table| table.len() >= SHORTEST)?;
    let sum = table.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    if !table.starts_with(SIGNATURE) || sum != 0 {
        return None;
    }

    let [interface_type] = field(table, at::INTERFACE_TYPE)?;
    let address = u64::from_le_bytes(field(table, at::ADDRESS)?);
    if address == 0 {
        return Some(Spcr::None);
    }
    if ![INTERFACE_16550, INTERFACE_16450, INTERFACE_16550_BY_ADDRESS].contains(&interface_type) {
        return Some(Spcr::Other(interface_type));
    }
    let [space, register_bits] = [field::<1>(table, at::BASE_ADDRESS)?[0], field::<1>(table, at::REGISTER_BITS)?[0]];
    let place = match space {
        SPACE_PORTS => Place::ports(u16::try_from(address).ok()?)?,
        SPACE_MEMORY => {
            let [access_size] = field(table, at::ACCESS_SIZE)?;
            memory(address, register_bits, access_size)?
        }
        _ => return None,
    };
    Some(Spcr::Uart(Uart::of_firmware(place)))
}

/// Registers in memory. Their distance is their width. The table gives the width of an access; by default it is that of
/// a register.
fn memory(address: u64, register_bits: u8, access_size: u8) -> Option<Place> {
    // Access sizes: 0 is unspecified, 1 is a byte, 2 two, 3 four. Firmware omits either field.
    let access_bytes = match access_size {
        0 => None,
        1..=3 => Some(1 << (access_size - 1)),
        _ => return None,
    };
    let register_bytes = match register_bits {
        0 => access_bytes.unwrap_or(1),
        8 | 16 | 32 => register_bits / 8,
        _ => return None,
    };
    let access_bytes = access_bytes.unwrap_or(register_bytes);
    let distance = register_bytes.max(access_bytes);
    (address < END && address.is_multiple_of(access_bytes.into())).then_some(Place::Memory {
        start: Hpa(address),
        distance,
        access_bytes,
    })
}

fn field<const BYTES: usize>(table: &[u8], at: usize) -> Option<[u8; BYTES]> {
    table.get(at..at + BYTES)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::{END, Spcr, at, read};
    use crate::boot::console::{Place, Uart};
    use addr::Hpa;

    /// A table with this interface type and base address: address space, register bits, access size, address.
    fn table(interface_type: u8, (space, bits, access_size, address): (u8, u8, u8, u64)) -> Vec<u8> {
        let mut bytes = vec![0; 80];
        bytes[..4].copy_from_slice(b"SPCR");
        bytes[at::LENGTH] = 80;
        bytes[at::INTERFACE_TYPE] = interface_type;
        bytes[at::BASE_ADDRESS..][..4].copy_from_slice(&[space, bits, 0, access_size]);
        bytes[at::ADDRESS..][..8].copy_from_slice(&address.to_le_bytes());
        seal(&mut bytes);
        bytes
    }

    /// Makes the checksum right.
    fn seal(bytes: &mut [u8]) {
        bytes[9] = 0;
        bytes[9] = bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_sub(byte));
    }

    fn of_firmware(place: Place) -> Spcr {
        Spcr::Uart(Uart::of_firmware(place))
    }

    #[test]
    fn uart_at_ports_and_in_memory_is_found() {
        for interface_type in [0, 1, 0x12] {
            for (port, registers) in [(0x2f8, (1, 8, 1, 0x2f8)), (0x3f8, (1, 8, 0, 0x3f8)), (0xfff8, (1, 0, 0, 0xfff8))]
            {
                assert_eq!(read(&table(interface_type, registers)), of_firmware(Place::Ports(port)));
            }
            for (registers, distance, access_bytes) in [
                ((0, 8, 1, 0xfedc_9000), 1, 1),
                ((0, 32, 3, 0xfedc_9000), 4, 4),
                // A byte of each register of four.
                ((0, 32, 1, 0xfedc_9000), 4, 1),
                // One of the two is omitted, or the access is wider than the register.
                ((0, 32, 0, 0xfedc_9000), 4, 4),
                ((0, 0, 3, 0xfedc_9000), 4, 4),
                ((0, 0, 0, 0xfedc_9001), 1, 1),
                ((0, 8, 3, 0xfedc_9000), 4, 4),
                ((0, 16, 2, END - 0x100), 2, 2),
            ] {
                let start = Hpa(registers.3);
                let place = Place::Memory { start, distance, access_bytes };
                assert_eq!(read(&table(interface_type, registers)), of_firmware(place), "{registers:x?}");
            }
        }
    }

    #[test]
    fn no_console_and_one_of_another_kind_are_told_apart() {
        assert_eq!(read(&table(0, (1, 8, 1, 0))), Spcr::None);
        // A PL011, and firmware's console on it is off.
        assert_eq!(read(&table(3, (0, 32, 3, 0x900_0000))), Spcr::Other(3));
        assert_eq!(read(&table(3, (0, 32, 3, 0))), Spcr::None);
    }

    #[test]
    fn addresses_that_make_no_sense_are_not_believed() {
        for registers in [
            (1, 8, 1, 0xfff9),
            (1, 8, 1, 0x1_0000),
            (1, 8, 1, 0x1_0000_03f8),
            (0, 32, 3, 0xfedc_9002),
            (0, 64, 4, 0xfedc_9000),
            (0, 32, 9, 0xfedc_9000),
            (0, 7, 0, 0xfedc_9000),
            (0, 8, 1, END),
            (0, 8, 1, u64::MAX),
            // PCI configuration space, and functional fixed hardware.
            (2, 8, 1, 0x10),
            (0x7f, 8, 1, 0x10),
        ] {
            assert_eq!(read(&table(0, registers)), Spcr::Damaged, "{registers:x?}");
        }
    }

    #[test]
    fn any_damage_is_noticed_and_longer_tables_are_read() {
        let good = table(0, (1, 8, 1, 0x2f8));
        for length in 0..good.len() {
            assert_eq!(read(&good[..length]), Spcr::Damaged, "{length} bytes");
        }
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            assert_eq!(read(&bytes), Spcr::Damaged, "byte {at}");
        }
        // Too short, though the sum is right.
        let mut short = good[..79].to_vec();
        short[at::LENGTH] = 79;
        seal(&mut short);
        assert_eq!(read(&short), Spcr::Damaged);
        // Revision 4 has a name at the end; and bytes after the table do not belong to it.
        let mut long = good.clone();
        long.extend(b"\x01\x02\x03\x04\\_SB.COM2\0");
        long[at::LENGTH] = long.len().try_into().expect("is short");
        seal(&mut long);
        long.extend([0xff; 7]);
        assert_eq!(read(&long), of_firmware(Place::Ports(0x2f8)));
    }
}
