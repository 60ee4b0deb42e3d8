//! What a file keeps of a VM: the reference time, and of each vCPU where it is in its program.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::registers::{reference_time, set_reference_time};
use crate::vcpu::Owner;
use crate::vm::Vm;
use crate::vm::saved::{decode, encode};

/// A vCPU.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedVcpu {
    pub(super) at: u64,
    /// It waits for its start, or for an interrupt.
    pub(super) is_off: bool,
    pub(super) is_halted: bool,
    pub(super) is_stopped: bool,
    pub(super) is_interrupted: bool,
    pub(super) has_rung: bool,
    /// How many ticks later its timer rings.
    pub(super) rings_in: Option<u64>,
    pub(super) gprs: [u64; 16],
}

pub(crate) fn can_save() -> Result<(), &'static str> {
    Ok(())
}

pub(crate) fn save_shared(vm: &Vm, tick: u64) -> Vec<u8> {
    encode(&reference_time(vm, tick))
}

/// A time of all ones is that of another processor.
pub(crate) fn restore_shared(vm: &Vm, state: &[u8], tick: u64) -> Result<(), String> {
    match decode(state)? {
        u64::MAX => Err(String::from("this processor lacks a feature")),
        time => {
            set_reference_time(vm, tick, time);
            Ok(())
        }
    }
}

pub(crate) fn save_vcpu(_: &Vm, _: u32, owner: &mut Owner, tick: u64) -> Vec<u8> {
    encode(&owner.arch.state(tick))
}

pub(crate) fn restore_vcpu(_: &Vm, _: u32, owner: &mut Owner, state: &[u8], tick: u64) -> Result<(), String> {
    owner.arch.set_state(decode(state)?, tick);
    Ok(())
}

pub(crate) fn time_stood_still(vm: &Vm, from: u64, to: u64) {
    set_reference_time(vm, to, reference_time(vm, from));
    for vcpu in vm.vcpus() {
        vcpu.own().split().0.arch.move_timer(to.saturating_sub(from));
    }
}
