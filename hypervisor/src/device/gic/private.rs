//! The 32 private interrupts of one vCPU (SGIs and PPIs) that are not in a list register.

use super::list_register::{End, ListRegister, State};
use super::registers::{Register, Width};
use super::state::VcpuState;
use super::{PRIORITY_BITS, bits};

/// State of INTIDs 0 to 31, a bit each.
#[derive(Debug)]
pub(super) struct Private {
    pub(super) enabled: u32,
    /// Pending on its own account: an edge that came, an SGI, a write of ISPENDR.
    pub(super) latch: u32,
    /// The line is asserted. Pending while level-triggered.
    pub(super) line: u32,
    pub(super) active: u32,
    /// Edge-triggered; SGIs always are.
    pub(super) edge: u32,
    /// Linked to a physical interrupt of this pCPU; the guest's end of it also ends the physical one.
    pub(super) linked: u32,
    pub(super) priority: [u8; 32],
}

/// INTIDs of SGIs.
const SGIS: u32 = 0xffff;

impl Private {
    /// After reset: all disabled. The PPIs in `linked` are level-triggered and stay so.
    pub(super) const fn new(linked: u32) -> Self {
        let linked = linked & !SGIS;
        Self { enabled: 0, latch: 0, line: 0, active: 0, edge: SGIS, linked, priority: [0; 32] }
    }

    /// Pending and let through.
    pub(super) const fn ready(&self) -> u32 {
        self.pending() & self.enabled
    }

    const fn pending(&self) -> u32 {
        self.latch | self.line & !self.edge
    }

    pub(super) const fn is_edge(&self, bit: u32) -> bool {
        self.edge & bit != 0
    }

    pub(super) const fn is_enabled(&self, bit: u32) -> bool {
        self.enabled & bit != 0
    }

    pub(super) const fn linked(&self) -> u32 {
        self.linked
    }

    pub(super) fn priority(&self, intid: u32) -> u8 {
        self.priority[intid as usize % 32]
    }

    /// The line of a PPI is asserted, or not.
    pub(super) fn set_line(&mut self, bit: u32, asserted: bool) {
        if !asserted {
            self.line &= !bit;
            return;
        }
        self.latch |= bit & self.edge & !self.line;
        self.line |= bit;
    }

    /// The guest, or the hypervisor in its place, ends an active interrupt.
    pub(super) fn deactivate(&mut self, bit: u32) {
        self.active &= !bit;
        self.forget_linked(bit);
    }

    /// If `bit` is linked, the physical interrupt has ended, and comes again if its cause remains.
    pub(super) fn forget_linked(&mut self, bit: u32) {
        self.line &= !(bit & self.linked);
    }

    /// Moves the state into a list register. `offered` tells whether a pending interrupt may be delivered. The second
    /// result tells whether the pending state came from the latch.
    pub(super) fn load(&mut self, intid: u32, offered: bool) -> (ListRegister, bool) {
        let bit = 1 << intid;
        let active = self.active & bit != 0;
        // A level is pending again after its end, not before: the line may have changed by then.
        let pending = offered && self.ready() & bit != 0 && (!active || self.edge & bit != 0);
        let latched = pending && self.latch & bit != 0;
        self.active &= !bit;
        if latched {
            self.latch &= !bit;
        }

        let end = if self.linked & bit != 0 {
            End::Physical
        } else if self.edge & bit != 0 {
            End::Silent
        } else {
            End::Exit
        };
        (ListRegister::new(intid, self.priority(intid), end, State { pending, active }), latched)
    }

    /// Takes the state back.
    pub(super) fn unload(&mut self, intid: u32, state: State, latched: bool) {
        let bit = 1 << intid;
        if state.active {
            self.active |= bit;
        }
        if state.pending && latched {
            self.latch |= bit;
        }
    }
}

/// Another host's.
impl Private {
    /// Takes over a state, and of the lines those in `lines`.
    pub(super) fn take_over(&mut self, state: &VcpuState, lines: u32) {
        self.enabled = state.enabled;
        self.latch = state.latch;
        self.line = state.line & lines & !SGIS;
        self.active = state.active;
        self.edge = (state.edge | SGIS) & !self.linked;
        self.priority = state.priority.map(|priority| priority & PRIORITY_BITS);
    }
}

/// Registers of the SGI frame. All of the state is here when they are accessed.
impl Private {
    /// Reads the register at `offset` in the frame.
    pub(super) fn read(&self, offset: u32, width: Width) -> u64 {
        let value = match Register::at(offset, width) {
            Some(Register::Group { word: 0 }) => u32::MAX,
            Some(Register::Enable { word: 0, .. }) => self.enabled,
            Some(Register::Pending { word: 0, .. }) => self.pending(),
            Some(Register::Active { word: 0, .. }) => self.active,
            Some(Register::Priority { first }) => read_bytes(&self.priority, first, width),
            Some(Register::Config { half: half @ 0..2 }) => spread(self.edge >> (half * 16)),
            _ => 0,
        };
        value.into()
    }

    /// Writes the register at `offset` in the frame.
    pub(super) fn write(&mut self, offset: u32, width: Width, value: u32) {
        match Register::at(offset, width) {
            Some(Register::Enable { word: 0, set }) => assign(&mut self.enabled, value, set),
            Some(Register::Pending { word: 0, set }) => {
                assign(&mut self.latch, value, set);
                // A linked line only repeats a physical interrupt, so it is cleared like a latch.
                if !set {
                    self.forget_linked(value);
                }
            }
            Some(Register::Active { word: 0, set: true }) => self.active |= value,
            Some(Register::Active { word: 0, set: false }) => bits(self.active & value).for_each(|intid| {
                self.deactivate(1 << intid);
            }),
            Some(Register::Priority { first }) => write_bytes(&mut self.priority, first, width, value),
            // SGIs are edges; linked interrupts are levels.
            Some(Register::Config { half: 1 }) => {
                self.edge = (gather(value) << 16 | SGIS) & !self.linked;
            }
            _ => {}
        }
    }
}

/// Sets or clears the bits of `ones`.
pub(super) fn assign(bits: &mut u32, ones: u32, set: bool) {
    if set {
        *bits |= ones;
    } else {
        *bits &= !ones;
    }
}

/// Reads a byte or a word of priorities. Bytes after the last one are zero.
pub(super) fn read_bytes(priorities: &[u8], first: usize, width: Width) -> u32 {
    let bytes = priorities.iter().skip(first).take(width.bytes() as usize);
    bytes.rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

/// Writes a byte or a word of priorities, of which only the upper five bits exist.
pub(super) fn write_bytes(priorities: &mut [u8], first: usize, width: Width, value: u32) {
    let bytes = priorities.iter_mut().skip(first).take(width.bytes() as usize);
    for (priority, byte) in bytes.zip(value.to_le_bytes()) {
        *priority = byte & PRIORITY_BITS;
    }
}

/// Bit n of the lower half to bit 2n + 1: the format of ICFGR.
pub(super) fn spread(edges: u32) -> u32 {
    bits(edges & 0xffff).fold(0, |value, n| value | 2 << (n * 2))
}

/// The reverse of [`spread`].
pub(super) fn gather(value: u32) -> u32 {
    (0..16).fold(0, |edges, n| edges | (value >> (n * 2 + 1) & 1) << n)
}
