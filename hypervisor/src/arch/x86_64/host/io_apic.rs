//! The machine's I/O APIC (82093AA), for the VM that has the machine's devices. Nobody else has a use for its pins.

#![expect(unsafe_code, reason = "registers in memory")]

use addr::Hpa;
use spin::Mutex;

use super::{acpi, paging};
use crate::device::io_apic::{MMIO_BASE, PINS};
use crate::io::pins::MachineEntry;

/// Registers: one is selected, and shows in the window.
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const FIRST_ENTRY: u32 = 0x10;
const BYTES: u64 = 4096;

/// The lower half of a masked entry.
const MASKED: u32 = 1 << 16;

/// Held while a register is selected.
static SELECTED: Mutex<()> = Mutex::new(());

/// Masks all pins. `None` if the machine has no I/O APIC with the first pins at the usual address.
pub(in crate::arch::x86_64) fn init() -> Option<()> {
    acpi::machine()?.io_apic.filter(|base| base.0 == MMIO_BASE)?;
    paging::map_mmio(Hpa(MMIO_BASE), BYTES);
    for pin in 0..PINS {
        write(MachineEntry { pin, value: u64::from(MASKED) });
    }
    Some(())
}

/// Writes an entry. It is masked in between, so no interrupt sees half of it.
pub(in crate::arch::x86_64) fn write(entry: MachineEntry) {
    let _selected = SELECTED.lock();
    let Ok(pin) = u32::try_from(entry.pin) else { return };
    let [low, high] = [entry.value & 0xffff_ffff, entry.value >> 32].map(|half| u32::try_from(half).unwrap_or(MASKED));
    let register = FIRST_ENTRY + 2 * pin;
    // With the trigger mode that it will have: see `Pins`.
    write_register(register, low | MASKED);
    write_register(register + 1, high);
    if low & MASKED == 0 {
        write_register(register, low);
    }
}

fn write_register(number: u32, value: u32) {
    for (offset, value) in [(SELECT, number), (WINDOW, value)] {
        let register = (paging::MMIO + MMIO_BASE + offset) as *mut u32;
        // SAFETY: `init` has mapped the registers, and only a caller that found them calls `write`.
        unsafe { register.write_volatile(value) };
    }
}
