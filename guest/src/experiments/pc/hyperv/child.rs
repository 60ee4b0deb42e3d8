//! G: the registers and the other state of a child's vCPU, as a virtual machine monitor reads and writes them (TLFS,
//! "Virtual Processors"; Linux' `hvgdk_mini.h` and `hvhdk.h`). The registers are those that QEMU 11.1 uses.

use core::sync::atomic::Ordering;

use guest_model::hypercall::{Control, INVALID_PARAMETER, SUCCESS, reps, status};

use super::{
    Answer, Cases, Context, NO_INTERFACE, Outcome, ShownAnswer, ask, by_registers, enlightened, place, signals,
};
use crate::arch::control::cpuid;
use crate::arch::hyperv::{self, Registers};
use crate::arch::ram::Ram;

const CREATE: u16 = 0x40;
const INITIALIZE: u16 = 0x41;
const FINALIZE: u16 = 0x42;
const DELETE: u16 = 0x43;
const DEPOSIT: u16 = 0x48;
const WITHDRAW: u16 = 0x49;
pub(super) const SET_PROPERTY: u16 = 0x45;
pub(super) const MAP_PAGES: u16 = 0x4b;
const INSTALL_INTERCEPT: u16 = 0x4d;
const CREATE_VP: u16 = 0x4e;
const DELETE_VP: u16 = 0x4f;
const GET_REGISTERS: u16 = 0x50;
const SET_REGISTERS: u16 = 0x51;
const TRANSLATE: u16 = 0x52;
const REGISTER_CPUID: u16 = 0x91;
pub(super) const GET_STATE: u16 = 0xe3;
pub(super) const SET_STATE: u16 = 0xe4;
pub(super) const GET_CPUID: u16 = 0xf4;

const INVALID_VP: u16 = 0xe;
const INVALID_VALUE: u16 = 0x50;
const NO_RESOURCES: u16 = 0x1d;

/// What QEMU's accelerator asks Linux for.
const FLAGS: u64 = 0x48_2110;
const CREATE_PARTITIONS: u32 = 1 << 0;
pub(super) const PAGE: u64 = 4096;

/// Names of registers (HV_REGISTER_NAME).
pub(super) mod name {
    pub(in crate::experiments) const EXPLICIT_SUSPEND: u32 = 0;
    pub(in crate::experiments) const INTERCEPT_SUSPEND: u32 = 1;
    pub(in crate::experiments) const ACTIVITY: u32 = 4;
    pub(in crate::experiments) const PENDING_INTERRUPTION: u32 = 0x1_0002;
    pub(in crate::experiments) const INTERRUPT_STATE: u32 = 0x1_0003;
    pub(in crate::experiments) const PENDING_EVENT: u32 = 0x1_0004;
    pub(in crate::experiments) const NOTIFICATIONS: u32 = 0x1_0006;
    pub(in crate::experiments) const RAX: u32 = 0x2_0000;
    pub(in crate::experiments) const RIP: u32 = 0x2_0010;
    pub(in crate::experiments) const RFLAGS: u32 = 0x2_0011;
    pub(in crate::experiments) const XMM0: u32 = 0x3_0000;
    pub(in crate::experiments) const FP0: u32 = 0x3_0010;
    pub(in crate::experiments) const FP_CONTROL: u32 = 0x3_0018;
    pub(in crate::experiments) const XMM_CONTROL: u32 = 0x3_0019;
    pub(in crate::experiments) const CR0: u32 = 0x4_0000;
    pub(in crate::experiments) const CR2: u32 = 0x4_0001;
    pub(in crate::experiments) const CR3: u32 = 0x4_0002;
    pub(in crate::experiments) const CR4: u32 = 0x4_0003;
    pub(in crate::experiments) const CR8: u32 = 0x4_0004;
    pub(in crate::experiments) const XFEM: u32 = 0x4_0005;
    pub(in crate::experiments) const DR0: u32 = 0x5_0000;
    pub(in crate::experiments) const DR6: u32 = 0x5_0004;
    pub(in crate::experiments) const ES: u32 = 0x6_0000;
    pub(in crate::experiments) const CS: u32 = 0x6_0001;
    pub(in crate::experiments) const SS: u32 = 0x6_0002;
    pub(in crate::experiments) const IDTR: u32 = 0x7_0000;
    pub(in crate::experiments) const TSC: u32 = 0x8_0000;
    pub(in crate::experiments) const EFER: u32 = 0x8_0001;
    pub(in crate::experiments) const KERNEL_GS_BASE: u32 = 0x8_0002;
    pub(in crate::experiments) const APIC_BASE: u32 = 0x8_0003;
    pub(in crate::experiments) const PAT: u32 = 0x8_0004;
    pub(in crate::experiments) const SYSENTER_CS: u32 = 0x8_0005;
    pub(in crate::experiments) const STAR: u32 = 0x8_0008;
    pub(in crate::experiments) const LSTAR: u32 = 0x8_0009;
    pub(in crate::experiments) const MTRR_DEF_TYPE: u32 = 0x8_000e;
    pub(in crate::experiments) const MTRR_BASE: u32 = 0x8_0010;
    pub(in crate::experiments) const MTRR_MASK: u32 = 0x8_0040;
    pub(in crate::experiments) const MTRR_FIXED: u32 = 0x8_0070;
    pub(in crate::experiments) const TSC_AUX: u32 = 0x8_007b;
    pub(in crate::experiments) const HYPERCALL: u32 = 0x9_0001;
    pub(in crate::experiments) const TIME: u32 = 0x9_0004;
    pub(in crate::experiments) const VP_ASSIST: u32 = 0x9_0013;
    pub(in crate::experiments) const REFERENCE_TSC: u32 = 0x9_0017;
    pub(in crate::experiments) const SINT0: u32 = 0xa_0000;
    pub(in crate::experiments) const SCONTROL: u32 = 0xa_0010;
    pub(in crate::experiments) const STIMER0: u32 = 0xb_0000;
}

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if hyperv::features().is_none() || cpuid(0x4000_0003, 0).ebx & CREATE_PARTITIONS == 0 {
        return NO_INTERFACE;
    }
    let mut cases = Cases::new(context, "hv-child");
    let Some(child) = Child::new(&mut cases, "G1", 0) else { return cases.done() };
    after_creation(&mut cases, &child);
    round_trips(&mut cases, &child);
    order(&mut cases, &child);
    refusals(&mut cases, &child);
    states(&mut cases, &child);
    cpuid_and_tables(&mut cases, &child);
    running(&mut cases, &child);
    signals::run(&mut cases, &child);
    impossible(&mut cases, &child);
    let plain_cpuid = enlightened::vendor(&child);
    anew(&mut cases, &child);
    child.end(&mut cases, ["G9", "G9.1", "G9.2"]);

    if let Some(child) = Child::new(&mut cases, "I0", enlightened::FEATURES) {
        enlightened::run(&mut cases, &child, plain_cpuid);
        child.end(&mut cases, ["I9", "I9.1", "I9.2"]);
    }
    cases.done()
}

/// A partition with two VPs, which are suspended.
pub(super) struct Child {
    pub(super) id: u64,
}

impl Child {
    /// One that is offered these synthetic features.
    fn new(cases: &mut Cases, case: &str, features: u64) -> Option<Self> {
        let answer = call(Control::simple(CREATE), &[FLAGS, 0, 0x609, 0, 0, 0, 0]);
        let id = output(0);
        let child = Self { id };
        let mut free = (0..).map(|page| address_of(page) / PAGE);
        let mut deposit = |count: usize| {
            let mut input = [0; 257];
            input[0] = id;
            input[1..=count].iter_mut().zip(&mut free).for_each(|(place, page)| *place = page);
            call(Control::rep(DEPOSIT, count as u64), &input)
        };
        let steps = [
            answer,
            call(Control::simple(SET_PROPERTY), &[id, 0x1_0001, features]),
            deposit(208),
            by_registers(Control::simple(INITIALIZE), &[id]),
            deposit(180),
            call(Control::simple(CREATE_VP), &[id, 0, 0, 0, 0]),
            call(Control::simple(CREATE_VP), &[id, 1, 0, 0, 0]),
        ]
        .map(code);
        let is_there = steps == [SUCCESS; 7];
        cases.check(case, "a partition with two VPs", "status 0 for each", format_args!("{steps:?}"), is_there);
        is_there.then_some(child)
    }

    fn end(&self, cases: &mut Cases, [finalize, withdraw, delete]: [&str; 3]) {
        let by_id = |code| by_registers(Control::simple(code), &[self.id]);
        let mut finalized = by_id(FINALIZE);
        for _ in 0..1000 {
            if finalized != Ok(0) {
                finalized = by_id(FINALIZE);
            }
        }
        cases.status(finalize, "FINALIZE", &[SUCCESS], finalized);
        let mut pages = 0;
        let last = loop {
            let answer = call(Control::rep(WITHDRAW, 512), &[self.id, 0]);
            pages += answer.map_or(0, reps);
            if code(answer) != SUCCESS {
                break answer;
            }
        };
        cases.check(
            withdraw,
            "WITHDRAW: all deposited pages come back",
            "status 29, 388 pages",
            format_args!("{} {pages} pages", ShownAnswer(last)),
            code(last) == NO_RESOURCES && pages == 388,
        );
        cases.status(delete, "DELETE", &[SUCCESS], by_id(DELETE));
    }

    /// Writes registers of VP 0. The value has 128 bits.
    pub(super) fn set(&self, list: &[(u32, u128)]) -> Answer {
        let mut input = [0; 2 + 4 * 40];
        input[0] = self.id;
        for (place, (name, value)) in input[2..].chunks_mut(4).zip(list) {
            place.copy_from_slice(&[u64::from(*name), 0, low(*value), low(*value >> 64)]);
        }
        call(Control::rep(SET_REGISTERS, list.len() as u64), &input)
    }

    /// Reads a register.
    pub(super) fn get(&self, vp: u64, name: u32) -> Result<u128, u16> {
        match call(Control::rep(GET_REGISTERS, 1), &[self.id, vp, name.into()]) {
            Ok(answer) if status(answer) == SUCCESS => Ok(u128::from(output(0)) | u128::from(output(1)) << 64),
            Ok(answer) => Err(status(answer)),
            Err(_) => Err(u16::MAX),
        }
    }

    /// Reads or writes state of VP 0 in [`STATE_PAGE`].
    pub(super) fn state(&self, code: u16, kind: u64) -> Answer {
        call(Control::simple(code).variable(1), &[self.id, 0, 1 << 31 | kind, 0, 7, address_of(STATE_PAGE) / PAGE])
    }
}

/// Pages of free memory: those up to 388 are deposited.
const STATE_PAGE: u64 = 400;
pub(super) const CODE_PAGE: u64 = 401;

/// Word of the local APIC's state: id and version, LDR and DFR, spurious vector and the first of ISR, TMR, IRR.
pub(super) const SPURIOUS: u64 = 2;

/// The address of a page of free memory.
pub(super) fn address_of(page: u64) -> u64 {
    core::ptr::from_ref(Ram::all().word(page * PAGE)) as u64
}

pub(super) fn state_word(at: u64) -> &'static core::sync::atomic::AtomicU64 {
    Ram::all().word(STATE_PAGE * PAGE + at * 8)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
fn low(value: u128) -> u64 {
    value as u64
}

/// A VP that is deleted and created again has nothing of the former one.
fn anew(cases: &mut Cases, child: &Child) {
    let old = [(name::RAX, 0x77), (name::XMM0, 0x66), (name::LSTAR, 0x4000), (name::TSC_AUX, 5)];
    let set = child.set(&old);
    let deleted = by_registers(Control::simple(DELETE_VP), &[child.id, 0]);
    let gone = child.get(0, name::RIP);
    let created = call(Control::simple(CREATE_VP), &[child.id, 0, 0, 0, 0]);
    let steps = [set, deleted, created].map(code);
    cases.check(
        "G12",
        "a VP is deleted and created again",
        "status 0, none meanwhile",
        format_args!("{steps:?} {gone:x?}"),
        steps == [SUCCESS; 3] && gone == Err(INVALID_VP),
    );
    let suspended = [name::EXPLICIT_SUSPEND, name::INTERCEPT_SUSPEND, name::ACTIVITY].map(|name| child.get(0, name));
    let reset = [name::RIP, name::RAX, name::CR0, name::LSTAR, name::TSC_AUX].map(|name| child.get(0, name));
    let vector = [name::XMM0, name::XFEM].map(|name| child.get(0, name));
    cases.check(
        "G12.1",
        "and begins as a new one",
        "1, 0, 0, and fff0, 0, 60000010, 0, 0, and 0, 1",
        format_args!("{suspended:x?} {reset:x?} {vector:x?}"),
        suspended == [Ok(1), Ok(0), Ok(0)]
            && reset == [Ok(0xfff0), Ok(0), Ok(0x6000_0010), Ok(0), Ok(0)]
            && vector == [Ok(0), Ok(1)],
    );
}

/// The status of an answer; no status if it was an exception.
pub(super) fn code(answer: Answer) -> u16 {
    answer.map_or(u16::MAX, status)
}

/// A call. Its output is in the spare page.
pub(super) fn call(control: Control, words: &[u64]) -> Answer {
    ask(&Registers::call(control.0, place(words), hyperv::spare_page().address()))
}

pub(super) fn output(at: usize) -> u64 {
    hyperv::spare_page().words()[at].load(Ordering::SeqCst)
}

fn after_creation(cases: &mut Cases, child: &Child) {
    let of = |vp, names: [u32; 3]| names.map(|name| child.get(vp, name));
    let names = [name::EXPLICIT_SUSPEND, name::INTERCEPT_SUSPEND, name::ACTIVITY];
    let (first, second) = (of(0, names), of(1, names));
    cases.check(
        "G2",
        "a new VP is suspended; the second waits for a start-up message",
        "1, 0, 0 and 1, 0, 1",
        format_args!("{first:x?} {second:x?}"),
        first == [Ok(1), Ok(0), Ok(0)] && second == [Ok(1), Ok(0), Ok(1)],
    );
    let reset = of(0, [name::RIP, name::CS, name::CR0]);
    cases.check(
        "G2.1",
        "it begins at the reset vector",
        "fff0, CS f000 at ffff0000, CR0 60000010",
        format_args!("{reset:x?}"),
        reset == [Ok(0xfff0), Ok(0x009b_f000_0000_ffff_0000_0000_ffff_0000), Ok(0x6000_0010)],
    );
    let none = call(Control::rep(GET_REGISTERS, 1), &[child.id, 2, name::RIP.into()]);
    cases.status("G2.2", "a VP that there is not", &[INVALID_VP], none);
}

fn round_trips(cases: &mut Cases, child: &Child) {
    let mut wrong = (0, 0, 0);
    let mut count = 0;
    let mut tried = 0;
    let mut trip = |name: u32, value: u128| {
        tried += 1;
        let set = child.set(&[(name, value)]);
        let got = child.get(0, name);
        if code(set) != SUCCESS || got != Ok(value) {
            count += 1;
            wrong = (name, value, got.unwrap_or(u128::MAX));
        }
    };
    for number in 0..16 {
        trip(name::RAX + number, 0x1111_2222_0000_0000 + u128::from(number));
        trip(name::XMM0 + number, 0x0123_4567_89ab_cdef << 64 | u128::from(number));
    }
    for number in 0..8 {
        trip(name::FP0 + number, 0x4005_8000 << 48 | u128::from(number));
        let attributes = if number == 1 { 0xa09b } else { 0xc093 };
        trip(name::ES + number, attributes << 112 | 0x8 << 96 | 0xf_ffff << 64 | 0x77 << 12);
    }
    for number in 0..4 {
        trip(name::DR0 + number, 0x1234_5000);
    }
    for number in 0..11 {
        trip(name::MTRR_FIXED + number, 0x0506_0606_0606_0600);
    }
    for number in 0..8 {
        trip(name::MTRR_BASE + number, 0xc000_0006);
        trip(name::MTRR_MASK + number, 0xff_f000_0800);
    }
    for (name, value) in [
        (name::RIP, 0x7c00),
        (name::RFLAGS, 0x202),
        // Control, status and tag words, opcode, and where: then where, MXCSR and its mask.
        (name::FP_CONTROL, 0x0000_7fff_1234_5678_0000_0001_0000_037e_u128),
        (name::CR2, 0xdead_0000),
        (name::CR3, 0x1000),
        (name::CR8, 5),
        (name::XFEM, 3),
        (name::DR6, 0xffff_0ff0),
        (name::DR6 + 1, 0x400),
        (name::IDTR, 0x1000 << 64 | 0x3ff << 48),
        (name::IDTR + 1, 0x2000 << 64 | 0x7f << 48),
        (name::KERNEL_GS_BASE, 0xffff_8000_0000_1000),
        (name::PAT, 0x0007_0406_0007_0406),
        (name::SYSENTER_CS, 0x10),
        (name::SYSENTER_CS + 1, 0xffff_8000_0000_2000),
        (name::SYSENTER_CS + 2, 0xffff_8000_0000_3000),
        (name::STAR, 0x0023_0010_0000_0000),
        (name::LSTAR, 0xffff_8000_0000_4000),
        (name::LSTAR + 1, 0),
        (name::LSTAR + 2, 0x4_7700),
        (name::MTRR_DEF_TYPE, 0xc06),
        (name::TSC_AUX, 1),
        (name::APIC_BASE, 0xfee0_0d00),
        (name::APIC_BASE, 0xfee0_0900),
        (name::HYPERCALL, 0),
        (name::HYPERCALL + 1, 0),
        (name::SCONTROL, 1),
        (name::SCONTROL, 0),
        (name::ACTIVITY, 2),
        (name::ACTIVITY, 0),
        (name::INTERRUPT_STATE, 3),
        (name::INTERRUPT_STATE, 0),
        // An interrupt, a page fault with an error code, none. Then the same fault as one that is to be delivered.
        (name::PENDING_INTERRUPTION, 0x41_0001),
        (name::PENDING_INTERRUPTION, 0x6_000e_0017),
        (name::PENDING_INTERRUPTION, 0),
        (name::PENDING_EVENT, 0xbeef_0000 << 64 | 0x6_000e_0101),
        (name::PENDING_EVENT, 0),
        (name::NOTIFICATIONS, 0),
    ] {
        trip(name, value);
    }
    cases.check(
        "G3",
        "each register that QEMU writes is read back",
        "all are as written",
        format_args!("{count} of {tried} are not, the last {wrong:x?}"),
        count == 0 && tried > 110,
    );

    // The lower half, the address of x87's last operand, comes back only if the VP was on no pCPU meanwhile: AMD's
    // XSAVE saves it only while an exception of x87 waits (APM, FXSAVE), and QEMU's never. A register that was written
    // before may still have had the VP look after its messages.
    let control = child.set(&[(name::XMM_CONTROL, 0xffff_0000_1fa0 << 64 | 0x1234)]);
    let got = child.get(0, name::XMM_CONTROL).unwrap_or(0);
    cases.check(
        "G3.1",
        "MXCSR is written, its mask is the processor's",
        "status 0, 1fa0",
        format_args!("{} {got:x}", ShownAnswer(control)),
        code(control) == SUCCESS && low(got >> 64) & 0xffff_ffff == 0x1fa0,
    );
    let before = child.get(0, name::TSC).unwrap_or(0);
    let written = code(child.set(&[(name::TSC, 1 << 60)]));
    let (first, second) = (child.get(0, name::TSC).unwrap_or(0), child.get(1, name::TSC).unwrap_or(0));
    let is_moved = |tsc: u128| (1 << 60..(1 << 60) + (1 << 40)).contains(&tsc);
    cases.check(
        "G3.2",
        "the time-stamp counter moves for both VPs",
        "2^60 and a little",
        format_args!("{written}, {before:x} {first:x} {second:x}"),
        written == SUCCESS && !is_moved(before) && is_moved(first) && is_moved(second) && second >= first,
    );
}

fn order(cases: &mut Cases, child: &Child) {
    // Long mode, with the paging before all that it needs; and back to what real mode has.
    let long = [(name::CR0, 0x8000_0031), (name::CR4, 0x620), (name::EFER, 0xd01)];
    let answers = [child.set(&long), child.set(&[long[2], long[1], long[0]])];
    let state = [name::CR0, name::CR4, name::EFER].map(|name| child.get(0, name));
    cases.check(
        "G4",
        "CR0, CR4 and EFER in any order",
        "3 done, 80000031 620 d01",
        format_args!("{} {state:x?}", ShownAnswer(answers[0])),
        answers.iter().all(|answer| *answer == Ok(3 << 32)) && state == [Ok(0x8000_0031), Ok(0x620), Ok(0xd01)],
    );
    let back = child.set(&[(name::CR4, 0), (name::EFER, 0), (name::CR0, 0x10)]);
    cases.status("G4.1", "and back", &[SUCCESS], back);
}

fn refusals(cases: &mut Cases, child: &Child) {
    for (case, about, list, expected, done) in [
        ("G5", "notifications of deliverability", &[(name::NOTIFICATIONS, 1)][..], INVALID_PARAMETER, 0),
        ("G5.1", "a register that does not exist", &[(0x7777_7777, 0)], INVALID_PARAMETER, 0),
        ("G5.2", "a memory type that does not exist", &[(name::PAT, 2)], INVALID_VALUE, 0),
        (
            "G5.3",
            "CR0 of 33 bits, behind two others",
            &[(name::RAX, 1), (name::RIP, 2), (name::CR0, 1 << 32)],
            INVALID_VALUE,
            2,
        ),
        ("G5.4", "a bit of CR4 that is not offered", &[(name::CR4, 1 << 30)], INVALID_VALUE, 0),
        ("G5.5", "XCR0 without x87", &[(name::XFEM, 6)], INVALID_VALUE, 0),
        ("G5.6", "a reserved bit of MXCSR", &[(name::XMM_CONTROL, 1 << 95)], INVALID_VALUE, 0),
        ("G5.7", "SVME", &[(name::EFER, 1 << 12)], INVALID_VALUE, 0),
        ("G5.8", "CR3 beyond the address space", &[(name::CR3, 1 << 63)], INVALID_VALUE, 0),
        ("G5.9", "a vector that is no exception", &[(name::PENDING_INTERRUPTION, 0x40_0007)], INVALID_VALUE, 0),
    ] {
        let answer = child.set(list);
        let matches = answer == Ok(u64::from(expected) | done << 32);
        cases.check(case, about, "refused", format_args!("{}", ShownAnswer(answer)), matches);
    }
    let after = [name::RAX, name::RIP].map(|name| child.get(0, name));
    cases.check("G5.10", "the two are written", "1, 2", format_args!("{after:x?}"), after == [Ok(1), Ok(2)]);
}

fn states(cases: &mut Cases, child: &Child) {
    const LOCAL_APIC: u64 = 0;
    const XSAVE: u64 = 1;
    let read = child.state(GET_STATE, LOCAL_APIC);
    let words: [u64; 3] = [0, 1, SPURIOUS].map(|at: u64| state_word(at).load(Ordering::SeqCst));
    cases.check(
        "G6",
        "the local APIC after power-on",
        "version 50014, DFR ffffffff, spurious vector ff",
        format_args!("{} {words:x?}", ShownAnswer(read)),
        code(read) == SUCCESS && words == [0x5_0014 << 32, 0xffff_ffff_u64 << 32, 0xff],
    );
    // On, with vector 0x41 requested: word 2 of IRR, which begins at byte 84.
    state_word(SPURIOUS).store(0x1ff, Ordering::SeqCst);
    state_word(11).store(2, Ordering::SeqCst);
    let write = child.state(SET_STATE, LOCAL_APIC);
    (0..22).for_each(|at| state_word(at).store(!0, Ordering::SeqCst));
    let again = child.state(GET_STATE, LOCAL_APIC);
    let words = [SPURIOUS, 11].map(|at| state_word(at).load(Ordering::SeqCst));
    cases.check(
        "G6.1",
        "its state comes back",
        "1ff, 2",
        format_args!("{} {} {words:x?}", ShownAnswer(write), ShownAnswer(again)),
        code(write) == SUCCESS && code(again) == SUCCESS && words == [0x1ff, 2],
    );
    state_word(SPURIOUS).store(0xff, Ordering::SeqCst);
    state_word(11).store(0, Ordering::SeqCst);
    cases.status("G6.2", "and goes", &[SUCCESS], child.state(SET_STATE, LOCAL_APIC));

    let set = child.set(&[(name::XMM0, 0x77 << 64 | 0x66)]);
    let read = child.state(GET_STATE, XSAVE);
    let xmm0 = [20, 21].map(|at| state_word(at).load(Ordering::SeqCst));
    let header = [64, 65].map(|at| state_word(at).load(Ordering::SeqCst));
    cases.check(
        "G7",
        "the image of XSAVE is compacted, and has the registers",
        "66 77, bits 1:0, bit 63",
        format_args!("{} {} {xmm0:x?} {header:x?}", ShownAnswer(set), ShownAnswer(read)),
        code(read) == SUCCESS && xmm0 == [0x66, 0x77] && header[0] & 3 == 3 && header[1] >> 63 == 1,
    );
    state_word(20).store(0x55, Ordering::SeqCst);
    let write = child.state(SET_STATE, XSAVE);
    let xmm0 = child.get(0, name::XMM0);
    cases.check(
        "G7.1",
        "and is written",
        "77 55",
        format_args!("{} {xmm0:x?}", ShownAnswer(write)),
        code(write) == SUCCESS && xmm0 == Ok(0x77 << 64 | 0x55),
    );
    for (case, about, at, bits) in [
        ("G7.2", "a component that there is not", 64, 1 << 62),
        ("G7.3", "a reserved word of the header", 66, 1),
        ("G7.4", "a reserved bit of MXCSR", 3, 1 << 31),
        ("G7.5", "no format", 65, 1 << 63),
    ] {
        let word = state_word(at);
        let good = word.load(Ordering::SeqCst);
        word.store(good ^ bits, Ordering::SeqCst);
        cases.status(case, about, &[INVALID_PARAMETER], child.state(SET_STATE, XSAVE));
        word.store(good, Ordering::SeqCst);
    }
    let nowhere = [child.id, 0, 1 << 31, 0, 7, 1 << 30];
    let answer = call(Control::simple(GET_STATE).variable(1), &nowhere);
    cases.status("G7.6", "a page that the parent has not", &[INVALID_PARAMETER], answer);
}

fn cpuid_and_tables(cases: &mut Cases, child: &Child) {
    // Leaf 4000_0100 of VP 0 is 1, 2, 3, 4; leaf 1 has all bits.
    let register = |leaf: u64, values: [u64; 4]| {
        let [a, b, c, d] = values.map(|value| 0xffff_ffff << 32 | value);
        let split = |first: u64, second: u64| first >> 32 | second << 32;
        let input = [child.id, 2 << 32, leaf, a << 32, split(a, b), split(b, c), split(c, d), d >> 32];
        code(call(Control::simple(REGISTER_CPUID), &input))
    };
    let answers = [register(0x4000_0100, [1, 2, 3, 4]), register(1, [0; 4])];
    let get = code(call(Control::rep(GET_CPUID, 2), &[child.id, 0, 0, 0x4000_0100, 1]));
    let words = [0, 1, 2, 3].map(output);
    cases.check(
        "G8",
        "CPUID answers what is registered, and the APIC id of the VP",
        "1 2 3 4, and zeros",
        format_args!("{answers:?} {get} {words:x?}"),
        answers == [SUCCESS; 2] && get == SUCCESS && words == [2 << 32 | 1, 4 << 32 | 3, 0, 0],
    );
    let install = call(Control::simple(INSTALL_INTERCEPT), &[child.id, 2 << 32 | 4, 1]);
    cases.status("G8.1", "messages about CPUID are asked for", &[SUCCESS], install);

    let translate = call(Control::simple(TRANSLATE), &[child.id, 0, 1, 0x1234]);
    cases.check(
        "G8.2",
        "without paging an address is what it is",
        "code 0, page 1234",
        format_args!("{} {:x} {:x}", ShownAnswer(translate), output(0), output(1)),
        code(translate) == SUCCESS && output(0) & 0xffff_ffff == 0 && output(1) == 0x1234,
    );
    let _ = child.set(&[(name::CR0, 0x8000_0011), (name::CR3, 0x7000_0000)]);
    let translate = call(Control::simple(TRANSLATE), &[child.id, 0, 1, 0x1234]);
    cases.check(
        "G8.3",
        "with tables where there is no memory it is nowhere",
        "code 4",
        format_args!("{} {:x}", ShownAnswer(translate), output(0)),
        code(translate) == SUCCESS && output(0) & 0xffff_ffff == 4,
    );
    let _ = child.set(&[(name::CR0, 0x10), (name::CR3, 0)]);
}

/// A VP that counts in RAX is suspended, read, and goes on.
fn running(cases: &mut Cases, child: &Child) {
    // inc eax (in real mode with 66: the whole register); jmp to it.
    Ram::all().word(CODE_PAGE * PAGE).store(0xfceb_4066, Ordering::SeqCst);
    let map = call(Control::rep(MAP_PAGES, 1), &[child.id, 0, 0xf, address_of(CODE_PAGE) / PAGE]);
    let real = |selector: u128| 0x93 << 112 | selector << 96 | 0xffff << 64;
    let start = child.set(&[
        (name::CR0, 0x10),
        (name::CR4, 0),
        (name::EFER, 0),
        (name::CS, 0x9b << 112 | 0xffff << 64),
        (name::SS, real(0)),
        (name::RFLAGS, 2),
        (name::RIP, 0),
        (name::RAX, 0),
        (name::INTERCEPT_SUSPEND, 0),
        (name::EXPLICIT_SUSPEND, 0),
    ]);
    let read = || child.get(0, name::RAX).unwrap_or(0);
    let mut seen = [0; 3];
    let mut last = 0;
    for place in &mut seen {
        last = (0..100_000).map(|_| read()).find(|now| *now > last).unwrap_or(last);
        *place = last;
    }
    let grows = seen[0] != 0 && seen[2] > seen[1] && seen[1] > seen[0];
    let state = [name::EXPLICIT_SUSPEND, name::INTERCEPT_SUSPEND].map(|name| child.get(0, name));
    let stop = child.set(&[(name::EXPLICIT_SUSPEND, 1)]);
    let (first, second) = (read(), read());
    cases.check(
        "G10",
        "registers of a VP that runs are read, and it goes on; suspended it stands still",
        "RAX grows, then is the same",
        format_args!(
            "{} {} {seen:x?} {state:x?} {} {first:x} {second:x}",
            ShownAnswer(map),
            ShownAnswer(start),
            ShownAnswer(stop)
        ),
        code(map) == SUCCESS
            && start == Ok(10 << 32)
            && grows
            && state == [Ok(0), Ok(0)]
            && first == second
            && first != 0,
    );
}

/// States that no processor is ever in: the VP stops, and its parent hears of it.
fn impossible(cases: &mut Cases, child: &Child) {
    let mut running = 0;
    for (cr0, cr4, efer, cs) in [
        // Long mode without PAE; without protection; with a code segment of 64 and of 32 bits.
        (0x8000_0011, 0, 0x500, 0x9b),
        (0x8000_0010, 0x20, 0x500, 0x9b),
        (0x8000_0011, 0x20, 0x500, 0xe09b),
        // Not write-through, but cached.
        (0x2000_0010, 0, 0, 0x9b),
    ] {
        let _ = child.set(&[
            (name::CR0, cr0),
            (name::CR3, 0),
            (name::CR4, cr4),
            (name::EFER, efer),
            (name::CS, cs << 112 | 0xffff << 64),
            (name::RIP, 0x8000),
            (name::INTERCEPT_SUSPEND, 0),
            (name::EXPLICIT_SUSPEND, 0),
        ]);
        let stops = (0..100_000).any(|_| child.get(0, name::INTERCEPT_SUSPEND) == Ok(1));
        running += u32::from(!stops);
    }
    let stop = child.set(&[(name::EXPLICIT_SUSPEND, 1)]);
    cases.check(
        "G11",
        "states that contradict themselves stop the VP",
        "all four",
        format_args!("{running} run on, {}", ShownAnswer(stop)),
        running == 0 && code(stop) == SUCCESS,
    );
}
