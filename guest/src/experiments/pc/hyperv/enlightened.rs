//! I: the Hyper-V interface of a child, which its parent offers, and whose pages the parent takes away.

use core::sync::atomic::Ordering;

use guest_model::hypercall::{ACCESS_DENIED, Control, SUCCESS};

use super::child::{CODE_PAGE, Child, GET_CPUID, MAP_PAGES, PAGE, SET_PROPERTY, address_of, call, code, name, output};
use super::{Cases, ShownAnswer};
use crate::arch::hypercall;
use crate::arch::ram::Ram;

const GET_PROPERTY: u16 = 0x44;
const GET_PROPERTY_EX: u16 = 0x101;
const ASSIGNABLE_FEATURES: u64 = 0x9_0009;
const TIME_FREEZE: u64 = 0x3_0003;
const REFERENCE_TIME: u64 = 0x3_0005;
/// In units of 100 ns.
const HOUR: u64 = 3600 * 10_000_000;
const SELF: u64 = !0;

/// What QEMU 11.1 asks for: among others the APIC's MSRs (6), guest idle (10), flushes (25) and IPIs (26).
pub(super) const FEATURES: u64 = 0x640_0ffb;
const APIC_AND_IDLE: u64 = 1 << 6 | 1 << 10;
/// What the child then has of leaf 4000_0003: EAX, but for an invariant TSC, and EDX; and of 4000_0004, EAX.
const PRIVILEGES: u64 = 0x0a6e;
const TSC_INVARIANT: u64 = 1 << 15;
const OTHER_FEATURES: u64 = 0x8_0110;
const HINTS: u64 = 0x624;

/// Pages for the child's data, and for its hypercall page, which comes and goes.
const DATA: u64 = 404;
const CALLS: u64 = 405;
const DATA_AT: u64 = 0x1000;
const CALLS_AT: u64 = 0x2000;

const RIGHTS: u64 = 0xf;
const NO_ACCESS: u64 = 0x1_0000;
/// What the parent leaves in the page.
const MARK: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// In protected mode, without paging:
///
/// ```text
///  0        wrmsr GUEST_OS_ID; wrmsr HYPERCALL, 2001
/// 18        vmmcall (vmcall) with code 40, CREATE_PARTITION; the result to 1000
/// 25        call 2000 with code 2, a flush, and the input at 1010; the result to 1004
/// 51        rdmsr VP_INDEX to 1008
/// 5d        inc dword [100c]
/// 63        out 80, al
/// ```
const PROGRAM: [u64; 13] = [
    0xbac0_3140_0000_00b9,
    0x3141_300f_8100_0000,
    0x300f_0000_2001_b8d2,
    0xd901_0f00_0000_40b8,
    0x31d2_3100_0010_00a3,
    0x1010_b9f6_31ff_31db,
    0xb800_0018_00bc_0000,
    0x0011_00a3_0000_2000,
    0x15ff_0000_0002_b800,
    0x0010_04a3_0000_1100,
    0x320f_4000_0002_b900,
    0x0c05_ff00_0010_08a3,
    0x9090_9080_e600_0010,
];
const AFTER_ENABLE: u128 = 0x18;
const AT_COUNT: u128 = 0x5d;
const AT_OUT: u128 = 0x63;

/// What a child's CPUID says of its hypervisor: the first word of leaf 4000_0000.
pub(super) fn vendor(child: &Child) -> u64 {
    cpuid(child, 0x4000_0000)[0]
}

/// `child` was created with [`FEATURES`]; another one without had this [`vendor`].
pub(super) fn run(cases: &mut Cases, child: &Child, other_vendor: u64) {
    offer(cases, child, other_vendor);
    time(cases, child);
    round_trips(cases, child);
    pages(cases, child);
}

fn data(at: u64) -> u64 {
    word(DATA, at).load(Ordering::SeqCst)
}

fn word(page: u64, at: u64) -> &'static core::sync::atomic::AtomicU64 {
    Ram::all().word(page * PAGE + at)
}

/// EAX and EBX, ECX and EDX of a leaf, as VP 0 gets them.
fn cpuid(child: &Child, leaf: u64) -> [u64; 2] {
    match code(call(Control::rep(GET_CPUID, 1), &[child.id, 0, 0, leaf])) {
        SUCCESS => [output(0), output(1)],
        _ => [u64::MAX; 2],
    }
}

fn offer(cases: &mut Cases, child: &Child, other_vendor: u64) {
    let answer = call(Control::simple(GET_PROPERTY_EX), &[SELF, ASSIGNABLE_FEATURES, 0]);
    let (banks, features) = (output(0), output(1));
    cases.check(
        "I1",
        "the parent may offer all that QEMU wants, but for the APIC's MSRs and guest idle",
        "one bank, and these",
        format_args!("{} {banks:x} {features:x}", ShownAnswer(answer)),
        code(answer) == SUCCESS && banks == 1 && features & FEATURES == FEATURES & !APIC_AND_IDLE,
    );
    let [first, third, fourth] = [0x4000_0000, 0x4000_0003, 0x4000_0004].map(|leaf| cpuid(child, leaf));
    let is_offered = first == [0x7263_694d_4000_0006, 0x7648_2074_666f_736f]
        && third[0] & !TSC_INVARIANT == PRIVILEGES
        && third[1] == OTHER_FEATURES << 32
        && fourth[0] & 0xffff_ffff == HINTS;
    cases.check(
        "I2",
        "the child finds Hyper-V, without a parent's privileges",
        "Microsoft Hv, a6e or 8a6e, 80110, 624",
        format_args!("{first:x?} {third:x?} {fourth:x?}"),
        is_offered,
    );
    let is_vmware = other_vendor >> 32 == u64::from(u32::from_le_bytes(*b"VMwa"));
    let about = "a child that is offered nothing finds nothing of it";
    cases.check("I2.1", about, "VMwa", format_args!("{other_vendor:x}"), is_vmware);
}

/// The parent freezes the child's time, sets it, and lets it go on.
fn time(cases: &mut Cases, child: &Child) {
    let set = |property: u64, value: u64| code(call(Control::simple(SET_PROPERTY), &[child.id, property, value]));
    let reference = || match code(call(Control::simple(GET_PROPERTY), &[child.id, REFERENCE_TIME])) {
        SUCCESS => output(0),
        _ => u64::MAX,
    };
    let times = || {
        let [tsc, time] = [name::TSC, name::TIME].map(|name| child.get(0, name).unwrap_or(0));
        [tsc, time, reference().into()]
    };
    let (before, later) = (times(), times());
    let frozen = set(TIME_FREEZE, 1);
    let (first, second) = (times(), times());
    let moved = set(REFERENCE_TIME, HOUR);
    let there = times();
    let thawed = set(TIME_FREEZE, 0);
    let (third, fourth) = (times(), times());
    let is_later = |one: [u128; 3], other: [u128; 3]| (0..3).all(|at| one[at] < other[at]);
    cases.check(
        "I8",
        "the child's clocks stand still while they are frozen, and go on from there",
        "later, the same, an hour, later",
        format_args!("{before:x?} {later:x?} {frozen} {first:x?} {second:x?} {moved} {there:x?} {thawed} {third:x?}"),
        [frozen, moved, thawed] == [SUCCESS; 3]
            && is_later(before, later)
            && first == second
            && first[1] == first[2]
            && there == [first[0], HOUR.into(), HOUR.into()]
            && is_later(there, third)
            && is_later(third, fourth)
            // Far less than a minute.
            && fourth[1] - u128::from(HOUR) < u128::from(HOUR / 60),
    );
}

fn round_trips(cases: &mut Cases, child: &Child) {
    let written = [
        (name::HYPERCALL + 1, 0x8100 << 48),
        (name::HYPERCALL, 0x7001),
        (name::VP_ASSIST, 0x8001),
        (name::REFERENCE_TSC, 0x9001),
        (name::SCONTROL, 1),
        (name::SCONTROL + 2, 0xa001),
        (name::SCONTROL + 3, 0xb001),
        (name::SINT0 + 2, 0x4_0040),
        (name::STIMER0, 0x2_0008),
        (name::STIMER0 + 1, 1 << 60),
    ];
    let answers = written.map(|(name, value)| code(child.set(&[(name, value)])));
    let read = written.map(|(name, _)| child.get(0, name));
    // The count has started the timer.
    let is_same = |((name, value), read): (&(u32, u128), &Result<u128, u16>)| {
        *read == Ok(*value) || (*name == name::STIMER0 && *read == Ok(*value | 1))
    };
    cases.check(
        "I3",
        "the parent writes the child's MSRs and reads them back, where the child has no memory too",
        "all are as written",
        format_args!("{answers:?} {read:x?}"),
        answers == [SUCCESS; 10] && written.iter().zip(&read).all(is_same),
    );
    let reset = child.set(&[(name::HYPERCALL + 1, 0), (name::STIMER0 + 1, 0), (name::SCONTROL, 0)]);
    let after = [name::HYPERCALL, name::REFERENCE_TSC].map(|name| child.get(0, name));
    cases.check(
        "I3.1",
        "a guest without identity has neither hypercalls nor a clock's page",
        "0, 0",
        format_args!("{} {after:x?}", ShownAnswer(reset)),
        after == [Ok(0); 2],
    );
}

fn pages(cases: &mut Cases, child: &Child) {
    let map = |at: u64, flags: u64, page: u64| {
        let source = if flags == NO_ACCESS { 0 } else { address_of(page) / PAGE };
        code(call(Control::rep(MAP_PAGES, 1), &[child.id, at / PAGE, flags, source]))
    };
    for (place, bytes) in (0..).step_by(8).zip(PROGRAM.map(hypercall::adapted)) {
        word(CODE_PAGE, place).store(bytes, Ordering::SeqCst);
    }
    for at in 0..PAGE / 8 {
        word(DATA, at * 8).store(0, Ordering::SeqCst);
        word(CALLS, at * 8).store(MARK, Ordering::SeqCst);
    }
    // A flush of all VPs' address spaces.
    word(DATA, 0x18).store(3, Ordering::SeqCst);
    let mapped = [map(0, RIGHTS, CODE_PAGE), map(DATA_AT, RIGHTS, DATA), map(CALLS_AT, NO_ACCESS, CALLS)];
    let flat = |kind: u128| kind << 112 | 8 << 96 | 0xffff_ffff << 64;
    let start = child.set(&[
        (name::CR0, 0x11),
        (name::CS, flat(0xc09b)),
        (name::SS, flat(0xc093)),
        (name::ES, flat(0xc093)),
        (name::ES + 3, flat(0xc093)),
        (name::RFLAGS, 2),
        (name::RIP, 0),
    ]);
    let go_on = || child.set(&[(name::EXPLICIT_SUSPEND, 0), (name::INTERCEPT_SUSPEND, 0)]);
    // Where it has exited for the parent.
    let stopped = || {
        let has_stopped = (0..1_000_000).any(|_| child.get(0, name::INTERCEPT_SUSPEND) == Ok(1));
        if has_stopped { child.get(0, name::RIP).unwrap_or(u128::MAX) } else { u128::MAX - 1 }
    };

    let _ = go_on();
    let (rip, left) = (stopped(), [word(CALLS, 0).load(Ordering::SeqCst), data(0)]);
    cases.check(
        "I4",
        "the hypercall page is away: the child waits behind the write of its MSR",
        "at 18, and nothing else has happened",
        format_args!("{mapped:?} {} {rip:#x} {left:x?}", ShownAnswer(start)),
        rip == AFTER_ENABLE && left == [MARK, 0],
    );
    let back = map(CALLS_AT, RIGHTS, CALLS);
    let _ = go_on();
    let (rip, results) = (stopped(), [data(0), data(8)]);
    cases.check(
        "I5",
        "it is back: the child is denied a parent's call, flushes by hypercall, and is VP 0",
        "at 63: status 6, status 0; 0, 1 round",
        format_args!("{back} {rip:#x} {results:x?}"),
        rip == AT_OUT && results == [ACCESS_DENIED.into(), 1 << 32],
    );
    let registers = [name::HYPERCALL, name::HYPERCALL + 1].map(|name| child.get(0, name));
    let about = "the parent reads what the child has written";
    let is_read = registers == [Ok(u128::from(CALLS_AT) | 1), Ok(0x8100_0000 << 32)];
    cases.check("I5.1", about, "2001, 8100000000000000", format_args!("{registers:x?}"), is_read);

    // The clock's page, written by the parent, is owed to all VPs before they go on.
    let away = map(CALLS_AT, NO_ACCESS, CALLS);
    for at in 0..3 {
        word(CALLS, at * 8).store(MARK, Ordering::SeqCst);
    }
    let set = child.set(&[(name::REFERENCE_TSC, u128::from(CALLS_AT) | 1), (name::RIP, AT_COUNT)]);
    let _ = go_on();
    let (rip, rounds) = (stopped(), data(8) >> 32);
    let back = map(CALLS_AT, RIGHTS, CALLS);
    let _ = go_on();
    let (end, more) = (stopped(), data(8) >> 32);
    let clock = [0, 8].map(|at| word(CALLS, at).load(Ordering::SeqCst));
    cases.check(
        "I6",
        "the clock's page is away when the parent names it: it is written before the child goes on",
        "at 5d after 1 round, at 63 after 2; a sequence, and a scale",
        format_args!("{away} {} {rip:#x} {rounds} {back} {end:#x} {more} {clock:x?}", ShownAnswer(set)),
        (rip, rounds, end, more) == (AT_COUNT, 1, AT_OUT, 2)
            && clock[0] & 0xffff_ffff != 0
            && clock.iter().all(|word| ![0, MARK].contains(word)),
    );
    let stop = child.set(&[(name::EXPLICIT_SUSPEND, 1), (name::HYPERCALL + 1, 0), (name::CR0, 0x10)]);
    cases.status("I7", "the child stops", &[SUCCESS], stop);
}
