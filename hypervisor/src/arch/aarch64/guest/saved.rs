//! What a file keeps of a VM: nothing yet, on this architecture.

use alloc::string::String;
use alloc::vec::Vec;

use crate::vcpu::Owner;
use crate::vm::Vm;

/// Why not.
const WHY: &str = "on AArch64 VMs cannot be saved yet";

pub(crate) fn can_save() -> Result<(), &'static str> {
    Err(WHY)
}

pub(crate) fn save_shared(_: &Vm, _: u64) -> Vec<u8> {
    Vec::new()
}

pub(crate) fn restore_shared(_: &Vm, _: &[u8], _: u64) -> Result<(), String> {
    Err(String::from(WHY))
}

pub(crate) fn save_vcpu(_: &Vm, _: u32, _: &mut Owner, _: u64) -> Vec<u8> {
    Vec::new()
}

pub(crate) fn restore_vcpu(_: &Vm, _: u32, _: &mut Owner, _: &[u8], _: u64) -> Result<(), String> {
    Err(String::from(WHY))
}

pub(crate) fn time_stood_still(_: &Vm, _: u64, _: u64) {}
