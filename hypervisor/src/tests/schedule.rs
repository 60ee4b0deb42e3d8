//! Waking, blocking, preemption, stealing, timers.

use interleave::STEPS;
use std::vec;
use std::vec::Vec;

use super::{Scenario, config, explore, run_guest, start, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;

const A: u64 = 0x1000;
const B: u64 = 0x1008;
const C: u64 = 0x1010;

/// Two vCPUs that wake each other, twice.
pub(super) const PING_PONG: Scenario = Scenario {
    name: "two vCPUs wake each other",
    cpus: 2,
    count: 14_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let ping = |value| [Op::Write(A, value), Op::Interrupt(1), Op::Sleep(B, value)];
        let pong = |value| [Op::Sleep(A, value), Op::Write(B, value), Op::Interrupt(0)];
        let first = [&[Op::Start(1)][..], &ping(1), &ping(2), &[Op::ShutDown]].concat();
        let second = [&pong(1)[..], &pong(2), &[Op::Halt]].concat();
        run_guest(simulation, &config("ping-pong", 2), vec![first, second]);
    },
};

/// A vCPU that spins until another has run, on the only pCPU.
pub(super) const SPINNER: Scenario = Scenario {
    name: "a spinning vCPU is preempted",
    cpus: 1,
    count: 4_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let spinner = vec![Op::Start(1), Op::Start(2), Op::Await(A, 1), Op::Await(B, 1), Op::ShutDown];
        let others = [A, B].map(|word| vec![Op::Work(1000), Op::Write(word, 1), Op::Stop]);
        let [one, other] = others;
        run_guest(simulation, &config("spinner", 3), vec![spinner, one, other]);
    },
};

/// A vCPU wakes another for its own pCPU, and spins until that one has answered. Before it goes on, the pCPU looks
/// which of them runs.
pub(super) const WOKEN_BY_SPINNER: Scenario = Scenario {
    name: "a vCPU gives way to one that it has woken",
    cpus: 1,
    count: 2_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let wake = |value| [Op::Sleep(C, value), Op::Write(A, value), Op::Interrupt(1), Op::Pause(B, value)];
        let answer = |value| [Op::Write(C, value), Op::Interrupt(0), Op::Sleep(A, value), Op::Write(B, value)];
        let first = [&[Op::Start(1)][..], &wake(1), &wake(2), &[Op::ShutDown]].concat();
        let second = [&answer(1)[..], &answer(2), &[Op::Stop]].concat();
        run_guest(simulation, &config("woken", 2), vec![first, second]);
        assert_eq!(simulation.entries_in_vain(), 0, "entries that an interrupt to itself ended at once");
    },
};

/// More vCPUs than pCPUs, and all of them spin for each other. None may wait for good beside an idle pCPU.
pub(super) const CROWD: Scenario = Scenario {
    name: "more vCPUs than pCPUs take turns",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first = vec![
            Op::Start(1),
            Op::Start(2),
            Op::Start(3),
            Op::Sleep(A, 1),
            Op::Sleep(B, 1),
            Op::Await(C, 1),
            Op::ShutDown,
        ];
        let wake = |word| vec![Op::Yield, Op::Write(word, 1), Op::Interrupt(0), Op::Yield, Op::Stop];
        let last = vec![Op::Await(A, 1), Op::Yield, Op::Await(B, 1), Op::Write(C, 1), Op::Stop];
        run_guest(simulation, &config("crowd", 4), vec![first, wake(A), wake(B), last]);
    },
};

/// A vCPU interrupts all others at once, which takes it several steps, while its VM is paused and goes on.
pub(super) const TO_ALL: Scenario = Scenario {
    name: "an interrupt to all reaches all",
    cpus: 2,
    count: 8_000,
    steps: STEPS,
    script: |simulation: &Simulation| interrupt_all(simulation, Op::InterruptOthers),
};

/// A device interrupts all at once, which others carry on, while the VM is paused and goes on.
pub(super) const DEVICE_TO_ALL: Scenario = Scenario {
    name: "an interrupt of a device to all reaches all",
    cpus: 2,
    count: 8_000,
    steps: STEPS,
    script: |simulation: &Simulation| interrupt_all(simulation, Op::InterruptByDevice),
};

/// Four vCPUs sleep until the first one interrupts them, by `send`, and tell it that they have heard of it.
fn interrupt_all(simulation: &Simulation, send: Op) {
    let done = |number: u64| B + 8 * number;
    let starts = (1..=4).map(Op::Start);
    let all = |value| (1..=4).map(move |other| Op::Sleep(done(other), value));
    let first = starts.chain(all(1)).chain([Op::Write(A, 2), send]).chain(all(2)).chain([Op::ShutDown]);
    let other = |number| {
        let tell = |value| [Op::Write(done(number), value), Op::Interrupt(0)];
        [&tell(1)[..], &[Op::Sleep(A, 2)], &tell(2), &[Op::Stop]].concat()
    };
    let programs = [first.collect()].into_iter().chain((1..=4).map(other)).collect();
    let vm = start(simulation, &config("to-all", 5), programs);
    vm.pause(true);
    crate::sync::relax();
    vm.pause(false);
    until_gone(simulation, vm);
}

/// A vCPU wakes another and keeps running. The woken one runs on the other pCPU, which is idle or about to be.
pub(super) const BESIDE_SPINNER: Scenario = Scenario {
    name: "a woken vCPU runs beside one that spins",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        run_guest(simulation, &config("beside", 2), beside_spinner().into());
    },
};

/// One spins and never gives way. The other, which it wakes, has to run beside it.
pub(super) fn beside_spinner() -> [Vec<Op>; 2] {
    let wake = |value| [Op::Poll(A, value), Op::Write(B, value), Op::Interrupt(1)];
    let first = [&[Op::Start(1)][..], &wake(1), &wake(2), &[Op::Poll(A, 3), Op::ShutDown]].concat();
    let sleep = |value| [Op::Write(A, value), Op::Sleep(B, value)];
    let second = [&sleep(1)[..], &sleep(2), &[Op::Write(A, 3), Op::Stop]].concat();
    [first, second]
}

/// A vCPU hands the only pCPU over to another, which spins until the first one has run again, and then wakes it.
pub(super) const HAND_OVER: Scenario = Scenario {
    name: "a vCPU hands its pCPU over and gets it back",
    cpus: 1,
    count: 4_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let over = |value| [Op::Write(A, value), Op::HandOver(1), Op::Write(B, value), Op::Sleep(C, value)];
        let back = |value| [Op::Sleep(A, value), Op::Await(B, value), Op::Write(C, value), Op::HandOver(0)];
        let first = [&[Op::Start(1)][..], &over(1), &over(2), &[Op::ShutDown]].concat();
        let second = [&back(1)[..], &back(2), &[Op::Halt]].concat();
        run_guest(simulation, &config("hand-over", 2), vec![first, second]);
    },
};

/// The same with an idle pCPU beside it.
pub(super) const HAND_OVER_BESIDE: Scenario =
    Scenario { name: "a vCPU hands its pCPU over beside an idle one", cpus: 2, ..HAND_OVER };

/// vCPUs that sleep by timers. One is woken by an interrupt before its timer expires; the timer must not wake it again.
pub(super) const TIMERS: Scenario = Scenario {
    name: "timers wake halted vCPUs",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first = vec![
            Op::Start(1),
            Op::Start(2),
            Op::Timer(5_000),
            Op::Halt,
            Op::Timer(900_000),
            Op::Sleep(A, 1),
            Op::Timer(2_000),
            Op::Halt,
            Op::Sleep(B, 1),
            Op::ShutDown,
        ];
        let second = vec![Op::Timer(3_000), Op::Halt, Op::Write(A, 1), Op::Interrupt(0), Op::Stop];
        let third = vec![Op::Timer(4_000), Op::Halt, Op::Yield, Op::Write(B, 1), Op::Interrupt(0), Op::Stop];
        run_guest(simulation, &config("timers", 3), vec![first, second, third]);
    },
};

/// All vCPUs halt with interrupts off, whichever is the last.
pub(super) const ALL_STOP: Scenario = Scenario {
    name: "a VM whose vCPUs all stop ends",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let first = vec![Op::Start(1), Op::Start(2), Op::Stop];
        run_guest(simulation, &config("all-stop", 3), vec![first, vec![Op::Stop], vec![Op::Yield, Op::Stop]]);
    },
};

#[test]
fn vcpu_that_hands_its_pcpu_over_gets_another_turn() {
    explore(HAND_OVER);
    explore(HAND_OVER_BESIDE);
}

#[test]
fn halted_vcpu_wakes_for_each_interrupt() {
    explore(PING_PONG);
}

#[test]
fn spinning_vcpu_gives_way_to_those_that_it_spins_for() {
    explore(SPINNER);
}

#[test]
fn spinning_vcpu_gives_way_at_once_to_one_that_it_has_woken() {
    explore(WOKEN_BY_SPINNER);
}

#[test]
fn no_vcpu_waits_for_ever_when_there_are_more_of_them_than_pcpus() {
    explore(CROWD);
}

#[test]
fn interrupt_to_all_vcpus_reaches_all_while_the_vm_is_paused_and_goes_on() {
    explore(TO_ALL);
}

#[test]
fn interrupt_of_a_device_to_all_vcpus_reaches_all_while_the_vm_is_paused_and_goes_on() {
    explore(DEVICE_TO_ALL);
}

#[test]
fn woken_vcpu_never_waits_beside_an_idle_pcpu() {
    explore(BESIDE_SPINNER);
}

#[test]
fn halted_vcpu_wakes_when_its_timer_is_due() {
    explore(TIMERS);
}

#[test]
fn vm_ends_when_its_last_vcpu_stops() {
    explore(ALL_STOP);
}
