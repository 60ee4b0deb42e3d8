//! Memory that is mapped at its first touch, and the dirty log, while guests write.

use interleave::STEPS;
use std::vec;
use std::vec::Vec;

use abi::dirty::Comparison;
use abi::payload::{DirtyLogging, DirtySource, Populate, Role, Split, VmConfig};
use addr::Gpa;

use super::{Scenario, config, create, explore, prepare, run_guest, start, until_gone};
use crate::arch::fake::machine::Simulation;
use crate::arch::fake::program::Op;
use crate::sync::relax;
use crate::vm::Vm;
use crate::vm::dirty::session::{Done, Session};

const PAGE: u64 = 0x1000;
const DONE: u64 = 8 * PAGE;

/// Writes to a word of each of three pages, again and again, and then halts for ever.
fn writer(word: u64) -> Vec<Op> {
    let round = |value| {
        [
            Op::Write(PAGE + word, value),
            Op::Write(2 * PAGE + word, value),
            Op::Yield,
            Op::Write(PAGE + word, value + 1),
            Op::Write(3 * PAGE + word, value),
        ]
    };
    let rounds = [1, 3, 5, 7].map(round).concat();
    [&rounds[..], &[Op::Halt, Op::Jump(rounds.len())]].concat()
}

/// Runs the session to its end.
fn finish(session: &mut Session, vm: &Vm) -> Done {
    loop {
        if let Some(done) = session.step(vm) {
            return done;
        }
    }
}

fn logged(simulation: &Simulation, how: DirtyLogging) {
    let config = VmConfig { dirty: how, ..config("logged", 2) };
    let mut first = writer(0);
    first.insert(0, Op::Start(1));
    if let Some(Op::Jump(to)) = first.last_mut() {
        *to += 1;
    }
    let vm = start(simulation, &config, vec![first, writer(8)]);

    let mut session = Session::start(&vm, how, true).unwrap_or_else(|_| panic!("there is memory for a mirror"));
    for value in 1..=2u64 {
        session.begin_round(false);
        finish(&mut session, &vm);
        assert!(vm.memory.write(Gpa(PAGE + 64), &value.to_le_bytes()), "the host writes as well");
    }
    vm.pause(true);
    simulation.wait_until("the VM is at rest", || vm.is_at_rest());
    session.begin_round(false);
    finish(&mut session, &vm);
    session.begin_comparison();
    let Done::Compared(Comparison { pages, different, first }) = finish(&mut session, &vm) else {
        panic!("a comparison was asked for")
    };
    assert_eq!((pages, different, first), (512, 0, None), "the copy differs from the VM's memory");
    session.stop(&vm);
    vm.stop(abi::control::StopReason::Commanded, format_args!("by the script"));
    drop(session);
    until_gone(simulation, vm);
}

/// Writes are found by faults, large pages are split as they are written.
pub(super) const BY_FAULTS: Scenario = Scenario {
    name: "a dirty log by write protection",
    cpus: 2,
    count: 1_000,
    steps: STEPS,
    script: |simulation| {
        let source = Some(DirtySource::WriteProtect);
        logged(simulation, DirtyLogging { split: Split::Lazy, source, splits_per_second: None });
    },
};

/// The hardware records writes.
pub(super) const BY_HARDWARE: Scenario = Scenario {
    name: "a dirty log by the hardware",
    cpus: 2,
    count: 1_000,
    steps: STEPS,
    script: |simulation| {
        let source = Some(DirtySource::Hardware);
        logged(simulation, DirtyLogging { split: Split::Adaptive, source, splits_per_second: None });
    },
};

/// The hardware records writes, and lists them.
pub(super) const BY_LIST: Scenario = Scenario {
    name: "a dirty log by the hardware's list",
    cpus: 2,
    count: 1_000,
    steps: STEPS,
    script: |simulation| {
        simulation.list_writes();
        let source = Some(DirtySource::Pml);
        logged(simulation, DirtyLogging { split: Split::Adaptive, source, splits_per_second: None });
    },
};

/// A guest writes, and stays in the guest. A round finds all that it has written until then.
pub(super) const WHILE_IT_RUNS: Scenario = Scenario {
    name: "a round of a dirty log while the guest runs",
    cpus: 1,
    count: 200,
    // The guest looks at a word all the time.
    steps: 10 * STEPS,
    script: |simulation| {
        const GO: u64 = DONE + 8;
        simulation.list_writes();
        let how = DirtyLogging { split: Split::Adaptive, source: None, splits_per_second: None };
        let config = VmConfig { dirty: how, ..config("running", 1) };
        let turn = |turn| [Op::Write((turn % 3 + 1) * PAGE, turn), Op::Write(DONE, turn), Op::Await(GO, turn)];
        let turns = (1..=TURNS).flat_map(turn).chain([Op::ShutDown]).collect();
        let vm = start(simulation, &config, vec![turns]);
        let mut session = Session::start(&vm, how, true).unwrap_or_else(|_| panic!("there is memory for a mirror"));
        let is_done = |turn: u64| {
            let mut word = [0; 8];
            vm.memory.read(Gpa(DONE), &mut word) && u64::from_le_bytes(word) == turn
        };
        for turn in 1..=TURNS {
            while !is_done(turn) {
                relax();
            }
            session.begin_round(false);
            finish(&mut session, &vm);
            session.begin_comparison();
            let Done::Compared(comparison) = finish(&mut session, &vm) else { panic!("a comparison was asked for") };
            assert_eq!(comparison.different, 0, "turn {turn}: the round has missed a page: {comparison:?}");
            assert!(vm.memory.write(Gpa(GO), &turn.to_le_bytes()));
        }
        drop(session);
        until_gone(simulation, vm);
    },
};
const TURNS: u64 = 3;

/// Has the hypervisor write to several pages, of which a pCPU remembers one at a time.
fn visited() -> Vec<Op> {
    let pages = [1, 33, 65].map(|page| Op::WriteByHost(page * PAGE, page));
    [&pages.repeat(40)[..], &[Op::Stop]].concat()
}

/// The log of a parent ends, and small pages become large ones, while the hypervisor writes for it. It finds each page.
pub(super) const MADE_WHOLE: Scenario = Scenario {
    name: "a parent's pages become large while the hypervisor writes to them",
    cpus: 1,
    count: 100,
    steps: STEPS,
    script: |simulation| {
        let source = Some(DirtySource::WriteProtect);
        let how = DirtyLogging { split: Split::Eager, source, splits_per_second: None };
        let config = VmConfig { role: Role::Parent, dirty: how, ..config("whole", 1) };
        prepare(core::slice::from_ref(&config));
        let vm = create(simulation, 0, &config, vec![visited()]);
        let mut session = Session::start(&vm, how, false).unwrap_or_else(|_| panic!("there is memory for a log"));
        let whole = vm.memory.table_bytes();
        while session.has_work() {
            session.step(&vm);
        }
        assert!(vm.memory.table_bytes() > whole, "its page was split ahead");
        vm.start();
        session.stop(&vm);
        while !session.is_over() {
            session.step(&vm);
            // The last table waits for who walks in it.
            relax();
        }
        assert_eq!(vm.memory.table_bytes(), whole, "it is large again");
        vm.stop(abi::control::StopReason::Commanded, format_args!("by the script"));
        drop(session);
        until_gone(simulation, vm);
    },
};

#[test]
fn hypervisor_finds_a_parents_pages_while_they_become_large() {
    explore(MADE_WHOLE);
}

/// vCPUs touch the same pages for the first time.
pub(super) const FIRST_TOUCH: Scenario = Scenario {
    name: "pages are mapped when they are touched",
    cpus: 2,
    count: 10_000,
    steps: STEPS,
    script: |simulation| {
        let config = VmConfig { populate: Populate::Touch4K, ..config("touched", 2) };
        let all = |word| (0..3).map(move |page| Op::Write(page * PAGE + word, 1 + page)).collect::<Vec<_>>();
        let checks = |word| (0..3).map(move |page| Op::Expect(page * PAGE + word, 1 + page)).collect::<Vec<_>>();
        let first = [&[Op::Start(1)][..], &all(0), &[Op::Sleep(DONE, 1)], &checks(0), &checks(8), &[Op::ShutDown]];
        let second = [&all(8)[..], &checks(8), &[Op::Write(DONE, 1), Op::Interrupt(0), Op::Stop]];
        run_guest(simulation, &config, vec![first.concat(), second.concat()]);
    },
};

/// A guest writes to an address without memory. The fake machine has no device there either.
pub(super) const NO_MEMORY: Scenario = Scenario {
    name: "a write where there is no memory",
    cpus: 1,
    count: 100,
    steps: STEPS,
    script: |simulation| {
        const BEYOND: u64 = 4 << 20;
        for populate in [Populate::AtStart, Populate::Touch4K] {
            let config = VmConfig { populate, ..config("beyond", 1) };
            // If memory were mapped there, the guest would never end.
            run_guest(simulation, &config, vec![vec![Op::Write(0, 1), Op::Write(BEYOND, 1), Op::Jump(2)]]);
        }
    },
};

#[test]
fn write_where_there_is_no_memory_is_left_to_devices() {
    explore(NO_MEMORY);
}

#[test]
fn copy_kept_by_write_faults_is_the_guests_memory_in_the_end() {
    explore(BY_FAULTS);
}

#[test]
fn copy_kept_by_the_hardwares_records_is_the_guests_memory_in_the_end() {
    explore(BY_HARDWARE);
}

#[test]
fn copy_kept_by_the_hardwares_list_is_the_guests_memory_in_the_end() {
    explore(BY_LIST);
}

#[test]
fn round_finds_what_a_guest_has_written_that_did_not_leave_since() {
    explore(WHILE_IT_RUNS);
}

#[test]
fn page_that_two_vcpus_touch_first_is_mapped_once() {
    explore(FIRST_TOUCH);
}
