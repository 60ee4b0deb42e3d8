//! Two VMs on cores of two threads, with `smt=core`. The machine itself asserts that no two VMs are in their guests on
//! the threads of a core.

use std::vec;
use std::vec::Vec;

use interleave::STEPS;

use abi::payload::{CpuShare, VmConfig};

use super::schedule::beside_spinner;
use super::{Scenario, config, create, explore, prepare, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;

const A: u64 = 0x1000;
const B: u64 = 0x1008;

/// Two VMs with these programs, which may use these pCPUs.
fn two_vms(simulation: &Simulation, pcpus: [Option<u64>; 2], programs: [Vec<Op>; 2]) {
    simulation.schedule_by_core();
    let configs = [0, 1].map(|number| {
        let share = CpuShare { pcpus: pcpus[number], ..CpuShare::DEFAULT };
        VmConfig { share, ..config(["one", "other"][number], 2) }
    });
    prepare(&configs);
    let [one, other] = [0, 1].map(|number| create(simulation, number, &configs[number as usize], programs.to_vec()));
    one.start();
    other.start();
    until_gone(simulation, one);
    until_gone(simulation, other);
}

/// On one core. Their vCPUs spin for each other and wake each other, so both VMs are on both threads in turn.
pub(super) const STRANGERS: Scenario = Scenario {
    name: "two VMs take turns on the threads of a core",
    cpus: 2,
    count: 6_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first =
            vec![Op::Start(1), Op::Await(A, 1), Op::Write(B, 1), Op::Interrupt(1), Op::Await(A, 2), Op::ShutDown];
        let second = vec![Op::Write(A, 1), Op::Sleep(B, 1), Op::Write(A, 2), Op::Yield, Op::Stop];
        two_vms(simulation, [None; 2], [first, second]);
    },
};

/// On one core, and each may use one of the threads only: who leaves has to wake the other thread.
pub(super) const PINNED: Scenario = Scenario {
    name: "two VMs use a thread of a core each, in turn",
    cpus: 2,
    count: 4_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first =
            vec![Op::Start(1), Op::Sleep(A, 1), Op::Write(B, 1), Op::Interrupt(1), Op::Await(A, 2), Op::ShutDown];
        let second = vec![Op::Write(A, 1), Op::Interrupt(0), Op::Sleep(B, 1), Op::Write(A, 2), Op::Stop];
        two_vms(simulation, [Some(0b01), Some(0b10)], [first, second]);
    },
};

/// On two cores, with vCPUs that spin and never give way in that time: each VM must get a core of its own, with both
/// threads.
pub(super) const SIDE_BY_SIDE: Scenario = Scenario {
    name: "two VMs run on a core each",
    cpus: 4,
    count: 6_000,
    steps: STEPS,
    script: |simulation: &Simulation| two_vms(simulation, [None; 2], beside_spinner()),
};

#[test]
fn vms_take_turns_on_a_core_and_are_never_on_it_together() {
    explore(STRANGERS);
}

#[test]
fn thread_that_cannot_run_what_waits_wakes_the_one_that_can() {
    explore(PINNED);
}

#[test]
fn no_vm_waits_beside_a_core_that_runs_nothing() {
    explore(SIDE_BY_SIDE);
}
