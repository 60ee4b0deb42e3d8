//! Debug registers of guests: breakpoints, watchpoints, single steps.
//!
//! Few guests use them, and there are up to 66. So while the guest's MDSCR_EL1 requests nothing, they trap and are
//! stored here. If it requests something (a debugger in the guest sets a breakpoint, or steps), they are loaded and
//! open to the guest, until its vCPU leaves the pCPU without a request. They do not affect EL2: debug exceptions go to
//! EL1 (MDCR_EL2.TDE is clear), and are not taken from a higher level (Arm ARM, D2.4).
//!
//! Registers for external debuggers (OS lock, communication channel, claim tags) always trap. The OS lock is a bit
//! here; the rest reads as zero.

#![expect(unsafe_code, reason = "debug registers are written")]

use aarch64_defs::registers::mdscr_el1;
use aarch64_defs::syndrome::SystemRegister;
use serde::{Deserialize, Serialize};

use crate::arch::aarch64::el2;
use crate::arch::aarch64::register::{isb, read_register, write_register};

/// One vCPU's registers while they are not in a processor.
#[derive(Debug, Default)]
pub(in crate::arch::aarch64) struct Debug {
    control: u64,
    /// DBGBVR, DBGBCR, DBGWVR and DBGWCR, each of up to 16.
    points: [[u64; 16]; 4],
    /// The guest has locked the OS lock, so none of this has an effect.
    is_locked: bool,
    /// The registers are in the processor, and do not trap.
    is_open: bool,
}

/// What a file keeps of them.
#[derive(Serialize, Deserialize)]
pub(super) struct State {
    control: u64,
    points: [[u64; 16]; 4],
    is_locked: bool,
}

/// Which of the debug registers.
enum Place {
    Control,
    Point { kind: usize, number: usize },
    OsLock,
    OsLockStatus,
    Other,
}

impl Place {
    fn of(register: SystemRegister) -> Option<Self> {
        Some(match register.parts() {
            (2, 0, 0, 2, 2) => Self::Control,
            (2, 0, 0, number @ 0..16, kind @ 4..8) => {
                Self::Point { kind: usize::from(kind) - 4, number: usize::from(number) }
            }
            (2, 0, 1, 0, 4) => Self::OsLock,
            (2, 0, 1, 1, 4) => Self::OsLockStatus,
            (2, 0, 0 | 1 | 7, ..) | (2, 3, 0, 1 | 4 | 5, 0) => Self::Other,
            _ => return None,
        })
    }
}

impl Debug {
    /// The registers at reset: no breakpoints or steps, and the OS lock is locked.
    pub(super) fn new() -> Self {
        Self { is_locked: true, ..Self::default() }
    }

    /// Their state while they are not in a processor.
    pub(super) fn state(&self) -> State {
        State { control: self.control, points: self.points, is_locked: self.is_locked }
    }

    /// Takes over a state while they are not in a processor.
    pub(super) fn set_state(&mut self, state: &State) {
        self.control = state.control & mdscr_el1::GUESTS;
        self.points = state.points;
        self.is_locked = state.is_locked;
    }

    /// The guest's read, when it traps; `None` if there is no such register.
    pub(in crate::arch::aarch64) fn read(&self, register: SystemRegister) -> Option<u64> {
        /// OSLSR_EL1: the lock exists; it is locked.
        const EXISTS: u64 = 1 << 3;
        const LOCKED: u64 = 1 << 1;
        Some(match Place::of(register)? {
            Place::Control => self.control,
            Place::Point { kind, number } if has(kind, number) => self.points[kind][number],
            Place::Point { .. } => return None,
            Place::OsLockStatus => EXISTS | if self.is_locked { LOCKED } else { 0 },
            Place::OsLock | Place::Other => 0,
        })
    }

    /// The guest's write, when it traps; false if there is no such register. The vCPU is on this pCPU.
    pub(in crate::arch::aarch64) fn write(&mut self, register: SystemRegister, value: u64) -> bool {
        match Place::of(register) {
            None => return false,
            Some(Place::Control) => self.control = value & mdscr_el1::GUESTS,
            Some(Place::Point { kind, number }) if has(kind, number) => self.points[kind][number] = value,
            Some(Place::Point { .. }) => return false,
            Some(Place::OsLock) => {
                // Locked while it is open: store the processor's values here, and close.
                self.depart();
                self.is_locked = value & 1 != 0;
            }
            Some(Place::OsLockStatus | Place::Other) => {}
        }
        self.arrive();
        true
    }

    /// The vCPU comes to this pCPU, or has changed its request.
    pub(super) fn arrive(&mut self) {
        let wanted = self.control & mdscr_el1::ASKS != 0 && !self.is_locked;
        if wanted && !self.is_open {
            self.load();
        }
        if wanted != self.is_open {
            self.set_open(wanted);
        }
    }

    /// The vCPU leaves this pCPU.
    pub(super) fn depart(&mut self) {
        if self.is_open {
            self.save();
            self.set_open(false);
        }
    }

    fn set_open(&mut self, open: bool) {
        self.is_open = open;
        let control = if open { self.control } else { 0 };
        // SAFETY: the guest's; concerns EL1 and EL0 alone.
        unsafe { write_register!("mdscr_el1", control) };
        // SAFETY: opens nothing but the guest's own debug registers.
        unsafe { write_register!("mdcr_el2", el2::mdcr(open)) };
        isb();
    }
}

/// Whether the processor has this many of a kind: two of breakpoints, then two of watchpoints.
fn has(kind: usize, number: usize) -> bool {
    let shift = if kind < 2 { 12 } else { 20 };
    number as u64 <= read_register!("id_aa64dfr0_el1") >> shift & 0xf
}

macro_rules! points {
    ($($number:literal)*) => {
        impl Debug {
            fn load(&self) {
                $(
                    if has(0, $number) {
                        // SAFETY: matches at EL1 and EL0 alone.
                        unsafe { write_register!(concat!("dbgbvr", $number, "_el1"), self.points[0][$number]) };
                        // SAFETY: as above.
                        unsafe { write_register!(concat!("dbgbcr", $number, "_el1"), self.points[1][$number]) };
                    }
                    if has(2, $number) {
                        // SAFETY: as above.
                        unsafe { write_register!(concat!("dbgwvr", $number, "_el1"), self.points[2][$number]) };
                        // SAFETY: as above.
                        unsafe { write_register!(concat!("dbgwcr", $number, "_el1"), self.points[3][$number]) };
                    }
                )*
            }

            fn save(&mut self) {
                self.control = read_register!("mdscr_el1") & mdscr_el1::GUESTS;
                $(
                    if has(0, $number) {
                        self.points[0][$number] = read_register!(concat!("dbgbvr", $number, "_el1"));
                        self.points[1][$number] = read_register!(concat!("dbgbcr", $number, "_el1"));
                    }
                    if has(2, $number) {
                        self.points[2][$number] = read_register!(concat!("dbgwvr", $number, "_el1"));
                        self.points[3][$number] = read_register!(concat!("dbgwcr", $number, "_el1"));
                    }
                )*
            }
        }
    };
}
points!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Opens the locks of this pCPU, without which nothing ever matches. External debuggers may change them later.
pub(super) fn unlock() {
    // SAFETY: affects only debug exceptions, and EL2 takes none.
    unsafe { write_register!("oslar_el1", 0u64) };
    // SAFETY: as above.
    unsafe { write_register!("osdlr_el1", 0u64) };
    // SAFETY: as above.
    unsafe { write_register!("mdscr_el1", 0u64) };
    isb();
}
