//! Plan, execute, commit.
//!
//! The plan names everything that the instruction will do and finds everything that can stop it. After the device was
//! touched for the first time nothing can fail: registers, flags and RIP follow unconditionally.

use crate::cpu::bits::{AF, CF, OF, PF, RF, SF, ZF};
use crate::decode::{Address, Base, Instruction, Operand, Operation, Register};
use crate::fetch::{Window, outcome};
use crate::walk::{Access, translate};
use crate::{CpuState, Device, Exception, Memory, Outcome, Segment, Width};
use addr::{Gpa, PAGE_BYTES, PageSize};

/// Carries out `instruction`, which was found at RIP in `window`.
pub(crate) fn execute(
    state: &mut CpuState,
    memory: &impl Memory,
    device: &mut impl Device,
    fault_gpa: Gpa,
    instruction: &Instruction,
    window: &Window,
) -> Outcome {
    let width = instruction.memory_width;
    let Some((address, plan)) = plan(instruction) else {
        return window.unsupported_of(instruction.length);
    };
    let Some(linear) = linear(state, &address, instruction.length) else {
        let is_stack = address.segment == Segment::Ss;
        return Outcome::Fault(if is_stack { Exception::STACK } else { Exception::GENERAL_PROTECTION });
    };
    let gpa = match translate(state, memory, linear, plan.access()) {
        Ok(gpa) => gpa,
        Err(stop) => return outcome(stop),
    };
    if gpa.page(PageSize::Size4K) != fault_gpa.page(PageSize::Size4K) {
        return Outcome::Retry;
    }
    if gpa.offset_in(PageSize::Size4K) + width.bytes() > PAGE_BYTES {
        return window.unsupported_of(instruction.length);
    }

    match plan {
        Plan::Store(source) => device.write(gpa, width, width.truncate(value(state, source))),

        Plan::Load(register, is_signed) => {
            let read = device.read(gpa, width);
            let extended = if is_signed { width.sign_extend(read) } else { width.truncate(read) };
            set_register(state, register, extended);
        }

        Plan::Exchange(register) => {
            let old = width.truncate(device.read(gpa, width));
            device.write(gpa, width, self::register(state, register));
            set_register(state, register, old);
        }

        Plan::Modify(arithmetic, source) => {
            let old = width.truncate(device.read(gpa, width));
            let (result, flags) = arithmetic.compute(width, old, width.truncate(value(state, source)));
            if arithmetic.keeps_result() {
                device.write(gpa, width, result);
            }
            set_flags(state, flags);
        }

        Plan::Combine(arithmetic, register) => {
            let read = width.truncate(device.read(gpa, width));
            let (result, flags) = arithmetic.compute(width, self::register(state, register), read);
            if arithmetic.keeps_result() {
                set_register(state, register, result);
            }
            set_flags(state, flags);
        }
    }

    state.rip = state.rip_after(instruction.length);
    state.rflags &= !RF;
    Outcome::Done { length: instruction.length }
}

/// What happens between the device and the vCPU.
#[derive(Clone, Copy)]
enum Plan {
    /// The value goes to the device.
    Store(Source),
    /// The device's value goes to the register, sign-extended or zero-extended.
    Load(Register, bool),
    /// Both change places.
    Exchange(Register),
    /// The device's value is combined with the source, in place.
    Modify(Arithmetic, Source),
    /// The register is combined with the device's value, in the register.
    Combine(Arithmetic, Register),
}

/// An operand that is not in memory.
#[derive(Clone, Copy)]
enum Source {
    Register(Register),
    Immediate(u64),
}

impl Plan {
    fn access(&self) -> Access {
        match self {
            Self::Store(_) | Self::Exchange(_) => Access::Write,
            Self::Modify(arithmetic, _) if arithmetic.keeps_result() => Access::Write,
            Self::Load(..) | Self::Modify(..) | Self::Combine(..) => Access::Read,
        }
    }
}

/// The plan for an instruction, or `None` for a combination of operands that no processor has.
fn plan(instruction: &Instruction) -> Option<(Address, Plan)> {
    use Operand::{Immediate, Memory};
    use Operation::{Exchange, Move, MoveSignExtended, MoveZeroExtended};

    let width = instruction.memory_width;
    let is_same_width = |register: Register| register.width == width;
    let arithmetic = Arithmetic::of(instruction.operation);
    match (instruction.operation, instruction.to, instruction.from) {
        (MoveZeroExtended | MoveSignExtended, Operand::Register(register), Memory(address)) => {
            Some((address, Plan::Load(register, instruction.operation == MoveSignExtended)))
        }
        (_, Operand::Register(register), Memory(address)) if is_same_width(register) => match instruction.operation {
            Move => Some((address, Plan::Load(register, false))),
            Exchange => Some((address, Plan::Exchange(register))),
            _ => Some((address, Plan::Combine(arithmetic?, register))),
        },
        (_, Memory(address), Operand::Register(register)) if is_same_width(register) => match instruction.operation {
            Move => Some((address, Plan::Store(Source::Register(register)))),
            Exchange => Some((address, Plan::Exchange(register))),
            _ => Some((address, Plan::Modify(arithmetic?, Source::Register(register)))),
        },
        (Move, Memory(address), Immediate(value)) => Some((address, Plan::Store(Source::Immediate(value)))),
        (_, Memory(address), Immediate(value)) => Some((address, Plan::Modify(arithmetic?, Source::Immediate(value)))),
        _ => None,
    }
}

/// Linear address of an operand; `None` when it is not canonical.
fn linear(state: &CpuState, address: &Address, length: u8) -> Option<u64> {
    let base = match address.base {
        Some(Base::Register(number)) => state.gprs[usize::from(number)],
        Some(Base::NextInstruction) => state.rip_after(length),
        None => 0,
    };
    let index = match address.index {
        Some((number, scale)) => state.gprs[usize::from(number)].wrapping_mul(u64::from(scale)),
        None => 0,
    };
    let offset = base.wrapping_add(index).wrapping_add(address.displacement);
    state.linear(address.segment, address.width.truncate(offset))
}

fn value(state: &CpuState, source: Source) -> u64 {
    match source {
        Source::Register(register) => self::register(state, register),
        Source::Immediate(value) => value,
    }
}

/// The register's value, zero-extended.
fn register(state: &CpuState, register: Register) -> u64 {
    let whole = state.gprs[usize::from(register.number)];
    if register.high { whole >> 8 & 0xff } else { register.width.truncate(whole) }
}

/// Sets the part that the register names. A 32-bit write clears the upper half, narrower ones keep what is above
/// (APM vol. 1, 3.1.2).
fn set_register(state: &mut CpuState, register: Register, value: u64) {
    let whole = &mut state.gprs[usize::from(register.number)];
    let value = register.width.truncate(value);
    *whole = match register.width {
        Width::Qword | Width::Dword => value,
        Width::Byte if register.high => *whole & !0xff00 | value << 8,
        Width::Word | Width::Byte => *whole & !register.width.truncate(u64::MAX) | value,
    };
}

fn set_flags(state: &mut CpuState, flags: u64) {
    state.rflags = state.rflags & !(CF | PF | AF | ZF | SF | OF) | flags;
}

/// An operation of two values that sets the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Or,
    And,
    Xor,
    Add,
    Subtract,
    /// Subtraction for the flags only.
    Compare,
    /// AND for the flags only.
    Test,
}

impl Arithmetic {
    fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::Or => Some(Self::Or),
            Operation::And => Some(Self::And),
            Operation::Xor => Some(Self::Xor),
            Operation::Add => Some(Self::Add),
            Operation::Subtract => Some(Self::Subtract),
            Operation::Compare => Some(Self::Compare),
            Operation::Test => Some(Self::Test),
            Operation::Move | Operation::MoveZeroExtended | Operation::MoveSignExtended | Operation::Exchange => None,
        }
    }

    fn keeps_result(self) -> bool {
        !matches!(self, Self::Compare | Self::Test)
    }

    /// The result and the six arithmetic flags, for operands that fit into `width` (APM vol. 1, 3.1.4). AF, undefined
    /// after logic, is cleared.
    pub(crate) fn compute(self, width: Width, left: u64, right: u64) -> (u64, u64) {
        let flag = |condition: bool, flag: u64| if condition { flag } else { 0 };
        let (result, carries) = match self {
            Self::Or => (left | right, 0),
            Self::Xor => (left ^ right, 0),
            Self::And | Self::Test => (left & right, 0),
            Self::Add => {
                let result = width.truncate(left.wrapping_add(right));
                let overflow = width.is_negative((left ^ result) & (right ^ result));
                (result, flag(result < left, CF) | flag(overflow, OF) | (left ^ right ^ result) & AF)
            }
            Self::Subtract | Self::Compare => {
                let result = width.truncate(left.wrapping_sub(right));
                let overflow = width.is_negative((left ^ right) & (left ^ result));
                (result, flag(left < right, CF) | flag(overflow, OF) | (left ^ right ^ result) & AF)
            }
        };
        // Parity is that of the lowest byte, whatever the width.
        let parity = flag((result & 0xff).count_ones().is_multiple_of(2), PF);
        (result, carries | parity | flag(result == 0, ZF) | flag(width.is_negative(result), SF))
    }
}
