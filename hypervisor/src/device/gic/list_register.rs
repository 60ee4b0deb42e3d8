//! A list register: one interrupt that the processor delivers (ICH_LRn_EL2, IHI 0069 12.4.6).

use super::PRIORITY_BITS;

/// A list register, as the processor reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ListRegister(pub(super) u64);

/// Where the interrupt is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) pending: bool,
    pub(super) active: bool,
}

/// The end of this interrupt is ...
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// ... not noticed.
    Silent,
    /// ... an exit, because the line must be checked again.
    Exit,
    /// ... also the end of the physical interrupt of the same number.
    Physical,
}

impl State {
    pub(super) const fn is_none(self) -> bool {
        !self.pending && !self.active
    }
}

impl ListRegister {
    pub(super) fn new(intid: u32, priority: u8, end: End, state: State) -> Self {
        let end = match end {
            End::Silent => 0,
            End::Exit => EOI,
            End::Physical => HW | u64::from(intid) << PHYSICAL_SHIFT,
        };
        let mut list = Self(u64::from(intid) | u64::from(priority & PRIORITY_BITS) << PRIORITY_SHIFT | GROUP_1 | end);
        list.set_state(state);
        list
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
    pub(super) const fn intid(self) -> u32 {
        self.0 as u32
    }

    pub(super) const fn priority(self) -> u8 {
        self.0.to_be_bytes()[1]
    }

    pub(super) const fn state(self) -> State {
        State { pending: self.0 & PENDING != 0, active: self.0 & ACTIVE != 0 }
    }

    pub(super) fn set_state(&mut self, state: State) {
        self.0 &= !(PENDING | ACTIVE);
        if state.pending {
            self.0 |= PENDING;
        }
        if state.active {
            self.0 |= ACTIVE;
        }
    }
}

const PHYSICAL_SHIFT: u32 = 32;
/// Without HW: the end of the interrupt raises the maintenance interrupt.
const EOI: u64 = 1 << 41;
const PRIORITY_SHIFT: u32 = 48;
const GROUP_1: u64 = 1 << 60;
const HW: u64 = 1 << 61;
const PENDING: u64 = 1 << 62;
const ACTIVE: u64 = 1 << 63;

/// Fields of ICH_HCR_EL2 (IHI 0069 12.4.5).
pub(super) mod control {
    /// The virtual interface is on.
    pub(crate) const EN: u64 = 1 << 0;
    /// Exit while at most one of the list registers is in use.
    pub(crate) const UIE: u64 = 1 << 1;
    /// Exit when an interrupt was ended that is in no list register.
    pub(crate) const LRENPIE: u64 = 1 << 2;
    /// Exit while no list register is pending.
    pub(crate) const NPIE: u64 = 1 << 3;
    /// Writes of ICC_DIR_EL1 exit.
    pub(crate) const TDIR: u64 = 1 << 14;
    /// Interrupts ended that are in no list register.
    pub(crate) const fn eoi_count(control: u64) -> u32 {
        (control >> 27 & 0x1f) as u32
    }
}
