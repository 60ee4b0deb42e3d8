//! The guest's machine: the addresses of its devices. As on QEMU's `virt`, or, for the VM that has the machine's
//! devices, as on the machine.

use abi::control::Line;
use addr::Gpa;

pub(super) use crate::device::gic::{DISTRIBUTOR_SIZE as DISTRIBUTOR_BYTES, REDISTRIBUTOR_SIZE as REDISTRIBUTOR_BYTES};
pub(super) use crate::device::pl011::MMIO_SIZE as SERIAL_BYTES;

/// Where the emulated devices are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// The interrupt controller's distributor.
    pub(super) distributor: Gpa,
    /// The redistributors, one after the other.
    pub(super) redistributors: Gpa,
    /// The serial ports: first register and number among the shared interrupts.
    pub(super) serial: [(Gpa, u32); 2],
}

/// Of a VM without the machine's devices.
pub(super) const VIRTUAL: Layout = Layout {
    distributor: Gpa(0x0800_0000),
    redistributors: Gpa(0x1000_0000),
    serial: [(Gpa(0x0900_0000), 1), (Gpa(0x0901_0000), 2)],
};

/// As many as the payload's format allows.
pub(super) const MAX_VCPUS: u32 = abi::payload::MAX_VCPUS;

/// RAM of such a VM, from here on in one piece.
pub(super) const RAM: Gpa = Gpa(0x4000_0000);

const _: () = assert!(VIRTUAL.redistributors.0 + MAX_VCPUS as u64 * REDISTRIBUTOR_BYTES <= RAM.0);

/// Private interrupt numbers of the timers: secure, physical, virtual, EL2's.
pub(super) const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];

impl Layout {
    /// The serial port that has a line's bytes.
    pub(super) fn serial(&self, line: Line) -> (Gpa, u32) {
        self.serial[crate::vm::line_index(line)]
    }
}
