//! Commands on the control port: VMs are created, paused, logged and destroyed by a tool while their vCPUs run.

use alloc::sync::{Arc, Weak};
use core::cell::RefCell;
use interleave::STEPS;
use std::collections::BTreeMap;
use std::vec;
use std::vec::Vec;

use abi::control::{Answer, Command, Message, Part, Receiver, Refusal, Request, VmEvent, encode};
use abi::payload::{Blob, DirtyLogging, DirtySource, File, Split, VmConfig};
use addr::PAGE_BYTES;
use vcpu_layout::Proof;

use super::{Scenario, config, explore, prepare};
use crate::arch::fake::machine::{Simulation, machine};
use crate::arch::fake::program::Op;
use crate::arch::{Arch, Machine};
use crate::vm::{Vm, table, tags};
use crate::{control, cpu};

/// The other end of the control port. The script's pCPU is the one that serves the port.
pub(super) struct Tool<'a> {
    simulation: &'a Simulation,
    heard: RefCell<Heard>,
    last: u32,
}

#[derive(Default)]
struct Heard {
    receiver: Receiver,
    replies: BTreeMap<u32, Result<Answer, Refusal>>,
    /// What happened to VMs, in order.
    events: Vec<(u32, VmEvent)>,
}

impl<'a> Tool<'a> {
    /// The host has just started.
    pub(super) fn connect(simulation: &'a Simulation) -> Self {
        control::init(&[], false, false);
        Self { simulation, heard: RefCell::default(), last: 0 }
    }

    /// Sends a command, and does not wait for the answer. Returns the command's number.
    pub(super) fn send(&mut self, command: Command) -> u32 {
        self.last += 1;
        let frame = encode(&Request { id: self.last, command }).expect("it fits into a frame");
        self.simulation.send(&frame);
        self.last
    }

    /// The answer to a command. It comes, whatever the VMs do: else all pCPUs sleep for ever.
    pub(super) fn answer(&self, id: u32) -> Result<Answer, Refusal> {
        self.simulation.wait_until("a command is answered", || {
            loop {
                let has_more = control::poll();
                self.listen();
                let is_answered = self.heard.borrow().replies.contains_key(&id);
                // With a trace there is always more to do.
                if is_answered || !has_more {
                    return is_answered;
                }
            }
        });
        self.heard.borrow_mut().replies.remove(&id).expect("it is there")
    }

    pub(super) fn ask(&mut self, command: Command) -> Result<Answer, Refusal> {
        let id = self.send(command);
        self.answer(id)
    }

    /// A command that must succeed.
    pub(super) fn does(&mut self, command: Command) {
        assert_eq!(self.ask(command), Ok(Answer::Done));
    }

    fn listen(&self) {
        let Heard { receiver, replies, events } = &mut *self.heard.borrow_mut();
        for byte in self.simulation.received() {
            match receiver.push(byte) {
                None | Some(Ok(Message::Up(_) | Message::Console { .. })) => {}
                Some(Ok(Message::Reply { id, result })) => {
                    assert!(replies.insert(id, result).is_none(), "command {id} is answered twice");
                }
                Some(Ok(Message::Vm { vm, event, .. })) => events.push((vm, event)),
                Some(other) => panic!("{other:?}"),
            }
        }
    }

    /// Creates a VM, in the steps of `dunlin create`.
    pub(super) fn create(&mut self, config: &VmConfig) -> u32 {
        let Ok(Answer::Upload(upload)) = self.ask(Command::CreateBegin { config: config.clone() }) else {
            panic!("there is room for it")
        };
        let kernel = Command::CreateData { upload, part: Part::Kernel, offset: 0, bytes: vec![0; KERNEL_BYTES] };
        self.does(kernel);
        let created = self.ask(Command::CreateFinish { upload });
        assert_eq!(created, Ok(Answer::Created { vm: upload }));
        upload
    }

    /// What happened to the VM since the last call, in order.
    pub(super) fn events_of(&self, number: u32) -> Vec<VmEvent> {
        self.listen();
        let mut heard = self.heard.borrow_mut();
        let (of_it, others) = core::mem::take(&mut heard.events).into_iter().partition(|(vm, _)| *vm == number);
        heard.events = others;
        let of_it: Vec<_> = of_it;
        of_it.into_iter().map(|(_, event)| event).collect()
    }
}

pub(super) const KERNEL_BYTES: usize = 64;

/// A VM that the tool creates.
pub(super) fn sent(name: &str) -> VmConfig {
    VmConfig { kernel: File::Blob(Blob { offset: 0, bytes: KERNEL_BYTES as u64 }), ..config(name, 2) }
}

/// A VM that was created, and did not start yet.
fn weak(number: u32) -> Weak<Vm> {
    table::table().alive(number).map(Arc::downgrade).expect("it was just created")
}

/// Two vCPUs that write, halt, and wake each other for ever.
pub(super) fn busy() -> Vec<Vec<Op>> {
    let write = |page: u64| Op::Write(page * PAGE_BYTES, page);
    vec![
        vec![Op::Start(1), write(1), Op::Interrupt(1), Op::Timer(2_000), Op::Halt, Op::Jump(1)],
        vec![write(2), Op::Timer(3_000), Op::Halt, Op::Interrupt(0), Op::Jump(0)],
    ]
}

/// A tool creates a VM, pauses it, lets it go on, and destroys it. The answer to each command comes when it is done.
pub(super) const COMMANDED: Scenario = Scenario {
    name: "a VM lives by commands",
    cpus: 2,
    count: 1_500,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let config = sent("commanded");
        prepare(core::slice::from_ref(&config));
        simulation.load("commanded", busy());
        let mut tool = Tool::connect(simulation);
        // A running host has no boot modules.
        let named = VmConfig { kernel: File::Module(String::from("kernel")), ..config.clone() };
        assert_eq!(tool.ask(Command::CreateBegin { config: named }), Err(Refusal::Invalid));
        for _ in 0..2 {
            let vm = tool.create(&config);
            let left = weak(vm);
            tool.does(Command::Start { vm });
            tool.does(Command::Pause { vm });
            assert!(left.upgrade().is_some_and(|vm| vm.is_at_rest()), "the pause was answered, and a vCPU may run");
            tool.does(Command::Resume { vm });
            tool.does(Command::Destroy { vm });
            assert_eq!(left.strong_count(), 0, "the end was answered, and the VM is still there");
            assert_eq!(tags::usage()[1], 0, "tags of a VM that is gone");
            let events = tool.events_of(vm);
            let [VmEvent::Created { .. }, VmEvent::Started, VmEvent::Stopped { .. }, VmEvent::Destroyed] = &events[..]
            else {
                panic!("{events:?}")
            };
            assert_eq!(tool.ask(Command::Pause { vm }), Err(Refusal::NoSuchVm));
        }
    },
};

/// Commands about a VM that ends meanwhile, by itself or by another command: each gets one answer.
pub(super) const ENDS_MEANWHILE: Scenario = Scenario {
    name: "a VM ends while commands are about it",
    cpus: 2,
    count: 1_500,
    steps: STEPS,
    script: |simulation: &Simulation| {
        table::init();
        let how = DirtyLogging { split: Split::Lazy, source: Some(DirtySource::WriteProtect), splits_per_second: None };
        let configs = ["by-command", "by-itself"].map(|name| VmConfig { dirty: how, ..sent(name) });
        prepare(&configs);
        let ends = vec![Op::Start(1), Op::Write(PAGE_BYTES, 1), Op::Yield, Op::Timer(2_000), Op::Halt, Op::ShutDown];
        simulation.load("by-command", busy());
        simulation.load("by-itself", vec![ends, vec![Op::Write(2 * PAGE_BYTES, 2), Op::Halt, Op::Jump(0)]]);
        let mut tool = Tool::connect(simulation);
        for config in &configs {
            let vm = tool.create(config);
            let left = weak(vm);
            tool.does(Command::Start { vm });
            let logs = tool.ask(Command::DirtyStart { vm, how: Some(how), mirror: false }).is_ok();
            let round = tool.send(Command::DirtyRound { vm, lose: false });
            let pause = tool.send(Command::Pause { vm });
            let ends = [Command::Destroy { vm }, Command::Destroy { vm }].map(|destroy| tool.send(destroy));
            let round = tool.answer(round);
            let is_over = |refusal: &Refusal| matches!(refusal, Refusal::NotRunning | Refusal::NoSuchVm);
            assert!(matches!(&round, Ok(Answer::Round(_))) || round.as_ref().is_err_and(is_over) || !logs, "{round:?}");
            let pause = tool.answer(pause);
            assert!(pause == Ok(Answer::Done) || pause.as_ref().is_err_and(is_over), "{pause:?}");
            // The first that comes too late finds no VM.
            let ends = ends.map(|end| tool.answer(end));
            assert!(ends.contains(&Ok(Answer::Done)), "{ends:?}");
            assert!(ends.iter().all(|end| *end == Ok(Answer::Done) || end.as_ref().is_err_and(is_over)), "{ends:?}");
            assert_eq!(left.strong_count(), 0, "the end was answered, and the VM is still there");
            let stops = tool.events_of(vm).iter().filter(|event| matches!(event, VmEvent::Stopped { .. })).count();
            assert_eq!(stops, 1, "an end is told once");
        }
    },
};

/// The pCPU that keeps house wakes: for a call, at a tick, or for something else, as an interrupt of a VM's device.
pub(super) const CALLED: Scenario = Scenario {
    name: "the control port has its turn when it is called",
    cpus: 1,
    count: 40,
    steps: STEPS,
    script: |simulation: &Simulation| {
        let mut tool = Tool::connect(simulation);
        let this = cpu::this();
        let mut works_after = |what: fn()| {
            while cpu::finish_housekeeping(this) {}
            let id = tool.send(Command::Resume { vm: 7 });
            what();
            while cpu::finish_housekeeping(this) {}
            tool.listen();
            let is_answered = tool.heard.borrow().replies.contains_key(&id);
            if !is_answered {
                assert_eq!(tool.answer(id), Err(Refusal::NoSuchVm));
            }
            is_answered
        };
        assert!(!works_after(|| {}), "nobody has called");
        assert!(works_after(|| cpu::this().taken.device.add(Proof::by_place(), 1)), "a device of the port's has");
        assert!(works_after(|| cpu::this().taken.kick.add(Proof::by_place(), 1)), "another pCPU has");
        assert!(works_after(|| _ = machine().pass(Machine::hz() / 100)), "a tick has come");
    },
};

#[test]
fn control_port_has_its_turn_when_it_is_called_or_at_a_tick_and_not_for_each_wake_up() {
    explore(CALLED);
}

#[test]
fn each_command_about_a_vm_is_answered_when_it_is_done() {
    explore(COMMANDED);
}

#[test]
fn commands_about_a_vm_that_ends_get_one_answer_each() {
    explore(ENDS_MEANWHILE);
}
