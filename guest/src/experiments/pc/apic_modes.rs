//! The local APIC in all its modes: off, xAPIC, x2APIC and back, at its default address and elsewhere, with the
//! matching CPUID (APM vol. 2, 16.3.1 and 16.9; SDM vol. 3, "x2APIC State Transitions").
//!
//! QEMU's own CPU cannot run this: there, a disabled APIC stays off until reset.

use crate::arch::attempt::{Fault, load_u32, rdmsr, store_u32, wrmsr};
use crate::arch::control::{self, cpuid};
use crate::arch::{apic, cpu_local, window};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};

const X2APIC: u64 = 1 << 10;
const ENABLE: u64 = 1 << 11;
/// A page where nothing is.
const ELSEWHERE: u64 = 0xfed4_0000;
/// An unused vector.
const VECTOR: u8 = 0x91;

/// Registers and their values after reset (APM vol. 2, table 16-2). The first eight are the same in both modes.
const AFTER_RESET: [(u64, u32); 11] = [
    (0x80, 0),
    (0xf0, 0xff),
    (0x320, 0x1_0000),
    (0x340, 0x1_0000),
    (0x350, 0x1_0000),
    (0x360, 0x1_0000),
    (0x370, 0x1_0000),
    (0x380, 0),
    (0x3e0, 0),
    (0xd0, 0),
    (0xe0, u32::MAX),
];

/// Whether leaves 1 and 8000_0001 show an APIC. On Intel's processors the second has no such bit, and repeats nothing.
fn shown() -> [bool; 2] {
    let second = if control::maker().is(b"GenuineIntel") { 1 } else { 0x8000_0001 };
    [1, second].map(|leaf| cpuid(leaf, 0).edx >> 9 & 1 != 0)
}

fn refused(value: u64) -> bool {
    wrmsr(apic::APIC_BASE, value).is_err_and(|fault| fault.vector == Fault::GP)
}

/// The version register of the APIC whose page is mapped at `page`.
fn load(page: u64) -> u32 {
    load_u32(page + apic::VERSION).unwrap_or(0)
}

fn msr(register: u64) -> u32 {
    0x800 + (register >> 4 & 0xff) as u32
}

/// The first register that is not as after reset, in xAPIC mode or x2APIC mode.
fn not_reset(x2apic: bool) -> Option<(u64, u64)> {
    let count = if x2apic { 9 } else { AFTER_RESET.len() };
    AFTER_RESET[..count].iter().find_map(|&(register, value)| {
        let seen = if x2apic {
            rdmsr(msr(register)).unwrap_or(u64::MAX)
        } else {
            load_u32(apic::XAPIC_PAGE + register).map_or(u64::MAX, u64::from)
        };
        (seen != value.into()).then_some((register, seen))
    })
}

pub(super) fn run(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("QEMU's own APIC stays off");
    }
    let mut cases = Cases::new(context, "apic-modes");
    let start = rdmsr(apic::APIC_BASE).unwrap_or_default();
    let off = start & !(ENABLE | X2APIC);
    linear_addresses(&mut cases);
    for round in 0..context.settings.iterations.unwrap_or(3) {
        use_it();
        turn_off(&mut cases, off);
        as_xapic(&mut cases, off);
        if control::has_x2apic() {
            as_x2apic(&mut cases, off);
        }
        apic::enable_this_cpu();
        let seen = rdmsr(apic::APIC_BASE).unwrap_or_default();
        let works = works();
        cases.check(
            "back",
            "the APIC as this kernel uses it, again",
            "as at first, and it takes interrupts",
            format_args!("round {round} base {seen:#x} works {works}"),
            seen == start && works,
        );
    }
    elsewhere(&mut cases, off);
    apic::enable_this_cpu();
    cases.done()
}

fn linear_addresses(cases: &mut Cases) {
    let (bits, la57) = (cpuid(0x8000_0008, 0).eax >> 8 & 0xff, cpuid(7, 0).ecx >> 16 & 1 != 0);
    cases.check(
        "linear",
        "CPUID 8000_0008: width of linear addresses",
        "57 with LA57, else 48",
        format_args!("{bits} LA57 {la57}"),
        bits == if la57 { 57 } else { 48 },
    );
}

/// Changes each register that a reset must clear.
fn use_it() {
    apic::write(0x80, 0x50);
    apic::write(0x320, 0x1_0033);
    apic::write(0x370, 0x44);
    apic::write(0x3e0, 3);
    apic::send_self(VECTOR);
}

/// Whether an interrupt to itself arrives, and is requested no more after the next reset.
fn works() -> bool {
    apic::send_self(VECTOR);
    let requested = apic::is_requested(VECTOR);
    let base = rdmsr(apic::APIC_BASE).unwrap_or_default();
    let _ = wrmsr(apic::APIC_BASE, base & !(ENABLE | X2APIC));
    apic::enable_this_cpu();
    requested && !apic::is_requested(VECTOR)
}

fn turn_off(cases: &mut Cases, off: u64) {
    let before = shown();
    let written = wrmsr(apic::APIC_BASE, off).is_ok();
    let after = shown();
    cases.check(
        "off",
        "IA32_APIC_BASE without enable",
        "taken; CPUID shows no APIC",
        format_args!("taken {written} before {before:?} after {after:?}"),
        written && before == [true; 2] && after == [false; 2],
    );
    let _ = store_u32(apic::XAPIC_PAGE + 0x80, 0);
    let (page, register) = (load(apic::XAPIC_PAGE), rdmsr(msr(apic::VERSION)));
    cases.check(
        "off-registers",
        "registers of an APIC that is off",
        "an empty page, #GP",
        format_args!("page {page:x?} msr {}", register.is_err()),
        page == u32::MAX && register.is_err(),
    );
    let refusals = [off | X2APIC, off | X2APIC | ENABLE].map(refused);
    cases.check(
        "off-to-x2apic",
        "x2APIC without enable, and straight from off",
        "#GP, #GP",
        format_args!("{refusals:?} cpuid {:?}", shown()),
        refusals == [true; 2] && shown() == [false; 2],
    );
}

fn as_xapic(cases: &mut Cases, off: u64) {
    let written = wrmsr(apic::APIC_BASE, off | ENABLE).is_ok();
    let (shown, wrong) = (shown(), not_reset(false));
    cases.check(
        "xapic",
        "on again as an xAPIC",
        "CPUID shows it; all registers as after reset",
        format_args!("taken {written} cpuid {shown:?} wrong {wrong:x?}"),
        written && shown == [true; 2] && wrong.is_none(),
    );
}

fn as_x2apic(cases: &mut Cases, off: u64) {
    let written = wrmsr(apic::APIC_BASE, off | ENABLE | X2APIC).is_ok();
    let (shown, wrong) = (shown(), not_reset(true));
    let page = load(apic::XAPIC_PAGE);
    cases.check(
        "x2apic",
        "from there to x2APIC",
        "CPUID shows it; all registers as after reset; no page",
        format_args!("taken {written} cpuid {shown:?} wrong {wrong:x?} page {page:x?}"),
        written && shown == [true; 2] && wrong.is_none() && page == u32::MAX,
    );
    let back = refused(off | ENABLE);
    let again = wrmsr(apic::APIC_BASE, off | ENABLE | X2APIC).is_ok();
    cases.check(
        "x2apic-to-xapic",
        "x2APIC straight to xAPIC, and to itself",
        "#GP; taken",
        format_args!("refused {back} taken {again}"),
        back && again,
    );
}

/// The page of registers is moved, and back.
fn elsewhere(cases: &mut Cases, off: u64) {
    let _ = wrmsr(apic::APIC_BASE, off);
    let moved_base = off & 0xfff | ELSEWHERE | ENABLE;
    let moved = wrmsr(apic::APIC_BASE, moved_base).is_ok();
    let there = load(window::map_physical(cpu_local::index(), ELSEWHERE));
    let here = load(apic::XAPIC_PAGE);
    let seen = rdmsr(apic::APIC_BASE).unwrap_or_default();
    cases.check(
        "moved",
        "the page of registers at another address",
        "it is there, and no more here",
        format_args!("taken {moved} there {there:x?} here {here:x?} base {seen:x?}"),
        moved && seen == moved_base && here == u32::MAX && there & 0xff == 0x14,
    );
    let reserved = (0..8).chain([9, control::physical_bits(), 63]).all(|bit| refused(moved_base | 1 << bit));
    cases.check(
        "base-reserved",
        "reserved bits of IA32_APIC_BASE",
        "#GP each",
        format_args!("{reserved}"),
        reserved && rdmsr(apic::APIC_BASE) == Ok(moved_base),
    );
    let back = wrmsr(apic::APIC_BASE, off | ENABLE).is_ok();
    let here = load(apic::XAPIC_PAGE);
    cases.check(
        "moved-back",
        "the page of registers where it was",
        "it is here",
        format_args!("taken {back} here {here:x?}"),
        back && here & 0xff == 0x14,
    );
}
