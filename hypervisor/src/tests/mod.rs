//! Tests of the core on the fake machine: the same scenarios in many interleavings, and with planted mistakes.
//!
//! A scenario is a function that gets a machine with some pCPUs, creates VMs on it and waits for their end. It asserts
//! what must always hold. A lost wake-up is found because then all pCPUs sleep. [`explore`] runs a scenario in many
//! interleavings, by two kinds of schedules, from fixed seeds.

mod commands;
mod control;
mod cores;
mod device_states;
mod devices;
mod dirty;
mod end;
mod firmware;
mod lent;
mod life;
pub(crate) mod mistakes;
mod saved;
mod schedule;
mod shootdown;
mod suspend;
mod tool_port;
mod visitor;

use alloc::sync::{Arc, Weak};
use std::string::String;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::vec::Vec;

use abi::payload::{
    ApicMode, Blob, CpuShare, DecodeCache, Devices, DirtyLogging, File, HyperV, Populate, RemoteFlush, Role, Split,
    TagScheme, VmConfig,
};
use interleave::Schedules;

use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::program::Op;
use crate::vm::creation::Creation;
use crate::vm::spec::Spec;
use crate::vm::{self, Vm};

/// A scenario, with its number of pCPUs that run vCPUs.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    name: &'static str,
    cpus: usize,
    /// The number of interleavings.
    count: usize,
    /// An interleaving with more steps counts as endless.
    steps: usize,
    script: fn(&Simulation),
}

/// Seeds and kinds of interleavings.
const RANDOM_SEED: u64 = 0x5eed_0001;
const PRIORITIES_SEED: u64 = 0x5eed_0002;
const CHANGES: usize = 4;

/// Tests that run at the same time share the process' memory of simulated machines. A machine with a planted mistake
/// may write to a frame that another machine has by now. So such machines run alone, with this lock held for writing.
static SHARED_FRAMES: RwLock<()> = RwLock::new(());

/// Keeps machines with planted mistakes from running.
pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
    // A test that failed has broken nothing for the others.
    SHARED_FRAMES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps all other machines from running.
fn alone() -> RwLockWriteGuard<'static, ()> {
    SHARED_FRAMES.write().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a scenario in as many interleavings as it is worth.
fn explore(scenario: Scenario) {
    let _no_mistakes = beside_others();
    // Miri knows the threads of the operating system only, and takes a thousand times as long.
    if cfg!(miri) {
        return run(scenario.cpus, scenario.script);
    }
    if let Err(what) = find(scenario, scenario.count) {
        panic!("{what}");
    }
}

/// Runs a scenario in `count` interleavings, half of them of each of two kinds, and in some more in which pCPUs go in
/// step, until it fails. Returns the failure.
fn find(scenario: Scenario, count: usize) -> Result<(), String> {
    let Scenario { name, cpus, steps, script, .. } = scenario;
    // Where all go in step, those that wait take as many steps as the others.
    for (schedules, seed, count, steps) in [
        (Schedules::Random, RANDOM_SEED, count / 2, steps),
        (Schedules::Priorities(CHANGES), PRIORITIES_SEED, count / 2, steps),
        (Schedules::InStep, RANDOM_SEED, count / 20, 20 * steps),
    ] {
        let found = interleave::find(schedules, seed, count, steps, move || run(cpus, script));
        if let Err((number, what)) = found {
            return Err(format!("{name}: interleaving {number} of {schedules:?} from seed {seed:#x}: {what}"));
        }
    }
    Ok(())
}

#[test]
fn scenarios_hold_on_threads_of_the_operating_system_too() {
    let all = [
        schedule::PING_PONG,
        schedule::TIMERS,
        schedule::ALL_STOP,
        cores::STRANGERS,
        cores::SIDE_BY_SIDE,
        shootdown::SIDE_BY_SIDE,
        shootdown::MOVING,
        life::PAUSE,
        life::COME_AND_GO,
        devices::TAKEN,
        devices::OWNER_ENDS,
        dirty::BY_FAULTS,
        dirty::BY_LIST,
        dirty::FIRST_TOUCH,
        end::BESIDE_WORK,
        lent::TAKEN_FROM_CHILD,
        lent::VISITED,
        lent::DEPOSITED_IN_USE,
        lent::DEVICE_AS_MEMORY,
        lent::tracked::HARVESTED,
        suspend::SUSPEND,
        control::COMMANDED,
        control::ENDS_MEANWHILE,
        saved::AND_RESTORED,
        saved::RESUMED,
        tool_port::CARRIES_BYTES,
        visitor::BESIDE_HOST,
        visitor::HANGS_UP,
        visitor::FLOODS,
    ];
    let _no_mistakes = beside_others();
    for Scenario { cpus, script, .. } in all {
        (0..20).for_each(|_| run(cpus, script));
    }
}

/// A VM of this name, with 2 MiB of memory.
pub(crate) fn config(name: &str, vcpus: usize) -> VmConfig {
    VmConfig {
        name: String::from(name),
        vcpus: u32::try_from(vcpus).expect("few"),
        memory_bytes: 2 << 20,
        kernel: File::Blob(Blob { offset: 0, bytes: 0 }),
        initrd: None,
        cmdline: String::new(),
        role: Role::Guest,
        devices: Devices::None,
        apic: ApicMode::X2Apic,
        hyperv: HyperV::Off,
        flush: RemoteFlush::Hypercall,
        tags: TagScheme::Epoch,
        tag_limit: None,
        decode_cache: DecodeCache::Off,
        populate: Populate::AtStart,
        dirty: DirtyLogging { split: Split::Lazy, source: None, splits_per_second: None },
        share: CpuShare::DEFAULT,
    }
}

/// Cuts the machine's tags for these VMs, as the host does at its start.
pub(crate) fn prepare(configs: &[VmConfig]) {
    vm::tags::init(configs, 7, true).expect("there are tags for the VMs");
}

/// Makes a VM, which does not run yet.
pub(crate) fn create(simulation: &Simulation, number: u32, config: &VmConfig, programs: Vec<Vec<Op>>) -> Arc<Vm> {
    simulation.load(&config.name, programs);
    let mut creation = Creation::begin(number, config.clone()).expect("the machine has room for it");
    let spec = Spec { config, kernel: &[], initrd: None };
    loop {
        if let Some(vm) = creation.step(spec).expect("the machine has room for it") {
            return vm;
        }
    }
}

/// Makes and starts a VM that has a vCPU for each program.
fn start(simulation: &Simulation, config: &VmConfig, programs: Vec<Vec<Op>>) -> Arc<Vm> {
    prepare(core::slice::from_ref(config));
    let vm = create(simulation, 0, config, programs);
    vm.start();
    vm
}

/// Waits until nothing is left of the VM.
fn until_gone(simulation: &Simulation, vm: Arc<Vm>) {
    let name = String::from(vm.name());
    let left: Weak<Vm> = Arc::downgrade(&vm);
    drop(vm);
    simulation.wait_until(&format!("{name} has ended and is freed"), || left.strong_count() == 0);
}

/// Runs programs as the vCPUs of a VM until it has ended.
fn run_guest(simulation: &Simulation, config: &VmConfig, programs: Vec<Vec<Op>>) {
    let vm = start(simulation, config, programs);
    until_gone(simulation, vm);
}
