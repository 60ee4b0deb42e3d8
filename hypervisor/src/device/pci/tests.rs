//! Both ways compared, and hostile accesses.

use super::config_space::ConfigSpace;
use super::{ADDRESS_ENABLE, Pci, Place, State};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
/// Bytes of ECAM for one bus.
const BUS: u64 = 1 << 20;

/// A register of a function by configuration mechanism #1.
fn address(bus: u32, device: u32, function: u32, register: u32) -> u32 {
    ADDRESS_ENABLE | bus << 16 | device << 11 | function << 8 | register
}

/// `bytes` at `register` of function 0 of device 0, by the ports, with the address register as software writes it.
fn by_ports(pci: &mut Pci, address: u32, bytes: u8) -> u32 {
    pci.write_port(ADDRESS, 4, address & !3);
    pci.read_port(DATA + (address & 3) as u16, bytes)
}

/// The low `bytes` bytes.
fn low(value: u64, bytes: u64) -> u64 {
    if bytes == 8 { value } else { value & ((1 << (bytes * 8)) - 1) }
}

/// A bus with a second function that has two base address registers: 1 MiB of 64-bit prefetchable memory, 32 ports.
fn with_device() -> Pci {
    let mut pci = Pci::new();
    let mut device = ConfigSpace::empty();
    device.define(0x00, 0x1234_5678_u32.to_le_bytes(), [0; 4]);
    device.define(0x10, 0xc_u64.to_le_bytes(), (!0xf_ffff_u64).to_le_bytes());
    device.define(0x18, 1_u32.to_le_bytes(), 0xffe0_u32.to_le_bytes());
    pci.functions.push((Place(3 << 3 | 5), device));
    pci
}

#[test]
fn function_zero_is_a_host_bridge() {
    let mut pci = Pci::new();
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0), 4), 0x0008_1b36);
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 8), 4), 0x0600_0000);
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0xa), 2), 0x0600 | 0xffff << 16);
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0xe), 1) & 0xff, 0, "header type 0, one function");
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0x34), 1) & 0xff, 0, "no capabilities");
    assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0x3d), 1) & 0xff, 0, "no interrupt pin");
}

#[test]
fn all_other_places_read_ones_by_both_doors() {
    let mut pci = Pci::new();
    for bus in 0..=255 {
        for place in 0..=255_u32 {
            if bus == 0 && place == 0 {
                continue;
            }
            assert_eq!(by_ports(&mut pci, ADDRESS_ENABLE | bus << 16 | place << 8, 4), u32::MAX, "{bus} {place:#x}");
            let offset = u64::from(bus) << 20 | u64::from(place) << 12;
            assert_eq!(pci.read_memory(offset, 8), u64::MAX, "{bus} {place:#x}");
        }
    }
}

#[test]
fn both_doors_give_the_same_bytes_at_every_width_and_alignment() {
    let mut pci = with_device();
    for place in [0, 3 << 3 | 5, 1 << 3] {
        for register in 0..0x100_u32 {
            for bytes in [1_u8, 2, 4] {
                // An access beyond the register's four bytes leaves the data ports; the ECAM continues.
                let inside = (4 - (register & 3)).min(u32::from(bytes));
                let ports = by_ports(&mut pci, ADDRESS_ENABLE | place << 8 | register, bytes);
                let memory = pci.read_memory(u64::from(place << 12 | register), bytes.into());
                assert_eq!(
                    low(ports.into(), inside.into()),
                    low(memory, inside.into()),
                    "{bytes} bytes at {register:#x} of {place:#x}"
                );
                let behind = u64::from(ports) | low(u64::MAX, inside.into());
                assert_eq!(behind, u32::MAX.into(), "what lies behind is empty");
            }
        }
    }
}

#[test]
fn what_one_door_writes_the_other_reads() {
    let mut pci = Pci::new();
    for (value, door) in [(0x5a_u32, true), (0xa5, false)] {
        if door {
            pci.write_port(ADDRESS, 4, address(0, 0, 0, 0x3c));
            pci.write_port(DATA, 1, value);
        } else {
            pci.write_memory(0x3c, 1, value.into());
        }
        assert_eq!(pci.read_memory(0x3c, 1) & 0xff, value.into());
        assert_eq!(by_ports(&mut pci, address(0, 0, 0, 0x3c), 1) & 0xff, value);
    }
}

#[test]
fn address_register_takes_whole_writes_alone_and_keeps_no_reserved_bits() {
    let mut pci = Pci::new();
    pci.write_port(ADDRESS, 4, u32::MAX);
    assert_eq!(pci.read_port(ADDRESS, 4), 0x80ff_fffc);
    // Linux does this to detect configuration mechanism #2.
    pci.write_port(ADDRESS + 3, 1, 1);
    assert_eq!(pci.read_port(ADDRESS, 4), 0x80ff_fffc);
    for (port, bytes) in [(ADDRESS, 1), (ADDRESS, 2), (ADDRESS + 2, 1), (ADDRESS + 2, 2), (ADDRESS + 3, 1)] {
        pci.write_port(port, bytes, 0);
        assert_eq!(pci.read_port(ADDRESS, 4), 0x80ff_fffc, "{bytes} bytes at {port:#x}");
        assert_eq!(pci.read_port(port, bytes), u32::MAX, "{bytes} bytes at {port:#x}");
    }
}

#[test]
fn data_ports_are_empty_while_the_address_is_not_enabled() {
    let mut pci = Pci::new();
    pci.write_port(ADDRESS, 4, 0x3c);
    assert_eq!(pci.read_port(DATA, 4), u32::MAX);
    pci.write_port(DATA, 4, 0x77);
    assert_eq!(pci.read_memory(0x3c, 1) & 0xff, 0);
}

#[test]
fn accesses_that_only_touch_the_data_ports_have_their_part_of_them() {
    let mut pci = Pci::new();
    pci.write_port(ADDRESS, 4, address(0, 0, 0, 0));
    assert_eq!(pci.read_port(ADDRESS + 2, 4), 0x1b36_ffff);
    assert_eq!(pci.read_port(ADDRESS + 3, 2), 0xffff_36ff);
    assert_eq!(pci.read_port(DATA + 2, 4), 0xffff_0008);
    assert_eq!(pci.read_port(DATA + 3, 4), 0xffff_ff00);
}

#[test]
fn read_only_registers_stay_whatever_is_written_to_them() {
    let mut pci = Pci::new();
    let all = |pci: &Pci| -> Vec<u64> { (0..256).map(|register| pci.read_memory(register, 1) & 0xff).collect() };
    let before = all(&pci);
    for register in 0..256 {
        pci.write_memory(register, 8, u64::MAX);
        pci.write_port(ADDRESS, 4, u32::try_from(register).expect("small") & !3 | ADDRESS_ENABLE);
        pci.write_port(DATA, 4, u32::MAX);
    }
    let changed: Vec<_> = before.iter().zip(all(&pci)).enumerate().filter(|(_, (old, new))| **old != *new).collect();
    let expected = [(4, (&0, 0x07)), (5, (&0, 0x05)), (0xc, (&0, 0xff)), (0x3c, (&0, 0xff))];
    assert_eq!(changed, expected);
}

#[test]
fn bridge_has_no_base_address_registers_to_be_sized() {
    let mut pci = Pci::new();
    for bar in (0x10..0x28).step_by(4).chain([0x30]) {
        pci.write_memory(bar, 4, u32::MAX.into());
        assert_eq!(pci.read_memory(bar, 4) & 0xffff_ffff, 0, "{bar:#x}");
    }
}

#[test]
fn base_address_registers_of_a_device_are_sized_by_writing_ones() {
    let mut pci = with_device();
    let at = u64::from(3_u32 << 3 | 5) << 12;
    pci.write_memory(at + 0x10, 8, u64::MAX);
    assert_eq!(pci.read_memory(at + 0x10, 8), 0xffff_ffff_fff0_000c);
    pci.write_memory(at + 0x18, 4, u32::MAX.into());
    assert_eq!(pci.read_memory(at + 0x18, 4) & 0xffff_ffff, 0xffe1);
    pci.write_memory(at + 0x10, 8, 0xc012_3456);
    assert_eq!(pci.read_memory(at + 0x10, 8), 0xc010_000c);
    assert_eq!(pci.read_memory(at, 4) & 0xffff_ffff, 0x1234_5678);
}

#[test]
fn registers_beyond_a_conventional_function_read_ones() {
    let mut pci = Pci::new();
    pci.write_memory(0x100, 4, 0);
    assert_eq!(pci.read_memory(0x100, 4), u64::MAX);
    assert_eq!(pci.read_memory(0xfc, 8), 0xffff_ffff_0000_0000, "four bytes of each");
    assert_eq!(pci.read_memory(0xfff, 2), u64::MAX, "the end of one function and the beginning of the next");
}

#[test]
fn offsets_beyond_the_ecam_are_an_empty_bus() {
    let mut pci = Pci::new();
    for offset in [BUS - 1, BUS, 255 * BUS, 256 * BUS - 1, 256 * BUS, u64::from(u32::MAX), u64::MAX - 7, u64::MAX] {
        for bytes in [1, 2, 4, 8] {
            pci.write_memory(offset, bytes, 0);
            assert_eq!(low(pci.read_memory(offset, bytes), 1), 0xff, "{bytes} bytes at {offset:#x}");
        }
    }
    // The last offset wraps: the first one follows.
    assert_eq!(pci.read_memory(0, 4) & 0xffff_ffff, 0x0008_1b36);
}

#[test]
fn restored_bus_reads_as_the_saved_one() {
    let mut rng = fastrand::Rng::with_seed(6);
    for _ in 0..200 {
        let mut saved = Pci::new();
        for _ in 0..rng.u32(..20) {
            saved.write_memory(rng.u64(..0x100), 1 << rng.u32(..4), rng.u64(..));
            saved.write_port(0xcf8, 4, rng.u32(..) & 0xff | ADDRESS_ENABLE);
        }
        let restored = Pci::with_state(&saved.state());
        assert_eq!(restored.state(), saved.state());
        assert_eq!(
            [0xcf8, 0xcfc].map(|port| restored.read_port(port, 4)),
            [0xcf8, 0xcfc].map(|port| saved.read_port(port, 4))
        );
    }
    let odd = Pci::with_state(&State { address: u32::MAX, bridge: alloc::vec![0xff; 10_000] });
    assert_eq!(odd.read_memory(0, 4), Pci::new().read_memory(0, 4), "the numbers of the bridge are not writable");
}
