//! The configuration space of one function: the value of each byte, and its writable bits.
//!
//! Most registers of a header need nothing else. This also gives a base address register its size: the bits below the
//! size are not writable. Such a register of a function that the VM was given has one address, its *home*. A guest asks
//! for the size by writing ones; any other value takes the register home. So it cannot move a function's memory.

/// A conventional function's space. The registers above it, up to the 4096 of PCI Express, do not exist: they read
/// ones, which tells a kernel that there are none.
pub const BYTES: usize = 256;

/// Registers of the header, type 0 (PCI Local Bus Specification 3.0, 6.1).
pub mod register {
    /// Vendor.
    pub const VENDOR: usize = 0x00;
    /// Device, by the vendor's numbers.
    pub const DEVICE: usize = 0x02;
    /// Command.
    pub const COMMAND: usize = 0x04;
    /// Status.
    pub const STATUS: usize = 0x06;
    /// Revision. The class code follows it.
    pub const REVISION: usize = 0x08;
    /// Class code: interface, subclass, base class.
    pub const CLASS: usize = 0x09;
    /// Length of a cache line.
    pub const CACHE_LINE_SIZE: usize = 0x0c;
    /// Kind of header.
    pub const HEADER_TYPE: usize = 0x0e;
    /// The first of six base address registers.
    pub const BARS: usize = 0x10;
    /// Vendor and device of the board.
    pub const SUBSYSTEM: usize = 0x2c;
    /// The first capability.
    pub const CAPABILITIES: usize = 0x34;
    /// The interrupt controller's input, for software.
    pub const INTERRUPT_LINE: usize = 0x3c;
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
pub struct ConfigSpace {
    values: [u8; BYTES],
    /// Bits that a write changes.
    writable: [u8; BYTES],
    bars: [Option<Bar>; 6],
}

/// A base address register.
#[derive(Clone, Copy, Debug)]
struct Bar {
    /// Its value, flags included.
    home: u32,
    /// Its writable bits.
    mask: u32,
}

impl ConfigSpace {
    /// A function whose bytes all read zero and are not writable.
    pub const fn empty() -> Self {
        Self { values: [0; BYTES], writable: [0; BYTES], bars: [None; 6] }
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
    pub fn define<const N: usize>(&mut self, at: usize, values: [u8; N], writable: [u8; N]) {
        let bytes = self.values.iter_mut().zip(&mut self.writable).skip(at);
        for ((value, mask), (new_value, new_mask)) in bytes.zip(values.into_iter().zip(writable)) {
            (*value, *mask) = (new_value, new_mask);
        }
    }

    /// Makes base address register `index`, below 6, one whose address bits are `mask`. `home` is its value.
    pub fn define_bar(&mut self, index: usize, home: u32, mask: u32) {
        if let Some(bar) = self.bars.get_mut(index) {
            *bar = Some(Bar { home, mask });
            self.define(register::BARS + 4 * index, home.to_le_bytes(), mask.to_le_bytes());
        }
    }

    /// A write is complete: base address registers that were not asked for their size go home.
    pub(super) fn settle(&mut self) {
        for (index, bar) in self.bars.into_iter().enumerate() {
            let Some(Bar { home, mask }) = bar else { continue };
            let at = register::BARS + 4 * index;
            if self.dword(at) & mask != mask {
                self.define(at, home.to_le_bytes(), mask.to_le_bytes());
            }
        }
    }

    /// The byte at `at`; ones behind the last.
    fn byte(&self, at: usize) -> u8 {
        self.values.get(at).copied().unwrap_or(super::EMPTY)
    }

    /// The two bytes from `at` on.
    #[must_use]
    pub fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.byte(at), self.byte(at + 1)])
    }

    /// The four bytes from `at` on.
    #[must_use]
    pub fn dword(&self, at: usize) -> u32 {
        u32::from(self.word(at + 2)) << 16 | u32::from(self.word(at))
    }

    pub(super) fn read(&self, register: u16) -> u8 {
        self.byte(usize::from(register))
    }

    pub(super) fn write(&mut self, register: u16, written: u8) {
        let register = usize::from(register);
        if let (Some(value), Some(mask)) = (self.values.get_mut(register), self.writable.get(register)) {
            *value = *value & !mask | written & mask;
        }
    }
}
