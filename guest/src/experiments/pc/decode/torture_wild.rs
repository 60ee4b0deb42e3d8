//! Random code at CPL 3, while a neighbour changes it and its page tables.

use core::sync::atomic::Ordering;

use super::UNBACKED;
use super::forms_list::FORMS;
use super::torture::{
    CODE, CODE_FRAMES, DISTURBED, FIELD, FIELD_PAGES, IO_APIC, LOCAL_APIC, MEMORY, MEMORY_FRAME, MIXED, NOTHING, STACK,
    WILD, Worker, count,
};
use crate::arch::code_pages::{self, ALL, NO_EXECUTE, PAGE, PRESENT, UNCACHED, USER, WRITABLE, Which};
use crate::arch::encode::END;
use crate::arch::probe::{self, INTERRUPTS, Level, Registers};
use crate::arch::{apic, boot, control, tlb, tsc};
use crate::interrupt::TIMER;
use guest_model::random::Random;

/// Flags that code may begin with: status, trap, direction.
const ANY_FLAGS: u64 = 0xcd5 | 1 << 8;
/// Runs between two times at which the pages are put in order.
const ORDER: u64 = 16;
/// A bit of an entry that is reserved, unless physical addresses have 52 bits; then it is left out.
const RESERVED: u64 = 1 << 51;
/// Code pages, which random code must not write: only the neighbour does, with care.
const READABLE: u64 = PRESENT | USER;
/// Bytes of one piece of code.
const LENGTH: usize = 24;

pub(super) fn run(worker: &mut Worker, until: u64) {
    let mut runs = 0;
    for index in CODE_FRAMES {
        code_pages::fill(worker.frame(index), END);
    }
    while tsc::now() < until {
        if runs % ORDER == 0 {
            worker.map();
            for (page, index) in CODE_FRAMES.into_iter().enumerate() {
                worker.point(CODE + page, worker.frame(index) | READABLE);
            }
        }
        runs += 1;
        let offset = match worker.random.below(3) {
            // Near the page's end.
            0 => PAGE - 1 - worker.random.below(LENGTH as u64),
            _ => worker.random.below(PAGE),
        };
        let code = make(worker);
        let rip = worker.write_code(offset, &code);
        let mut start = Registers::at(rip);
        for register in 0..start.general.len() {
            start.general[register] = value(worker);
        }
        start.rflags |= INTERRUPTS | worker.random.bits() & ANY_FLAGS & !(u64::from(worker.random.below(8) != 0) << 8);

        apic::arm_once(TIMER, tsc::ticks(500 + worker.random.below(2000)));
        let mut end = probe::run(&start, Level::User);
        if end.is_timer() && end.registers == start {
            // An interrupt that was left over from before.
            apic::arm_once(TIMER, tsc::ticks(2000));
            end = probe::run(&start, Level::User);
        }
        count(&end);
        WILD.fetch_add(1, Ordering::Relaxed);
        // Random code may have left an x87 exception pending.
        probe::reset_x87();
    }
    apic::disarm();
}

/// Random bytes, or forms that emulators know, some with prefixes before or bits flipped.
fn make(worker: &mut Worker) -> [u8; LENGTH] {
    let mut code = [0; LENGTH];
    code.fill_with(|| worker.random.bits().to_le_bytes()[3]);
    if worker.random.below(4) == 0 {
        spare_the_machine(&mut code, &mut worker.random);
        return code;
    }
    let mut at = 0;
    while at < LENGTH {
        let form = FORMS[worker.random.index(FORMS.len())].code;
        let prefixes: [u8; 12] = [0x66, 0x67, 0xf2, 0xf3, 0xf0, 0x2e, 0x64, 0x65, 0x48, 0x4f, 0x41, 0x36];
        let prefix = prefixes[worker.random.index(prefixes.len())];
        let prefixed = worker.random.below(3) == 0;
        let bytes = [prefix].into_iter().filter(|_| prefixed).chain(form.iter().copied());
        let mut end = at;
        for (place, byte) in code[at..].iter_mut().zip(bytes) {
            *place = byte;
            end += 1;
        }
        if worker.random.below(4) == 0 {
            code[at + worker.random.index(end - at)] ^= 1 << worker.random.below(8);
        }
        at = end;
    }
    spare_the_machine(&mut code, &mut worker.random);
    code
}

/// Removes code that crashes QEMU 7.2 while it decodes, and that no emulator of ours sees. QEMU aborts at VEX and SSE
/// instructions with meaningless fields, and at LOCK before a bit test of a register.
fn spare_the_machine(code: &mut [u8; LENGTH], random: &mut Random) {
    for at in 0..LENGTH {
        let escaped = |place: usize| code[place] == 0x0f && code.get(place + 2).is_none_or(|modrm| *modrm >= REGISTER);
        match code[at] {
            VEX_3 | VEX_2 => code[at] = 0x88,
            LOCK if (at..LENGTH).any(escaped) => code[at] = 0x3e,
            _ => {}
        }
        if at > 0 && code[at - 1] == 0x0f && !SECOND.contains(&code[at]) {
            code[at] = SECOND[random.index(SECOND.len())];
        }
    }
}

const LOCK: u8 = 0xf0;
const VEX_3: u8 = 0xc4;
const VEX_2: u8 = 0xc5;
/// The smallest ModRM byte whose operand is a register.
const REGISTER: u8 = 0xc0;
/// What may follow 0F: opcodes for emulators, and harmless ones.
const SECOND: [u8; 40] = [
    0x00, 0x01, 0x02, 0x03, 0x0b, 0x31, 0x40, 0x45, 0x47, 0x4f, 0x80, 0x84, 0x85, 0x8f, 0x90, 0x94, 0x9f, 0xa2, 0xa3,
    0xa4, 0xa5, 0xab, 0xac, 0xad, 0xaf, 0xb0, 0xb1, 0xb3, 0xb6, 0xb7, 0xba, 0xbb, 0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1,
    0xc7, 0xc8,
];

/// A register: mostly an address where something is, often at the end of a page.
fn value(worker: &mut Worker) -> u64 {
    let pages = [
        CODE,
        LOCAL_APIC,
        NOTHING,
        NOTHING + 1,
        MIXED,
        MIXED + 1,
        MIXED + 2,
        MIXED + 3,
        MEMORY,
        STACK,
        IO_APIC,
        FIELD + worker.random.index(FIELD_PAGES),
    ];
    let page = pages[worker.random.index(pages.len())];
    let page = worker.at(page);
    match worker.random.below(10) {
        0..3 => page + worker.random.below(PAGE),
        3..6 => page + PAGE - 1 - worker.random.below(20),
        6 => page + apic::VERSION,
        7 => 1 << 47 | worker.random.bits(),
        8 => worker.random.below(1 << 20),
        _ => worker.random.bits(),
    }
}

/// Disturbs the code of CPU `victim`. The victim repairs its pages from time to time.
pub(super) fn disturb(worker: &mut Worker, victim: usize, until: u64) {
    while tsc::now() < until {
        disturb_once(worker, victim);
        DISTURBED.fetch_add(1, Ordering::Relaxed);
    }
    code_pages::use_table(victim, Some(Which::Own), ALL);
}

fn disturb_once(worker: &mut Worker, victim: usize) {
    let frame = |index| code_pages::frame(victim, index);
    let code = CODE + worker.random.index(2);
    let right = frame(CODE_FRAMES[code - CODE]) | READABLE;
    let reserved = if control::physical_bits() < 52 { RESERVED } else { 0 };
    match worker.random.below(8) {
        // A byte of the code, for good.
        0..3 => {
            // Good in every place, see `spare_the_machine`.
            let byte = SECOND[worker.random.index(SECOND.len())];
            let byte = if byte < REGISTER { byte } else { 0x8b };
            code_pages::write(frame(CODE_FRAMES[worker.random.index(2)]), worker.random.below(PAGE), &[byte]);
        }
        // The code's page, for a while.
        3..5 => {
            let wrong = [
                0,
                right & !PRESENT,
                right & !USER,
                right | NO_EXECUTE,
                frame(CODE_FRAMES[worker.random.index(2)]) | READABLE,
                right | reserved,
            ];
            code_pages::point(victim, code, wrong[worker.random.index(wrong.len())]);
            wait(worker);
            code_pages::point(victim, code, right);
        }
        // A page of operands, until it is put in order.
        5..7 => {
            let nothing = UNBACKED | UNCACHED | NO_EXECUTE | USER;
            let entries = [
                0,
                nothing | PRESENT | WRITABLE,
                nothing | PRESENT,
                apic::XAPIC_PAGE | UNCACHED | NO_EXECUTE | PRESENT | USER,
                apic::XAPIC_PAGE | UNCACHED | NO_EXECUTE | PRESENT,
                boot::io_apic().map_or(0, |at| at | UNCACHED | NO_EXECUTE | PRESENT | USER),
                frame(MEMORY_FRAME) | ALL | NO_EXECUTE,
                frame(MEMORY_FRAME) | PRESENT | USER | NO_EXECUTE,
                nothing | PRESENT | WRITABLE | reserved,
            ];
            let pages = [LOCAL_APIC, NOTHING, NOTHING + 1, MIXED, MIXED + 1, MIXED + 2, MEMORY, STACK, FIELD];
            let page = pages[worker.random.index(pages.len())];
            code_pages::point(victim, page, entries[worker.random.index(entries.len())]);
        }
        // The upper entry, for a while.
        _ => {
            let wrong = [
                (None, 0),
                (Some(Which::Own), PRESENT | WRITABLE),
                (Some(Which::Own), PRESENT | USER),
                (Some(Which::Own), ALL | NO_EXECUTE),
                (Some(Which::Spare), ALL),
            ];
            let (table, bits) = wrong[worker.random.index(wrong.len())];
            code_pages::use_table(victim, table, bits);
            wait(worker);
            code_pages::use_table(victim, Some(Which::Own), ALL);
        }
    }
    if worker.random.below(16) == 0 {
        tlb::flush_all();
    }
}

/// Not by PAUSE, for which a hypervisor may take the CPU away.
fn wait(worker: &mut Worker) {
    (0..worker.random.below(2000)).for_each(|round| _ = core::hint::black_box(round));
}
