//! Instructions whose result the architecture prescribes.

use core::fmt;
use core::sync::atomic::Ordering;

use super::torture::{
    CODE, FIELD, FIELD_PAGES, KNOWN, LATEST, LOCAL_APIC, MEMORY, MEMORY_FRAME, MIXED, MIXED_FRAMES, NOTHING, STACK,
    TWICE, Worker, count, violation,
};
use crate::arch::attempt::Fault;
use crate::arch::code_pages::{self, NO_EXECUTE, PAGE};
use crate::arch::encode::{LOAD_RDI, STORE_RDI, load_far};
use crate::arch::probe::{self, DOWN, End, INTERRUPTS, Level, PLANNED, RAX, RBP, RCX, RDI, RDX, RSI, RSP, Registers};
use crate::arch::{apic, tlb, tsc};
use crate::interrupt::TIMER;

const STACK_FAULT: u8 = 12;
const DEBUG: u8 = 1;
const TRAP: u64 = 1 << 8;

/// Error code of a page fault (APM vol. 2, 8.4.2): the page is present; a write; from CPL 3; a fetch.
const IS_PRESENT: u64 = 1;
const IS_WRITE: u64 = 2;
const FROM_USER: u64 = 4;
const IS_FETCH: u64 = 16;

/// Tries one thing; a wrong result is a violation.
type Pick = fn(&mut Worker);

const PICKS: [Pick; 16] = [
    second_page_absent,
    second_page_not_for_code,
    too_long,
    longest,
    not_canonical,
    read_only,
    into_absent_page,
    load_across,
    store_across,
    between_devices,
    huge_count,
    downwards,
    misaligned_exchange,
    bad_lock,
    single_step,
    not_on_a_device,
];

pub(super) fn run(worker: &mut Worker, until: u64) {
    while tsc::now() < until {
        let pick = PICKS[worker.random.index(PICKS.len())];
        pick(worker);
        KNOWN.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `code`, `offset` bytes into the code pages, and counts its end.
fn execute(worker: &Worker, offset: u64, code: &[u8], level: Level, start: Registers) -> End {
    let rip = worker.write_code(offset, code);
    let end = probe::run(&Registers { rip, ..start.with(RSP, worker.at(STACK) + 0x800) }, level);
    count(&end);
    end
}

/// Both levels, in turn.
fn level(worker: &mut Worker) -> (Level, u64) {
    if worker.random.below(2) == 0 { (Level::Kernel, 0) } else { (Level::User, FROM_USER) }
}

fn expect(name: &str, expected: fmt::Arguments<'_>, end: &End, code: &[u8], fits: bool) {
    if !fits {
        violation(name, expected, end, code);
    }
}

fn expect_fault(name: &str, vector: u8, error: u64, cr2: Option<u64>, end: &End, code: &[u8]) {
    let fits = end.vector == vector && end.error == error && cr2.is_none_or(|cr2| cr2 == end.cr2);
    let cr2 = cr2.unwrap_or(0);
    expect(name, format_args!("vector {vector} error {error:#x} cr2 {cr2:#x}"), end, code, fits);
}

/// Registers with RDI at a register of the local APIC.
fn at_version(worker: &Worker) -> Registers {
    Registers::at(0).with(RDI, worker.at(LOCAL_APIC) + apic::VERSION)
}

/// Where code that crosses the page's end begins, with one to five bytes before it.
fn before_the_end(worker: &mut Worker) -> u64 {
    PAGE - 1 - worker.random.below(5)
}

fn set_second_page(worker: &Worker, entry: u64) {
    worker.point(CODE + 1, entry);
    tlb::flush_page(worker.at(CODE + 1));
}

fn second_page_absent(worker: &mut Worker) {
    let (level, user) = level(worker);
    let offset = before_the_end(worker);
    let code = load_far(0);
    // The translation was good a moment ago.
    let warm = execute(worker, offset, &code, level, at_version(worker));
    let version = u64::from(worker.version);
    expect("page-crossing", format_args!("{version:#x}"), &warm, &code, warm.value(RAX) == Ok(version));
    set_second_page(worker, 0);
    let end = execute(worker, offset, &code, level, at_version(worker));
    set_second_page(worker, worker.code_entry(1));
    expect_fault("second-page-absent", Fault::PF, IS_FETCH | user, Some(worker.at(CODE + 1)), &end, &code);
}

fn second_page_not_for_code(worker: &mut Worker) {
    let (level, user) = level(worker);
    let offset = before_the_end(worker);
    let code = load_far(0);
    set_second_page(worker, worker.code_entry(1) | NO_EXECUTE);
    let end = execute(worker, offset, &code, level, at_version(worker));
    set_second_page(worker, worker.code_entry(1));
    let error = IS_FETCH | IS_PRESENT | user;
    expect_fault("second-page-nx", Fault::PF, error, Some(worker.at(CODE + 1)), &end, &code);
}

/// Prefixes that change nothing about `mov eax, [rdi]`.
const IDLE_PREFIXES: [u8; 4] = [0x2e, 0x36, 0x3e, 0x26];

fn with_prefixes<const N: usize>(worker: &mut Worker) -> [u8; N] {
    let mut code = [0; N];
    code.fill_with(|| IDLE_PREFIXES[worker.random.index(IDLE_PREFIXES.len())]);
    code[N - 2..].copy_from_slice(LOAD_RDI);
    code
}

fn too_long(worker: &mut Worker) {
    let (level, _) = level(worker);
    let code: [u8; 16] = with_prefixes(worker);
    let offset = if worker.random.below(2) == 0 { 0 } else { PAGE - 1 - worker.random.below(14) };
    let end = execute(worker, offset, &code, level, at_version(worker));
    expect_fault("too-long", Fault::GP, 0, None, &end, &code);
}

fn longest(worker: &mut Worker) {
    let (level, _) = level(worker);
    let code: [u8; 15] = with_prefixes(worker);
    let offset = if worker.random.below(2) == 0 { 0 } else { PAGE - 1 - worker.random.below(14) };
    let end = execute(worker, offset, &code, level, at_version(worker));
    let version = u64::from(worker.version);
    expect("longest", format_args!("{version:#x}"), &end, &code, end.value(RAX) == Ok(version));
}

fn not_canonical(worker: &mut Worker) {
    let (level, _) = level(worker);
    let at = 1 << 47 | worker.random.bits() & 0x3fff_ffff_ffff;
    let forms: [(&[u8], usize); 6] = [
        (LOAD_RDI, RDI),
        (STORE_RDI, RDI),
        (&[0xf3, 0xa4], RDI),
        (&[0x01, 0x07], RDI),
        (&[0x8b, 0x45, 0x00], RBP),
        (&[0x89, 0x45, 0x00], RBP),
    ];
    let (code, register) = forms[worker.random.index(forms.len())];
    let start = at_version(worker).with(RSI, worker.at(MEMORY)).with(RCX, 4).with(register, at);
    let end = execute(worker, 0, code, level, start);
    // By RBP it is a stack fault, but there are CPUs that make no difference.
    let vector = if register == RBP && end.vector == STACK_FAULT { STACK_FAULT } else { Fault::GP };
    expect_fault("not-canonical", vector, 0, None, &end, code);
}

fn read_only(worker: &mut Worker) {
    let (level, user) = level(worker);
    let forms: [&[u8]; 7] = [
        STORE_RDI,
        &[0x01, 0x07],
        &[0xab],
        &[0xf3, 0xaa],
        &[0xf0, 0x0f, 0xc1, 0x07],
        &[0x0f, 0xab, 0x0f],
        &[0x87, 0x07],
    ];
    let code = forms[worker.random.index(forms.len())];
    let end = execute(worker, 0, code, level, at_version(worker).with(RCX, 3));
    let cr2 = worker.at(LOCAL_APIC) + apic::VERSION;
    expect_fault("read-only", Fault::PF, IS_PRESENT | IS_WRITE | user, Some(cr2), &end, code);
}

/// The second half of the operand is on a page that is absent: the first is not changed.
fn into_absent_page(worker: &mut Worker) {
    let (level, user) = level(worker);
    let end_of_memory = worker.at(MEMORY) + PAGE;
    let frame = worker.frame(MEMORY_FRAME);
    code_pages::write(frame, PAGE - 8, &[0x77; 8]);
    let write = worker.random.below(2) == 0;
    let code = if write { STORE_RDI } else { LOAD_RDI };
    let end = execute(worker, 0, code, level, Registers::at(0).with(RDI, end_of_memory - 2));
    let error = user | if write { IS_WRITE } else { 0 };
    expect_fault("into-absent-page", Fault::PF, error, Some(end_of_memory), &end, code);
    let kept = code_pages::word(frame, PAGE - 8) == u64::from_le_bytes([0x77; 8]);
    expect("into-absent-page", format_args!("memory unchanged"), &end, code, kept);
}

/// Memory, nothing, memory: a load over either border has the bytes of the memory in their places.
fn load_across(worker: &mut Worker) {
    let (level, _) = level(worker);
    let first = worker.random.below(2) == 0;
    let border = if first { MIXED + 1 } else { MIXED + 2 };
    let bits = worker.random.bits_u32();
    let bytes = bits.to_le_bytes();
    code_pages::write(worker.frame(MIXED_FRAMES[0]), PAGE - 2, &bytes[..2]);
    code_pages::write(worker.frame(MIXED_FRAMES[1]), 0, &bytes[2..]);
    let end = execute(worker, 0, LOAD_RDI, level, Registers::at(0).with(RDI, worker.at(border) - 2));
    let mask = if first { 0xffff } else { 0xffff_0000 };
    let expected = u64::from(bits) & mask;
    // A hypervisor may refuse an operand in two places, but must not invent the contents of memory.
    let fits = end.vector != PLANNED || end.registers.general[RAX] & mask == expected;
    expect("load-across", format_args!("{expected:#x} in {mask:#x}"), &end, LOAD_RDI, fits);
}

fn store_across(worker: &mut Worker) {
    let (level, _) = level(worker);
    let first = worker.random.below(2) == 0;
    let (border, frame, offset) =
        if first { (MIXED + 1, MIXED_FRAMES[0], PAGE - 8) } else { (MIXED + 2, MIXED_FRAMES[1], 0) };
    let frame = worker.frame(frame);
    let bits = worker.random.bits() & 0xffff_ffff;
    code_pages::write(frame, offset, &[0x77; 8]);
    let start = Registers::at(0).with(RDI, worker.at(border) - 2).with(RAX, bits);
    let end = execute(worker, 0, STORE_RDI, level, start);
    let before = u64::from_le_bytes([0x77; 8]);
    let after = if first { before & !0 >> 16 | bits << 48 } else { before & !0xffff | bits >> 16 };
    let expected = if end.vector == PLANNED { after } else { before };
    let seen = code_pages::word(frame, offset);
    expect("store-across", format_args!("memory {expected:#x} not {seen:#x}"), &end, STORE_RDI, seen == expected);
}

/// From the local APIC's last bytes into unbacked addresses: no manual says how it ends, but it ends.
fn between_devices(worker: &mut Worker) {
    let (level, _) = level(worker);
    let codes: [&[u8]; 3] = [LOAD_RDI, &[0x48, 0x8b, 0x07], &[0xf3, 0xac]];
    let code = codes[worker.random.index(codes.len())];
    let at = worker.at(MIXED + 4) - 1 - worker.random.below(7);
    let start = Registers::at(0).with(RDI, at).with(RSI, at).with(RCX, 16);
    execute(worker, 0, code, level, start);
}

/// Counts that would take hours. The timer's interrupt must arrive in between, and the remaining count must add up.
fn huge_count(worker: &mut Worker) {
    const COUNT: u64 = 1 << 40;
    let (level, _) = level(worker);
    // STOSB, MOVSB, LODSB, STOSQ; bytes per step, and the register that moves.
    let forms: [(&[u8], u64, usize); 4] =
        [(&[0xf3, 0xaa], 1, RDI), (&[0xf3, 0xa4], 1, RDI), (&[0xf3, 0xac], 1, RSI), (&[0xf3, 0x48, 0xab], 8, RDI)];
    let (code, step, moving) = forms[worker.random.index(forms.len())];
    let at = worker.at(FIELD);
    let mut start = Registers::at(0).with(RDI, at).with(RSI, at).with(RCX, COUNT);
    start.rflags |= INTERRUPTS;

    let delay = tsc::ticks(1000);
    let due = tsc::now() + apic::arm_once(TIMER, delay).max(delay);
    let end = execute(worker, 0, code, level, start);
    let late = tsc::now().saturating_sub(due);
    apic::disarm();

    if end.is_timer() && end.registers.rflags & INTERRUPTS == 0 {
        // The first interrupt's result is lost.
        TWICE.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let [moved, left] = [moving, RCX].map(|register| end.registers.general[register]);
    let adds_up = moved.wrapping_sub(at) == (COUNT - left) * step;
    expect("huge-count", format_args!("registers that add up"), &end, code, adds_up);
    if end.is_timer() {
        LATEST.fetch_max(late, Ordering::Relaxed);
        expect(
            "huge-count",
            format_args!("an interrupt in time, not {late} ticks late"),
            &end,
            code,
            late <= worker.patience,
        );
    } else {
        // The end of the mapped range.
        let border = at + FIELD_PAGES as u64 * PAGE;
        let fits = end.vector == Fault::PF && end.cr2 == border && moved == border;
        expect("huge-count", format_args!("the timer, or #PF at {border:#x}"), &end, code, fits);
    }
}

/// REP STOSD with falling addresses, past the beginning of the mapped range.
fn downwards(worker: &mut Worker) {
    let (level, user) = level(worker);
    let code: &[u8] = &[0xf3, 0xab];
    let steps = 1 + worker.random.below(20);
    let at = worker.at(NOTHING);
    let mut start = Registers::at(0).with(RDI, at + (steps - 1) * 4).with(RCX, 100);
    start.rflags |= DOWN;
    let end = execute(worker, 0, code, level, start);
    expect_fault("downwards", Fault::PF, IS_WRITE | user, Some(at - 4), &end, code);
    let fits = end.registers.general[RDI] == at - 4 && end.registers.general[RCX] == 100 - steps;
    expect("downwards", format_args!("rdi {:#x} rcx {}", at - 4, 100 - steps), &end, code, fits);
}

fn misaligned_exchange(worker: &mut Worker) {
    let (level, _) = level(worker);
    let code: &[u8] = &[0x48, 0x0f, 0xc7, 0x0f];
    let at = worker.at(NOTHING) + 8 + worker.random.below(100) * 16;
    let end = execute(worker, 0, code, level, Registers::at(0).with(RDI, at));
    expect_fault("misaligned-cmpxchg16b", Fault::GP, 0, None, &end, code);
}

/// LOCK where it is invalid. QEMU's own CPU accepts it, so the case is omitted there.
fn bad_lock(worker: &mut Worker) {
    if !worker.judged {
        return;
    }
    let (level, _) = level(worker);
    let codes: [&[u8]; 5] =
        [&[0xf0, 0x8b, 0x07], &[0xf0, 0x89, 0x07], &[0xf0, 0x83, 0x3f, 0], &[0xf0, 0x85, 0x07], &[0xf0, 0xab]];
    let code = codes[worker.random.index(codes.len())];
    let end = execute(worker, 0, code, level, Registers::at(0).with(RDI, worker.at(NOTHING)));
    expect_fault("bad-lock", Fault::UD, 0, None, &end, code);
}

/// With the trap flag set, the instruction completes, then the exception arrives.
fn single_step(worker: &mut Worker) {
    let (level, _) = level(worker);
    let mut start = at_version(worker);
    start.rflags |= TRAP;
    let end = execute(worker, 0, LOAD_RDI, level, start);
    let after = worker.at(CODE) + LOAD_RDI.len() as u64;
    let fits =
        end.vector == DEBUG && end.registers.rip == after && end.registers.general[RAX] == u64::from(worker.version);
    expect("single-step", format_args!("#db at {after:#x}, value {:#x}", worker.version), &end, LOAD_RDI, fits);
}

/// Instructions that no driver uses on devices. They complete or are refused; they never hang.
fn not_on_a_device(worker: &mut Worker) {
    const CODES: [&[u8]; 44] = [
        &[0xff, 0x1f],                               // call far [rdi]
        &[0x48, 0xff, 0x2f],                         // jmp far [rdi]
        &[0xff, 0x17],                               // call [rdi]
        &[0xff, 0x27],                               // jmp [rdi]
        &[0x0f, 0xb4, 0x07],                         // lfs eax, [rdi]
        &[0x0f, 0xb2, 0x07],                         // lss eax, [rdi]
        &[0x8e, 0x07],                               // mov es, [rdi]
        &[0x8c, 0x0f],                               // mov [rdi], cs
        &[0x0f, 0x02, 0x07],                         // lar eax, [rdi]
        &[0x0f, 0x00, 0x27],                         // verr [rdi]
        &[0x0f, 0x01, 0x07],                         // sgdt [rdi]
        &[0x0f, 0x01, 0x17],                         // lgdt [rdi]
        &[0x0f, 0x01, 0x1f],                         // lidt [rdi]
        &[0x0f, 0x01, 0x27],                         // smsw [rdi]
        &[0x0f, 0x01, 0x3f],                         // invlpg [rdi]
        &[0x0f, 0x10, 0x07],                         // movups xmm0, [rdi]
        &[0x0f, 0x11, 0x07],                         // movups [rdi], xmm0
        &[0x66, 0x0f, 0x6f, 0x07],                   // movdqa xmm0, [rdi]
        &[0xc5, 0xfc, 0x10, 0x07],                   // vmovups ymm0, [rdi]
        &[0xc5, 0xfc, 0x11, 0x07],                   // vmovups [rdi], ymm0
        &[0xc4, 0xe2, 0x7d, 0x2c, 0x07],             // vmaskmovps ymm0, ymm0, [rdi]
        &[0x66, 0x0f, 0x38, 0x00, 0x07],             // pshufb xmm0, [rdi]
        &[0xd9, 0x07],                               // fld dword [rdi]
        &[0xdd, 0x1f],                               // fstp qword [rdi]
        &[0xdf, 0x2f],                               // fild qword [rdi]
        &[0x0f, 0xae, 0x07],                         // fxsave [rdi]
        &[0x0f, 0xae, 0x0f],                         // fxrstor [rdi]
        &[0x0f, 0xae, 0x27],                         // xsave [rdi]
        &[0x0f, 0xae, 0x2f],                         // xrstor [rdi]
        &[0x0f, 0xae, 0x3f],                         // clflush [rdi]
        &[0x0f, 0x18, 0x0f],                         // prefetch [rdi]
        &[0x0f, 0xc3, 0x07],                         // movnti [rdi], eax
        &[0x0f, 0xaf, 0x07],                         // imul eax, [rdi]
        &[0xf7, 0x37],                               // div dword [rdi]
        &[0xd1, 0x07],                               // rol dword [rdi], 1
        &[0x0f, 0xa4, 0x07, 0x05],                   // shld [rdi], eax, 5
        &[0x0f, 0xbc, 0x07],                         // bsf eax, [rdi]
        &[0x0f, 0x38, 0xf0, 0x07],                   // movbe eax, [rdi]
        &[0x0f, 0x47, 0x07],                         // cmova eax, [rdi]
        &[0x0f, 0x94, 0x07],                         // sete [rdi]
        &[0xd7],                                     // xlat
        &[0x48, 0x87, 0xfc, 0xc8, 0x10, 0x00, 0x03], // xchg rsp, rdi; enter 16, 3
        &[0x48, 0x87, 0xfc, 0x50, 0x58, 0x9c, 0x9d], // xchg rsp, rdi; push, pop, pushf, popf
        &[0x48, 0x87, 0xfc, 0xc3],                   // xchg rsp, rdi; ret
    ];
    let code = CODES[worker.random.index(CODES.len())];
    let places = [worker.at(LOCAL_APIC) + apic::VERSION, worker.at(NOTHING) + 0x800, worker.at(FIELD) + 0x800];
    let at = places[worker.random.index(places.len())];
    // At CPL 3, so that a jump to, or a segment load from, the contents there does no harm. The timer ends code that
    // continues.
    let mut start = Registers::at(0).with(RDI, at).with(7, at).with(3, at).with(RDX, 0).with(RBP, at);
    start.rflags |= INTERRUPTS;
    apic::arm_once(TIMER, tsc::ticks(2000));
    execute(worker, 0, code, Level::User, start);
    apic::disarm();
    if worker.random.below(8) == 0 {
        privileged(worker, at);
    }
}

/// INVLPG accesses nothing. LGDT of all ones must be refused: such a base is not canonical.
fn privileged(worker: &Worker, at: u64) {
    let code: &[u8] = &[0x0f, 0x01, 0x3f];
    let end = execute(worker, 0, code, Level::Kernel, Registers::at(0).with(RDI, at));
    expect("invlpg", format_args!("no access"), &end, code, end.vector == PLANNED);
    // Without a hypervisor, the CPU would use the descriptor that it reads.
    if worker.judged {
        let code: &[u8] = &[0x0f, 0x01, 0x17];
        let end = execute(worker, 0, code, Level::Kernel, Registers::at(0).with(RDI, worker.at(NOTHING)));
        expect("lgdt", format_args!("an exception"), &end, code, end.vector != PLANNED);
    }
}
