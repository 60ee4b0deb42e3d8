//! Creation, pause and end of VMs.

use interleave::STEPS;
use std::vec;
use std::vec::Vec;

use abi::control::StopReason;

use super::{Scenario, config, create, explore, prepare, run_guest, start, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;

const A: u64 = 0x1000;
const B: u64 = 0x1008;
const C: u64 = 0x1010;

/// Two vCPUs that wake each other for ever.
fn endless() -> Vec<Vec<Op>> {
    vec![
        vec![Op::Start(1), Op::Write(A, 1), Op::Interrupt(1), Op::Timer(3_000), Op::Halt, Op::Jump(1)],
        vec![Op::Yield, Op::Timer(2_000), Op::Interrupt(0), Op::Halt, Op::Jump(0)],
    ]
}

/// A VM is stopped by the host, whatever its vCPUs do.
pub(super) const STOP: Scenario = Scenario {
    name: "a VM is stopped",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let vm = start(simulation, &config("stopped", 2), endless());
        vm.stop(StopReason::Commanded, format_args!("by the script"));
        until_gone(simulation, vm);
    },
};

/// As above, and nothing but a kick makes a vCPU leave its guest.
pub(super) const STOP_SPINNING: Scenario = Scenario {
    name: "a VM that spins is stopped",
    cpus: 2,
    count: 6_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let vm = start(simulation, &config("spinning", 1), vec![vec![Op::Jump(0)]]);
        vm.stop(StopReason::Commanded, format_args!("by the script"));
        until_gone(simulation, vm);
    },
};

/// A VM is paused and continued. While it is paused nothing changes in it.
pub(super) const PAUSE: Scenario = Scenario {
    name: "a VM is paused and goes on",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let counts = |word| {
            (1..=4)
                .flat_map(move |value| [Op::Write(word, value), Op::Work(500)])
                .chain([Op::Yield])
                .collect::<Vec<_>>()
        };
        let first = [&[Op::Start(1)][..], &counts(A), &[Op::Sleep(B, 4), Op::Write(C, 1), Op::Halt]].concat();
        let second = [&counts(B)[..], &[Op::Interrupt(0), Op::Stop]].concat();
        let vm = start(simulation, &config("paused", 2), vec![first, second]);
        vm.pause(true);
        simulation.wait_until("the VM is at rest", || vm.is_at_rest());
        let words = || {
            let mut bytes = [0; 24];
            assert!(vm.memory.read(addr::Gpa(A), &mut bytes), "it has memory there");
            bytes
        };
        let before = words();
        crate::sync::relax();
        assert_eq!(words(), before, "a vCPU runs while its VM is at rest");
        vm.pause(false);
        simulation.wait_until("the guest has done all that it was to do", || words()[16] == 1);
        vm.stop(StopReason::Commanded, format_args!("by the script"));
        until_gone(simulation, vm);
    },
};

/// One VM after the other, in the same frames and with the same tags, while a third runs.
pub(super) const COME_AND_GO: Scenario = Scenario {
    name: "VMs come and go",
    cpus: 2,
    count: 4_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let programs = || {
            let first =
                vec![Op::Expect(A, 0), Op::Start(1), Op::Map(3, 1), Op::Touch(3), Op::Sleep(A, 7), Op::ShutDown];
            vec![first, vec![Op::Touch(3), Op::Write(A, 7), Op::Interrupt(0), Op::Stop]]
        };
        let configs = ["first", "second", "beside"].map(|name| config(name, 2));
        prepare(&configs);
        let beside = create(simulation, 2, &configs[2], programs());
        beside.start();
        for (number, config) in (0..).zip(&configs[..2]) {
            let vm = create(simulation, number, config, programs());
            vm.start();
            until_gone(simulation, vm);
        }
        until_gone(simulation, beside);
    },
};

/// A VM that turns itself off while others of its vCPUs are about to run.
pub(super) const TURNED_OFF: Scenario = Scenario {
    name: "a VM turns itself off",
    cpus: 2,
    count: 8_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let programs = vec![vec![Op::Start(1), Op::Start(2), Op::ShutDown], vec![Op::Halt], vec![Op::Await(A, 1)]];
        run_guest(simulation, &config("turned-off", 3), programs);
    },
};

#[test]
fn stopped_vm_is_freed_whatever_its_vcpus_were_doing() {
    explore(STOP);
}

#[test]
fn spinning_vcpu_is_kicked_out_of_its_guest() {
    explore(STOP_SPINNING);
}

#[test]
fn nothing_changes_in_a_vm_at_rest_and_all_of_it_goes_on() {
    explore(PAUSE);
}

#[test]
fn frames_and_tags_of_a_vm_that_ended_hold_nothing_of_it() {
    explore(COME_AND_GO);
}

#[test]
fn vm_that_turns_itself_off_leaves_nothing_behind() {
    explore(TURNED_OFF);
}
