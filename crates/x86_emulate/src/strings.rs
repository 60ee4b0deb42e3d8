//! String instructions: one element, or many with a repeat prefix.
//!
//! Each repetition is an instruction of its own: an interrupt may come before it. So a run ends after a batch, or
//! before an element that cannot be translated. The guest then executes that element as a new instruction.

use crate::arithmetic;
use crate::cpu::bits::{DF, TF};
use crate::execute::{Progress, RAX, RCX, RDI, RDX, RSI};
use crate::instruction::{Instruction, Operation, Register, Repeat};
use crate::operand::{Emulation, NO_PAGE, Place};
use crate::walk::Access;
use crate::{Cpu, Device, Memory, Outcome, Segment, Width};

/// Maximum number of elements of a repeated string instruction per emulation.
pub const BATCH: u32 = 64;

impl Operation {
    /// Whether the instruction can be repeated.
    #[must_use]
    pub const fn is_string(self) -> bool {
        matches!(
            self,
            Self::StoreString
                | Self::MoveString
                | Self::LoadString
                | Self::CompareString
                | Self::ScanString
                | Self::InString
                | Self::OutString
        )
    }

    /// Whether it reads at SI.
    const fn has_source(self) -> bool {
        matches!(self, Self::MoveString | Self::LoadString | Self::CompareString | Self::OutString)
    }

    /// The access at DI, if there is one.
    const fn destination_access(self) -> Option<Access> {
        match self {
            Self::StoreString | Self::MoveString | Self::InString => Some(Access::Write),
            Self::CompareString | Self::ScanString => Some(Access::Read),
            _ => None,
        }
    }
}

/// The places of one element.
struct Element {
    source: Option<Place>,
    destination: Option<Place>,
}

impl<C: Cpu, M: Memory, D: Device> Emulation<'_, C, M, D> {
    pub(crate) fn string(&mut self, instruction: &Instruction) -> Result<Progress, Outcome> {
        let is_port = matches!(instruction.operation, Operation::InString | Operation::OutString);
        if is_port != (self.fault_page == NO_PAGE) {
            return Err(Outcome::Retry);
        }
        let register = |number| Register { number, width: instruction.address.width, high: false };
        let count = register(RCX);
        if instruction.repeat == Repeat::Never {
            let element = self.element(instruction)?;
            self.confirm_first(&element)?;
            self.carry_out(instruction, &element);
            return Ok(Progress::Through);
        }

        // The caller raises the trap after each repetition.
        let batch = if self.cpu.rflags() & TF == 0 { BATCH } else { 1 };
        for done in 0..batch {
            let left = self.register(count);
            if left == 0 {
                return Ok(Progress::Through);
            }
            let element = match self.element(instruction) {
                Ok(element) => element,
                Err(outcome) if done == 0 => return Err(outcome),
                // The finished elements stay; the guest executes the rest again.
                Err(_) => return Ok(Progress::Partly),
            };
            if done == 0 {
                self.confirm_first(&element)?;
            }
            let equal = self.carry_out(instruction, &element);
            self.set_register(count, left - 1);
            let ends = match (equal, instruction.repeat) {
                (Some(equal), Repeat::WhileEqual) => !equal,
                (Some(equal), Repeat::WhileDifferent) => equal,
                _ => false,
            };
            if ends || left == 1 {
                return Ok(Progress::Through);
            }
        }
        Ok(Progress::Partly)
    }

    /// Finds the places of the next element.
    fn element(&mut self, instruction: &Instruction) -> Result<Element, Outcome> {
        let Instruction { operation, width, address, .. } = *instruction;
        let offset =
            |emulation: &Self, number| emulation.register(Register { number, width: address.width, high: false });
        let source = if operation.has_source() {
            let at = offset(self, RSI);
            Some(self.find(address.segment, at, width.bytes(), Access::Read)?)
        } else {
            None
        };
        let destination = match operation.destination_access() {
            Some(access) => {
                let at = offset(self, RDI);
                Some(self.find(Segment::Es, at, width.bytes(), access)?)
            }
            None => None,
        };
        Ok(Element { source, destination })
    }

    /// The hardware stopped at the first element; later ones may be anywhere.
    fn confirm_first(&self, element: &Element) -> Result<(), Outcome> {
        if self.fault_page == NO_PAGE {
            return Ok(());
        }
        match (element.source, element.destination) {
            (Some(source), Some(destination)) => self.confirm(&[source, destination]),
            (Some(place), None) | (None, Some(place)) => self.confirm(&[place]),
            (None, None) => Err(Outcome::Retry),
        }
    }

    /// Executes one element and moves on to the next. If it compares, returns whether the two were equal.
    fn carry_out(&mut self, instruction: &Instruction, element: &Element) -> Option<bool> {
        let Instruction { operation, width, address, .. } = *instruction;
        let accumulator = Register { number: RAX, width, high: false };
        #[expect(clippy::cast_possible_truncation, reason = "DX has 16 bits")]
        let port = self.register(Register { number: RDX, width: Width::Word, high: false }) as u16;
        let mut equal = None;

        // The value from the source, or from a register or port.
        let value = match (operation, element.source) {
            (_, Some(source)) => self.read(source, width),
            (Operation::InString, None) => width.truncate(self.device.read_port(port, width)),
            _ => self.register(accumulator),
        };
        match (operation, element.destination) {
            (Operation::CompareString | Operation::ScanString, Some(destination)) => {
                let other = self.read(destination, width);
                if let Some(computed) = arithmetic::combine(operation, width, value, other, false) {
                    let rflags = computed.flags_after(self.cpu.rflags());
                    self.cpu.set_rflags(rflags);
                    equal = Some(computed.is_zero());
                }
            }
            (_, Some(destination)) => self.write(destination, width, value),
            (Operation::OutString, None) => self.device.write_port(port, width, value),
            (_, None) => self.set_register(accumulator, value),
        }

        let step = if self.cpu.rflags() & DF == 0 { width.bytes() } else { width.bytes().wrapping_neg() };
        for (number, moves) in [(RSI, element.source.is_some()), (RDI, element.destination.is_some())] {
            let register = Register { number, width: address.width, high: false };
            if moves {
                let next = self.register(register).wrapping_add(step);
                self.set_register(register, next);
            }
        }
        equal
    }
}
