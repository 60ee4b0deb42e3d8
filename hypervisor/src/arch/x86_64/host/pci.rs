//! The PCI functions of the machine, and their configuration spaces in memory (PCI Express 7.2.2).
//!
//! [`init`] lists them before the other pCPUs start, because it asks for the sizes of BARs: for a moment a function's
//! memory is off, and an emulator minds ([`quirks`](super::quirks)). Later, VMs are given functions of this list.
//!
//! Firmware's table of windows (MCFG) may lie ([`mcfg`](crate::boot::mcfg)). A function that is not there reads as
//! ones, whatever else is at its place.

#![expect(unsafe_code, reason = "registers in memory")]

use alloc::vec::Vec;

use abi::payload::PciFunction;
use addr::{Hpa, HpaRange, PAGE_BYTES};
use spin::Once;

use super::acpi;
use super::paging::map_mmio;
use crate::device::pci::config_space::{BYTES, register};
use crate::io::function::{BARS, Raw, bars};
use crate::memory_map::MemoryMap;

/// A function of the machine.
#[derive(Debug)]
pub(in crate::arch::x86_64) struct Listed {
    pub(in crate::arch::x86_64) function: PciFunction,
    /// What its BARs read after ones were written; zeros for bridges.
    sizes: [u32; BARS],
    /// The values of its BARs.
    values: [u32; BARS],
}

/// All functions that were found.
static FUNCTIONS: Once<Vec<Listed>> = Once::new();

/// Class of bridges.
const CLASS_BRIDGE: u8 = 6;
const BRIDGE_HEADER: u8 = 1;
const SECONDARY_BUS: usize = 0x19;
/// Command: ports and memory are on.
const DECODES: u16 = 0b11;
/// Command: memory is on.
const DECODES_MEMORY: u16 = 0b10;

/// Lists the functions of segment 0. Runs on the first pCPU, before devices are used.
pub(super) fn init(machine: &acpi::Machine, memory: &MemoryMap) {
    let mut found = Vec::new();
    let mut seen = [false; 256];
    let mut buses: Vec<u8> = machine.ecam.iter().map(|window| window.first_bus).collect();
    while let Some(bus) = buses.pop() {
        let is_reachable = machine.ecam.iter().any(|window| window.has(bus));
        if core::mem::replace(&mut seen[usize::from(bus)], true) || !is_reachable {
            continue;
        }
        for device in 0..32 {
            for number in 0..8 {
                let function = PciFunction { bus, device, function: number };
                let Some(space) = Space::of(function).filter(Space::is_there) else {
                    if number == 0 {
                        break;
                    }
                    continue;
                };
                let header = space.byte(register::HEADER_TYPE);
                if header & 0x7f == BRIDGE_HEADER {
                    buses.push(space.byte(SECONDARY_BUS));
                }
                let listed = list(function, &space);
                listed.tell_if_in_ram(&space, memory);
                found.push(listed);
                if number == 0 && header & 0x80 == 0 {
                    break;
                }
            }
        }
    }
    log::debug!("PCI: {} functions", found.len());
    FUNCTIONS.call_once(|| found);
}

fn list(function: PciFunction, space: &Space) -> Listed {
    let bar = |index: usize| register::BARS + 4 * index;
    // Bridges have two.
    let count = if space.byte(register::HEADER_TYPE) & 0x7f == 0 { BARS } else { 2 };
    let values = core::array::from_fn(|index| if index < count { space.dword(bar(index)) } else { 0 });
    if count != BARS || space.byte(register::CLASS + 2) == CLASS_BRIDGE {
        return Listed { function, sizes: [0; BARS], values };
    }
    let command = space.word(register::COMMAND);
    space.set_word(register::COMMAND, command & !DECODES);
    (0..BARS).for_each(|index| space.set_dword(bar(index), u32::MAX));
    let sizes = core::array::from_fn(|index| space.dword(bar(index)));
    (0..BARS).for_each(|index| space.set_dword(bar(index), values[index]));
    space.set_word(register::COMMAND, command);
    Listed { function, sizes, values }
}

/// The function, if the machine has it.
pub(in crate::arch::x86_64) fn find(function: PciFunction) -> Option<&'static Listed> {
    all().find(|listed| listed.function == function)
}

/// All functions.
pub(in crate::arch::x86_64) fn all() -> impl Iterator<Item = &'static Listed> {
    FUNCTIONS.get().map_or(&[][..], Vec::as_slice).iter()
}

impl Listed {
    /// Says so if it answers where RAM is. Nobody else gets RAM by that: a VM is refused such a function, and in the VM
    /// with all devices that RAM stays out of reach, or is the VM's own.
    fn tell_if_in_ram(&self, space: &Space, memory: &MemoryMap) {
        if space.word(register::COMMAND) & DECODES_MEMORY == 0 {
            return;
        }
        for bar in bars(&self.read(space)).unwrap_or_default() {
            if memory.touches_ram(&bar.range) {
                log::warn!(
                    "PCI: {} has its memory at {}, where RAM is; no VM can be given it by itself",
                    self.function,
                    bar.range.start
                );
            }
        }
    }

    /// What it says of itself now.
    pub(in crate::arch::x86_64) fn read(&self, space: &Space) -> Raw {
        Raw { config: core::array::from_fn(|at| space.byte(at)), sizes: self.sizes }
    }

    /// Whether it may have registers in this range: as far as can be told, for bridges and others.
    pub(in crate::arch::x86_64) fn may_be_in(&self, range: &HpaRange) -> bool {
        const PORTS: u32 = 1;
        const WIDE: u32 = 2 << 1;
        (0..BARS).any(|index| {
            let (value, size) = (self.values[index], self.sizes[index]);
            let high = if value & 0b111 == WIDE { self.values.get(index + 1).copied().unwrap_or(0) } else { 0 };
            let start = u64::from(high) << 32 | u64::from(value & !0xf);
            let bytes = u64::from((size & !0xf).wrapping_neg()).max(16);
            let own = HpaRange::new(Hpa(start), bytes);
            value & PORTS == 0 && start != 0 && own.is_some_and(|own| own.overlaps(range))
        })
    }
}

/// Configuration space of a function of the machine.
#[derive(Clone, Copy, Debug)]
pub(in crate::arch::x86_64) struct Space(u64);

impl Space {
    /// That of this function. `None` if the machine has no window for it.
    pub(in crate::arch::x86_64) fn of(function: PciFunction) -> Option<Self> {
        let window = acpi::machine()?.ecam.iter().find(|window| window.has(function.bus))?;
        let offset = u64::from(function.index()) * PAGE_BYTES;
        Some(Self(map_mmio(Hpa(window.base.0.checked_add(offset)?), PAGE_BYTES).0))
    }

    /// Whether a function answers there.
    pub(in crate::arch::x86_64) fn is_there(&self) -> bool {
        !matches!(self.word(register::VENDOR), 0 | u16::MAX)
    }

    pub(in crate::arch::x86_64) fn byte(&self, at: usize) -> u8 {
        // SAFETY: `at` stays within the page that `of` has mapped. Reading configuration space has no effect.
        unsafe { ((self.0 + within(at, 1)) as *const u8).read_volatile() }
    }

    pub(in crate::arch::x86_64) fn word(&self, at: usize) -> u16 {
        // SAFETY: as above, and aligned.
        unsafe { ((self.0 + within(at, 2)) as *const u16).read_volatile() }
    }

    pub(in crate::arch::x86_64) fn dword(&self, at: usize) -> u32 {
        // SAFETY: as above.
        unsafe { ((self.0 + within(at, 4)) as *const u32).read_volatile() }
    }

    pub(in crate::arch::x86_64) fn set_word(&self, at: usize, value: u16) {
        // SAFETY: within the page, and aligned. What it makes the function do, the callers know: no function reaches
        // memory that is not its owner's, because the IOMMU decides about that.
        unsafe { ((self.0 + within(at, 2)) as *mut u16).write_volatile(value) };
    }

    pub(in crate::arch::x86_64) fn set_dword(&self, at: usize, value: u32) {
        // SAFETY: as above.
        unsafe { ((self.0 + within(at, 4)) as *mut u32).write_volatile(value) };
    }
}

/// The offset of `bytes` at `at`, within conventional configuration space and aligned.
fn within(at: usize, bytes: usize) -> u64 {
    let at = at % BYTES;
    (at - at % bytes) as u64
}
