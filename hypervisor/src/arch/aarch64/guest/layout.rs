//! The guest's machine: the addresses of its devices, as on QEMU's `virt`.

use abi::control::Line;
use addr::Gpa;

pub(super) use crate::device::gic::{DISTRIBUTOR_SIZE as DISTRIBUTOR_BYTES, REDISTRIBUTOR_SIZE as REDISTRIBUTOR_BYTES};
pub(super) use crate::device::pl011::MMIO_SIZE as SERIAL_BYTES;

/// The interrupt controller's distributor.
pub(super) const DISTRIBUTOR: Gpa = Gpa(0x0800_0000);

/// The serial ports: first register and number among the shared interrupts.
pub(super) const SERIAL: [(Gpa, u32); 2] = [(Gpa(0x0900_0000), 1), (Gpa(0x0901_0000), 2)];

/// The redistributors, one after the other.
pub(super) const REDISTRIBUTORS: Gpa = Gpa(0x1000_0000);
/// As many as the payload's format allows.
pub(super) const MAX_VCPUS: u32 = abi::payload::MAX_VCPUS;

/// RAM, from here on in one piece.
pub(super) const RAM: Gpa = Gpa(0x4000_0000);

const _: () = assert!(REDISTRIBUTORS.0 + MAX_VCPUS as u64 * REDISTRIBUTOR_BYTES <= RAM.0);

/// Private interrupt numbers of the timers: secure, physical, virtual, EL2's.
pub(super) const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];

/// The serial port that has a line's bytes.
pub(super) fn serial(line: Line) -> (Gpa, u32) {
    SERIAL[crate::vm::line_index(line)]
}
