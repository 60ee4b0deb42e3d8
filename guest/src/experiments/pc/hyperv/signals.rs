//! H: what a child and its parent tell each other while the child runs: messages, doorbells, interrupts (TLFS,
//! "Inter-Partition Communication"; Linux' `mshv_synic.c` and `mshv_eventfd.c`).

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::hypercall::{Control, INVALID_PARAMETER, SUCCESS};

use super::child::{CODE_PAGE, Child, GET_STATE, PAGE, SET_STATE, SPURIOUS, address_of, call, code, name, state_word};
use super::{Cases, by_registers};
use crate::arch::attempt::wrmsr;
use crate::arch::hyperv::{ENABLE, msr};
use crate::arch::ram::Ram;
use crate::arch::{cpu_local, tsc};
use crate::cpu;
use crate::interrupt::{COUNTED, taken};

const CLEAR_INTERRUPT: u16 = 0x56;
const DELETE_PORT: u16 = 0x58;
const DISCONNECT_PORT: u16 = 0x5b;
const RING_EMPTY: u16 = 0x8b;
const ASSERT: u16 = 0x94;
const CREATE_PORT: u16 = 0x95;
const CONNECT_PORT: u16 = 0x96;

const INVALID_PORT: u16 = 0x11;
const INVALID_CONNECTION: u16 = 0x12;

const SELF: u64 = !0;
/// The parent's pages for messages and for event rings.
const MESSAGES: u64 = 402;
const RINGS: u64 = 403;
/// Of Linux' driver: SINT 5 tells of its event ring by a message in slot 0.
const SINT: u64 = 5;
const AS_INTERCEPT: u64 = 1 << 19;
const OPAQUE_INTERCEPT: u64 = 0x8000_003f;
const SINT_INTERCEPT: u64 = 0x8000_0061;
const PENDING: u64 = 1 << 40;

/// Where the child has no memory.
const BELL: u64 = 0xfebf_0000;

/// VP 0 of the child is suspended, and has memory at address 0.
pub(super) fn run(cases: &mut Cases, child: &Child) {
    let is_up = [
        (msr::SINT0, u64::from(COUNTED)),
        (msr::SINT0 + 5, u64::from(COUNTED) | AS_INTERCEPT),
        (msr::SIMP, address_of(MESSAGES) | ENABLE),
        (msr::SIRBP, address_of(RINGS) | ENABLE),
        (msr::SCONTROL, ENABLE),
    ]
    .into_iter()
    .all(|(number, value)| wrmsr(number, value).is_ok());
    cases.check("H1", "pages for messages and event rings", "no fault", format_args!("{is_up}"), is_up);
    // What earlier cases have left.
    let _ = Heard::until(cases, |heard| heard.of_child != 0);

    doorbells(cases, child);
    interrupts(cases, child);
    cost(cases, child);
    let is_off = [msr::SCONTROL, msr::SIRBP, msr::SIMP].into_iter().all(|number| wrmsr(number, 0).is_ok());
    cases.check("H9", "all off again", "no fault", format_args!("{is_off}"), is_off);
}

fn word(page: u64, at: u64) -> &'static AtomicU64 {
    Ram::all().word(page * PAGE + at)
}

/// The messages in slot 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Heard {
    of_child: u32,
    of_ring: u32,
    others: u32,
    interrupts: u64,
}

impl Heard {
    /// Takes messages as a kernel does, until there are `enough`.
    fn until(cases: &Cases, enough: impl Fn(Self) -> bool) -> Self {
        let before = taken(cpu_local::index()).counted.load(Ordering::SeqCst);
        let heard = Cell::new(Self::default());
        let patience = cases.patience().min(tsc::ticks(300_000));
        cpu::wait_until(patience, || {
            let mut now = heard.get();
            match word(MESSAGES, 0).load(Ordering::SeqCst) & 0xffff_ffff {
                0 => return enough(now),
                OPAQUE_INTERCEPT => now.of_child += 1,
                SINT_INTERCEPT if word(MESSAGES, 16).load(Ordering::SeqCst) & 0xffff_ffff == SINT => now.of_ring += 1,
                _ => now.others += 1,
            }
            let old = word(MESSAGES, 0).fetch_and(!0xffff_ffff, Ordering::SeqCst);
            if old & PENDING != 0 && wrmsr(msr::EOM, 0).is_err() {
                now.others += 1;
            }
            heard.set(now);
            false
        });
        Self { interrupts: taken(cpu_local::index()).counted.load(Ordering::SeqCst) - before, ..heard.get() }
    }
}

/// Puts code into the child's first page, and lets VP 0 run it in real mode, with DS at the doorbells.
fn start(child: &Child, at: u64, program: &[u64], rflags: u128) -> bool {
    for (place, bytes) in (at..).step_by(8).zip(program) {
        word(CODE_PAGE, place).store(*bytes, Ordering::SeqCst);
    }
    let segment = |kind: u128, base: u64| kind << 112 | 0xffff << 64 | u128::from(base);
    let registers = [
        (name::CR0, 0x10),
        (name::CR8, 0),
        (name::IDTR, 0x3ff << 48),
        (name::CS, segment(0x9b, 0)),
        (name::SS, segment(0x93, 0)),
        (name::ES + 3, segment(0x93, BELL)),
        (name::RFLAGS, rflags),
        (name::RIP, at.into()),
        (name::RAX, 1),
        (name::RAX + 1, 8),
        (name::RAX + 3, 7),
        (name::RAX + 4, 0x700),
        (name::INTERCEPT_SUSPEND, 0),
        (name::EXPLICIT_SUSPEND, 0),
    ];
    child.set(&registers) == Ok((registers.len() as u64) << 32)
}

fn stop(child: &Child) -> (u128, u128) {
    let _ = child.set(&[(name::EXPLICIT_SUSPEND, 1)]);
    [name::INTERCEPT_SUSPEND, name::RIP].map(|name| child.get(0, name).unwrap_or(u128::MAX)).into()
}

fn doorbells(cases: &mut Cases, child: &Child) {
    let create =
        |port: u64| call(Control::simple(CREATE_PORT), &[SELF, port, child.id, 4, 0xffff_ffff << 32 | SINT, 0, 0]);
    let connect = |number: u64, port: u64, at: u64, value: u64, flags: u64| {
        call(Control::simple(CONNECT_PORT), &[child.id, number, SELF, port, 4, at, value, flags, 0])
    };
    const WORD: u64 = 2;
    const ANY_VALUE: u64 = 1 << 31;
    let made =
        [create(0x11), create(0x22), connect(1, 0x11, BELL, 0, WORD | ANY_VALUE), connect(2, 0x22, BELL + 4, 7, WORD)]
            .map(code);
    let refused = [create(0x11), connect(1, 0x11, BELL + 8, 0, 0), connect(3, 0x33, BELL, 0, 0)].map(code);
    cases.check(
        "H2",
        "two doorbells, and three that cannot be",
        "0 for the two; 17, 18, 17",
        format_args!("{made:?} {refused:?}"),
        made == [SUCCESS; 4] && refused == [INVALID_PORT, INVALID_CONNECTION, INVALID_PORT],
    );

    // mov [0], ax; the same; mov [4], bx; mov [4], cx. The last one has another value, and exits.
    let is_started = start(child, 0x800, &[0x0000_0689_0000_0689, 0x0004_0e89_0004_1e89], 2);
    let heard = Heard::until(cases, |heard| heard.of_child == 1 && heard.of_ring != 0);
    let (is_suspended, rip) = stop(child);
    cases.check(
        "H3",
        "a child rings three times and goes on; at another value it exits to the VMM",
        "a message about the ring and one about the VP, which is at 80c",
        format_args!("{is_started} {heard:?} {is_suspended} {rip:#x}"),
        is_started
            && (heard.of_child, heard.others) == (1, 0)
            && (1..=3).contains(&heard.of_ring)
            && heard.interrupts != 0
            && (is_suspended, rip) == (1, 0x80c),
    );
    let ports = ring();
    let has = |port| ports.contains(&port);
    cases.check(
        "H4",
        "the ring has both ports, from its first place on",
        "11, 22, or one of them again",
        format_args!("{ports:x?}"),
        has(0x11) && has(0x22) && ports.iter().all(|port| [0, 0x11, 0x22].contains(port)) && ports[0] != 0,
    );
    let empty = by_registers(Control::simple(RING_EMPTY), &[SINT]);
    cases.status("H4.1", "the ring is empty", &[SUCCESS], empty);

    let disconnect = |number: u64| code(by_registers(Control::simple(DISCONNECT_PORT), &[child.id, 1 << 32 | number]));
    let delete = |port: u64| code(by_registers(Control::simple(DELETE_PORT), &[SELF, port]));
    let gone = [disconnect(1), disconnect(2), delete(0x11), delete(0x22)];
    let gone_already = [disconnect(1), delete(0x11)];
    let is_started = start(child, 0x800, &[], 2);
    let heard = Heard::until(cases, |heard| heard.of_child == 1);
    let (_, rip) = stop(child);
    cases.check(
        "H5",
        "without the doorbells the first write exits to the VMM",
        "0 for each, then 18 and 17; at 800",
        format_args!("{gone:?} {gone_already:?} {is_started} {heard:?} {rip:#x}"),
        gone == [SUCCESS; 4]
            && gone_already == [INVALID_CONNECTION, INVALID_PORT]
            && (heard.of_child, heard.of_ring) == (1, 0)
            && rip == 0x800,
    );
}

/// The first ports in the ring, which is empty then.
fn ring() -> [u64; 5] {
    let at = SINT * 256;
    let words = [0, 8, 16].map(|offset| word(RINGS, at + offset).load(Ordering::SeqCst));
    for offset in [8, 16] {
        word(RINGS, at + offset).store(0, Ordering::SeqCst);
    }
    word(RINGS, at).fetch_and(0xffff_ffff, Ordering::SeqCst);
    let halves = |word: u64| [word & 0xffff_ffff, word >> 32];
    let ([_, first], [second, third], [fourth, fifth]) = (halves(words[0]), halves(words[1]), halves(words[2]));
    [first, second, third, fourth, fifth]
}

fn assert(child: &Child, kind_and_flags: u64, destination: u64, vector: u64) -> u16 {
    code(call(Control::simple(ASSERT), &[child.id, kind_and_flags, destination, vector]))
}

fn interrupts(cases: &mut Cases, child: &Child) {
    const LEVEL: u64 = 1 << 32;
    const LOGICAL: u64 = 1 << 33;
    const NMI: u64 = 4;
    const EXTERNAL: u64 = 7;
    const IF: u128 = 1 << 9;
    // The APIC on; vectors 2 and 40 lead to an OUT, which exits.
    let _ = child.state(GET_STATE, 0);
    state_word(SPURIOUS).store(0x1ff, Ordering::SeqCst);
    let is_on = code(child.state(SET_STATE, 0)) == SUCCESS;
    for (at, bytes) in [(0x8, 0x900), (0x100, 0x900), (0x900, 0x80e6)] {
        word(CODE_PAGE, at).store(bytes, Ordering::SeqCst);
    }
    // hlt; jmp to it.
    const HALT: &[u64] = &[0x00fd_ebf4];
    for (case, about, kind, destination, vector, rflags) in [
        ("H6", "a halted VP takes a fixed interrupt", 0, 0, 0x40, IF | 2),
        ("H6.1", "one that is level-triggered", LEVEL, 0, 0x40, IF | 2),
        ("H6.2", "one for everybody", 0, 0xff, 0x40, IF | 2),
        ("H6.3", "an NMI, with interrupts off", NMI, 0, 0, 2),
    ] {
        let is_started = is_on && start(child, 0x840, HALT, rflags);
        let is_halted = (0..100_000).any(|_| child.get(0, name::ACTIVITY) == Ok(2));
        let answer = assert(child, kind, destination, vector);
        let heard = Heard::until(cases, |heard| heard.of_child == 1);
        let (_, rip) = stop(child);
        cases.check(
            case,
            about,
            "it is in its handler, at 900",
            format_args!("{is_started} {is_halted} {answer} {heard:?} {rip:#x}"),
            is_started && is_halted && answer == SUCCESS && (heard.of_child, heard.others) == (1, 0) && rip == 0x900,
        );
        // The interrupt is over: in service there is nothing.
        let _ = child.state(GET_STATE, 0);
        (3..15).for_each(|at| state_word(at).store(0, Ordering::SeqCst));
        state_word(SPURIOUS).store(0x1ff, Ordering::SeqCst);
        let _ = child.state(SET_STATE, 0);
        let _ = child.set(&[(name::ACTIVITY, 0), (name::INTERRUPT_STATE, 0)]);
    }
    let others = [
        assert(child, EXTERNAL, 0, 0),
        assert(child, LOGICAL, 0, 0x40),
        assert(child, 2, 0, 0x40),
        assert(child, 0, 0, 0x100),
        code(by_registers(Control::simple(CLEAR_INTERRUPT), &[child.id])),
    ];
    cases.check(
        "H7",
        "an external interrupt without a vector, a logical destination of nobody, SMI, a vector of 9 bits, and CLEAR",
        "0, 0, 0, 5, 0",
        format_args!("{others:?}"),
        others == [SUCCESS, SUCCESS, SUCCESS, INVALID_PARAMETER, SUCCESS],
    );
}

/// Linux makes this call with interrupts off, for each interrupt of a device.
fn cost(cases: &mut Cases, child: &Child) {
    const CALLS: u64 = 1000;
    let before = tsc::now();
    let are_done = (0..CALLS).all(|_| assert(child, 0, 0, 0x40) == SUCCESS);
    let nanos = (tsc::now() - before) / tsc::ticks(1).max(1) * 1000 / CALLS;
    let _ = child.set(&[(name::RFLAGS, 2)]);
    cases.check(
        "H8",
        "a thousand interrupts to a VP that is suspended",
        "status 0",
        format_args!("{are_done}, {nanos} ns each"),
        are_done,
    );
}
