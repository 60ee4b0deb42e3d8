//! What a file keeps of a vCPU, while it is on no pCPU.
//!
//! Counts of timers are those of the guest's counter, which stands still meanwhile: nothing here moves with the time.
//! The registers of EL1 hold whatever the guest has written, and mean nothing to EL2. The word that decides to which
//! level an entry leads is checked: [`spsr::is_guests`].

use aarch64_defs::registers::{spsr, timer_control};
use serde::{Deserialize, Serialize};

use super::{ArchVcpu, Interface, Timer, gic_config};
use crate::arch::aarch64::el2::{debug, el1};
use crate::arch::aarch64::guest::fpu;
use crate::arch::aarch64::host::gic::{GUEST_PHYSICAL_TIMER, GUEST_TIMER};
use crate::device::generic_timer::{self, GenericTimer};
use crate::device::gic::{self, VcpuGic};
use crate::vcpu::activity::Activity;

/// The state of a vCPU.
#[derive(Serialize, Deserialize)]
pub(in crate::arch::aarch64) struct SavedVcpu {
    /// X0 to X30.
    x: [u64; 31],
    pc: u64,
    pstate: u64,
    power: Power,
    /// The machine has reported an error that is this guest's, which ends the VM at the next entry.
    has_erred: bool,
    el1: el1::State,
    vectors: fpu::State,
    debug: debug::State,
    /// CNTV_CTL_EL0 and CNTV_CVAL_EL0.
    timer: [u64; 2],
    physical_timer: generic_timer::State,
    interface: Interface,
    gic: gic::VcpuState,
}

/// Whether it runs.
#[derive(Clone, Copy, Serialize, Deserialize)]
enum Power {
    On,
    /// After WFI; with the count of CNTVCT_EL0 at which a WFIT ends.
    Waits(Option<u64>),
    Off,
}

/// ICH_VMCR_EL2: VENG0 to VCBPR, VEOIM, VBPR1, VBPR0, VPMR (IHI 0069, 12.4.8).
const INTERFACE_CONTROL: u64 = 0x1f | 1 << 9 | 0x3f << 18 | 0xff << 24;
/// The active priorities of a group: a bit for each.
const PRIORITIES: u64 = 0xffff_ffff;

impl ArchVcpu {
    /// Its state. It has emptied its list registers: [`VcpuGic::empty_lists`].
    pub(in crate::arch::aarch64) fn saved(&self) -> SavedVcpu {
        debug_assert!(!self.is_loaded, "its registers are here");
        SavedVcpu {
            x: self.registers.x,
            pc: self.registers.pc,
            pstate: self.registers.pstate,
            power: match self.activity {
                Activity::Active | Activity::Traced => Power::On,
                Activity::Halted => Power::Waits(self.wait_ends_at),
                Activity::Off => Power::Off,
            },
            has_erred: self.has_erred,
            el1: self.el1.state(),
            vectors: self.fpu.state(),
            debug: self.debug.state(),
            timer: [self.timer.control, self.timer.deadline],
            physical_timer: self.physical_timer.state(),
            interface: self.interface,
            gic: self.gic.state(),
        }
    }

    /// The vCPU `index` of a new VM with `vcpus` takes over a state. Its ID registers are those of the state's guest
    /// already. `None` for a state that no guest has.
    pub(in crate::arch::aarch64) fn restore(&mut self, state: &SavedVcpu, index: u32, vcpus: u32) -> Option<()> {
        if !spsr::is_guests(state.pstate, self.id_registers.has_aarch32()) {
            return None;
        }
        self.registers.x = state.x;
        self.registers.pc = state.pc;
        self.registers.pstate = state.pstate;
        (self.activity, self.wait_ends_at) = match state.power {
            Power::On => (Activity::Active, None),
            Power::Waits(until) => (Activity::Halted, until),
            Power::Off => (Activity::Off, None),
        };
        self.has_erred = state.has_erred;
        self.el1.set_state(&state.el1);
        self.fpu.set_state(&state.vectors);
        self.debug.set_state(&state.debug);
        let [control, deadline] = state.timer;
        self.timer = Timer { control: control & (timer_control::ENABLE | timer_control::IMASK), deadline };
        self.physical_timer = GenericTimer::with_state(&state.physical_timer);
        self.interface = Interface {
            control: state.interface.control & INTERFACE_CONTROL,
            active: state.interface.active.map(|active| active & PRIORITIES),
        };
        // The virtual timer's line says that its interrupt has come and not ended; the other's follows its timer.
        let physical = if self.physical_timer.is_asserted() { 1 << GUEST_PHYSICAL_TIMER } else { 0 };
        self.gic = VcpuGic::with_state(gic_config(index, vcpus), &state.gic, 1 << GUEST_TIMER | physical);
        Some(())
    }
}
