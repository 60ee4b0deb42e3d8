//! What a file keeps of a VM: its interrupt controller, its clock, what its guest was told of the processor, its vCPUs.
//!
//! The guest's counter is the host's less an offset, the same on all vCPUs. A file has the guest's counter at the tick
//! at which its time was stopped. All deadlines are counts of it, so only the offset moves.
//!
//! Interrupts that are pending or active in list registers are in the state of the private interrupts and of the
//! distributor, where registers show them ([`gic::DistributorState`]).

use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use aarch64_defs::features::{COUNT, IdRegisters};
use aarch64_defs::promise::Promise;
use serde::{Deserialize, Serialize};

use super::{id_registers, platform};
use crate::arch::aarch64::el2::vcpu::SavedVcpu;
use crate::arch::aarch64::host::counter;
use crate::arch::aarch64::register::read_register;
use crate::arch::aarch64::speculation;
use crate::cpu::preemption::preemption_point;
use crate::device::gic::{self, Distributor};
use crate::vcpu::Owner;
use crate::vm::Vm;
use crate::vm::saved::{decode, encode, senseless};

/// What the vCPUs share.
#[derive(Serialize, Deserialize)]
struct Shared {
    told: Told,
    /// The guest's counter.
    count: u64,
    distributor: gic::DistributorState,
}

/// A [`Promise`].
#[derive(Serialize, Deserialize)]
struct Told {
    hz: u64,
    midr: u64,
    id_registers: Vec<u64>,
    ctr: u64,
    dczid: u64,
    vtr: u64,
    workarounds: [i32; 3],
}

/// No counter gets that far: a counter of 1 GHz needs 146 years for it. So differences of two counts have a sign.
const MOST_COUNT: u64 = 1 << 62;

/// It is possible.
pub(crate) fn can_save() -> Result<(), &'static str> {
    Ok(())
}

/// What the vCPUs share. Empties their list registers first.
pub(crate) fn save_shared(vm: &Vm, tick: u64) -> Vec<u8> {
    let distributor = &vm.platform().distributor;
    let mut count = 0;
    let mut told = id_registers::offered().clone();
    for vcpu in vm.vcpus() {
        preemption_point();
        let mut guard = vcpu.own();
        let arch = &mut guard.split().0.arch;
        arch.gic.accept(vcpu.posted().interrupts.take());
        arch.gic.empty_lists(&mut distributor.lock());
        // All have the same.
        count = arch.count_at(tick);
        told.clone_from(&arch.id_registers);
    }
    let state = distributor.lock().state();
    // A VM that goes on here fills them again. Who is told comes later.
    platform::deliver_news(vm);
    encode(&Shared { told: Told::of(&promise(&told)), count, distributor: state })
}

/// A new VM takes it over.
pub(crate) fn restore_shared(vm: &Vm, state: &[u8], tick: u64) -> Result<(), String> {
    let Shared { told, count, distributor } = decode(state)?;
    let told = told.promise().ok_or_else(senseless)?;
    told.check(&promise(id_registers::offered())).map_err(|broken| broken.to_string())?;
    if count >= MOST_COUNT {
        return Err(senseless());
    }
    let distributor = Distributor::with_state(&distributor, vm.config.vcpus).ok_or_else(senseless)?;
    *vm.platform().distributor.lock() = distributor;
    let id_registers = Arc::new(told.id_registers);
    for vcpu in vm.vcpus() {
        preemption_point();
        let mut guard = vcpu.own();
        let arch = &mut guard.split().0.arch;
        arch.set_count(count, tick);
        arch.id_registers = id_registers.clone();
    }
    Ok(())
}

/// A vCPU that is on no pCPU.
pub(crate) fn save_vcpu(_: &Vm, _: u32, owner: &mut Owner, _: u64) -> Vec<u8> {
    encode(&owner.arch.saved())
}

/// A vCPU of a new VM takes it over.
pub(crate) fn restore_vcpu(vm: &Vm, index: u32, owner: &mut Owner, state: &[u8], _: u64) -> Result<(), String> {
    let state: SavedVcpu = decode(state)?;
    owner.arch.restore(&state, index, vm.config.vcpus).ok_or_else(senseless)?;
    vm.vcpus()[index as usize].posted().set_power(owner.arch.is_on());
    Ok(())
}

/// The VM's time goes on at `to`, where it was at `from`.
pub(crate) fn time_stood_still(vm: &Vm, from: u64, to: u64) {
    for vcpu in vm.vcpus() {
        preemption_point();
        let mut guard = vcpu.own();
        let arch = &mut guard.split().0.arch;
        let count = arch.count_at(from);
        arch.set_count(count, to);
    }
}

/// What a guest with these ID registers is told of this machine.
fn promise(id_registers: &IdRegisters) -> Promise {
    Promise {
        hz: counter::hz(),
        midr: read_register!("midr_el1"),
        id_registers: *id_registers,
        ctr: read_register!("ctr_el0"),
        dczid: read_register!("dczid_el0"),
        vtr: read_register!("ich_vtr_el2"),
        workarounds: speculation::for_guests().answers(),
    }
}

impl Told {
    fn of(promise: &Promise) -> Self {
        let Promise { hz, midr, id_registers, ctr, dczid, vtr, workarounds } = *promise;
        Self { hz, midr, id_registers: id_registers.values().to_vec(), ctr, dczid, vtr, workarounds }
    }

    /// `None` if it has another number of registers.
    fn promise(&self) -> Option<Promise> {
        let values: [u64; COUNT] = self.id_registers.as_slice().try_into().ok()?;
        let id_registers = IdRegisters::with_values(values);
        let Self { hz, midr, ctr, dczid, vtr, workarounds, .. } = *self;
        Some(Promise { hz, midr, id_registers, ctr, dczid, vtr, workarounds })
    }
}
