//! Two ports: a tool outside, and processes in a parent that open the parent's port.

use alloc::collections::BTreeMap;
use core::cell::RefCell;
use std::vec;
use std::vec::Vec;

use abi::control::{Answer, Command, Message, Part, Receiver, Refusal, Request, VmEvent, encode};
use abi::payload::{Role, VmConfig};
use interleave::STEPS;

use super::control::{KERNEL_BYTES, Tool, busy, sent};
use super::tool_port::Program;
use super::{Scenario, explore, prepare};
use crate::arch::fake::machine::{Simulation, run};
use crate::control;
use crate::vm::table;

/// A process in the parent.
struct Inside<'a> {
    simulation: &'a Simulation,
    program: RefCell<Program>,
    heard: RefCell<Heard>,
    last: u32,
}

/// What it has read from the port.
#[derive(Default)]
struct Heard {
    receiver: Receiver,
    replies: BTreeMap<u32, Result<Answer, Refusal>>,
    /// Number of frames that were refused.
    refused: usize,
}

impl Inside<'_> {
    /// Opens the port.
    fn open(&mut self) {
        *self.heard.borrow_mut() = Heard::default();
        self.last = 0;
        self.program.borrow_mut().set_open(true);
    }

    fn close(&mut self) {
        self.program.borrow_mut().set_open(false);
        while control::poll() {}
    }

    /// Writes bytes, all of them.
    fn write(&self, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            done += self.program.borrow_mut().write(&bytes[done..]);
            control::poll();
        }
    }

    fn send(&mut self, command: Command) -> u32 {
        self.last += 1;
        self.write(&encode(&Request { id: self.last, command }).expect("it fits into a frame"));
        self.last
    }

    fn listen(&self) {
        let Heard { receiver, replies, refused } = &mut *self.heard.borrow_mut();
        for byte in self.program.borrow_mut().read() {
            match receiver.push(byte) {
                None => {}
                Some(Ok(Message::Reply { id, result })) => {
                    assert!(replies.insert(id, result).is_none(), "command {id} is answered twice");
                }
                Some(Ok(Message::Refused(_))) => *refused += 1,
                Some(other) => panic!("{other:?}"),
            }
        }
    }

    fn answer(&self, id: u32) -> Result<Answer, Refusal> {
        self.simulation.wait_until("a process is answered", || {
            while control::poll() {}
            self.listen();
            self.heard.borrow().replies.contains_key(&id)
        });
        self.heard.borrow_mut().replies.remove(&id).expect("it is there")
    }

    fn ask(&mut self, command: Command) -> Result<Answer, Refusal> {
        let id = self.send(command);
        self.answer(id)
    }
}

/// A tool outside has created and started a parent. Both are there, and the parent's number.
fn beside<'a>(simulation: &'a Simulation, others: &[VmConfig]) -> (Tool<'a>, Inside<'a>, u32) {
    table::init();
    let config = VmConfig { role: Role::Parent, ..sent("parent") };
    let mut all = vec![config.clone()];
    all.extend_from_slice(others);
    prepare(&all);
    simulation.load("parent", busy());
    let mut tool = Tool::connect(simulation);
    let own = tool.create(&config);
    tool.does(Command::Start { vm: own });
    let vm = table::table().running(own).cloned().expect("it runs");
    let program = RefCell::new(Program::start(&vm));
    (tool, Inside { simulation, program, heard: RefCell::default(), last: 0 }, own)
}

/// The parent ends by a command from outside, and nothing is left of it.
fn end(mut tool: Tool<'_>, inside: Inside<'_>, own: u32) {
    drop(inside);
    tool.does(Command::Destroy { vm: own });
    while control::poll() {}
}

/// Both ask at the same time, with the same numbers. The process creates, starts and destroys a VM.
pub(super) const BESIDE_HOST: Scenario = Scenario {
    name: "a process in a parent makes requests",
    cpus: 1,
    count: 30,
    steps: 4 * STEPS,
    script: |simulation: &Simulation| {
        let config = sent("its");
        let (mut tool, mut inside, own) = beside(simulation, core::slice::from_ref(&config));
        inside.open();
        let [outer, inner] = [tool.send(Command::List { first: 0 }), inside.send(Command::Hello)];
        assert!(matches!(inside.answer(inner), Ok(Answer::Host(_))));
        assert!(matches!(tool.answer(outer), Ok(Answer::Vms(vms)) if vms.len() == 1));

        simulation.load("its", busy());
        let Ok(Answer::Upload(upload)) = inside.ask(Command::CreateBegin { config }) else { panic!("there is room") };
        let bytes = vec![0; KERNEL_BYTES];
        let done = Ok(Answer::Done);
        assert_eq!(inside.ask(Command::CreateData { upload, part: Part::Kernel, offset: 0, bytes }), done);
        assert_eq!(inside.ask(Command::CreateFinish { upload }), Ok(Answer::Created { vm: upload }));
        assert_eq!(inside.ask(Command::Start { vm: upload }), done);
        assert_eq!(inside.ask(Command::Pause { vm: upload }), done);
        assert_eq!(inside.ask(Command::Resume { vm: upload }), done);
        assert_eq!(inside.ask(Command::Destroy { vm: upload }), done);
        let events = tool.events_of(upload);
        let expected = matches!(
            events[..],
            [VmEvent::Created { .. }, VmEvent::Started, VmEvent::Stopped { .. }, VmEvent::Destroyed]
        );
        assert!(expected, "outside, all of it is told: {events:?}");

        for command in
            [Command::Stop { vm: own }, Command::Pause { vm: own }, Command::Destroy { vm: own }, Command::PowerOff]
        {
            assert_eq!(inside.ask(command), Err(Refusal::Own));
        }
        end(tool, inside, own);
    },
};

/// A process dies in the middle of everything: the next one hears nothing of it, and can do the same.
pub(super) const HANGS_UP: Scenario = Scenario {
    name: "a process in a parent dies",
    cpus: 1,
    count: 30,
    steps: 4 * STEPS,
    script: |simulation: &Simulation| {
        let config = sent("never");
        let other = sent("other");
        let (mut tool, mut inside, own) = beside(simulation, &[config.clone(), other.clone()]);
        simulation.load("other", busy());
        let other = tool.create(&other);
        tool.does(Command::Start { vm: other });
        inside.open();
        let begun = inside.ask(Command::CreateBegin { config: config.clone() });
        assert!(matches!(begun, Ok(Answer::Upload(_))));
        inside.send(Command::List { first: 0 });
        inside.send(Command::Destroy { vm: other });
        inside.send(Command::TraceStart);
        // As long as the trace goes on, there is always more to do.
        while !crate::trace::is_on() {
            control::poll();
        }
        let frame = encode(&Request { id: 77, command: Command::Hello }).expect("short");
        inside.write(&frame[..frame.len() / 2]);
        inside.close();
        assert!(!crate::trace::is_on(), "nobody else ends it");

        inside.open();
        // The end of the other VM has no reader any more.
        simulation.wait_until("the other VM is gone", || {
            while control::poll() {}
            table::table().alive(other).is_err()
        });
        assert_eq!(inside.program.borrow_mut().read(), Vec::<u8>::new(), "answers to another process");
        assert!(matches!(inside.ask(Command::Hello), Ok(Answer::Host(_))), "the other half of a frame");
        let begun = inside.ask(Command::CreateBegin { config });
        let Ok(Answer::Upload(upload)) = begun else { panic!("the upload before is gone: {begun:?}") };
        assert_eq!(inside.ask(Command::CreateAbort { upload }), Ok(Answer::Done));
        end(tool, inside, own);
    },
};

/// A process asks and asks, and does not read. It is not read from any more, until it reads.
pub(super) const FLOODS: Scenario = Scenario {
    name: "a process in a parent floods its port",
    cpus: 1,
    count: 4,
    steps: 100 * STEPS,
    script: |simulation: &Simulation| {
        let (mut tool, mut inside, own) = beside(simulation, &[]);
        inside.open();
        let mut sent = 0;
        let mut stuck = 0;
        while stuck < 20 {
            let frame = encode(&Request { id: sent + 1, command: Command::Hello }).expect("short");
            if inside.program.borrow_mut().write(&frame) == frame.len() {
                sent += 1;
                stuck = 0;
            } else {
                stuck += 1;
                control::poll();
            }
            assert!(sent < 10_000, "requests without end are read");
        }
        // Meanwhile the other port is served.
        assert!(matches!(tool.ask(Command::Hello), Ok(Answer::Host(_))));
        for id in 1..=sent {
            assert!(matches!(inside.answer(id), Ok(Answer::Host(_))), "{id}");
        }
        end(tool, inside, own);
    },
};

#[test]
fn process_in_a_parent_makes_requests_beside_the_tool_outside() {
    explore(BESIDE_HOST);
}

#[test]
fn next_process_hears_nothing_of_one_that_died() {
    explore(HANGS_UP);
}

#[test]
fn process_that_does_not_read_is_not_read_from() {
    explore(FLOODS);
}

#[test]
fn garbage_from_a_process_disturbs_nobody() {
    const SEED: u64 = 0x5eed_0022;
    run(1, |simulation| {
        let (mut tool, mut inside, own) = beside(simulation, &[]);
        let mut rng = fastrand::Rng::with_seed(SEED);
        for _ in 0..300 {
            inside.open();
            for _ in 0..rng.usize(..4) {
                let mut bytes = match rng.u8(..3) {
                    0 => vec![0xab; rng.usize(..20_000)],
                    1 => encode(&Request { id: 1, command: Command::Stats { vm: rng.u32(..3), first: rng.u32(..) } })
                        .expect("short"),
                    _ => (0..rng.usize(..500)).map(|_| rng.u8(..)).collect(),
                };
                if !bytes.is_empty() && rng.bool() {
                    let at = rng.usize(..bytes.len());
                    bytes[at] = rng.u8(..);
                }
                inside.write(&bytes);
            }
            assert!(matches!(tool.ask(Command::List { first: 0 }), Ok(Answer::Vms(_))));
            let _ = inside.program.borrow_mut().read();
            inside.close();
        }
        inside.open();
        inside.write(&[1, 2, 3, 0]);
        assert!(matches!(inside.ask(Command::Hello), Ok(Answer::Host(_))));
        assert_eq!(inside.heard.borrow().refused, 1, "a refusal for the bytes before");
        end(tool, inside, own);
    });
}

#[test]
fn parent_that_ends_takes_its_process_along() {
    run(1, |simulation| {
        let (mut tool, mut inside, own) = beside(simulation, &[]);
        inside.open();
        inside.send(Command::List { first: 0 });
        drop(inside);
        tool.does(Command::Destroy { vm: own });
        assert!(matches!(tool.ask(Command::List { first: 0 }), Ok(Answer::Vms(vms)) if vms.is_empty()));
    });
}
