//! Plan, execute, commit.
//!
//! The plan translates the addresses of all operands; only this can fail. After the first access nothing can fail:
//! registers, flags and RIP follow unconditionally.

use crate::arithmetic::{self, Computed};
use crate::cpu::bits::{CF, RF};
use crate::cpu::{rip_after, stack_width};
use crate::instruction::{Base, Form, Instruction, Operation, Register};
use crate::operand::{Emulation, Place};
use crate::walk::Access;
use crate::walks::Walks;
use crate::{Cause, Cpu, Device, Exception, Memory, Outcome, Segment, Width};

/// Executes `instruction`, which is at RIP.
pub fn execute<M: Memory>(
    cpu: &mut impl Cpu,
    memory: &M,
    device: &mut impl Device,
    walks: &mut Walks<M>,
    cause: Cause,
    instruction: &Instruction,
) -> Outcome {
    Emulation::new(cpu, memory, device, walks, cause).execute(instruction)
}

/// How far an instruction was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// To its end.
    Through,
    /// Repetitions are left.
    Partly,
}

impl<C: Cpu, M: Memory, D: Device> Emulation<'_, C, M, D> {
    /// Executes `instruction`, which is at RIP.
    #[inline(always)]
    pub fn execute(&mut self, instruction: &Instruction) -> Outcome {
        // Nearly all accesses to devices are moves.
        let result = match instruction.operation {
            Operation::Move => self.copy(instruction).map(|()| Progress::Through),
            _ => self.run(instruction),
        };
        match result {
            Ok(Progress::Through) => {
                self.step_over(instruction.length);
                Outcome::Done { length: instruction.length }
            }
            Ok(Progress::Partly) => Outcome::Again,
            Err(outcome) => outcome,
        }
    }

    /// Moves RIP over an instruction of `length`.
    #[inline(always)]
    pub(crate) fn step_over(&mut self, length: u8) {
        let next = rip_after(self.cpu, self.regime.mode, length);
        self.cpu.set_rip(next);
        let rflags = self.cpu.rflags();
        self.cpu.set_rflags(rflags & !RF);
    }

    #[inline(never)]
    fn run(&mut self, instruction: &Instruction) -> Result<Progress, Outcome> {
        use Operation::{
            Add, AddWithCarry, And, BitComplement, BitReset, BitSet, BitTest, Compare, CompareExchange,
            CompareExchangePair, CompareString, Decrement, Exchange, ExchangeAdd, InString, Increment, LoadString,
            Move, MoveSignExtended, MoveString, MoveZeroExtended, Negate, Not, Or, OutString, Pop, Push, ScanString,
            StoreString, Subtract, SubtractWithBorrow, Test, Xor,
        };
        match instruction.operation {
            // The caller has done it.
            Move => {}
            MoveZeroExtended | MoveSignExtended => self.extend(instruction)?,
            Add | Or | AddWithCarry | SubtractWithBorrow | And | Subtract | Xor | Compare | Test => {
                self.combine(instruction)?;
            }
            Increment | Decrement | Not | Negate => self.change(instruction)?,
            BitTest | BitSet | BitReset | BitComplement => self.bit(instruction)?,
            Exchange => self.exchange(instruction)?,
            ExchangeAdd => self.exchange_add(instruction)?,
            CompareExchange => self.compare_exchange(instruction)?,
            CompareExchangePair => self.compare_exchange_pair(instruction)?,
            Push => self.push(instruction)?,
            Pop => self.pop(instruction)?,
            StoreString | MoveString | LoadString | CompareString | ScanString | InString | OutString => {
                return self.string(instruction);
            }
        }
        Ok(Progress::Through)
    }

    /// The place of the operand in memory, which must be where the hardware stopped.
    fn operand(&mut self, instruction: &Instruction, access: Access) -> Result<Place, Outcome> {
        let offset = self.offset(instruction);
        let place = self.find(instruction.address.segment, offset, instruction.width.bytes(), access)?;
        self.confirm(&[place])?;
        Ok(place)
    }

    /// The operand that is not in memory.
    #[inline(always)]
    pub(crate) fn source(&self, instruction: &Instruction) -> u64 {
        match instruction.form {
            Form::ToMemoryImmediate => instruction.width.truncate(instruction.immediate),
            _ => self.register(instruction.register),
        }
    }

    fn set_flags(&mut self, computed: Computed) {
        let rflags = computed.flags_after(self.cpu.rflags());
        self.cpu.set_rflags(rflags);
    }

    /// MOV.
    #[inline(always)]
    fn copy(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { form, width, register, address, .. } = *instruction;
        let offset = self.offset(instruction);
        let access = if form == Form::FromMemory { Access::Read } else { Access::Write };
        let Some(gpa) = self.find_here(address.segment, offset, width.bytes(), access)? else {
            return self.copy_elsewhere(instruction);
        };
        match access {
            Access::Read => {
                let value = self.device.read(gpa, width);
                self.set_register(register, value);
            }
            _ => self.device.write(gpa, width, width.truncate(self.source(instruction))),
        }
        Ok(())
    }

    /// MOV of an operand on two pages, or outside 64-bit mode.
    #[inline(never)]
    fn copy_elsewhere(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let width = instruction.width;
        if instruction.form == Form::FromMemory {
            let place = self.operand(instruction, Access::Read)?;
            let value = self.read(place, width);
            self.set_register(instruction.register, value);
        } else {
            let place = self.operand(instruction, Access::Write)?;
            self.write(place, width, self.source(instruction));
        }
        Ok(())
    }

    fn extend(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let width = instruction.width;
        let place = self.operand(instruction, Access::Read)?;
        let value = self.read(place, width);
        let is_signed = instruction.operation == Operation::MoveSignExtended;
        self.set_register(instruction.register, if is_signed { width.sign_extend(value) } else { value });
        Ok(())
    }

    /// ADD and similar.
    fn combine(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { operation, width, form, register, .. } = *instruction;
        let for_flags_only = matches!(operation, Operation::Compare | Operation::Test);
        let writes = form != Form::FromMemory && !for_flags_only;
        let place = self.operand(instruction, if writes { Access::Write } else { Access::Read })?;

        let in_memory = self.read(place, width);
        let other = self.source(instruction);
        let (left, right) = if form == Form::FromMemory { (other, in_memory) } else { (in_memory, other) };
        let carry = self.cpu.rflags() & CF != 0;
        let Some(computed) = arithmetic::combine(operation, width, left, right, carry) else {
            return Err(Outcome::Retry);
        };
        if writes {
            self.write(place, width, computed.value);
        } else if !for_flags_only {
            self.set_register(register, computed.value);
        }
        self.set_flags(computed);
        Ok(())
    }

    /// INC and similar.
    fn change(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let width = instruction.width;
        let place = self.operand(instruction, Access::Write)?;
        let value = self.read(place, width);
        let Some(computed) = arithmetic::change(instruction.operation, width, value) else {
            return Err(Outcome::Retry);
        };
        self.write(place, width, computed.value);
        self.set_flags(computed);
        Ok(())
    }

    /// BT and similar. A bit number in a register may exceed the operand: it then selects another operand (APM vol. 3,
    /// BT).
    fn bit(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { operation, width, form, address, .. } = *instruction;
        let number = self.source(instruction);
        let mut offset = self.offset(instruction);
        if form == Form::ToMemory {
            let bits = width.sign_extend(number).cast_signed();
            let operands = bits >> width.bits().trailing_zeros();
            let bytes = operands.wrapping_mul(width.bytes().cast_signed());
            offset = address.width.truncate(offset.wrapping_add_signed(bytes));
        }
        let writes = operation != Operation::BitTest;
        let access = if writes { Access::Write } else { Access::Read };
        let place = self.find(address.segment, offset, width.bytes(), access)?;
        self.confirm(&[place])?;

        let value = self.read(place, width);
        let Some(computed) = arithmetic::bit(operation, value, number % u64::from(width.bits())) else {
            return Err(Outcome::Retry);
        };
        if writes {
            self.write(place, width, computed.value);
        }
        self.set_flags(computed);
        Ok(())
    }

    fn exchange(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let place = self.operand(instruction, Access::Write)?;
        let old = self.read(place, instruction.width);
        self.write(place, instruction.width, self.register(instruction.register));
        self.set_register(instruction.register, old);
        Ok(())
    }

    fn exchange_add(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { operation, width, register, .. } = *instruction;
        let place = self.operand(instruction, Access::Write)?;
        let old = self.read(place, width);
        let Some(computed) = arithmetic::combine(operation, width, old, self.register(register), false) else {
            return Err(Outcome::Retry);
        };
        self.write(place, width, computed.value);
        self.set_register(register, old);
        self.set_flags(computed);
        Ok(())
    }

    /// CMPXCHG. It always writes: the old value, if that differs from the expected one.
    fn compare_exchange(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { operation, width, register, .. } = *instruction;
        let accumulator = Register { number: RAX, width, high: false };
        let place = self.operand(instruction, Access::Write)?;
        let found = self.read(place, width);
        let expected = self.register(accumulator);
        let Some(computed) = arithmetic::combine(operation, width, expected, found, false) else {
            return Err(Outcome::Retry);
        };
        if computed.is_zero() {
            self.write(place, width, self.register(register));
        } else {
            self.write(place, width, found);
            self.set_register(accumulator, found);
        }
        self.set_flags(computed);
        Ok(())
    }

    /// CMPXCHG8B and CMPXCHG16B: compare DX:AX with a pair in memory, and replace it by CX:BX.
    fn compare_exchange_pair(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { width, address, .. } = *instruction;
        let offset = self.offset(instruction);
        let bytes = 2 * width.bytes();
        let [expected, new] =
            [[RAX, RDX], [RBX, RCX]].map(|pair| pair.map(|number| Register { number, width, high: false }));

        // The longer of the two must be aligned (APM vol. 3, CMPXCHG16B).
        if width == Width::Qword {
            let base = self.cpu.segment(address.segment).base;
            let has_base = matches!(address.segment, Segment::Fs | Segment::Gs);
            let linear = if has_base { base.wrapping_add(offset) } else { offset };
            if !linear.is_multiple_of(bytes) {
                return Err(Outcome::Fault(Exception::GENERAL_PROTECTION));
            }
        }
        // The shorter one may cross pages, and so may each half.
        let place = self.find(address.segment, offset, bytes, Access::Write)?;
        let halves = [place.part(0, width.bytes()), place.part(width.bytes(), width.bytes())];
        self.confirm(&halves)?;

        let found = halves.map(|half| self.read(half, width));
        let is_equal = found == expected.map(|register| self.register(register));
        let written = if is_equal { new.map(|register| self.register(register)) } else { found };
        for (half, value) in halves.into_iter().zip(written) {
            self.write(half, width, value);
        }
        if !is_equal {
            for (register, value) in expected.into_iter().zip(found) {
                self.set_register(register, value);
            }
        }
        self.set_flags(arithmetic::equal(is_equal));
        Ok(())
    }

    fn push(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let width = instruction.width;
        let offset = self.offset(instruction);
        let from = self.find(instruction.address.segment, offset, width.bytes(), Access::Read)?;
        let pointer = Register { number: RSP, width: stack_width(self.cpu), high: false };
        let top = pointer.width.truncate(self.register(pointer).wrapping_sub(width.bytes()));
        let to = self.find(Segment::Ss, top, width.bytes(), Access::Write)?;
        self.confirm(&[from, to])?;

        let value = self.read(from, width);
        self.write(to, width, value);
        self.set_register(pointer, top);
        Ok(())
    }

    /// POP. An address based on the stack pointer uses its new value (APM vol. 3, POP).
    fn pop(&mut self, instruction: &Instruction) -> Result<(), Outcome> {
        let Instruction { width, address, .. } = *instruction;
        let pointer = Register { number: RSP, width: stack_width(self.cpu), high: false };
        let top = self.register(pointer);
        let from = self.find(Segment::Ss, top, width.bytes(), Access::Read)?;
        let grown = if address.base == Some(Base::Register(RSP)) { width.bytes() } else { 0 };
        let offset = address.width.truncate(self.offset(instruction).wrapping_add(grown));
        let to = self.find(address.segment, offset, width.bytes(), Access::Write)?;
        self.confirm(&[from, to])?;

        let value = self.read(from, width);
        self.write(to, width, value);
        self.set_register(pointer, top.wrapping_add(width.bytes()));
        Ok(())
    }
}

/// Numbers of general registers that instructions imply.
pub(crate) const RAX: u8 = 0;
pub(crate) const RCX: u8 = 1;
pub(crate) const RDX: u8 = 2;
pub(crate) const RBX: u8 = 3;
pub(crate) const RSP: u8 = 4;
pub(crate) const RSI: u8 = 6;
pub(crate) const RDI: u8 = 7;
