//! The configuration space that a guest finds for a function of its own.
//!
//! It is made once. Nothing in it is read from the function later, and a write only changes what the guest reads. The
//! few writes that mean something are found by a look at the result ([`Wanted`]).
//!
//! | register | the guest finds |
//! |---|---|
//! | identity, class, subsystem | the function's |
//! | Command | memory is on; bus master as the guest says; no ports, no line for interrupts |
//! | Status | capabilities; no errors |
//! | BARs | memory at its home in the guest's window; ports and ROM are missing |
//! | MSI-X, or MSI without it | to be enabled and masked; of MSI one message |
//! | PCI Express | what the function has, without its reset, as an endpoint of the root complex; writes are dropped |
//! | vendor-specific | what the function has; writes are dropped |
//! | other capabilities, registers beyond 0x40 | missing |

use addr::Gpa;

use super::{Description, Messages, Shown};
use crate::device::pci::config_space::{ConfigSpace, register};

/// Command: memory space.
pub const MEMORY_SPACE: u16 = 1 << 1;
/// Command: bus master.
pub const BUS_MASTER: u16 = 1 << 2;
/// Command: no interrupts by a line.
pub const NO_LINE: u16 = 1 << 10;
/// Command: memory space, bus master, parity errors, SERR, no line.
const COMMAND_WRITABLE: u16 = MEMORY_SPACE | BUS_MASTER | 1 << 6 | 1 << 8 | NO_LINE;
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// MSI-X: all messages are masked.
pub const MSI_X_MASKED: u16 = 1 << 14;
/// MSI-X: on.
pub const MSI_X_ON: u16 = 1 << 15;
/// MSI: on.
pub const MSI_ON: u16 = 1;

/// What a guest's configuration space says that a function shall do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// It may access memory.
    pub is_master: bool,
    /// It sends messages.
    pub sends: bool,
    /// MSI-X: all of them are masked.
    pub is_masked: bool,
    /// MSI: the message, as address and data.
    pub message: Option<(u64, u32)>,
}

impl Description {
    /// The space for a guest that has the memory of BAR `index` at `home(index)`.
    #[must_use]
    pub fn view(&self, home: impl Fn(usize) -> Option<Gpa>) -> ConfigSpace {
        let mut space = ConfigSpace::empty();
        let raw = &self.raw;
        space.define(register::VENDOR, raw.dword(register::VENDOR).to_le_bytes(), [0; 4]);
        space.define(register::COMMAND, (MEMORY_SPACE | NO_LINE).to_le_bytes(), COMMAND_WRITABLE.to_le_bytes());
        space.define(register::REVISION, raw.dword(register::REVISION).to_le_bytes(), [0; 4]);
        space.define(register::CACHE_LINE_SIZE, [0], [0xff]);
        space.define(register::SUBSYSTEM, raw.dword(register::SUBSYSTEM).to_le_bytes(), [0; 4]);
        space.define(register::INTERRUPT_LINE, [0xff], [0xff]);
        for bar in &self.bars {
            let Some(home) = home(bar.index) else { continue };
            let mask = !(bar.range.bytes() - 1);
            let [home, mask] = [home.0 & mask | u64::from(bar.flags), mask].map(halves);
            space.define_bar(bar.index, home[0], mask[0] & !0xf);
            if bar.is_wide {
                space.define_bar(bar.index + 1, home[1], mask[1]);
            }
        }

        self.shown.iter().for_each(|shown| self.show(shown, &mut space));
        let messages = self.show_messages(&mut space);
        // The list: the last one first, because each names the next. It is written over what a function with
        // overlapping capabilities has there.
        let mut next = 0;
        for at in self.shown.iter().rev().map(|shown| shown.at).chain([messages]) {
            space.define(at, [raw.byte(at), next], [0; 2]);
            [next, ..] = at.to_le_bytes();
        }
        space.define(register::STATUS, STATUS_CAPABILITIES.to_le_bytes(), [0; 2]);
        space.define(register::CAPABILITIES, [next], [0]);
        space
    }

    fn show(&self, shown: &Shown, space: &mut ConfigSpace) {
        for at in shown.at..shown.at + shown.bytes {
            space.define(at, [self.raw.byte(at)], [0]);
        }
        if shown.is_express {
            /// Kind of port, in the capabilities register.
            const KIND: u16 = 0xf << 4;
            const ROOT_COMPLEX_ENDPOINT: u16 = 9 << 4;
            const CAN_RESET: u32 = 1 << 28;
            let capabilities = self.raw.word(shown.at + 2) & !KIND | ROOT_COMPLEX_ENDPOINT;
            space.define(shown.at + 2, capabilities.to_le_bytes(), [0; 2]);
            space.define(shown.at + 4, (self.raw.dword(shown.at + 4) & !CAN_RESET).to_le_bytes(), [0; 4]);
        }
    }

    /// The capability for messages. Returns where it is.
    fn show_messages(&self, space: &mut ConfigSpace) -> usize {
        let raw = &self.raw;
        match self.messages {
            Messages::MsiX { at, .. } => {
                let control = raw.word(at + 2) & !(MSI_X_ON | MSI_X_MASKED);
                space.define(at + 2, control.to_le_bytes(), (MSI_X_ON | MSI_X_MASKED).to_le_bytes());
                space.define(at + 4, raw.dword(at + 4).to_le_bytes(), [0; 4]);
                space.define(at + 8, raw.dword(at + 8).to_le_bytes(), [0; 4]);
                at
            }
            Messages::Msi { at, is_wide, .. } => {
                let control = if is_wide { super::MSI_IS_WIDE } else { 0 };
                space.define(at + 2, control.to_le_bytes(), MSI_ON.to_le_bytes());
                space.define(at + 4, [0; 4], (!3_u32).to_le_bytes());
                if is_wide {
                    space.define(at + 8, [0; 4], [0xff; 4]);
                }
                space.define(at + msi_data(is_wide), [0; 2], [0xff; 2]);
                at
            }
        }
    }

    /// What the guest wants of the function now.
    #[must_use]
    pub fn wanted(&self, space: &ConfigSpace) -> Wanted {
        let is_master = space.word(register::COMMAND) & BUS_MASTER != 0;
        match self.messages {
            Messages::MsiX { at, .. } => {
                let control = space.word(at + 2);
                let (sends, is_masked) = (control & MSI_X_ON != 0, control & MSI_X_MASKED != 0);
                Wanted { is_master, sends, is_masked, message: None }
            }
            Messages::Msi { at, is_wide, .. } => {
                let high = if is_wide { space.dword(at + 8) } else { 0 };
                let address = u64::from(high) << 32 | u64::from(space.dword(at + 4));
                let message = Some((address, space.word(at + msi_data(is_wide)).into()));
                Wanted { is_master, sends: space.word(at + 2) & MSI_ON != 0, is_masked: false, message }
            }
        }
    }
}

/// Where the data of an MSI is, from its capability.
#[must_use]
pub const fn msi_data(is_wide: bool) -> usize {
    if is_wide { 12 } else { 8 }
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}
