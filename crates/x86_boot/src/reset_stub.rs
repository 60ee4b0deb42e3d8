//! The code at the reset vector.
//!
//! With hardware-reduced ACPI and no EFI, Linux reboots by a jump to F000:FFF0 in real mode. A PC has its firmware
//! there. Here a few instructions write the reset register.

use crate::layout::{RESET_PORT, RESET_STUB, RESET_VALUE};
use crate::{GuestMemory, OutsideMemory};

const STUB: [u8; 9] = [
    0xba,
    RESET_PORT.to_le_bytes()[0],
    RESET_PORT.to_le_bytes()[1], // mov dx, RESET_PORT
    0xb0,
    RESET_VALUE, // mov al, RESET_VALUE
    0xee,        // out dx, al
    0xf4,        // hlt
    0xeb,
    0xfd, // jmp to the hlt
];

pub(crate) fn write(memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
    memory.write(RESET_STUB, &STUB)
}
