//! What a file keeps of the interrupt controller.
//!
//! It is the state behind the guest's registers, as it is without list registers: [`VcpuGic::empty_lists`] first gives
//! back what is in them. So the other host may have another number of list registers. A vCPU that takes over a state
//! visits the distributor before its next entry, and fills its list registers as usual.
//!
//! Bits that no interrupt controller has are ignored, so any state gives a controller that works.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::distributor::Distributor;
use super::private::Private;
use super::vcpu::{Config, VcpuGic};
use super::{INTIDS, PRIORITY_BITS, WORDS};

/// Of the part that all vCPUs share: a bit, or an entry, for each INTID. Entries of private ones are zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DistributorState {
    /// GICD_CTLR.EnableGrp1.
    pub(super) forwards: bool,
    pub(super) enabled: [u32; WORDS],
    pub(super) latch: [u32; WORDS],
    /// What devices have last said of their lines.
    pub(super) line: [u32; WORDS],
    pub(super) edge: [u32; WORDS],
    pub(super) active: [u32; WORDS],
    pub(super) priority: Vec<u8>,
    /// The lower half of IROUTER.
    pub(super) route: Vec<u32>,
    /// Of active ones: INTID, and the vCPU that will end it.
    pub(super) active_at: Vec<(u32, u32)>,
}

/// Of the private interrupts of a vCPU: a bit for each INTID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuState {
    pub(super) enabled: u32,
    pub(super) latch: u32,
    pub(super) line: u32,
    pub(super) active: u32,
    pub(super) edge: u32,
    pub(super) priority: [u8; 32],
    /// GICR_WAKER.ProcessorSleep.
    pub(super) asleep: bool,
    /// EOImode of the guest.
    pub(super) splits_end: bool,
}

impl Distributor {
    /// Its state, when all vCPUs are out of their guests, and have emptied their list registers since
    /// ([`VcpuGic::empty_lists`]). None of its interrupts is forwarded from the machine.
    #[must_use]
    pub fn state(&self) -> DistributorState {
        let mut state = DistributorState {
            forwards: self.forwards,
            enabled: self.enabled,
            latch: self.latch,
            line: self.line,
            edge: self.edge,
            active: self.active,
            priority: self.priority.to_vec(),
            route: self.route.to_vec(),
            active_at: Vec::new(),
        };
        // A vCPU may have filled them again. Its guest has not run, so the state at that visit holds.
        for word in 1..WORDS {
            let pending = self.held_pending[word] & self.held[word];
            state.latch[word] |= pending & (self.edge[word] | !self.line[word]);
            state.active[word] |= self.held_active[word] & self.held[word];
        }
        let active = state.active;
        state.active_at = self.all(|word| active[word]).map(|intid| (intid, self.holder[intid as usize])).collect();
        state
    }

    /// One for `vcpus` that goes on from a state. `None` for a state that none has.
    #[must_use]
    pub fn with_state(state: &DistributorState, vcpus: u32) -> Option<Self> {
        if state.priority.len() != INTIDS as usize || state.route.len() != INTIDS as usize {
            return None;
        }
        let mut distributor = Self::new(vcpus);
        distributor.forwards = state.forwards;
        // The first word is of private interrupts.
        let shared = |words: &[u32; WORDS]| {
            let mut words = *words;
            words[0] = 0;
            words
        };
        distributor.enabled = shared(&state.enabled);
        distributor.latch = shared(&state.latch);
        distributor.line = shared(&state.line);
        distributor.edge = shared(&state.edge);
        distributor.active = shared(&state.active);
        for (intid, (priority, route)) in (0..).zip(state.priority.iter().zip(&state.route)) {
            distributor.priority[intid] = priority & PRIORITY_BITS;
            distributor.set_route(intid, *route);
        }
        let mut without_vcpu = distributor.active;
        for &(intid, vcpu) in &state.active_at {
            let (word, bit) = super::split(intid);
            if word >= WORDS || without_vcpu[word] & bit == 0 || vcpu >= vcpus {
                return None;
            }
            without_vcpu[word] &= !bit;
            distributor.holder[intid as usize] = vcpu;
        }
        (without_vcpu == [0; WORDS]).then_some(distributor)
    }
}

impl VcpuGic {
    /// Its state, when its guest has not run since [`Self::empty_lists`]. SPIs are not in it, even if they are in list
    /// registers again: the distributor's state has them.
    #[must_use]
    pub fn state(&self) -> VcpuState {
        let Private { enabled, mut latch, line, mut active, edge, linked: _, priority } = self.private;
        for (intid, state, latched) in self.private_in_lists() {
            active |= u32::from(state.active) << intid;
            latch |= u32::from(state.pending && latched) << intid;
        }
        VcpuState {
            enabled,
            latch,
            line,
            active,
            edge,
            priority,
            asleep: self.is_asleep(),
            splits_end: self.splits_end(),
        }
    }

    /// One that goes on from a state. Of the PPIs' lines it has those in `lines`, a bit each.
    ///
    /// # Panics
    ///
    /// As [`VcpuGic::new`].
    #[must_use]
    pub fn with_state(config: Config, state: &VcpuState, lines: u32) -> Self {
        let mut gic = Self::new(config);
        gic.private.take_over(state, lines);
        gic.set_modes(state.asleep, state.splits_end);
        gic
    }
}
