//! Any commands on the control port: each gets one answer of its own kind, whatever the VMs do, and when all VMs are
//! destroyed nothing of them is left. Saved states come back changed, as from a hostile file.

use std::collections::BTreeMap;
use std::format;
use std::vec;
use std::vec::Vec;

use abi::control::{Answer, Command, Line, MEMORY_CHUNK, Part, Refusal};
use abi::payload::{Blob, CpuShare, DirtyLogging, DirtySource, File, HyperV, Populate, Split, TagScheme, VmConfig};
use addr::PAGE_BYTES;
use fuzz::Decisions;

use super::control::{KERNEL_BYTES, Tool, busy, sent};
use super::{beside_others, prepare};
use crate::arch::fake::machine::{Simulation, machine, run};
use crate::arch::fake::program::Op;
use crate::vm::{table, tags};

/// VMs that have programs.
const NAMES: [&str; 3] = ["first", "second", "third"];
/// More than the tool's patience with anything, in ticks.
const LONG: u64 = 200_000_000_000;

struct Fuzz<'a> {
    tool: Tool<'a>,
    random: Decisions,
    /// Commands without an answer.
    open: BTreeMap<u32, Command>,
    /// Numbers of VMs, uploads and saves.
    numbers: Vec<u32>,
    /// A state that a VM had, and what it was made of.
    saved: Option<(VmConfig, Vec<u8>)>,
    save: u32,
    state_bytes: u64,
    done: u64,
}

impl Fuzz<'_> {
    fn send(&mut self, command: Command) -> u32 {
        let id = self.tool.send(command.clone());
        self.open.insert(id, command);
        id
    }

    fn take(&mut self, id: u32) -> Option<Answer> {
        let answer = self.tool.answer(id);
        let command = self.open.remove(&id).expect("it was sent");
        let answer = match answer {
            Ok(answer) => answer,
            Err(refusal) => {
                assert_ne!(refusal, Refusal::Own, "there is no parent: {command:?}");
                return None;
            }
        };
        assert!(fits(&command, &answer), "{command:?} is answered by {answer:?}");
        self.done += 1;
        match (&command, &answer) {
            (_, Answer::Upload(number)) => self.numbers.push(*number),
            (_, Answer::Saving(saving)) => {
                (self.save, self.state_bytes) = (saving.save, saving.state_bytes);
                self.saved = Some((saving.config.clone(), Vec::new()));
            }
            (Command::SaveState { offset, .. }, Answer::Bytes(bytes)) => {
                if let Some((_, state)) = &mut self.saved
                    && *offset == state.len() as u64
                {
                    state.extend(bytes);
                }
            }
            _ => {}
        }
        Some(answer)
    }

    fn ask(&mut self, command: Command) -> Option<Answer> {
        let id = self.send(command);
        self.take(id)
    }

    fn number(&mut self) -> u32 {
        match self.random.u8(..8) {
            7 => self.random.u32(..),
            _ => self.random.choice(&self.numbers).copied().unwrap_or(0),
        }
    }

    fn config(&mut self) -> VmConfig {
        let random = &mut self.random;
        let mut config = sent(NAMES[random.usize(..NAMES.len())]);
        if random.bool() {
            // The first program wakes the second vCPU.
            config.vcpus = [3, 4, 0, 513, u32::MAX][random.usize(..5)];
        }
        if random.u8(..4) == 3 {
            config.memory_bytes = [4 << 20, 0, (2 << 20) + 1, 1 << 44, u64::MAX][random.usize(..5)];
        }
        if random.u8(..4) == 3 {
            config.tags = [TagScheme::Epoch, TagScheme::Generation, TagScheme::FlushAlways][random.usize(..3)];
            config.tag_limit = [None, Some(1), Some(0), Some(u32::MAX)][random.usize(..4)];
        }
        if random.u8(..4) == 3 {
            config.populate = [Populate::AtStart, Populate::Touch2M, Populate::Touch4K][random.usize(..3)];
            config.hyperv = [HyperV::Off, HyperV::Flush, HyperV::FlushIpi][random.usize(..3)];
        }
        if random.u8(..4) == 3 {
            let pcpus = [None, Some(1), Some(0), Some(u64::MAX)][random.usize(..4)];
            config.share =
                CpuShare { weight: random.u32(..), cap_percent: [None, Some(0), Some(50)][random.usize(..3)], pcpus };
        }
        if random.u8(..4) == 3 {
            let files = [
                File::Blob(Blob { offset: u64::MAX, bytes: KERNEL_BYTES as u64 }),
                File::Blob(Blob { offset: 0, bytes: 0 }),
                File::Blob(Blob { offset: 0, bytes: u64::MAX }),
                File::Module("kernel".into()),
            ];
            config.initrd = random.choice(&files).cloned();
            if random.bool() {
                config.kernel = random.choice(&files).cloned().unwrap_or(config.kernel);
            }
        }
        config
    }

    fn how(&mut self) -> DirtyLogging {
        DirtyLogging {
            split: [Split::Lazy, Split::Eager, Split::Adaptive][self.random.usize(..3)],
            source: [Some(DirtySource::WriteProtect), Some(DirtySource::Hardware), None][self.random.usize(..3)],
            splits_per_second: [None, Some(1), Some(u32::MAX)][self.random.usize(..3)],
        }
    }

    /// An address in a VM's memory, or somewhere else.
    fn gpa(&mut self) -> u64 {
        match self.random.u8(..4) {
            3 => u64::MAX - self.random.u64(..0x20_0000),
            2 => self.random.u64(..0x40_0000),
            _ => self.random.u64(..8) * PAGE_BYTES,
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let count = [1, KERNEL_BYTES, 0, 4096, MEMORY_CHUNK][self.random.usize(..5)];
        vec![self.random.u8(..); count]
    }

    fn command(&mut self) -> Command {
        let vm = self.number();
        match self.random.u8(..32) {
            0 => Command::Hello,
            1 => Command::List { first: vm },
            2 => Command::Resources,
            3 => Command::CreateBegin { config: self.config() },
            4 => {
                let part = [Part::Kernel, Part::Initrd][self.random.usize(..2)];
                let offset = [0, KERNEL_BYTES as u64, u64::MAX][self.random.usize(..3)];
                Command::CreateData { upload: vm, part, offset, bytes: self.bytes() }
            }
            5 => Command::CreateFinish { upload: vm },
            6 => Command::CreateAbort { upload: vm },
            7 => Command::Save { vm },
            8 => Command::SaveState { save: self.save, offset: [0, 4096, u64::MAX][self.random.usize(..3)] },
            9 => Command::SaveUsed { save: self.save, gpa: self.gpa() },
            10 => {
                let bytes = [4096, 1, u32::MAX][self.random.usize(..3)];
                Command::SaveMemory { save: self.save, gpa: self.gpa(), bytes }
            }
            11 => Command::SaveEnd { save: self.save, stay: self.random.bool() },
            12 => Command::RestoreState { upload: vm, offset: 0, bytes: self.bytes() },
            13 => Command::RestoreMemory { upload: vm, gpa: self.gpa(), bytes: self.bytes() },
            14 => Command::RestoreFinish { upload: vm },
            15 => Command::RestoreAbort { upload: vm },
            16 => Command::Start { vm },
            17 => Command::Destroy { vm },
            18 => Command::Stop { vm },
            19 => Command::Stats { vm, first: [0, 1, u32::MAX][self.random.usize(..3)] },
            20 => {
                let line = [Line::Console, Line::Agent][self.random.usize(..2)];
                Command::Input { vm, line, bytes: self.bytes() }
            }
            21 => Command::Layout { kind: self.random.u32(..8) },
            22 => Command::Places { first: [0, 100, u32::MAX][self.random.usize(..3)] },
            23 => Command::Pause { vm },
            24 => Command::Resume { vm },
            25 => Command::Write { vm, gpa: self.gpa(), bytes: self.bytes() },
            26 => Command::DirtyStart { vm, how: Some(self.how()), mirror: self.random.bool() },
            27 => Command::DirtyRound { vm, lose: self.random.bool() },
            28 => Command::DirtyInfo { vm },
            29 => Command::DirtyCompare { vm },
            30 => Command::DirtyStop { vm },
            _ => match self.random.u8(..4) {
                0 => Command::TraceStart,
                1 => Command::TraceStop,
                2 => Command::Exhaust { first: self.random.u64(..), count: self.random.u64(..) },
                _ => Command::TraceRead { pcpu: [0, 1, u32::MAX][self.random.usize(..3)] },
            },
        }
    }

    fn step(&mut self) {
        match self.random.u8(..16) {
            0 => self.create(),
            1 => self.restore(),
            2 => {
                // The whole state of a VM that is being saved.
                let (save, all) = (self.save, self.state_bytes);
                let known = self.saved.as_ref().map_or(0, |(_, state)| state.len() as u64);
                if known < all {
                    let _ = self.ask(Command::SaveState { save, offset: known });
                }
            }
            3 => {
                // Nobody says anything for a long time. No vCPU runs then: it would owe the others all of it.
                self.settle();
                for vm in self.numbers.clone() {
                    let _ = self.ask(Command::Destroy { vm });
                }
                machine().pass(LONG);
                let _ = self.ask(Command::Hello);
            }
            4 => self.settle(),
            number => {
                let command = self.command();
                let id = self.send(command);
                if number & 1 == 0 {
                    let _ = self.take(id);
                }
            }
        }
    }

    /// Waits for all answers.
    fn settle(&mut self) {
        while let Some((id, _)) = self.open.first_key_value().map(|(id, command)| (*id, command.clone())) {
            let _ = self.take(id);
        }
    }

    /// The steps of `dunlin create` and `dunlin start`.
    fn create(&mut self) {
        let config = self.config();
        let Some(Answer::Upload(upload)) = self.ask(Command::CreateBegin { config }) else { return };
        let bytes = vec![0; KERNEL_BYTES];
        let _ = self.ask(Command::CreateData { upload, part: Part::Kernel, offset: 0, bytes });
        if let Some(Answer::Created { vm }) = self.ask(Command::CreateFinish { upload }) {
            let _ = self.ask(Command::Start { vm });
        }
    }

    /// The steps of `dunlin restore`, with a state that may have changed.
    fn restore(&mut self) {
        let Some((config, mut state)) = self.saved.clone() else { return };
        for _ in 0..self.random.u8(..4) {
            let at = self.random.usize(..=state.len());
            match self.random.u8(..4) {
                0 => state.truncate(at),
                1 => state.insert(at, self.random.u8(..)),
                _ if at < state.len() => state[at] = self.random.u8(..),
                _ => {}
            }
        }
        let begin = Command::RestoreBegin { config, state_bytes: state.len() as u64 };
        let Some(Answer::Upload(upload)) = self.ask(begin) else { return };
        let answer = self.ask(Command::RestoreState { upload, offset: 0, bytes: state });
        if answer == Some(Answer::Done) && self.random.bool() {
            let _ = self.ask(Command::RestoreFinish { upload });
        }
    }
}

/// Whether an answer is of the kind that the protocol has for the command.
fn fits(command: &Command, answer: &Answer) -> bool {
    match command {
        Command::Hello => matches!(answer, Answer::Host(_)),
        Command::List { .. } => matches!(answer, Answer::Vms(_)),
        Command::Resources => matches!(answer, Answer::Resources(_)),
        Command::CreateBegin { .. } => matches!(answer, Answer::Upload(_)),
        Command::RestoreBegin { .. } => matches!(answer, Answer::Upload(_) | Answer::NotCreated { .. }),
        Command::CreateFinish { .. } => matches!(answer, Answer::Created { .. } | Answer::NotCreated { .. }),
        Command::RestoreState { .. } => matches!(answer, Answer::Done | Answer::NotCreated { .. }),
        Command::RestoreFinish { .. } => matches!(answer, Answer::Created { .. }),
        Command::Save { .. } => matches!(answer, Answer::Saving(_) | Answer::NotSaved { .. }),
        Command::SaveState { .. } | Command::SaveMemory { .. } => matches!(answer, Answer::Bytes(_)),
        Command::SaveUsed { .. } => matches!(answer, Answer::Used(_)),
        Command::Stats { .. } => matches!(answer, Answer::Stats { .. }),
        Command::Input { .. } => matches!(answer, Answer::Accepted(_)),
        Command::Layout { .. } => matches!(answer, Answer::Layout(_)),
        Command::Places { .. } => matches!(answer, Answer::Places(_)),
        Command::DirtyRound { .. } => matches!(answer, Answer::Round(_)),
        Command::DirtyInfo { .. } => matches!(answer, Answer::Dirty(_)),
        Command::DirtyCompare { .. } => matches!(answer, Answer::Compared(_)),
        Command::TraceRead { .. } => matches!(answer, Answer::Events(_)),
        Command::Exhaust { .. } => matches!(answer, Answer::Taken(_)),
        _ => *answer == Answer::Done,
    }
}

/// Returns how many commands had an effect.
fn commands(simulation: &Simulation, random: Decisions, steps: usize) -> u64 {
    table::init();
    prepare(&NAMES.map(sent));
    let more = || vec![Op::Timer(5_000), Op::Halt, Op::Jump(0)];
    for name in NAMES {
        simulation.load(name, busy().into_iter().chain([more(), more()]).collect::<Vec<_>>());
    }
    let tool = Tool::connect(simulation);
    let (open, numbers) = (BTreeMap::new(), Vec::new());
    let mut fuzz = Fuzz { tool, random, open, numbers, saved: None, save: 0, state_bytes: 0, done: 0 };
    for _ in 0..steps {
        if fuzz.random.are_over() {
            break;
        }
        fuzz.step();
    }

    let _ = fuzz.ask(Command::TraceStop);
    fuzz.settle();
    for number in fuzz.numbers.clone() {
        for command in [
            Command::CreateAbort { upload: number },
            Command::RestoreAbort { upload: number },
            Command::Destroy { vm: number },
        ] {
            let _ = fuzz.ask(command);
        }
        let events = format!("{:?}", fuzz.tool.events_of(number));
        for once in ["Created {", "Started", "Stopped {", "Destroyed"] {
            assert!(events.matches(once).count() <= 1, "VM {number}: {events}");
        }
    }
    simulation.wait_until("no VM is left", || {
        while crate::control::poll() {}
        table::table().len() == 0
    });
    assert_eq!(tags::usage()[1], 0, "tags of VMs that are gone");
    fuzz.done
}

#[test]
fn random_commands_are_answered_once_each_and_leave_nothing_behind() {
    let _no_mistakes = beside_others();
    for seed in 0..20 {
        run(2, |simulation| {
            let done = commands(simulation, Decisions::of_seed(seed), 300);
            assert!(done > 50, "seed {seed}: {done} commands had an effect");
        });
    }
}

/// The fuzzer decides about the commands. Its findings need not come again, because vCPUs run on other threads.
#[test]
fn commands_that_a_fuzzer_sends_are_answered_once_each_and_leave_nothing_behind() {
    fuzz::slow_target("commands", |bytes| {
        let _no_mistakes = beside_others();
        let decisions = Decisions::of_bytes(bytes);
        run(1, |simulation| {
            commands(simulation, decisions, usize::MAX);
        });
    });
}
