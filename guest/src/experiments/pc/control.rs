//! The values that CR0, CR4 and EFER (and CR8, DR6, DR7) accept: every bit by itself and combinations of bits, by every
//! instruction that writes them (APM vol. 2, 3.1 and table 14-5).
//!
//! The table is generated. Each case writes a value and reads the register. The register has the new value, kept the
//! old one after a #GP, or kept a read-only bit. QEMU's own CPU checks little: the experiment omits cases there after
//! which it cannot continue.

use crate::arch::attempt::{self, Fault};
use crate::arch::control_forms::{self, Form};
use crate::arch::{control, cpu_local, window};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};

const EFER: u32 = 0xc000_0080;

mod bit {
    pub(super) const PE: u64 = 1 << 0;
    pub(super) const MP: u64 = 1 << 1;
    pub(super) const EM: u64 = 1 << 2;
    pub(super) const TS: u64 = 1 << 3;
    pub(super) const ET: u64 = 1 << 4;
    pub(super) const NE: u64 = 1 << 5;
    pub(super) const WP: u64 = 1 << 16;
    pub(super) const AM: u64 = 1 << 18;
    pub(super) const NW: u64 = 1 << 29;
    pub(super) const CD: u64 = 1 << 30;
    pub(super) const PG: u64 = 1 << 31;
    pub(super) const ALL_OF_CR0: u64 = PE | MP | EM | TS | ET | NE | WP | AM | NW | CD | PG;

    pub(super) const PGE: u64 = 1 << 7;
    pub(super) const PAE: u64 = 1 << 5;

    pub(super) const LME: u64 = 1 << 8;
    pub(super) const LMA: u64 = 1 << 10;
    pub(super) const NXE: u64 = 1 << 11;
}

/// What the architecture does with a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// #GP(0), and nothing changes.
    Refused,
    /// The register has this value then.
    Becomes(u64),
}

/// A register, by how it is written and read.
struct Register {
    name: &'static str,
    write: fn(u64) -> Result<(), Fault>,
    read: fn() -> u64,
}

const CR0: Register = Register { name: "cr0", write: attempt::write_cr0, read: attempt::read_cr0 };
const CR4: Register = Register { name: "cr4", write: attempt::write_cr4, read: attempt::read_cr4 };
const EFER_MSR: Register = Register {
    name: "efer",
    write: |value| attempt::wrmsr(EFER, value),
    read: || attempt::rdmsr(EFER).unwrap_or_default(),
};

pub(super) fn run(context: &Context) -> Outcome {
    let mut cases = Cases::new(context, "control-registers");
    single_bits(&mut cases);
    combinations(&mut cases);
    moves(&mut cases);
    status_word(&mut cases);
    others(&mut cases);
    cases.done()
}

/// CR0 as this kernel runs, in 64-bit mode.
fn cr0_takes(value: u64) -> Answer {
    let contradicts = value >> 32 != 0 || value & bit::PG == 0 || value & bit::PE == 0;
    if contradicts || value & (bit::NW | bit::CD) == bit::NW {
        return Answer::Refused;
    }
    Answer::Becomes(value & bit::ALL_OF_CR0 | bit::ET)
}

/// CR4, in 64-bit mode, depending on CPUID.
fn cr4_takes(value: u64) -> Answer {
    let leaf_1 = control::cpuid(1, 0);
    let leaf_7 = control::cpuid(7, 0);
    let shown = |register: u32, number: u32| register >> number & 1 != 0;
    // Bit by bit, with CPUID's name of the feature (APM vol. 2, 3.1.3).
    let features = [
        (0, shown(leaf_1.edx, 1)),
        (1, shown(leaf_1.edx, 1)),
        (2, shown(leaf_1.edx, 4)),
        (3, shown(leaf_1.edx, 2)),
        (4, shown(leaf_1.edx, 3)),
        (5, shown(leaf_1.edx, 6)),
        (6, true),
        (7, shown(leaf_1.edx, 13)),
        (8, true),
        (9, shown(leaf_1.edx, 24)),
        (10, shown(leaf_1.edx, 25)),
        (11, shown(leaf_7.ecx, 2)),
        (16, shown(leaf_7.ebx, 0)),
        (18, shown(leaf_1.ecx, 26)),
        (20, shown(leaf_7.ebx, 7)),
        (21, shown(leaf_7.ebx, 20)),
        (22, shown(leaf_7.ecx, 3)),
    ];
    // LA57 cannot change in long mode. No guest sees PCIDE, CET and Intel's features.
    let writable: u64 = features.iter().filter(|(_, there)| *there).map(|(number, _)| 1 << number).sum();
    if value & !writable != 0 || value & bit::PAE == 0 { Answer::Refused } else { Answer::Becomes(value) }
}

/// EFER under paging.
fn efer_takes(value: u64, now: u64) -> Answer {
    let extended = control::cpuid(0x8000_0001, 0);
    let shown = |register: u32, number: u32| register >> number & 1 != 0;
    let features = [
        (0, shown(extended.edx, 11)),
        (8, shown(extended.edx, 29)),
        (11, shown(extended.edx, 20)),
        (12, shown(extended.ecx, 2)),
        (14, shown(extended.edx, 25)),
        (15, shown(extended.ecx, 17)),
    ];
    let writable: u64 = features.iter().filter(|(_, there)| *there).map(|(number, _)| 1 << number).sum();
    // Bits 7:1 read as zero, LMA follows.
    const IGNORED: u64 = 0xfe | bit::LMA;
    if value & !(writable | IGNORED) != 0 || (value ^ now) & bit::LME != 0 {
        return Answer::Refused;
    }
    Answer::Becomes(value & writable | now & bit::LMA)
}

/// Writes that crash QEMU's own CPU: paging off under this kernel, and bits of CR4 that it does not have.
fn is_deadly(register: &Register, value: u64) -> bool {
    match register.name {
        "cr0" => value & bit::PG == 0 || value & bit::PE == 0,
        "cr4" => cr4_takes(value) == Answer::Refused,
        "efer" => value & bit::LME == 0,
        _ => false,
    }
}

/// Writes `value` by `write`, checks the result, and restores the register.
fn check(
    cases: &mut Cases,
    name: &str,
    register: &Register,
    write: fn(u64) -> Result<(), Fault>,
    value: u64,
    expected: Answer,
) {
    let about = "a write of a control register";
    if !cases.context.judged && is_deadly(register, value) {
        return cases.skip(name, about, "QEMU's own CPU does not survive it");
    }
    let before = (register.read)();
    let fault = write(value).err();
    let after = (register.read)();
    if after != before {
        // A register that cannot be put back would make all cases behind it meaningless.
        let restored = (register.write)(before).is_ok() && (register.read)() == before;
        if !restored {
            cases.check(name, about, "restored", format_args!("{:#x} stays", (register.read)()), false);
            return;
        }
    }
    let seen = match fault {
        None => Answer::Becomes(after),
        Some(Fault { vector: Fault::GP, error: 0 }) if after == before => Answer::Refused,
        Some(fault) => {
            cases.check(name, about, "an answer", format_args!("{fault}, then {after:#x}"), false);
            return;
        }
    };
    let (wanted, is_right) = (word(expected), seen == expected);
    match seen {
        Answer::Refused => cases.check(name, about, wanted, format_args!("gp"), is_right),
        Answer::Becomes(now) => cases.check(name, about, wanted, format_args!("{before:#x} to {now:#x}"), is_right),
    }
}

fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Refused => "gp",
        Answer::Becomes(_) => "taken",
    }
}

/// A case's name, which has no room but on the stack.
struct Name {
    bytes: [u8; 48],
    length: usize,
}

impl Name {
    fn of(text: core::fmt::Arguments<'_>) -> Self {
        use core::fmt::Write;
        let mut name = Self { bytes: [0; 48], length: 0 };
        // A name that is too long is cut off.
        let _ = name.write_fmt(text);
        name
    }

    fn text(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }
}

impl core::fmt::Write for Name {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for &byte in text.as_bytes() {
            *self.bytes.get_mut(self.length).ok_or(core::fmt::Error)? = byte;
            self.length += 1;
        }
        Ok(())
    }
}

/// Each bit of each register, changed alone.
fn single_bits(cases: &mut Cases) {
    let (cr0, cr4, efer) = ((CR0.read)(), (CR4.read)(), (EFER_MSR.read)());
    for number in 0..64 {
        let value = cr0 ^ 1 << number;
        check(cases, Name::of(format_args!("cr0-bit-{number}")).text(), &CR0, CR0.write, value, cr0_takes(value));
    }
    for number in 0..64 {
        let value = cr4 ^ 1 << number;
        check(cases, Name::of(format_args!("cr4-bit-{number}")).text(), &CR4, CR4.write, value, cr4_takes(value));
    }
    for number in 0..64 {
        let value = efer ^ 1 << number;
        let name = Name::of(format_args!("efer-bit-{number}"));
        // Without NXE this kernel's own pages have a reserved bit.
        if value & bit::NXE == 0 && efer & bit::NXE != 0 {
            cases.skip(name.text(), "a write of a control register", "this kernel's pages need it");
        } else {
            check(cases, name.text(), &EFER_MSR, EFER_MSR.write, value, efer_takes(value, efer));
        }
    }
}

/// Combinations that conflict, or seem to.
fn combinations(cases: &mut Cases) {
    let (cr0, cr4) = ((CR0.read)(), (CR4.read)());
    let cr0_values = [
        ("cr0-nw-and-cd", cr0 | bit::NW | bit::CD),
        ("cr0-nw-without-cd", cr0 & !bit::CD | bit::NW),
        ("cr0-pg-without-pe", cr0 & !bit::PE),
        ("cr0-neither-pg-nor-pe", cr0 & !(bit::PG | bit::PE)),
        ("cr0-em-and-ts", cr0 | bit::EM | bit::TS),
        ("cr0-all-that-exist", cr0 | bit::ALL_OF_CR0),
        ("cr0-all-of-the-low-half", cr0 | 0xffff_ffff),
        ("cr0-all", u64::MAX),
        ("cr0-zero", 0),
        ("cr0-wp-and-bit-32", (cr0 ^ bit::WP) | 1 << 32),
    ];
    for (name, value) in cr0_values {
        check(cases, name, &CR0, CR0.write, value, cr0_takes(value));
    }
    let cr4_values = [
        ("cr4-pge-and-pae-clear", (cr4 ^ bit::PGE) & !bit::PAE),
        ("cr4-pge-and-la57", (cr4 ^ bit::PGE) | 1 << 12),
        ("cr4-pcide-and-pge", cr4 | 1 << 17 | bit::PGE),
        ("cr4-cet", cr4 | 1 << 23),
        ("cr4-vmxe-and-smxe", cr4 | 3 << 13),
        ("cr4-all", u64::MAX),
        ("cr4-zero", 0),
        ("cr4-bit-32-and-pge", (cr4 ^ bit::PGE) | 1 << 32),
    ];
    for (name, value) in cr4_values {
        check(cases, name, &CR4, CR4.write, value, cr4_takes(value));
    }
    let efer = (EFER_MSR.read)();
    let efer_values = [
        ("efer-lme-and-lma-clear", efer & !(bit::LME | bit::LMA)),
        ("efer-zero", 0),
        ("efer-all", u64::MAX),
        ("efer-reads-as-zero", efer | 0xfe),
    ];
    for (name, value) in efer_values {
        check(cases, name, &EFER_MSR, EFER_MSR.write, value, efer_takes(value, efer));
    }
}

/// The same write by each form of MOV, once valid and once refused.
fn moves(cases: &mut Cases) {
    let (cr0, cr4) = ((CR0.read)(), (CR4.read)());
    for (form, write) in control_forms::MOVES_TO_CR0 {
        for (of, value) in [("wp", cr0 ^ bit::WP), ("ts", cr0 ^ bit::TS), ("nw", cr0 & !bit::CD | bit::NW)] {
            // A #GP would find no stack.
            if form == "mov-from-rsp" && cr0_takes(value) == Answer::Refused {
                continue;
            }
            check_form(cases, ("cr0", form, of), &CR0, write, value, cr0_takes(value));
        }
    }
    for (form, write) in control_forms::MOVES_TO_CR4 {
        for (of, value) in [("pge", cr4 ^ bit::PGE), ("pae", cr4 & !bit::PAE)] {
            if form == "mov-from-rsp" && cr4_takes(value) == Answer::Refused {
                continue;
            }
            check_form(cases, ("cr4", form, of), &CR4, write, value, cr4_takes(value));
        }
    }
}

type FormName<'a> = (&'a str, &'a str, &'a str);

fn check_form(
    cases: &mut Cases,
    (of, form, value_name): FormName<'_>,
    register: &Register,
    write: fn(u64) -> Result<(), Fault>,
    value: u64,
    expected: Answer,
) {
    let name = Name::of(format_args!("{of}-{form}-{value_name}"));
    check(cases, name.text(), register, write, value, expected);
}

/// LMSW, CLTS and SMSW.
fn status_word(cases: &mut Cases) {
    let cr0 = (CR0.read)();
    const COPIED: u64 = bit::MP | bit::EM | bit::TS;
    let forms: [Form; 7] = control_forms::LMSW;
    for (form, load) in forms {
        // All bits that it can set, none (PE stays set), and TS alone with noise above.
        for (of, word) in [("all", 0xffff), ("none", 0), ("ts-and-noise", 0xffff_fff8)] {
            let expected = Answer::Becomes(cr0 & !COPIED | word & COPIED);
            check_form(cases, ("cr0", form, of), &CR0, load, word, expected);
        }
    }

    let about = "an operand of LMSW that cannot be read";
    let missing = window::demand_page(cpu_local::index(), 0);
    window::unmap(cpu_local::index(), 0);
    for (name, address, vector) in
        [("lmsw-missing-page", missing, Fault::PF), ("lmsw-not-canonical", 1 << 63, Fault::GP)]
    {
        let fault = control_forms::lmsw_at(address).err();
        let is_right = fault.is_some_and(|fault| fault == Fault { vector, error: 0 }) && (CR0.read)() == cr0;
        let seen = fault.map_or(0, |fault| fault.vector);
        cases.check(name, about, "fault", format_args!("vector {seen}"), is_right);
    }
    let is_right = attempt::read_cr2() == missing;
    cases.check("lmsw-cr2", about, "the address", format_args!("{:#x}", attempt::read_cr2()), is_right);

    let set = attempt::write_cr0(cr0 | bit::TS).is_ok() && control_forms::clts().is_ok();
    let is_right = set && (CR0.read)() == cr0 & !bit::TS;
    cases.check("clts", "CLTS clears TS", "clear", format_args!("{:#x}", (CR0.read)()), is_right);
    let _ = attempt::write_cr0(cr0);

    let [word, double, quad, memory] = control_forms::smsw();
    let low = cr0 & 0xffff;
    let is_right = word == !0xffff | low && double == cr0 && quad == cr0 && memory == !0xffff | low;
    cases.check("smsw", "SMSW reads CR0", "cr0", format_args!("{word:#x} {double:#x} {quad:#x} {memory:#x}"), is_right);
}

/// Reserved bits of registers that are not intercepted.
fn others(cases: &mut Cases) {
    const CR8: Register = Register { name: "cr8", write: attempt::write_cr8, read: attempt::read_cr8 };
    const DR6: Register = Register { name: "dr6", write: attempt::write_dr6, read: attempt::read_dr6 };
    const DR7: Register = Register { name: "dr7", write: attempt::write_dr7, read: attempt::read_dr7 };
    for (name, register, value) in [
        ("cr8-bit-4", &CR8, 1 << 4),
        ("cr8-bit-63", &CR8, 1 << 63),
        ("dr6-bit-32", &DR6, 1 << 32),
        ("dr7-bit-32", &DR7, 1 << 32 | 0x400),
    ] {
        check(cases, name, register, register.write, value, Answer::Refused);
    }
}
