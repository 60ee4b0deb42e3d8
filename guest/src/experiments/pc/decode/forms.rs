//! Executes each instruction form once on memory and once on a device register with the same contents: the results must
//! be the same.
//!
//! The CPU's access to memory is the reference, so this module does not define what an instruction does. It compares
//! registers (those with addresses by how far they moved), the defined flags, scratch memory, and the location's new
//! contents.
//!
//! | device | what of it is compared | forms |
//! |---|---|---|
//! | the timer's initial count, its interrupt masked | 32 bits | with 32-bit accesses |
//! | the task priority | 8 bits | the same |
//! | a thermal LVT entry, masked, if writing it shows | the vector | the same |
//! | an entry of the I/O APIC, its low half | vector, mode, mask | the same |
//! | nothing at all | that it stays as it is | all |
//!
//! Only 32-bit accesses are defined for the registers of APICs. Unbacked addresses allow all widths: the memory holds
//! what a read returns there, and writes are lost.

use super::forms_list::{FORMS, Form, STATUS, Way};
use super::{NEEDS_XAPIC, TASK_PRIORITY, UNBACKED, io_apic_window, local_apic, ports};
use crate::arch::attempt;
use crate::arch::code_pages::{self, ALL, PRESENT, UNCACHED, WRITABLE};
use crate::arch::encode::END;
use crate::arch::probe::{self, DOWN, End, Level, PLANNED, RAX, RBX, RCX, RDI, RDX, RSI, RSP, Registers};
use crate::arch::{apic, boot, cpu_local, tlb};
use crate::experiments::cases::Cases;
use crate::experiments::pc::line::Line;
use crate::experiments::{Context, Outcome};

const INITIAL_COUNT: u64 = 0x380;
const LVT_THERMAL: u64 = 0x330;
/// The low half of the I/O APIC's last entry of 24.
const LAST_ENTRY: u32 = 0x10 + 2 * 23;

/// Pages: code, memory, device; the scratch memory and its frame.
const CODE: usize = 0;
const MEMORY: usize = 8;
const DEVICE: usize = 12;
const SCRATCH: usize = 16;
/// Where in its pages a wide form begins: in the middle, with room on both sides.
const MIDDLE: u64 = 0x800;
/// Where the scratch memory is, and how many words of it are compared.
const SCRATCH_AT: u64 = 0x400;
const SCRATCH_WORDS: u64 = 64;

/// A location under test.
struct Target {
    name: &'static str,
    /// Physical address.
    at: u64,
    /// Bits that keep written values.
    kept: u64,
    /// Its values before each form.
    values: &'static [u32],
    /// Whether it is a single register of 32 bits.
    register: bool,
}

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if apic::is_x2apic() {
        return NEEDS_XAPIC;
    }
    let mut cases = Cases::new(context, "emulate-forms");
    apic::disarm();
    map();

    let with_io_apic = boot::io_apic().and(io_apic_window(LAST_ENTRY));
    let thermal = Target {
        name: "thermal",
        at: local_apic(LVT_THERMAL),
        kept: 0x1_00ff,
        values: &[0x1_00fe, 0x1_0031],
        register: true,
    };
    let targets = [
        Some(Target {
            name: "count",
            at: local_apic(INITIAL_COUNT),
            kept: 0xffff_ffff,
            values: &[0x8000_0055, 0x7fff_ffff, 0],
            register: true,
        }),
        Some(Target { name: "tpr", at: local_apic(TASK_PRIORITY), kept: 0xff, values: &[0x2f, 0xff], register: true }),
        Some(thermal).filter(shows_what_is_written),
        with_io_apic.map(|at| Target {
            name: "ioapic",
            at,
            kept: 0x1_afff,
            values: &[0x1_a0fe, 0x1_0031],
            register: true,
        }),
        Some(Target { name: "unbacked", at: UNBACKED + MIDDLE, kept: 0, values: &[0], register: false }),
    ];
    for form in &FORMS {
        let wrong = targets.iter().flatten().filter(|target| applies(form, target)).find_map(|target| {
            target.values.iter().find_map(|value| differs(form, target, *value).map(|wrong| (target.name, wrong)))
        });
        match wrong {
            None => cases.check(form.name, "device and memory", "", format_args!("the same"), true),
            Some((target, wrong)) => {
                let why = format_args!("{target}: {}", wrong.text());
                cases.check(form.name, "device and memory", "the same", why, false);
            }
        }
    }
    ports::run(&mut cases);

    // Masked and quiet, as before.
    let _ = attempt::store_u32(local_apic(LVT_THERMAL), 0x1_0000);
    if let Some(at) = io_apic_window(LAST_ENTRY) {
        let _ = attempt::store_u32(at, 0x1_0000);
    }
    apic::write(TASK_PRIORITY, 0);
    apic::disarm();
    code_pages::clear(cpu_local::index());
    tlb::flush_all();
    cases.done()
}

/// Code, memory, scratch; the device's page is mapped for each target.
fn map() {
    code_pages::clear(0);
    code_pages::point(0, CODE, code_pages::frame(0, 0) | ALL);
    code_pages::point(0, MEMORY, code_pages::frame(0, 1) | ALL);
    code_pages::point(0, SCRATCH, code_pages::frame(0, 2) | ALL);
    tlb::flush_all();
}

fn shows_what_is_written(target: &Target) -> bool {
    target.values.iter().all(|value| {
        let written = attempt::store_u32(target.at, *value).and_then(|()| attempt::load_u32(target.at));
        written.is_ok_and(|read| u64::from(read ^ *value) & target.kept == 0)
    })
}

fn applies(form: &Form, target: &Target) -> bool {
    !target.register || (form.width == 4 && !form.wide)
}

/// Sets the target to `value`, runs the form on memory with the same contents and on the target, and returns a
/// difference.
fn differs(form: &Form, target: &Target, value: u32) -> Option<Line> {
    let memory = code_pages::frame(0, 1);
    let offset = target.at % code_pages::PAGE;
    code_pages::point(0, DEVICE, target.at & !0xfff | PRESENT | WRITABLE | UNCACHED);
    tlb::flush_page(code_pages::address(0, DEVICE));

    if target.register {
        let _ = attempt::store_u32(target.at, value);
    }
    let held = attempt::load_u32(target.at).unwrap_or(0);
    // At unbacked addresses every word reads the same; beside a register nothing is compared.
    for word in 0..512 {
        code_pages::write(memory, word * 8, &(u64::from(held) << 32 | u64::from(held)).to_le_bytes());
    }

    let held = u64::from(held) << 32 | u64::from(held);
    let reference = run_on(form, code_pages::address(0, MEMORY) + offset, held);
    let scratch = scratch_sum();
    let seen = run_on(form, code_pages::address(0, DEVICE) + offset, held);
    if reference.end.vector != PLANNED {
        // The CPU itself lacks the instruction, or the form is wrong: then both must at least raise the same exception.
        return (reference.end.vector != seen.end.vector)
            .then(|| Line::of(format_args!("#{} on memory, #{}", reference.end.fault(), seen.end.fault())));
    }
    if seen.end.vector != PLANNED {
        return Some(Line::of(format_args!("#{} error {:#x}", seen.end.fault(), seen.end.error)));
    }
    for (number, name) in NAMES.into_iter().enumerate() {
        let moved = |run: &Run| match name {
            "rsi" | "rdi" | "rsp" => run.end.registers.general[number].wrapping_sub(run.start.general[number]),
            _ => run.end.registers.general[number],
        };
        if moved(&reference) != moved(&seen) {
            return Some(Line::of(format_args!("{name} {:#x} not {:#x}", moved(&seen), moved(&reference))));
        }
    }
    let defined = STATUS & !form.undefined | DOWN;
    let [flags, wanted] = [&seen, &reference].map(|run| run.end.registers.rflags & defined);
    if flags != wanted {
        return Some(Line::of(format_args!("flags {flags:#x} not {wanted:#x}")));
    }
    if scratch_sum() != scratch {
        return Some(Line::of(format_args!("scratch memory differs")));
    }
    let wanted = code_pages::word(memory, offset) & target.kept;
    let holds = u64::from(attempt::load_u32(target.at).unwrap_or(0));
    let changed = if target.register { holds & target.kept != wanted } else { holds != held & 0xffff_ffff };
    changed.then(|| Line::of(format_args!("holds {holds:#x} not {wanted:#x} of {:#x}", target.kept)))
}

const NAMES: [&str; 16] =
    ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"];

struct Run {
    start: Registers,
    end: End,
}

/// Runs the form with its target at `at`, which holds `held`.
fn run_on(form: &Form, at: u64, held: u64) -> Run {
    let code = code_pages::frame(0, 0);
    let rip = code_pages::address(0, CODE);
    let length = form.code.len() as u64;
    code_pages::write(code, 0, form.code);
    match form.way {
        Way::Absolute => code_pages::write(code, length - 8, &at.to_le_bytes()),
        Way::Relative => {
            code_pages::write(code, length - 4, &at.wrapping_sub(rip + length).to_le_bytes()[..4]);
        }
        Way::Destination | Way::Source | Way::Based => {}
    }
    code_pages::write(code, length, &[END]);

    // Half of it equals the device's contents, for forms that compare.
    let scratch = code_pages::frame(0, 2);
    for word in 0..512 {
        let value = if word < 140 { held } else { 0x1122_3344_5566_7788u64.rotate_left(word) };
        code_pages::write(scratch, u64::from(word) * 8, &value.to_le_bytes());
    }

    let scratch = code_pages::address(0, SCRATCH) + SCRATCH_AT;
    let (rdi, rsi) = match form.way {
        Way::Source => (scratch, at),
        Way::Based => (0x1000, scratch),
        Way::Destination | Way::Absolute | Way::Relative => (at, scratch),
    };
    let accumulator = if form.equal { held } else { form.rax };
    let rdx = match (form.equal, form.width) {
        (true, 8 | 16) if form.wide => held,
        _ => form.rdx,
    };
    let mut start = Registers::at(rip)
        .with(RAX, accumulator)
        .with(RBX, 0x6b6b_5a5a_4949_3838)
        .with(RCX, form.rcx)
        .with(RDX, rdx)
        .with(RSI, rsi)
        .with(RDI, rdi)
        .with(RSP, scratch + 0x80)
        .with(9, u64::MAX);
    if form.down {
        start.rflags |= DOWN;
    }
    let bases = (form.way == Way::Based).then(|| [at.wrapping_sub(0x1000); 2]);
    Run { start, end: probe::run_with_bases(&start, Level::Kernel, bases) }
}

/// The scratch memory in one number.
fn scratch_sum() -> u64 {
    let frame = code_pages::frame(0, 2);
    (0..SCRATCH_WORDS).fold(0, |sum: u64, word| {
        sum.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ code_pages::word(frame, SCRATCH_AT - 128 + word * 8)
    })
}
