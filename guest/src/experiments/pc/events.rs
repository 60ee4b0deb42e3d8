//! All combinations of interrupts, NMIs, debug traps, shadows and IRETs: which events arrive, where, and with which
//! saved flags.
//!
//! Each case is a short piece of code. It sends something to this CPU while interrupts are off. Then it executes STI or
//! MOV SS or both, one of twenty instructions, and some NOPs. It runs with and without TF, and also within the handler
//! of an NMI, where further NMIs wait. One line for each case lists the events. This experiment judges nothing: the
//! same cases on a machine without a hypervisor give the reference.

use core::fmt;

use crate::arch::apic::{self, Place};
use crate::arch::code_pages;
use crate::arch::event_log::{self, Code, TRAP_GATE};
use crate::experiments::{Context, Outcome};
use crate::record::record;

const LOW: u8 = 0x40;
const HIGH: u8 = 0x80;
const SOFTWARE: u8 = 0x33;
const DATA: u8 = 0x10;
const CODE: u8 = 0x08;

const IF: u32 = 0x202;
const NO_IF: u32 = 0x002;
const IF_TF: u32 = 0x302;

/// What a case sends, in this order; `None` is an NMI.
const SENT: [(&str, &[Option<u8>]); 6] = [
    ("nothing", &[]),
    ("int", &[Some(LOW)]),
    ("two-ints", &[Some(LOW), Some(HIGH)]),
    ("nmi", &[None]),
    ("nmi-int", &[None, Some(LOW)]),
    ("two-nmis", &[None, None]),
];

/// What precedes the instruction.
const BEFORE: [(&str, &[&[u8]]); 6] = [
    ("none", &[]),
    ("sti", &[STI]),
    ("mov-ss", &[MOV_SS]),
    ("sti,mov-ss", &[STI, MOV_SS]),
    ("mov-ss,sti", &[MOV_SS, STI]),
    ("sti,nop", &[STI, NOP]),
];

const STI: &[u8] = &[0xfb];
const MOV_SS: &[u8] = &[0x41, 0x8e, 0xd0];
const NOP: &[u8] = &[0x90];
const CLI: &[u8] = &[0xfa];
const PUSHF: &[u8] = &[0x9c];
const POPF: &[u8] = &[0x9d];
const IRET: &[u8] = &[0x48, 0xcf];
const HLT: &[u8] = &[0xf4];
const POP_RAX: &[u8] = &[0x58];
/// `or dword ptr [rsp], TF` and `and dword ptr [rsp], !TF`.
const OR_TF: &[u8] = &[0x81, 0x0c, 0x24, 0x00, 0x01, 0x00, 0x00];
const AND_NOT_TF: &[u8] = &[0x81, 0x24, 0x24, 0xff, 0xfe, 0xff, 0xff];
const JUMP_TO_NEXT: &[u8] = &[0xeb, 0x00];

/// The instruction of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Plain(&'static [u8]),
    /// The record shows what it pushes.
    Pushf,
    Popf(u32),
    /// To the next instruction, with these flags.
    Iret(u32),
    /// Only where something wakes it.
    Hlt,
    /// A read of the local APIC.
    ApicRead,
}

const OPS: [(&str, Op); 21] = [
    ("nop", Op::Plain(NOP)),
    ("int33", Op::Plain(&[0xcd, SOFTWARE])),
    ("int34-trap-gate", Op::Plain(&[0xcd, TRAP_GATE])),
    ("int3", Op::Plain(&[0xcc])),
    ("ud2", Op::Plain(&[0x0f, 0x0b])),
    // By ESI, which is zero.
    ("div0", Op::Plain(&[0xf7, 0xf6])),
    // Through R9, which is not canonical.
    ("gp", Op::Plain(&[0x49, 0x8b, 0x01])),
    ("cpuid", Op::Plain(&[0x0f, 0xa2])),
    ("rdmsr", Op::Plain(&[0x0f, 0x32])),
    ("apic-read", Op::ApicRead),
    ("pause", Op::Plain(&[0xf3, 0x90])),
    ("cli", Op::Plain(CLI)),
    ("sti", Op::Plain(STI)),
    ("mov-ss", Op::Plain(MOV_SS)),
    ("hlt", Op::Hlt),
    ("pushf", Op::Pushf),
    ("popf-if", Op::Popf(IF)),
    ("popf-no-if", Op::Popf(NO_IF)),
    ("popf-if-tf", Op::Popf(IF_TF)),
    ("iret-if", Op::Iret(IF)),
    ("iret-if-tf", Op::Iret(IF_TF)),
];

const APIC_BASE: u32 = 0x1b;
const X2APIC_VERSION: u32 = 0x803;

pub(super) fn run(_: &Context) -> Outcome {
    let mut cases = 0u64;
    for within_nmi in [false, true] {
        for trap in [false, true] {
            for (sent_name, sent) in SENT {
                for (before_name, before) in BEFORE {
                    for (op_name, op) in OPS {
                        // HLT needs an interrupt that arrives during it. With TF set, QEMU from version
                        // 10 on takes the trap between STI and HLT, and the interrupt when its handler has returned.
                        let wakes = sent.iter().any(Option::is_some) && before == [STI] && !trap;
                        if op == Op::Hlt && !wakes {
                            continue;
                        }
                        let (result, count) = run_case(within_nmi, trap, sent, before, op);
                        let pushed = if op == Op::Pushf { result & 0x300 } else { 0 };
                        record!(
                            "event-case",
                            context = if within_nmi { "nmi" } else { "main" },
                            trap = trap,
                            sent = sent_name,
                            before = before_name,
                            op = op_name,
                            pushed = format_args!("{pushed:#x}"),
                            events = Events(count),
                        );
                        cases += 1;
                    }
                }
            }
        }
    }
    record!("record", experiment = "events", cases = cases, apic = apic::name());
    Outcome::Done { failures: 0 }
}

/// Single-steps over instructions that exit. Each step must trap once, as over an instruction that does not exit.
pub(super) fn step_exits(context: &Context) -> Outcome {
    let mut failures = 0;
    let traps = |op| {
        let (_, count) = run_case(false, true, &[], &[], op);
        let noted = (0..count).map(event_log::noted);
        noted.fold((0u64, 0u64), |(count, places), noted| (count + 1, places << 8 | u64::from(noted.place)))
    };
    for _ in 0..context.settings.iterations.unwrap_or(10) {
        let wanted = traps(Op::Plain(NOP));
        for (name, op) in OPS.iter().filter(|(name, _)| ["cpuid", "rdmsr", "apic-read"].contains(name)) {
            let seen = traps(*op);
            failures += context.expect(
                "step-exits",
                format_args!("{name}"),
                format_args!("{}-traps-{:#x}", wanted.0, wanted.1),
                format_args!("{}-traps-{:#x}", seen.0, seen.1),
                seen == wanted && seen.0 > 0,
            );
        }
    }
    Outcome::Done { failures }
}

/// Vector, place and flags of each event: `40@7i` is vector 0x40 before instruction 7 with IF saved; t, r and s are TF,
/// RF and DR6.BS.
struct Events(usize);

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for index in 0..self.0 {
            let noted = event_log::noted(index);
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{:x}@{}", noted.vector, noted.place)?;
            let flags = [(noted.flags[0], "i"), (noted.flags[1], "t"), (noted.flags[2], "r"), (noted.single_step, "s")];
            flags.iter().filter(|(set, _)| *set).try_for_each(|(_, name)| f.write_str(name))?;
        }
        if self.0 == 0 { f.write_str("none") } else { Ok(()) }
    }
}

fn run_case(within_nmi: bool, trap: bool, sent: &[Option<u8>], before: &[&[u8]], op: Op) -> (u64, usize) {
    let mut code = Assembly::new();
    // `mov r8d, DATA` and `mov r9, an address that is not canonical`.
    code.add(&[0x41, 0xb8, DATA, 0, 0, 0]);
    code.add(&[0x49, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0x80]);
    let flags_at = match op {
        Op::Popf(flags) => {
            code.push(flags);
            None
        }
        Op::Iret(flags) => Some(code.push_frame(flags)),
        _ => None,
    };
    for &what in sent {
        code.send(what);
    }
    let ecx = if op == Op::ApicRead && apic::is_x2apic() { X2APIC_VERSION } else { APIC_BASE };
    code.add_word(&[0xb9], ecx);
    if trap {
        for bytes in [PUSHF, OR_TF, POPF] {
            code.instruction(bytes);
        }
    }
    for bytes in before {
        code.instruction(bytes);
    }
    match op {
        Op::Plain(bytes) => code.instruction(bytes),
        Op::Hlt => code.instruction(HLT),
        Op::Popf(_) => code.instruction(POPF),
        Op::Iret(_) => code.instruction(IRET),
        Op::ApicRead if apic::is_x2apic() => code.instruction(&[0x0f, 0x32]),
        // `mov eax, [rdi]`.
        Op::ApicRead => code.instruction(&[0x8b, 0x07]),
        Op::Pushf => {
            code.instruction(PUSHF);
            code.instruction(POP_RAX);
        }
    }
    if let Some(at) = flags_at {
        code.land_here(at);
    }
    for bytes in [NOP, NOP, CLI, PUSHF, AND_NOT_TF, POPF, &[0xc3]] {
        code.instruction(bytes);
    }

    let frame = code_pages::frame(0, 0);
    code_pages::write(frame, 0, &code.bytes[..code.length]);
    let starts = &code.starts[..code.marks];
    event_log::run(&Code { at: frame, starts, rdi: apic::XAPIC_PAGE + apic::VERSION, within_nmi })
}

/// A piece of code in the making.
struct Assembly {
    bytes: [u8; 256],
    length: usize,
    starts: [u16; 40],
    marks: usize,
}

impl Assembly {
    fn new() -> Self {
        let mut code = Self { bytes: [0; 256], length: 0, starts: [0; 40], marks: 0 };
        code.mark();
        code
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.bytes[self.length] = byte;
            self.length += 1;
        }
    }

    fn add_word(&mut self, bytes: &[u8], word: u32) {
        self.add(bytes);
        self.add(&word.to_le_bytes());
    }

    /// An instruction. The record shows an event that arrives before it.
    fn instruction(&mut self, bytes: &[u8]) {
        self.mark();
        self.add(bytes);
    }

    /// Another place begins here.
    fn mark(&mut self) {
        self.starts[self.marks] = u16::try_from(self.length).unwrap_or(u16::MAX);
        self.marks += 1;
    }

    /// `push value`.
    fn push(&mut self, value: u32) {
        self.add_word(&[0x68], value);
    }

    /// Pushes what IRETQ pops. Returns where to write the distance to its target, see [`Self::land_here`].
    fn push_frame(&mut self, flags: u32) -> usize {
        // `mov rax, rsp`; SS, RSP, RFLAGS, CS; `lea rax, [rip + distance]`; RIP.
        self.add(&[0x48, 0x89, 0xe0]);
        self.push(DATA.into());
        self.add(&[0x50]);
        self.push(flags);
        self.push(CODE.into());
        self.add(&[0x48, 0x8d, 0x05]);
        let at = self.length;
        self.add(&[0; 4]);
        self.add(&[0x50]);
        at
    }

    /// The IRET of the frame at `at` returns to the next instruction.
    fn land_here(&mut self, at: usize) {
        let distance = u32::try_from(self.length - at - 4).unwrap_or_default();
        for (byte, value) in self.bytes[at..].iter_mut().zip(distance.to_le_bytes()) {
            *byte = value;
        }
    }

    /// Sends an interrupt or an NMI to this CPU. It may arrive at any time from the next place on. (An emulator that
    /// does not check for interrupts after each instruction checks at the jump.)
    fn send(&mut self, vector: Option<u8>) {
        let (high, low) = apic::command_to_self(vector);
        match apic::command_place() {
            Place::Msr(number) => {
                self.add_word(&[0xb9], number);
                self.add_word(&[0xba], high);
                self.add_word(&[0xb8], low);
                self.add(&[0x0f, 0x30]);
            }
            Place::Memory(address) => {
                let [address_low, address_high] = [address, address + 0x10].map(|at| (at & 0xffff_ffff) as u32);
                for (at, value) in [(address_high, high), (address_low, low)] {
                    // `mov edx, address` and `mov dword ptr [rdx], value`.
                    self.add_word(&[0xba], at);
                    self.add_word(&[0xc7, 0x02], value);
                }
            }
        }
        self.mark();
        self.add(JUMP_TO_NEXT);
    }
}
