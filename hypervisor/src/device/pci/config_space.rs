//! The configuration space of one function: the value of each byte, and its writable bits.
//!
//! Most registers of a header need nothing else. This also gives a base address register its size: the bits below the
//! size are not writable.

/// A conventional function's space. The registers above it, up to the 4096 of PCI Express, do not exist: they read
/// ones, which tells a kernel that there are none.
const BYTES: usize = 256;

/// Registers of the header, type 0 (PCI Local Bus Specification 3.0, 6.1).
mod register {
    pub(super) const VENDOR: usize = 0x00;
    pub(super) const DEVICE: usize = 0x02;
    pub(super) const COMMAND: usize = 0x04;
    pub(super) const CLASS: usize = 0x09;
    pub(super) const CACHE_LINE_SIZE: usize = 0x0c;
    pub(super) const INTERRUPT_LINE: usize = 0x3c;
}

/// A bridge model without registers of its own: QEMU's "generic PCIe host bridge", with a number from Red Hat's range.
/// We own no vendor number. The other bridges that kernels know are chipsets of Intel and AMD, where kernels look for
/// registers that do not exist here. For this model no driver and no workaround exists.
const VENDOR_RED_HAT: u16 = 0x1b36;
const DEVICE_GENERIC_HOST_BRIDGE: u16 = 0x0008;
/// Base class 6 (bridge), subclass 0 (host), as the bytes interface, subclass, base class.
const CLASS_HOST_BRIDGE: [u8; 3] = [0, 0, 6];
/// Command: I/O space, memory space, bus master, SERR, interrupt off. None has an effect on this bridge; software reads
/// back its writes.
const COMMAND_WRITABLE: u16 = 0x0507;

/// The configuration space of a function.
#[derive(Debug)]
pub(super) struct ConfigSpace {
    values: [u8; BYTES],
    /// Bits that a write changes.
    writable: [u8; BYTES],
}

impl ConfigSpace {
    /// A function whose bytes all read zero and are not writable.
    pub(super) const fn empty() -> Self {
        Self { values: [0; BYTES], writable: [0; BYTES] }
    }

    /// The bridge between the CPUs and the bus: it has no base address register, no interrupt and no capability.
    pub(super) fn host_bridge() -> Self {
        let mut space = Self::empty();
        space.define(register::VENDOR, VENDOR_RED_HAT.to_le_bytes(), [0; 2]);
        space.define(register::DEVICE, DEVICE_GENERIC_HOST_BRIDGE.to_le_bytes(), [0; 2]);
        space.define(register::COMMAND, [0; 2], COMMAND_WRITABLE.to_le_bytes());
        space.define(register::CLASS, CLASS_HOST_BRIDGE, [0; 3]);
        space.define(register::CACHE_LINE_SIZE, [0], [0xff]);
        space.define(register::INTERRUPT_LINE, [0], [0xff]);
        space
    }

    /// Sets the bytes from `at` on, and their writable bits. Bytes after the end are dropped.
    pub(super) fn define<const N: usize>(&mut self, at: usize, values: [u8; N], writable: [u8; N]) {
        let bytes = self.values.iter_mut().zip(&mut self.writable).skip(at);
        for ((value, mask), (new_value, new_mask)) in bytes.zip(values.into_iter().zip(writable)) {
            (*value, *mask) = (new_value, new_mask);
        }
    }

    pub(super) fn read(&self, register: u16) -> u8 {
        self.values.get(usize::from(register)).copied().unwrap_or(super::EMPTY)
    }

    pub(super) fn write(&mut self, register: u16, written: u8) {
        let register = usize::from(register);
        if let (Some(value), Some(mask)) = (self.values.get_mut(register), self.writable.get(register)) {
            *value = *value & !mask | written & mask;
        }
    }
}
