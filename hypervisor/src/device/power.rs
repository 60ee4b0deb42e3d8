//! The ports by which a guest powers itself off or resets itself.
//!
//! | port | what | effect |
//! |---|---|---|
//! | 0x600 | ACPI sleep control | SLP_EN with the type of `\_S5`: power off |
//! | 0x601 | ACPI sleep status | none |
//! | 0xcf9 | reset register, named by ACPI's FADT | bit 2: reset |
//! | 0x64 | keyboard controller, command | 0xfe: pulse the reset line |
//!
//! The ACPI tables (`x86_boot`) announce the first three. The keyboard controller is not announced, but a kernel tries
//! its reset when nothing else works.

use x86_boot::layout::{RESET_PORT, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_OFF};

/// Command port of the keyboard controller.
const KEYBOARD_COMMAND_PORT: u16 = 0x64;
/// Keyboard controller command: pulse output line 0, which is the processor's reset.
const KEYBOARD_PULSE_RESET: u8 = 0xfe;
/// Sleep control: SLP_EN, enter the state of SLP_TYP now (ACPI 6.5, 4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;
/// Reset register: bit 2 resets the CPU; bit 1 chooses between its pin and the whole machine, which is the same here.
const RESET_CPU: u8 = 1 << 2;

/// The ports that this device answers.
pub const PORTS: [u16; 4] = [SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, RESET_PORT, KEYBOARD_COMMAND_PORT];

/// The guest's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerEvent {
    /// End the VM.
    PowerOff,
    /// Restart the VM.
    Reset,
}

/// The guest writes `value` to `port`, one of [`PORTS`].
#[must_use]
pub fn write(port: u16, value: u8) -> Option<PowerEvent> {
    let sleep_type = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
    match port {
        SLEEP_CONTROL_PORT if value & SLEEP_ENABLE != 0 && sleep_type == SLEEP_TYPE_OFF => Some(PowerEvent::PowerOff),
        RESET_PORT if value & RESET_CPU != 0 => Some(PowerEvent::Reset),
        KEYBOARD_COMMAND_PORT if value == KEYBOARD_PULSE_RESET => Some(PowerEvent::Reset),
        _ => None,
    }
}

/// The guest reads a port, any of [`PORTS`]: no wake-up happened, no reset is under way, and the keyboard controller
/// has taken its last command.
#[must_use]
pub fn read() -> u8 {
    0
}

#[cfg(test)]
mod tests;
