//! A PC's keyboard, polled through its controller (8042). A USB keyboard works only if the firmware emulates this
//! controller.

use spin::Mutex;

use super::acpi::Machine;
use super::port;
use crate::keyboard::Keyboard;

/// Data of the keyboard and of the mouse.
const DATA: u16 = 0x60;
const STATUS: u16 = 0x64;

mod status {
    pub(super) const DATA_READY: u8 = 1 << 0;
    /// The byte is from the mouse.
    pub(super) const IS_MOUSE: u8 = 1 << 5;
    /// A read from a bus without a device.
    pub(super) const NOTHING_THERE: u8 = 0xff;
}

/// The longest sequence that one scan code types.
const LONGEST: usize = 4;

static KEYBOARD: Mutex<Option<Keyboard>> = Mutex::new(None);

/// Takes the keyboard, as firmware has set it up, where there is one.
pub(super) fn init(machine: &Machine) {
    if machine.has_keyboard_controller && port::read_u8(STATUS) != status::NOTHING_THERE {
        *KEYBOARD.lock() = Some(Keyboard::new());
    }
}

/// Leaves the keyboard to somebody else.
pub(in crate::arch::x86_64) fn give_up() {
    *KEYBOARD.lock() = None;
}

/// Takes input. Returns the number of bytes.
pub(super) fn receive(into: &mut [u8]) -> usize {
    let Some(mut guard) = KEYBOARD.try_lock() else { return 0 };
    let Some(keyboard) = &mut *guard else { return 0 };
    let mut taken = 0;
    for _ in 0..into.len() / LONGEST {
        let status = port::read_u8(STATUS);
        if status & status::DATA_READY == 0 || status == status::NOTHING_THERE {
            break;
        }
        let code = port::read_u8(DATA);
        if status & status::IS_MOUSE == 0 {
            keyboard.scanned(code, |byte| {
                if let Some(slot) = into.get_mut(taken) {
                    *slot = byte;
                    taken += 1;
                }
            });
        }
    }
    taken
}
