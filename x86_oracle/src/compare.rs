//! Compares the results, except where the manuals let processors differ.

use crate::machine::{Case, Ended, FLAGS, RCX, RDI, RSI, WINDOW};
use std::fmt;
use x86_emulate::{Exception, Instruction, Mode, Operation, Repeat, Vendor, Width};

const PF: u64 = 1 << 2;
const AF: u64 = 1 << 4;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

/// Something that the emulator did otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The general register of this number: on the processor, in the emulator.
    Register(usize, u64, u64),
    /// RIP.
    Rip(u64, u64),
    /// The flags that are defined.
    Flags(u64, u64),
    /// The exception, or that there is one.
    Exception(Option<Exception>, Option<Exception>),
    /// A byte at this linear address; the first one that differs.
    Memory(u64, u8, u8),
    /// Nothing that could be compared.
    Misdeed(String),
}

/// All differences between the results of the processor, of this vendor, and of the emulator.
#[must_use]
pub fn compare(
    vendor: Vendor,
    case: &Case,
    instruction: &Instruction,
    (native, native_window): (&Ended, &[u8]),
    (emulated, emulated_window): (&Ended, &[u8]),
) -> Vec<Difference> {
    let mut differences = Vec::new();
    // The halves that 16- and 32-bit code cannot see are not defined after a change of mode (APM vol. 1, 2.1.3).
    let visible = if case.mode == Mode::Bits64 { u64::MAX } else { 0xffff_ffff };
    for (number, (&here, &there)) in native.gprs.iter().zip(&emulated.gprs).enumerate() {
        let is_lost = vendor == Vendor::Intel
            && here == there & 0xffff_ffff
            && may_lose_upper_half(case, instruction, native, number);
        if (here ^ there) & visible != 0 && !is_lost {
            differences.push(Difference::Register(number, here, there));
        }
    }
    if native.rip != emulated.rip {
        differences.push(Difference::Rip(native.rip, emulated.rip));
    }
    let defined = FLAGS & !if native.exception.is_none() { undefined_flags(instruction.operation) } else { 0 };
    let is_back = may_restore_flags(instruction, native) && native.flags & FLAGS == case.flags;
    if (native.flags ^ emulated.flags) & defined != 0 && !is_back {
        differences.push(Difference::Flags(native.flags & defined, emulated.flags & defined));
    }
    if native.exception != emulated.exception {
        differences.push(Difference::Exception(native.exception, emulated.exception));
    }
    let bytes = native_window.iter().zip(emulated_window);
    if native_window != emulated_window
        && let Some((at, (&native, &emulated))) = bytes.enumerate().find(|(_, (native, emulated))| native != emulated)
    {
        differences.push(Difference::Memory(WINDOW + at as u64, native, emulated));
    }
    differences
}

/// A repeated string instruction with 32-bit addresses and a count of zero changes nothing, nor does one that faults at
/// its first element. But Intel's processors may clear the upper halves of the registers that it would have changed.
/// (KVM does so for the count of zero, and for guests on Intel only: `string_registers_quirk` in
/// arch/x86/kvm/emulate.c. For the fault it was seen on a Xeon of family 6.)
fn may_lose_upper_half(case: &Case, instruction: &Instruction, native: &Ended, register: usize) -> bool {
    let is_short = case.mode == Mode::Bits64 && instruction.address.width == Width::Dword;
    let is_repeated = instruction.operation.is_string() && instruction.repeat != Repeat::Never;
    let does_nothing = case.gprs[RCX] & 0xffff_ffff == 0 || native.exception.is_some();
    is_repeated && is_short && does_nothing && [RCX, RSI, RDI].contains(&register)
}

/// A repeated CMPS or SCAS that faults may leave the flags as they were before the first repetition (SDM vol. 2B, REP),
/// because the remaining repetitions set them anyway. The APM does not say; the emulator keeps those of the last
/// repetition.
fn may_restore_flags(instruction: &Instruction, native: &Ended) -> bool {
    let compares = matches!(instruction.operation, Operation::CompareString | Operation::ScanString);
    compares && instruction.repeat != Repeat::Never && native.exception.is_some()
}

/// The flags that the manual leaves undefined after an instruction (APM vol. 3, chapter 3, "rFLAGS Affected" of each).
fn undefined_flags(operation: Operation) -> u64 {
    match operation {
        // AND, OR, XOR, TEST: all but AF.
        Operation::And | Operation::Or | Operation::Xor | Operation::Test => AF,
        // BT, BTC, BTR, BTS: CF is the bit; ZF does not change, as in Intel's manual (SDM vol. 2A, BT).
        Operation::BitTest | Operation::BitSet | Operation::BitReset | Operation::BitComplement => OF | SF | AF | PF,
        _ => 0,
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Register(number, native, emulated) => {
                write!(f, "{:4} {native:#018x} natively, {emulated:#018x} emulated", name(*number))
            }
            Self::Rip(native, emulated) => write!(f, "rip  {native:#x} natively, {emulated:#x} emulated"),
            Self::Flags(native, emulated) => {
                let differ = native ^ emulated;
                write!(f, "flags {native:#x} natively, {emulated:#x} emulated: {differ:#x} differ")
            }
            Self::Exception(native, emulated) => write!(f, "{native:x?} natively, {emulated:x?} emulated"),
            Self::Memory(at, native, emulated) => {
                write!(f, "at {at:#x} there is {native:#04x} natively, {emulated:#04x} emulated")
            }
            Self::Misdeed(what) => f.write_str(what),
        }
    }
}

/// A general register's name.
pub(crate) fn name(number: usize) -> &'static str {
    const NAMES: [&str; 16] =
        ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"];
    NAMES.get(number).copied().unwrap_or("?")
}
