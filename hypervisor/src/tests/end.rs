//! The end of VMs: while they are woken, paused and counted, and while others are at work.

use alloc::sync::{Arc, Weak};
use interleave::STEPS;
use std::vec;
use std::vec::Vec;

use abi::control::{Line, StopReason};
use abi::payload::{DirtyLogging, DirtySource, Split, TagScheme, VmConfig};
use sched::Pending;

use super::{Scenario, config, create, explore, prepare, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;
use crate::vm::dirty::session::Session;
use crate::vm::{Vm, table, tags};

const A: u64 = 0x1000;
const B: u64 = 0x1008;
const PAGE: u64 = 3;

fn stop(vm: &Vm) {
    vm.stop(StopReason::Commanded, format_args!("by the script"));
}

/// Creates and starts a VM by the host's table.
fn launch(simulation: &Simulation, config: &VmConfig, programs: Vec<Vec<Op>>) -> (u32, Weak<Vm>) {
    let number = table::new_number();
    let vm = create(simulation, number, config, programs);
    let left = Arc::downgrade(&vm);
    table::table().add(vm);
    table::table().start(number).expect("it was never started");
    (number, left)
}

/// Waits until the VM's last vCPU has left, and takes it apart as the host does. Nothing of it is left then.
fn bury(simulation: &Simulation, number: u32, left: &Weak<Vm>) {
    simulation.wait_until("the VM is over", || table::table().over().is_some_and(|vm| vm.number == number));
    let (_, vm) = table::table().bury(number, Vec::new()).expect("a VM that is over has an end");
    crate::vm::take_apart(vm);
    assert_eq!(left.strong_count(), 0, "the end of VM {number} was told, and a pCPU still has it");
    table::table().remove(number).expect("it has ended");
}

/// Two vCPUs that halt, and are woken by timers and by each other.
fn sleepers() -> Vec<Vec<Op>> {
    vec![
        vec![Op::Start(1), Op::Interrupt(1), Op::Timer(2_000), Op::Halt, Op::Jump(1)],
        vec![Op::Timer(3_000), Op::Halt, Op::Interrupt(0), Op::Jump(0)],
    ]
}

/// A VM ends while wake-ups are on their way: from its timers, from another vCPU, from the host.
pub(super) const WHILE_WOKEN: Scenario = Scenario {
    name: "a VM ends while it is woken",
    cpus: 2,
    count: 4_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let config = config("woken", 2);
        prepare(core::slice::from_ref(&config));
        let (number, left) = launch(simulation, &config, sleepers());
        let vm = table::table().running(number).cloned().expect("it runs");
        vm.type_on(Line::Console, b"x");
        vm.post(1, Pending::INTERRUPT);
        stop(&vm);
        vm.post(1, Pending::INTERRUPT);
        vm.type_on(Line::Console, b"y");
        drop(vm);
        bury(simulation, number, &left);
    },
};

/// A VM ends while it is being paused, or while it is to go on again.
pub(super) const WHILE_PAUSED: Scenario = Scenario {
    name: "a VM ends while it is paused",
    cpus: 2,
    count: 3_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let configs = ["before", "after", "between"].map(|name| config(name, 2));
        prepare(&configs);
        for (case, config) in configs.iter().enumerate() {
            let (number, left) = launch(simulation, config, sleepers());
            let vm = table::table().running(number).cloned().expect("it runs");
            if case == 1 {
                stop(&vm);
            }
            vm.pause(true);
            if case == 0 {
                stop(&vm);
            }
            if case == 2 {
                simulation.wait_until("the VM is at rest", || vm.is_at_rest());
                stop(&vm);
            }
            vm.pause(false);
            drop(vm);
            bury(simulation, number, &left);
        }
    },
};

/// VMs come, run and go by the table, while another is kicked, flushes, is logged, and waits for the same pCPUs.
pub(super) const BESIDE_WORK: Scenario = Scenario {
    name: "VMs come and go beside one at work",
    cpus: 2,
    count: 600,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let how = DirtyLogging { split: Split::Lazy, source: Some(DirtySource::WriteProtect), splits_per_second: None };
        let busy = VmConfig { dirty: how, ..config("busy", 2) };
        let others = ["first", "second"].map(|name| config(name, 2));
        prepare(&[&[busy.clone()][..], &others].concat());
        let changes = (1..=3).flat_map(|value| {
            [Op::Map(PAGE, value), Op::Flush(0b11, None), Op::Touch(PAGE), Op::Write(A, value), Op::Yield]
        });
        let mut changer = [&[Op::Start(1)][..], &changes.collect::<Vec<_>>()].concat();
        let rest = changer.len();
        changer.extend([Op::Write(A, 4), Op::Timer(5_000), Op::Halt, Op::Jump(rest)]);
        let user = vec![Op::Touch(PAGE), Op::Write(A + 8, 1), Op::Yield, Op::Interrupt(0), Op::Jump(0)];
        let (busy_number, busy_left) = launch(simulation, &busy, vec![changer, user]);
        let vm = table::table().running(busy_number).cloned().expect("it runs");
        let tags_before = tags::usage();

        let mut session = Session::start(&vm, how, false).unwrap_or_else(|_| panic!("there is memory for a log"));
        for config in &others {
            let second = vec![Op::Touch(PAGE), Op::Write(A, 7), Op::Interrupt(0), Op::Stop];
            let first = vec![Op::Expect(A, 0), Op::Start(1), Op::Map(PAGE, 1), Op::Touch(PAGE), Op::Sleep(A, 7)];
            let (number, left) = launch(simulation, config, vec![[first, vec![Op::ShutDown]].concat(), second]);
            session.begin_round(false);
            while session.step(&vm).is_none() {}
            bury(simulation, number, &left);
            assert_eq!(tags::usage(), tags_before, "tags of a VM that is gone");
        }
        session.stop(&vm);
        drop(session);
        stop(&vm);
        drop(vm);
        bury(simulation, busy_number, &busy_left);
        assert_eq!(tags::usage()[..2], [0, 0], "tags without a VM");
    },
};

/// Pools of tags end with their last VMs, and VMs of other kinds get their tags, whose entries TLBs still hold.
fn inherit(simulation: &Simulation) {
    let schemes = [TagScheme::Generation, TagScheme::Epoch, TagScheme::FlushAlways, TagScheme::Generation];
    let configs: Vec<_> = ["first", "second", "third", "fourth"]
        .into_iter()
        .zip(schemes)
        .map(|(name, tags)| VmConfig { tags, tag_limit: Some(3), ..config(name, 2) })
        .collect();
    prepare(&configs[..1]);
    for (number, config) in (0..).zip(&configs) {
        let first =
            vec![Op::Expect(A, 0), Op::Start(1), Op::Map(PAGE, 1), Op::Touch(PAGE), Op::Sleep(A, 7), Op::ShutDown];
        let second = vec![Op::Touch(PAGE), Op::Expect(B, 0), Op::Write(A, 7), Op::Interrupt(0), Op::Stop];
        let vm = create(simulation, number, config, vec![first, second]);
        vm.start();
        until_gone(simulation, vm);
    }
}

/// Each vCPU has a tag.
pub(super) const INHERITED_FROM_VCPUS: Scenario =
    Scenario { name: "a pool inherits tags of vCPUs", cpus: 2, count: 2_000, steps: STEPS, script: inherit };

/// Each VM has a tag.
pub(super) const INHERITED_FROM_VMS: Scenario = Scenario {
    name: "a pool inherits tags of VMs",
    cpus: 2,
    count: 8_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        simulation.tag_vms();
        inherit(simulation);
    },
};

#[test]
fn vm_that_is_woken_while_it_ends_ends() {
    explore(WHILE_WOKEN);
}

#[test]
fn vm_that_is_paused_while_it_ends_ends() {
    explore(WHILE_PAUSED);
}

#[test]
fn vms_come_and_go_without_a_trace_beside_one_at_work() {
    explore(BESIDE_WORK);
}

#[test]
fn tags_of_a_pool_that_ended_lead_nowhere_in_the_next_one() {
    explore(INHERITED_FROM_VCPUS);
    explore(INHERITED_FROM_VMS);
}
