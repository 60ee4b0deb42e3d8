//! A naive processor, bare and under a hypervisor: the same program takes the same events at the same places.
//!
//! The processor has twelve instructions, all about events. The bare one takes events as in the manuals. The other one
//! runs in a guest: it enters and exits, takes injected events, and exits for intercepts. The hypervisor around it is
//! [`Events`] and [`Step`] with the code that any hypervisor needs. Host interrupts, failing deliveries and an entry
//! that drops the interrupt shadow (QEMU's) come at random.

use fastrand::Rng;
use x86_defs::registers::{dr6, rflags, vector};
use x86_events::{Boundary, Debug, Event, Events, Exception, Flags, Step, Until};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Nop,
    Sti,
    Cli,
    MovSs,
    Popf {
        interrupts: bool,
        trap: bool,
    },
    Pushf,
    Int,
    Iret,
    Hlt,
    /// An invalid instruction. Its handler returns behind it.
    Ud,
    /// An instruction that always exits, and that the hypervisor emulates.
    Cpuid,
}

const SOFTWARE: u8 = 0x33;
const INTERRUPTS: [u8; 2] = [0x40, 0x80];
const VECTORS: [u8; 6] = [vector::DEBUG, vector::NMI, vector::INVALID_OPCODE, SOFTWARE, INTERRUPTS[0], INTERRUPTS[1]];
const MAIN: usize = 24;
const HANDLER: usize = 5;
const MOST_INSTRUCTIONS: u32 = 160;
const DEEPEST: usize = 40;
const MOST_ENTRIES: u32 = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Nmi,
    Interrupt(u8),
}

/// A program, and the events that arrive after given numbers of instructions.
#[derive(Clone, Debug)]
struct Scenario {
    code: Vec<Op>,
    arrivals: Vec<(u32, Arrival)>,
    /// INT uses a trap gate, which does not change IF.
    trap_gate: bool,
}

/// The visible events of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Delivered { vector: u8, at: usize, interrupts: bool, trap: bool, single_step: bool },
    Pushed { interrupts: bool, trap: bool },
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    pc: usize,
    interrupts: bool,
    trap: bool,
}

#[derive(Clone, Debug)]
struct Cpu<'a> {
    scenario: &'a Scenario,
    is_qemu: bool,
    pc: usize,
    interrupts: bool,
    trap: bool,
    shadow: bool,
    halted: bool,
    /// The last instruction was executed with TF set.
    trap_due: bool,
    dr6: u64,
    stack: Vec<Frame>,
    executed: u32,
    next_arrival: usize,
    log: Vec<Seen>,
}

impl<'a> Cpu<'a> {
    fn new(scenario: &'a Scenario, hardware: Hardware) -> Self {
        Self {
            scenario,
            is_qemu: hardware.loses_shadow,
            pc: 0,
            interrupts: false,
            trap: false,
            shadow: false,
            halted: false,
            trap_due: false,
            dr6: 0xffff_0ff0,
            stack: Vec::new(),
            executed: 0,
            next_arrival: 0,
            log: Vec::new(),
        }
    }

    fn arrivals(&mut self) -> Vec<Arrival> {
        let due = self.scenario.arrivals[self.next_arrival..].iter().take_while(|(at, _)| *at <= self.executed);
        let due: Vec<_> = due.map(|&(_, what)| what).collect();
        self.next_arrival += due.len();
        due
    }

    /// Halted with nothing to wake it: time jumps to the next arrival. Returns whether there is one.
    fn sleep(&mut self) -> bool {
        let Some(&(at, _)) = self.scenario.arrivals.get(self.next_arrival) else { return false };
        self.executed = self.executed.max(at);
        true
    }

    fn is_done(&self) -> bool {
        self.pc == MAIN || self.executed >= MOST_INSTRUCTIONS || self.stack.len() >= DEEPEST
    }

    fn deliver(&mut self, vector: u8, return_to: usize) {
        let single_step = self.dr6 & dr6::SINGLE_STEP != 0;
        if vector == vector::DEBUG {
            // As a handler does.
            self.dr6 &= !dr6::SINGLE_STEP;
        }
        let (interrupts, trap) = (self.interrupts, self.trap);
        self.log.push(Seen::Delivered { vector, at: return_to, interrupts, trap, single_step });
        self.stack.push(Frame { pc: return_to, interrupts, trap });
        self.interrupts &= vector == SOFTWARE && self.scenario.trap_gate;
        (self.trap, self.shadow, self.halted) = (false, false, false);
        let index = VECTORS.iter().position(|&known| known == vector).expect("a vector of the model");
        self.pc = MAIN + 1 + index * HANDLER;
    }

    /// The next instruction. An IRET with nothing to return from does nothing.
    fn op(&self) -> Op {
        match self.scenario.code[self.pc] {
            Op::Iret if self.stack.is_empty() => Op::Nop,
            op => op,
        }
    }

    /// TF in the flags that the last PUSHF has saved.
    fn clear_saved_trap_flag(&mut self) {
        if let Some(Seen::Pushed { trap, .. }) = self.log.last_mut() {
            *trap = false;
        }
    }

    /// Executes one instruction. Returns whether it was an IRET.
    fn execute(&mut self) -> bool {
        let op = self.op();
        let had_trap = self.trap;
        self.executed += 1;
        // Of several shadows in a row only the first is sure to hold (APM vol. 3, STI and MOV). MOV SS renews it, but
        // not in QEMU, where it does not delay a trap either.
        let was_in_shadow = std::mem::take(&mut self.shadow);
        match op {
            Op::Int => {
                self.deliver(SOFTWARE, self.pc + 1);
                return false;
            }
            Op::Ud => {
                self.deliver(vector::INVALID_OPCODE, self.pc + 1);
                return false;
            }
            Op::Sti => {
                self.shadow = !self.interrupts && !was_in_shadow;
                self.interrupts = true;
            }
            Op::Cli => self.interrupts = false,
            Op::MovSs => self.shadow = !(was_in_shadow && self.is_qemu),
            Op::Popf { interrupts, trap } => (self.interrupts, self.trap) = (interrupts, trap),
            Op::Pushf => self.log.push(Seen::Pushed { interrupts: self.interrupts, trap: self.trap }),
            Op::Hlt => self.halted = true,
            Op::Nop | Op::Cpuid | Op::Iret => {}
        }
        match (op, self.stack.last().copied()) {
            (Op::Iret, Some(Frame { pc, interrupts, trap })) => {
                self.stack.pop();
                (self.pc, self.interrupts, self.trap) = (pc, interrupts, trap);
            }
            _ => self.pc += 1,
        }
        self.trap_due = had_trap && (op != Op::MovSs || self.is_qemu);
        if self.trap_due {
            self.dr6 |= dr6::SINGLE_STEP;
        }
        op == Op::Iret
    }
}

/// The processor without a hypervisor (APM vol. 2, 8.5).
fn bare(scenario: &Scenario, hardware: Hardware) -> Vec<Seen> {
    let mut cpu = Cpu::new(scenario, hardware);
    let (mut latched, mut masked, mut pending) = (0u8, false, Vec::<u8>::new());
    loop {
        for arrival in cpu.arrivals() {
            match arrival {
                Arrival::Nmi => latched = (latched + 1).min(if masked { 1 } else { 2 }),
                Arrival::Interrupt(vector) if pending.contains(&vector) => {}
                Arrival::Interrupt(vector) => pending.push(vector),
            }
        }
        if std::mem::take(&mut cpu.trap_due) {
            cpu.deliver(vector::DEBUG, cpu.pc);
        } else if latched > 0 && !masked && !cpu.shadow {
            (latched, masked) = (latched - 1, true);
            cpu.deliver(vector::NMI, cpu.pc);
        } else if let Some(&vector) = pending.iter().max().filter(|_| cpu.interrupts && !cpu.shadow) {
            pending.retain(|&other| other != vector);
            cpu.deliver(vector, cpu.pc);
        } else if cpu.halted {
            if !cpu.sleep() {
                return cpu.log;
            }
        } else if cpu.is_done() {
            return cpu.log;
        } else if cpu.execute() {
            masked = false;
        }
    }
}

/// Why the guest exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    HostInterrupt,
    Window,
    Debug,
    InvalidOpcode,
    /// A fault that the hypervisor resolves: the instruction, or the delivery of an event, is retried.
    Stage2Fault,
    Iret,
    Popf,
    Pushf,
    Int,
    Halt,
    Cpuid,
    Done,
}

/// Properties of the hardware below the hypervisor.
#[derive(Clone, Copy, Debug)]
struct Hardware {
    /// An entry drops the interrupt shadow (QEMU before 9).
    loses_shadow: bool,
    /// One boundary in this many has a host interrupt.
    interrupts: u64,
    /// One delivery or execution in this many causes a stage-2 fault.
    faults: u64,
    /// INT sometimes exits although no step is active.
    looks_at_int: bool,
}

/// Possible mistakes of a hypervisor; the test must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// The mask of NMIs ends at IRET, not when it has completed.
    UnmaskAtIret,
    /// An interrupt shadow that the hardware drops is not kept.
    ForgetShadow,
    /// No exit after an injected event, although an NMI is pending.
    NoExitBehindEvent,
    /// POPF and IRET are single-stepped like other instructions.
    FlagsAreKept,
    /// The hypervisor's TF stays in the flags that PUSHF has saved.
    ShowTrapFlag,
    /// An interrupted INT is dropped.
    DropInterrupted,
    /// The processor executes INT in a shadow, and first takes pending events.
    LetIntRun,
    /// BS stays in DR6 after a step by the hypervisor.
    KeepSingleStep,
}

struct Virtual<'a> {
    cpu: Cpu<'a>,
    hardware: Hardware,
    mistake: Mistake,
    random: Rng,
    events: Events,
    pending: Vec<u8>,
    interrupted: Option<Event>,
    step: Option<(Step, bool)>,
    flags: Flags,
    window: bool,
    host_interrupt: bool,
}

impl Virtual<'_> {
    fn run(mut self) -> Vec<Seen> {
        for _ in 0..MOST_ENTRIES {
            for arrival in self.cpu.arrivals() {
                self.post(arrival);
            }
            let pending = self.pending.iter().max().copied();
            if self.cpu.halted {
                let takes = self.cpu.interrupts && !self.cpu.shadow && pending.is_some();
                if self.events.wakes() || takes {
                    self.cpu.halted = false;
                } else if self.cpu.sleep() {
                    continue;
                } else {
                    return self.cpu.log;
                }
            }
            let event = self.prepare(pending);
            let exit = self.enter(event);
            if exit == Exit::Done {
                return self.cpu.log;
            }
            self.handle(exit);
        }
        // Endless loop.
        Vec::new()
    }

    fn post(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Nmi => self.events.request_nmis(1),
            Arrival::Interrupt(vector) if self.pending.contains(&vector) => {}
            Arrival::Interrupt(vector) => self.pending.push(vector),
        }
    }

    fn prepare(&mut self, pending: Option<u8>) -> Option<Event> {
        let mut interrupted = self.interrupted.take();
        if self.mistake == Mistake::DropInterrupted && matches!(interrupted, Some(Event::Interrupt(_))) {
            interrupted = None;
        }
        let at = Boundary { interrupts_enabled: self.cpu.interrupts, shadow: self.cpu.shadow };
        let plan = self.events.next(at, pending, interrupted);
        if let Some(vector) = plan.retract {
            self.pending.push(vector);
        }
        if interrupted.is_none()
            && let Some(Event::Interrupt(vector)) = plan.inject
        {
            self.pending.retain(|&other| other != vector);
        }
        if plan.inject.is_some() {
            self.cpu.shadow = false;
        }
        // This model's interrupt controller has no EOI: another interrupt may be due at once.
        let another = matches!(plan.inject, Some(Event::Interrupt(_))) && !self.pending.is_empty();
        self.window = plan.until == Until::Window || another;
        self.host_interrupt = plan.until == Until::Delivered && self.mistake != Mistake::NoExitBehindEvent;
        self.step = None;
        if plan.until == Until::Step {
            if self.events.is_returning() {
                self.flags = Flags::Loaded;
            }
            let flags = if self.mistake == Mistake::FlagsAreKept { Flags::Kept } else { self.flags };
            let mut guest = self.debug();
            let step = Step::begin(self.cpu.pc as u64, &mut guest, flags);
            self.set_debug(guest);
            self.step = Some((step, self.cpu.shadow));
        }
        plan.inject
    }

    fn debug(&self) -> Debug {
        Debug { rflags: if self.cpu.trap { rflags::TF } else { 0 }, dr6: self.cpu.dr6, dr7: 0x400 }
    }

    fn set_debug(&mut self, debug: Debug) {
        (self.cpu.trap, self.cpu.dr6) = (debug.rflags & rflags::TF != 0, debug.dr6);
    }

    /// VMRUN, until the guest exits.
    fn enter(&mut self, event: Option<Event>) -> Exit {
        if self.hardware.loses_shadow {
            self.cpu.shadow = false;
        }
        if let Some(event) = event {
            if one_in(&mut self.random, self.hardware.faults) {
                self.interrupted = Some(event);
                return Exit::Stage2Fault;
            }
            match event {
                Event::Interrupt(vector) | Event::SoftwareInterrupt(vector) => self.cpu.deliver(vector, self.cpu.pc),
                Event::Nmi => self.cpu.deliver(vector::NMI, self.cpu.pc),
                Event::Exception(Exception { vector, .. }) => {
                    let behind = usize::from(vector == vector::INVALID_OPCODE);
                    self.cpu.deliver(vector, self.cpu.pc + behind);
                }
            }
        }
        loop {
            if std::mem::take(&mut self.cpu.trap_due) {
                return Exit::Debug;
            }
            for arrival in self.cpu.arrivals() {
                // A poster kicks.
                self.post(arrival);
                self.host_interrupt = true;
            }
            if std::mem::take(&mut self.host_interrupt) || one_in(&mut self.random, self.hardware.interrupts) {
                return Exit::HostInterrupt;
            }
            if self.window && self.cpu.interrupts && !self.cpu.shadow {
                return Exit::Window;
            }
            if self.cpu.is_done() {
                return Exit::Done;
            }
            if let Some(exit) = self.intercept() {
                return exit;
            }
            self.cpu.execute();
        }
    }

    fn intercept(&mut self) -> Option<Exit> {
        let looks = self.step.is_some() && self.flags == Flags::Kept;
        match self.cpu.op() {
            Op::Hlt => Some(Exit::Halt),
            Op::Cpuid => Some(Exit::Cpuid),
            Op::Iret if looks || (self.events.masks_nmis() && !self.events.is_returning()) => Some(Exit::Iret),
            Op::Popf { .. } if looks => Some(Exit::Popf),
            Op::Pushf if looks => Some(Exit::Pushf),
            Op::Int if self.step.is_some() => Some(Exit::Int),
            Op::Int if self.hardware.looks_at_int && one_in(&mut self.random, 3) => Some(Exit::Int),
            Op::Int if one_in(&mut self.random, self.hardware.faults) => {
                self.interrupted = Some(Event::SoftwareInterrupt(SOFTWARE));
                Some(Exit::Stage2Fault)
            }
            Op::Ud if self.step.is_some() => Some(Exit::InvalidOpcode),
            _ if one_in(&mut self.random, self.hardware.faults) => Some(Exit::Stage2Fault),
            _ => None,
        }
    }

    fn handle(&mut self, exit: Exit) {
        let step = self.step.take();
        let mut guest = self.debug();
        match step {
            Some((step, shadow)) if exit == Exit::Debug => {
                let (completed, guests) = step.end_by_debug(&mut guest);
                if completed {
                    self.events.stepped();
                    // Of several shadows in a row only the first holds.
                    self.cpu.shadow &= !shadow;
                    if step.has_saved_trap_flag() && self.mistake != Mistake::ShowTrapFlag {
                        self.cpu.clear_saved_trap_flag();
                    }
                }
                if self.mistake == Mistake::KeepSingleStep {
                    guest.dr6 |= dr6::SINGLE_STEP;
                }
                if guests {
                    self.events.raise(Exception::new(vector::DEBUG));
                }
            }
            Some((step, shadow)) => {
                step.end(&mut guest);
                if step.rip() == self.cpu.pc as u64 {
                    self.cpu.shadow |= shadow;
                }
            }
            None if exit == Exit::Debug => self.events.raise(Exception::new(vector::DEBUG)),
            None => {}
        }
        self.set_debug(guest);
        self.flags = Flags::Kept;

        match exit {
            Exit::HostInterrupt | Exit::Stage2Fault | Exit::Window | Exit::Debug | Exit::Done => {}
            Exit::InvalidOpcode => {
                self.events.abandon_step();
                self.events.raise(Exception::new(vector::INVALID_OPCODE));
                // It is not executed again: the model's handler returns behind it.
                self.cpu.executed += 1;
                return;
            }
            Exit::Iret => {
                self.events.at_iret();
                if self.mistake == Mistake::UnmaskAtIret {
                    self.events.stepped();
                    return;
                }
                self.flags = Flags::Loaded;
            }
            Exit::Popf => self.flags = Flags::Loaded,
            Exit::Pushf => self.flags = Flags::Saved,
            Exit::Int if self.cpu.shadow && self.mistake != Mistake::LetIntRun => {
                self.events.abandon_step();
                self.cpu.pc += 1;
                self.cpu.executed += 1;
                self.events.raise_software_interrupt(SOFTWARE);
                return;
            }
            Exit::Int => {
                if self.mistake == Mistake::LetIntRun {
                    self.cpu.shadow = false;
                    self.events.abandon_step();
                }
            }
            Exit::Halt | Exit::Cpuid => {
                self.cpu.halted = exit == Exit::Halt;
                self.skip();
                return;
            }
        }
        if self.cpu.shadow && self.hardware.loses_shadow && self.mistake != Mistake::ForgetShadow {
            self.events.keep_shadow();
        }
    }

    /// The instruction at PC was emulated.
    fn skip(&mut self) {
        self.cpu.pc += 1;
        self.cpu.executed += 1;
        self.cpu.shadow = false;
        self.events.abandon_step();
        if self.cpu.trap {
            self.cpu.dr6 |= dr6::SINGLE_STEP;
            self.events.raise(Exception::new(vector::DEBUG));
        }
    }
}

/// Never, when `count` is 0.
fn one_in(random: &mut Rng, count: u64) -> bool {
    count != 0 && random.u64(..count) == 0
}

fn scenario(random: &mut Rng) -> Scenario {
    let mut op = |in_handler: bool| match random.u32(..if in_handler { 21 } else { 18 }) {
        0..=2 => Op::Sti,
        3 => Op::Cli,
        4 | 5 => Op::MovSs,
        6 => Op::Popf { interrupts: one_in(random, 2), trap: one_in(random, 2) },
        7..=9 => Op::Int,
        10 => Op::Hlt,
        11 => Op::Ud,
        12 | 13 => Op::Cpuid,
        14 => Op::Iret,
        15 => Op::Pushf,
        _ => Op::Nop,
    };
    let mut code: Vec<Op> = (0..MAIN).map(|_| op(false)).collect();
    code.push(Op::Nop);
    for _ in VECTORS {
        code.extend((1..HANDLER).map(|_| op(true)));
        code.push(Op::Iret);
    }
    let mut arrivals: Vec<_> = (0..random.usize(..8))
        .map(|_| {
            let what = match random.usize(..5) {
                0..=2 => Arrival::Nmi,
                _ => Arrival::Interrupt(INTERRUPTS[random.usize(..2)]),
            };
            (random.u32(..40), what)
        })
        .collect();
    arrivals.sort_by_key(|&(at, _)| at);
    Scenario { code, arrivals, trap_gate: one_in(random, 2) }
}

fn hardware(random: &mut Rng) -> Hardware {
    Hardware {
        loses_shadow: one_in(random, 2),
        interrupts: [0, 2, 5, 20][random.usize(..4)],
        faults: [0, 4, 16][random.usize(..3)],
        looks_at_int: one_in(random, 2),
    }
}

/// Runs one scenario both ways. Returns the difference.
fn compare(seed: u64, mistake: Mistake) -> Result<usize, String> {
    let mut random = Rng::with_seed(seed);
    let scenario = scenario(&mut random);
    let hardware = hardware(&mut random);
    let wanted = bare(&scenario, hardware);
    let seen = Virtual {
        cpu: Cpu::new(&scenario, hardware),
        hardware,
        mistake,
        random,
        events: Events::new(),
        pending: Vec::new(),
        interrupted: None,
        step: None,
        flags: Flags::Kept,
        window: false,
        host_interrupt: false,
    }
    .run();
    if seen == wanted {
        return Ok(wanted.len());
    }
    let first = seen.iter().zip(&wanted).take_while(|(seen, wanted)| seen == wanted).count();
    Err(format!(
        "seed {seed}, {hardware:?}, event {first}: bare {:?}, guest {:?}\n{scenario:?}\n{wanted:?}\n{seen:?}",
        wanted.get(first),
        seen.get(first)
    ))
}

/// `DUNLIN_SCHEDULES` sets more.
fn schedules() -> u64 {
    std::env::var("DUNLIN_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(20_000)
}

#[test]
fn guest_takes_the_events_that_a_bare_processor_takes_in_the_same_order_and_places() {
    let mut events = 0;
    for seed in 1..=schedules() {
        events += compare(seed, Mistake::None).unwrap_or_else(|difference| panic!("{difference}"));
    }
    assert!(events as u64 > schedules(), "hardly anything happened: {events} events");
}

#[test]
fn each_planted_mistake_is_found() {
    let mistakes = [
        Mistake::UnmaskAtIret,
        Mistake::ForgetShadow,
        Mistake::NoExitBehindEvent,
        Mistake::FlagsAreKept,
        Mistake::ShowTrapFlag,
        Mistake::DropInterrupted,
        Mistake::LetIntRun,
        Mistake::KeepSingleStep,
    ];
    for mistake in mistakes {
        let found = (1..=20_000).find(|&seed| compare(seed, mistake).is_err());
        assert!(found.is_some(), "{mistake:?} was not found");
    }
}
