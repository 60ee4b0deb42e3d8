//! The state of a VM that goes into a file, and comes back in another host: all that it has besides its memory.
//!
//! The VM is paused, and its time stands still from a tick of the host's clock on, which belongs to the state. It is a
//! list of pieces, each with its length: what the architecture keeps of the whole VM, the serial lines, the vCPUs in
//! their order. A piece is encoded by `postcard`. What a guest has written but nobody has read yet is not in it: the
//! old host shows that.
//!
//! A restored VM takes over the pieces while it is paused, too. Its time goes on later ([`Arch::time_stood_still`]), so
//! the time for which it was in the file does not exist for its guest. Only its real-time clock tells.

use alloc::string::String;
use alloc::vec::Vec;

use abi::payload::{Devices, Role, VmConfig};
use addr::PAGE_BYTES;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{LINES, Vm};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::frames::{Exhausted, Filled, Frames};

/// Maximum number of bytes of the state of one vCPU, and of everything else.
const VCPU_BYTES: u64 = 8 << 10;
const SHARED_BYTES: u64 = 64 << 10;

/// Whether VMs with this description can be saved.
///
/// # Errors
/// Why not, for people.
pub(crate) fn check(config: &VmConfig) -> Result<(), &'static str> {
    match (&config.devices, config.role) {
        (Devices::All, _) => Err("it has the machine's devices, whose state is in the machine"),
        (Devices::These(_), _) => Err("it has PCI functions of the machine, whose state is in the machine"),
        (Devices::None, Role::Parent) => Err("it is a parent, and its children would not be in the file"),
        (Devices::None, Role::Guest) => Machine::can_save(),
    }
}

/// The largest state that a VM with this description can have.
pub(crate) fn most_bytes(config: &VmConfig) -> u64 {
    SHARED_BYTES + u64::from(config.vcpus) * VCPU_BYTES
}

/// The state of a VM that is at rest, and whose time stands still at `tick`.
///
/// # Errors
/// The host has no memory for it.
pub(crate) fn save(vm: &Vm, tick: u64) -> Result<Filled, Exhausted> {
    let mut state = Filled::new(Frames::allocate(most_bytes(&vm.config), PAGE_BYTES)?);
    let mut add = |piece: &[u8]| {
        let length = u32::try_from(piece.len()).map_err(|_| Exhausted)?;
        (state.push(&length.to_le_bytes()) && state.push(piece)).then_some(()).ok_or(Exhausted)
    };
    add(&Machine::save_shared(vm, tick))?;
    for line in LINES {
        add(&encode(&vm.serial(line).state()))?;
    }
    for (index, vcpu) in (0..).zip(vm.vcpus()) {
        preemption_point();
        add(&Machine::save_vcpu(vm, index, vcpu.own().split().0, tick))?;
    }
    Ok(state)
}

/// Takes over a state. The VM is new, and its vCPUs stay out of their guests. Its time stands still at `tick`.
///
/// # Errors
/// Why a VM with this state cannot run here, for people. Then the VM is good for nothing.
pub(crate) fn restore(vm: &Vm, state: &[u8], tick: u64) -> Result<(), String> {
    let mut rest = state;
    let mut next = || {
        let (length, behind) = rest.split_first_chunk().ok_or_else(senseless)?;
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (piece, behind) = behind.split_at_checked(length).ok_or_else(senseless)?;
        rest = behind;
        Ok::<_, String>(piece)
    };
    Machine::restore_shared(vm, next()?, tick)?;
    for line in LINES {
        let state = decode(next()?)?;
        let tell = |asserted| Machine::serial_interrupt(vm, line, asserted);
        vm.serial(line).set_state(&state, tell).ok_or_else(senseless)?;
    }
    for (index, vcpu) in (0..).zip(vm.vcpus()) {
        preemption_point();
        Machine::restore_vcpu(vm, index, vcpu.own().split().0, next()?, tick)?;
    }
    if rest.is_empty() { Ok(()) } else { Err(senseless()) }
}

/// The text for a state that no VM has.
pub(crate) fn senseless() -> String {
    String::from("its state means nothing to this hypervisor")
}

/// Encodes a piece of a state.
pub(crate) fn encode(state: &impl Serialize) -> Vec<u8> {
    // It fails only for types without a fixed form, and there are none.
    postcard::to_allocvec(state).unwrap_or_default()
}

/// Decodes a piece of a state.
///
/// # Errors
/// It is none, for people.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((state, [])) => Ok(state),
        _ => Err(senseless()),
    }
}
