//! VMs that are saved while they work, and restored: their guests notice nothing, wherever they were.

use core::cell::RefCell;
use std::vec;
use std::vec::Vec;

use abi::control::{About, Answer, Command, Refusal, Saving, StopReason, UPLOAD_CHUNK, VmEvent};
use abi::payload::{Devices, PciFunction, Role, VmConfig};
use addr::PAGE_BYTES;
use interleave::STEPS;

use super::control::{Tool, busy, sent};
use super::{Scenario, explore, prepare};
use crate::arch::fake::machine::{Simulation, machine};
use crate::arch::fake::program::Op;
use crate::vm::{saved, table};

/// Two vCPUs that write, wait for each other and for their timers, and check what they have written. The first turns
/// the machine off in the end.
fn finite() -> Vec<Vec<Op>> {
    let page = |number: u64| number * PAGE_BYTES;
    let rounds = 1..6;
    let first = rounds.clone().flat_map(|round| {
        let write = Op::Write(page(round), round);
        [write, Op::Await(page(0x40 + round), round), Op::Timer(2_000), Op::Halt, Op::Expect(page(round), round)]
    });
    let second = rounds.flat_map(|round| {
        let write = Op::Write(page(0x40 + round), round);
        [Op::Await(page(round), round), Op::Timer(3_000), Op::Halt, write]
    });
    vec![
        [Op::Start(1)].into_iter().chain(first).chain([Op::ShutDown]).collect(),
        second.chain([Op::Halt, Op::Jump(0)]).collect(),
    ]
}

/// All that a tool reads of a VM.
struct Contents {
    config: VmConfig,
    state: Vec<u8>,
    memory: Vec<(u64, Vec<u8>)>,
}

/// Reads it, as `dunlin save` does. The save is not over then.
fn read(tool: &mut Tool<'_>, saving: Saving) -> Contents {
    let save = saving.save;
    let (mut state, mut memory) = (Vec::new(), Vec::new());
    while (state.len() as u64) < saving.state_bytes {
        let Ok(Answer::Bytes(bytes)) = tool.ask(Command::SaveState { save, offset: state.len() as u64 }) else {
            panic!("it has more")
        };
        state.extend(bytes);
    }
    for (start, _) in saving.regions {
        let Ok(Answer::Used(used)) = tool.ask(Command::SaveUsed { save, gpa: start }) else { panic!("it has memory") };
        for page in (0..used.len() * 8).filter(|page| used[page / 8] >> (page % 8) & 1 != 0) {
            let gpa = start + page as u64 * PAGE_BYTES;
            let Ok(Answer::Bytes(bytes)) = tool.ask(Command::SaveMemory { save, gpa, bytes: 4096 }) else {
                panic!("it has memory")
            };
            memory.push((gpa, bytes));
        }
    }
    Contents { config: saving.config, state, memory }
}

/// Begins to restore it. Returns the answer to its state.
fn begin(tool: &mut Tool<'_>, contents: &Contents) -> (u32, Result<Answer, Refusal>) {
    let begin = Command::RestoreBegin { config: contents.config.clone(), state_bytes: contents.state.len() as u64 };
    let Ok(Answer::Upload(upload)) = tool.ask(begin) else { panic!("there is room for it") };
    let mut answer = Ok(Answer::Done);
    for (number, bytes) in contents.state.chunks(UPLOAD_CHUNK).enumerate() {
        let offset = (number * UPLOAD_CHUNK) as u64;
        answer = tool.ask(Command::RestoreState { upload, offset, bytes: bytes.to_vec() });
    }
    (upload, answer)
}

/// Restores it, as `dunlin restore` does.
fn restore(tool: &mut Tool<'_>, contents: &Contents) -> u32 {
    let (upload, taken) = begin(tool, contents);
    assert_eq!(taken, Ok(Answer::Done));
    assert_eq!(tool.ask(Command::Start { vm: upload }), Err(Refusal::Busy), "it is not complete");
    for (gpa, bytes) in &contents.memory {
        tool.does(Command::RestoreMemory { upload, gpa: *gpa, bytes: bytes.clone() });
    }
    assert_eq!(tool.ask(Command::RestoreFinish { upload }), Ok(Answer::Created { vm: upload }));
    upload
}

/// The guest turns its machine off.
fn finishes(tool: &Tool<'_>, simulation: &Simulation, vm: u32) {
    let events = RefCell::new(Vec::new());
    let is_end = |event: &VmEvent| matches!(event, VmEvent::Stopped { .. });
    simulation.wait_until("the guest has finished", || {
        while crate::control::poll() {}
        events.borrow_mut().extend(tool.events_of(vm));
        events.borrow().iter().any(is_end)
    });
    let ended = events.borrow().iter().find(|event| is_end(event)).cloned();
    assert!(matches!(ended, Some(VmEvent::Stopped { reason: StopReason::PowerOff, .. })), "{ended:?}");
}

/// A guest is saved at some moment, and restored: it finishes its work. If it stays, it finishes too.
pub(super) const AND_RESTORED: Scenario = Scenario {
    name: "a VM is saved and restored",
    cpus: 2,
    count: 400,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let config = sent("saved");
        prepare(core::slice::from_ref(&config));
        simulation.load("saved", finite());
        let mut tool = Tool::connect(simulation);
        for stay in [false, true] {
            let vm = tool.create(&config);
            tool.does(Command::Start { vm });
            match tool.ask(Command::Save { vm }) {
                Ok(Answer::Saving(saving)) => {
                    let save = saving.save;
                    assert_eq!(tool.ask(Command::Pause { vm }), Err(Refusal::Busy));
                    assert_eq!(tool.ask(Command::Save { vm }), Err(Refusal::Busy));
                    let contents = read(&mut tool, *saving);
                    tool.does(Command::SaveEnd { save, stay });
                    assert_eq!(tool.ask(Command::SaveState { save, offset: 0 }), Err(Refusal::NotSaving));
                    if stay {
                        finishes(&tool, simulation, vm);
                    }
                    tool.does(Command::Destroy { vm });
                    let again = restore(&mut tool, &contents);
                    finishes(&tool, simulation, again);
                    tool.does(Command::Destroy { vm: again });
                }
                // The guest was faster.
                Err(Refusal::NotRunning) => {
                    finishes(&tool, simulation, vm);
                    tool.does(Command::Destroy { vm });
                }
                other => panic!("{other:?}"),
            }
        }
    },
};

/// A paused guest's time stands still while it is saved, and while it is in its file. What cannot be restored leaves
/// nothing behind.
pub(super) const STANDS_STILL: Scenario = Scenario {
    name: "the time of a saved VM stands still",
    cpus: 2,
    count: 200,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let config = sent("saved");
        prepare(core::slice::from_ref(&config));
        simulation.load("saved", busy());
        let mut tool = Tool::connect(simulation);
        let vm = tool.create(&config);
        tool.does(Command::Start { vm });
        tool.does(Command::Pause { vm });
        let save = |tool: &mut Tool<'_>, vm: u32| {
            let Ok(Answer::Saving(saving)) = tool.ask(Command::Save { vm }) else { panic!("it can be saved") };
            (saving.save, read(tool, *saving))
        };
        // The first piece is the reference time, in units of 100 ticks.
        let time = |contents: &Contents| postcard::take_from_bytes::<u64>(&contents.state[4..]).expect("a time").0;
        let (first, contents) = save(&mut tool, vm);
        machine().pass(LONG);
        tool.does(Command::SaveEnd { save: first, stay: true });
        let (second, later) = save(&mut tool, vm);
        let passed = time(&later) - time(&contents);
        assert!(passed < LONG / 100, "{passed} units passed for the guest while it was saved");
        tool.does(Command::SaveEnd { save: second, stay: false });
        tool.does(Command::Destroy { vm });

        machine().pass(LONG);
        let again = restore(&mut tool, &later);
        tool.does(Command::Pause { vm: again });
        let (third, restored) = save(&mut tool, again);
        let passed = time(&restored) - time(&later);
        assert!(passed < LONG / 100, "{passed} units passed for the guest while it was in its file");
        assert_eq!(tool.ask(Command::RestoreBegin { config, state_bytes: 0 }), Err(Refusal::NameTaken));
        // Whatever lets the VM go on ends the save.
        tool.does(Command::Resume { vm: again });
        assert_eq!(tool.ask(Command::SaveEnd { save: third, stay: false }), Err(Refusal::NotSaving));
        tool.does(Command::Destroy { vm: again });

        let mut foreign = Contents { state: vec![10, 0, 0, 0], ..restored };
        foreign.state.extend([0xff; 9]);
        foreign.state.push(1);
        let senseless = Contents { state: vec![9, 0, 0, 0, 1], config: foreign.config.clone(), memory: Vec::new() };
        for (bad, why) in [(&foreign, "lacks a feature"), (&senseless, "means nothing")] {
            let (upload, answer) = begin(&mut tool, bad);
            let Ok(Answer::NotCreated { about: About::State, why: said }) = answer else { panic!("{answer:?}") };
            assert!(said.contains(why), "{said}");
            assert_eq!(tool.ask(Command::RestoreFinish { upload }), Err(Refusal::NoSuchUpload));
            simulation.wait_until("nothing is left of it", || {
                while crate::control::poll() {}
                table::table().len() == 0
            });
        }
    },
};

/// A VM is resumed while its vCPUs are on their way to rest, because it is to be saved: both commands are answered.
pub(super) const RESUMED: Scenario = Scenario {
    name: "a VM that is about to be saved is resumed",
    cpus: 2,
    count: 100,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let config = sent("saved");
        prepare(core::slice::from_ref(&config));
        simulation.load("saved", busy());
        let mut tool = Tool::connect(simulation);
        let vm = tool.create(&config);
        tool.does(Command::Start { vm });
        let save = tool.send(Command::Save { vm });
        tool.does(Command::Resume { vm });
        assert_eq!(tool.answer(save), Err(Refusal::NotSaving));
        let again = tool.ask(Command::Save { vm });
        assert!(matches!(again, Ok(Answer::Saving(_))), "{again:?}");
        tool.does(Command::Destroy { vm });
    },
};

/// Ticks that no guest needs for anything.
const LONG: u64 = 100_000_000;

#[test]
fn guest_that_is_saved_at_any_moment_finishes_its_work_after_that() {
    explore(AND_RESTORED);
}

#[test]
fn save_that_a_resume_overtakes_is_answered() {
    explore(RESUMED);
}

#[test]
fn time_of_a_saved_guest_stands_still_and_a_foreign_state_is_refused() {
    explore(STANDS_STILL);
}

#[test]
fn vm_whose_state_is_not_all_its_own_is_refused_with_the_reason() {
    let plain = sent("saved");
    assert_eq!(saved::check(&plain), Ok(()));
    let function = PciFunction { bus: 0, device: 3, function: 0 };
    for (vm, why) in [
        (VmConfig { role: Role::Parent, ..plain.clone() }, "it is a parent"),
        (VmConfig { devices: Devices::All, ..plain.clone() }, "the machine's devices"),
        (VmConfig { devices: Devices::These(vec![function]), ..plain }, "PCI functions"),
    ] {
        let said = saved::check(&vm).expect_err("it is refused");
        assert!(said.contains(why), "{said}");
    }
}
