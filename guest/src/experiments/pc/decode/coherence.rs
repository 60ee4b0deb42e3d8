//! The instruction at an address changes. Whatever the hypervisor caches of it, it must execute the current
//! instruction.
//!
//! Each case executes an instruction that reads a device, changes the instruction at its address in one way, and
//! executes the new one. Then it changes it back, `iterations=` times (200). The result tells which instruction was
//! executed. Every other execution is of an earlier instruction, so a stale cache gives a wrong result every time, not
//! only once.
//!
//! This file has the cases that write code; `coherence_tables` has those that change its translation.

use super::partner::{Partner, Place, Request};
use super::{NEEDS_XAPIC, PRIORITY, Shown, TASK_PRIORITY, coherence_tables, local_apic};
use crate::arch::attempt::{self, Fault};
use crate::arch::code_pages::{self, ALL, PRESENT, UNCACHED, WRITABLE};
use crate::arch::encode::{
    ADD_RDI, END, LOAD_ABSOLUTE, LOAD_BYTE_RDI, LOAD_RDI, LOAD_RSI, OR_RDI, TWO_MODES, load_far, load_near,
    store_immediate,
};
use crate::arch::probe::{self, End, Level, R15, RAX, RCX, RDI, RSI, Registers};
use crate::arch::{apic, tlb};
use crate::experiments::cases::Cases;
use crate::experiments::pc::line::Line;
use crate::experiments::{Context, Outcome};

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let mut bench = Bench {
        cases: Cases::new(context, "decode-coherence"),
        rounds: context.settings.iterations.unwrap_or(200),
        version: u64::from(apic::read(apic::VERSION)),
    };
    apic::write(TASK_PRIORITY, PRIORITY);
    bench.map();

    written_by_oneself(&mut bench);
    written_by_another(&mut bench);
    modes(&mut bench);
    coherence_tables::run(&mut bench);
    bench.cases.skip("host-write", "code is written from outside of the VM", "no device writes memory");

    apic::write(TASK_PRIORITY, 0);
    code_pages::clear(0);
    tlb::flush_all();
    bench.cases.done()
}

/// Data for all cases.
pub(super) struct Bench<'a, 'b> {
    pub(super) cases: Cases<'a, 'b>,
    pub(super) rounds: u64,
    /// The local APIC's version, at RDI. RSI points to the task priority.
    pub(super) version: u64,
}

/// The required result of an execution, and the actual one.
pub(super) type Step = (u64, Result<u64, Fault>);

impl Bench<'_, '_> {
    /// Maps the first pages of CPU 0 to its frames.
    pub(super) fn map(&self) {
        code_pages::clear(0);
        for page in 0..code_pages::FRAMES {
            code_pages::point(0, page, code_pages::frame(0, page) | ALL);
            code_pages::fill(code_pages::frame(0, page), END);
        }
        tlb::flush_all();
    }

    /// The result of the first or the second meaning, if it is a load by RDI or by RSI.
    pub(super) fn of(&self, second: bool) -> u64 {
        if second { u64::from(PRIORITY) } else { self.version }
    }

    /// Alternates between the meanings; the step makes the change, executes, and answers.
    pub(super) fn alternate(&mut self, name: &str, about: &str, mut step: impl FnMut(&Self, bool) -> Step) {
        let wrong = (0..self.rounds).find_map(|round| {
            let (expected, seen) = step(self, round & 1 == 1);
            (seen != Ok(expected)).then_some((round, expected, seen))
        });
        self.close(name, about, wrong);
    }

    /// The record of a case, with its first wrong execution.
    pub(super) fn close(&mut self, name: &str, about: &str, wrong: Option<(u64, u64, Result<u64, Fault>)>) {
        match wrong {
            None => {
                let rounds = self.rounds;
                self.cases.check(name, about, "", format_args!("{rounds} changes"), true);
            }
            Some((round, expected, seen)) => {
                let text = Line::of(format_args!("{expected:#x}"));
                let why = format_args!("{} in round {round}, not {expected:#x}", Shown(seen));
                self.cases.check(name, about, text.text(), why, false);
            }
        }
    }
}

/// Registers for code at `rip`, with RDI and RSI at their device registers.
pub(super) fn start(rip: u64) -> Registers {
    Registers::at(rip).with(RDI, local_apic(apic::VERSION)).with(RSI, local_apic(TASK_PRIORITY))
}

/// Runs code at `rip`; answers RAX.
pub(super) fn execute(rip: u64) -> Result<u64, Fault> {
    probe::run(&start(rip), Level::Kernel).value(RAX)
}

/// Writes code at the start of a frame.
pub(super) fn write(frame: u64, code: &[u8]) {
    code_pages::write(frame, 0, code);
    code_pages::write(frame, code.len() as u64, &[END]);
}

fn code_frame() -> u64 {
    code_pages::frame(0, 0)
}

fn written_by_oneself(bench: &mut Bench) {
    let rip = code_pages::address(0, 0);
    bench.alternate("smc-same-vcpu", "the CPU rewrites its instruction", |bench, second| {
        write(code_frame(), if second { LOAD_RSI } else { LOAD_RDI });
        (bench.of(second), execute(rip))
    });

    bench.alternate("smc-operation", "ADD becomes OR", |bench, second| {
        write(code_frame(), if second { OR_RDI } else { ADD_RDI });
        let begun = start(rip).with(RAX, bench.version);
        let expected = if second { bench.version } else { (bench.version * 2) & 0xffff_ffff };
        (expected, probe::run(&begun, Level::Kernel).value(RAX))
    });

    bench.alternate("smc-width", "a load of 32 bits becomes one of 8", |bench, second| {
        write(code_frame(), if second { LOAD_BYTE_RDI } else { LOAD_RDI });
        let begun = start(rip).with(RAX, u64::MAX);
        let seen = probe::run(&begun, Level::Kernel).value(RAX);
        // A device need not answer a load of 8 bits. The CPU itself keeps the upper bits.
        if second { (u64::MAX >> 8, seen.map(|value| value >> 8)) } else { (bench.version, seen) }
    });

    bench.alternate("smc-displacement-only", "only the displacement changes", |bench, second| {
        write(code_frame(), &load_near(if second { 0x80 - 0x30 } else { 0 }));
        (bench.of(second), execute(rip))
    });

    bench.alternate("smc-immediate-only", "only the immediate operand of a store changes", |_, second| {
        let value = if second { 0x10 } else { PRIORITY };
        write(code_frame(), &store_immediate(value));
        let begun = start(rip).with(RDI, local_apic(TASK_PRIORITY));
        let ended = probe::run(&begun, Level::Kernel).value(RAX);
        (u64::from(value), ended.map(|_| u64::from(apic::read(TASK_PRIORITY))))
    });
    apic::write(TASK_PRIORITY, PRIORITY);

    bench.alternate("smc-length", "the new instruction is longer or shorter", |bench, second| {
        let code: &[u8] = if second { &load_far(0x80 - 0x30) } else { LOAD_RDI };
        write(code_frame(), code);
        let end = probe::run(&start(rip), Level::Kernel);
        let length = end.registers.rip.wrapping_sub(rip);
        (bench.of(second) << 8 | (code.len() as u64 + 1), end.value(RAX).map(|value| value << 8 | length & 0xff))
    });

    // Both addresses have executed both meanings before.
    code_pages::point(0, 1, code_frame() | ALL);
    tlb::flush_page(code_pages::address(0, 1));
    bench.alternate("alias", "the instruction is written at another address of the same frame", |bench, second| {
        let expected = bench.of(second);
        write(code_frame(), if second { LOAD_RSI } else { LOAD_RDI });
        let seen = [0, 1].map(|page| execute(code_pages::address(0, page)));
        (expected, if seen[0] == Ok(expected) { seen[1] } else { seen[0] })
    });
    bench.map();
}

fn written_by_another(bench: &mut Bench) {
    let (name, about) = ("smc-other-vcpu", "two CPUs rewrite the instruction in turn, and both execute it");
    let patience = bench.cases.patience();
    let Registers { general, rip, .. } = start(code_pages::address(0, 0));
    let place = Place { rip, frame: code_frame(), rdi: general[RDI], rsi: general[RSI] };
    let Some(mut partner) = Partner::hire(place, patience) else {
        bench.cases.skip(name, about, "needs two CPUs");
        return;
    };

    write(code_frame(), LOAD_RDI);
    let mut wrong = None;
    for round in 0..bench.rounds {
        let second = round & 1 == 1;
        let mut code = [END; 8];
        code[..2].copy_from_slice(if second { LOAD_RSI } else { LOAD_RDI });
        // The writer changes every two rounds, so that each writes both meanings.
        if round & 2 == 0 {
            write(code_frame(), &code);
        } else if partner.ask(Request::Write(code)).is_none() {
            wrong = Some((round, 0, Err(NO_ANSWER)));
            break;
        }
        // CPU 1 executes while this one does.
        partner.begin(Request::Run);
        let seen = [Some(execute(rip)), partner.end()].map(|seen| seen.unwrap_or(Err(NO_ANSWER)));
        let expected = bench.of(second);
        if let Some(seen) = seen.into_iter().find(|seen| *seen != Ok(expected)) {
            wrong = Some((round, expected, seen));
            break;
        }
    }
    drop(partner);
    bench.close(name, about, wrong);
}

/// Stands for a CPU that did not answer: no exception has this number.
pub(super) const NO_ANSWER: Fault = Fault { vector: 0xff, error: 0 };

/// 32-bit code needs an address below 4 GiB: that of its frame, which is mapped one to one. Its operands lie at
/// unbacked addresses there; 64-bit code with the same registers reaches the local APIC.
fn modes(bench: &mut Bench) {
    let rip = code_frame();
    let operand = code_pages::address(0, OPERAND) + apic::VERSION;
    let low = operand & 0xffff_ffff;
    code_pages::point(0, OPERAND, apic::XAPIC_PAGE | PRESENT | WRITABLE | UNCACHED);
    tlb::flush_page(operand);
    let nothing = u64::from(attempt::load_u32(low).unwrap_or(0));
    let level = |second| if second { Level::Kernel32 } else { Level::Kernel };

    write(code_frame(), LOAD_RDI);
    bench.alternate(
        "mode-at-same-rip",
        "the same bytes: [rdi] in 64-bit code, [edi] in 32-bit code",
        |bench, second| {
            let end = probe::run(&start(rip).with(RDI, operand), level(second));
            (if second { nothing } else { bench.version }, end.value(RAX))
        },
    );

    // In 32-bit code the address ends after four bytes; two instructions that change nothing follow, and the second
    // end.
    let mut code = [END; 10];
    code[0] = LOAD_ABSOLUTE;
    code[1..9].copy_from_slice(&operand.to_le_bytes());
    write(code_frame(), &code);
    bench.alternate("mode-changes-length", "an absolute address of 64 bits or of 32 bits", |bench, second| {
        let end = probe::run(&start(rip), level(second));
        let (value, length) = if second { (nothing, 11) } else { (bench.version, 10) };
        (value << 8 | length, end.value(RAX).map(|seen| seen << 8 | end.registers.rip.wrapping_sub(rip)))
    });

    write(code_frame(), TWO_MODES);
    bench.alternate(
        "mode-changes-prefix",
        "41 8b 07 is one instruction in 64-bit code and two in 32-bit code",
        |bench, second| {
            let begun = start(rip).with(R15, local_apic(TASK_PRIORITY)).with(RCX, 0x70);
            let end = probe::run(&begun, level(second));
            let (value, counted) = if second { (bench.version, 1) } else { (bench.of(true), 0) };
            (value << 8 | (0x70 + counted), end.value(RAX).map(|value| value << 8 | end.registers.general[RCX]))
        },
    );
}

/// The page through which cases reach operands.
pub(super) const OPERAND: usize = 16;

/// A required exception, as a step, with the required address and error code.
pub(super) fn must_fault(end: &End, vector: u8, error: u64, cr2: u64) -> Step {
    let seen = (end.vector, end.error, end.cr2);
    if seen == (vector, error, cr2) { (0, Ok(0)) } else { (0, Err(end.fault())) }
}
