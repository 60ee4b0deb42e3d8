//! The machine's I/O APICs (82093AA), for the VM that has the machine's devices. Nobody else has a use for their pins.

#![expect(unsafe_code, reason = "registers in memory")]

use alloc::vec::Vec;

use addr::{Hpa, HpaRange, PAGE_BYTES};
use log::warn;
use spin::{Mutex, Once};

use super::{acpi, boot, paging};
use crate::boot::madt::{self, IoApic};
use crate::device::io_apic::{FIRST_ENTRY, MMIO_BASE, SELECT, VERSION_REGISTER, WINDOW};
use crate::io::pins::{MachineEntry, Pin};

/// The lower half of a masked entry.
const MASKED: u32 = 1 << 16;

/// Those that were found, in the order of their pins.
static FOUND: Once<Vec<IoApic>> = Once::new();

/// Held while a register is selected.
static SELECTED: Mutex<()> = Mutex::new(());

/// Finds them, and masks all of their pins. Firmware may be wrong: what cannot be is left out. `None` if the machine
/// has no I/O APIC with the first pins at the usual address.
pub(in crate::arch::x86_64) fn init() -> Option<()> {
    FOUND.call_once(|| {
        let named = acpi::machine().map_or(&[][..], |machine| &machine.io_apics);
        let ram: Vec<HpaRange> =
            boot::handover().map(|handover| handover.memory.ram().iter().copied().collect()).unwrap_or_default();
        let version = |registers: Hpa| {
            paging::map_mmio(registers, PAGE_BYTES);
            read_register(registers, VERSION_REGISTER)
        };
        let left_out = |registers, why| warn!("ACPI: the I/O APIC at {registers} is left out: {why}");
        madt::io_apics(named, &ram, version, left_out)
    });
    for (controller, io_apic) in found().iter().enumerate() {
        for number in 0..io_apic.pins {
            write(MachineEntry { pin: Pin { controller, number }, value: MASKED.into() });
        }
    }
    let first = found().first()?;
    (first.first == 0 && first.registers.0 == MMIO_BASE).then_some(())
}

/// Those that were found.
pub(in crate::arch::x86_64) fn found() -> &'static [IoApic] {
    FOUND.get().map_or(&[], Vec::as_slice)
}

/// The pages of all that firmware names.
pub(in crate::arch::x86_64) fn pages() -> impl Iterator<Item = HpaRange> {
    let named = acpi::machine().map_or(&[][..], |machine| &machine.io_apics);
    named.iter().filter_map(|(_, registers)| HpaRange::new(Hpa(registers.0 & !(PAGE_BYTES - 1)), PAGE_BYTES))
}

/// Writes an entry. It is masked in between, so no interrupt sees half of it.
pub(in crate::arch::x86_64) fn write(entry: MachineEntry) {
    let Some(io_apic) = found().get(entry.pin.controller).filter(|io_apic| entry.pin.number < io_apic.pins) else {
        return;
    };
    let _selected = SELECTED.lock();
    let Ok(register) = u8::try_from(usize::from(FIRST_ENTRY) + 2 * entry.pin.number) else { return };
    let [low, high] = [entry.value & 0xffff_ffff, entry.value >> 32].map(|half| u32::try_from(half).unwrap_or(MASKED));
    let at = io_apic.registers;
    // With the trigger mode that it will have: see `Pins`.
    write_register(at, register, low | MASKED);
    write_register(at, register + 1, high);
    if low & MASKED == 0 {
        write_register(at, register, low);
    }
}

fn write_register(at: Hpa, number: u8, value: u32) {
    write_word(at, SELECT, number.into());
    write_word(at, WINDOW, value);
}

fn read_register(at: Hpa, number: u8) -> u32 {
    write_word(at, SELECT, number.into());
    let register = (paging::MMIO + at.0 + u64::from(WINDOW)) as *const u32;
    // SAFETY: as in `write_word`.
    unsafe { register.read_volatile() }
}

fn write_word(at: Hpa, offset: u16, value: u32) {
    let register = (paging::MMIO + at.0 + u64::from(offset)) as *mut u32;
    // SAFETY: `init` has mapped the page, which is no RAM, before anybody uses its address.
    unsafe { register.write_volatile(value) };
}
