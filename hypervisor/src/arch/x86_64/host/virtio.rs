//! Finds virtio devices on this architecture: on PCI bus 0 (PCI Express 7.2.2).

#![expect(unsafe_code, reason = "registers in memory")]

use core::ptr::NonNull;

use abi::payload::PciFunction;
use addr::{Hpa, HpaRange};
use alloc::vec::Vec;
use spin::Once;
use virtio_drivers::transport::DeviceType;
use virtio_drivers::transport::pci::bus::{BarInfo, Command, ConfigurationAccess, DeviceFunction, PciRoot};
use virtio_drivers::transport::pci::{PciTransport, virtio_device_type};

use super::paging::map_mmio;
use super::{acpi, boot, iommu};
use crate::arch::control_port::HostMemory;

/// What the hypervisor itself uses of PCI.
#[derive(Debug)]
pub(in crate::arch::x86_64) struct Used {
    /// The function.
    pub(in crate::arch::x86_64) function: PciFunction,
    /// Its registers.
    pub(in crate::arch::x86_64) registers: Vec<HpaRange>,
}

static USED: Once<Used> = Once::new();

/// The console, if it was found.
pub(in crate::arch::x86_64) fn used() -> Option<&'static Used> {
    USED.get()
}

/// How a virtio console is reached.
pub(crate) type ConsoleTransport = PciTransport;

/// Finds the first virtio console on PCI bus 0, and its address.
///
/// Only one pCPU may run at the time of the call: sizing a device's registers moves them through the address space for
/// a moment, which matters to an emulator ([`quirks`](super::quirks)).
pub(crate) fn find_console() -> Option<(ConsoleTransport, impl core::fmt::Display)> {
    let mut root = PciRoot::new(Bus0::find()?);
    let mut functions = root.enumerate_bus(0);
    let (console, _) = functions.find(|(_, info)| virtio_device_type(info) == Some(DeviceType::Console))?;
    let bars = root.bars(console).unwrap_or_default();
    let registers = bars.iter().flatten().filter_map(|bar| match bar {
        BarInfo::Memory { address, size, .. } => HpaRange::new(Hpa(*address), *size),
        BarInfo::IO { .. } => None,
    });
    let registers: Vec<HpaRange> = registers.collect();
    let is_ram = |range: &&HpaRange| boot::handover().is_none_or(|handover| handover.memory.touches_ram(range));
    if let Some(range) = registers.iter().find(is_ram) {
        log::warn!("the virtio console at {console} is not used: it has its memory at {}, where RAM is", range.start);
        return None;
    }
    let function = PciFunction { bus: console.bus, device: console.device, function: console.function };
    USED.call_once(|| Used { function, registers });
    iommu::trust(function.into());
    root.set_command(console, Command::MEMORY_SPACE | Command::BUS_MASTER | Command::INTERRUPT_DISABLE);
    let transport = PciTransport::new::<HostMemory, _>(&mut root, console)
        .inspect_err(|error| log::warn!("the virtio console at {console} is not used: {error}"))
        .ok()?;
    Some((transport, console))
}

/// Configuration space of PCI bus 0 in memory (PCI Express 7.2.2).
pub(super) struct Bus0(NonNull<u32>);

impl Bus0 {
    /// 32 devices of 8 functions, 4 KiB each.
    const BYTES: u64 = 1 << 20;

    /// By the window that firmware names for it.
    pub(super) fn find() -> Option<Self> {
        let window = acpi::machine()?.ecam.iter().find(|window| window.first_bus == 0)?;
        NonNull::new(map_mmio(window.base, Self::BYTES).0 as *mut u32).map(Self)
    }

    fn register(&self, function: DeviceFunction, offset: u8) -> Option<*mut u32> {
        let at = usize::from(function.device) << 15 | usize::from(function.function) << 12 | usize::from(offset & !3);
        (function.bus == 0 && function.valid()).then(|| self.0.as_ptr().wrapping_byte_add(at))
    }
}

impl ConfigurationAccess for Bus0 {
    fn read_word(&self, function: DeviceFunction, offset: u8) -> u32 {
        // Missing devices read as ones. SAFETY: `register` stays within the megabyte that `new` has mapped.
        self.register(function, offset).map_or(u32::MAX, |register| unsafe { register.read_volatile() })
    }

    fn write_word(&mut self, function: DeviceFunction, offset: u8, data: u32) {
        if let Some(register) = self.register(function, offset) {
            // SAFETY: as above.
            unsafe { register.write_volatile(data) };
        }
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self(self.0)
    }
}
