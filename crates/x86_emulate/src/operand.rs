//! Finds operands: in a device, in RAM, or partly in each.
//!
//! Only finding them can fail. After that, all operands of an instruction can be read and written.

use crate::cpu::{Regime, linear, rip_after};
use crate::fetch::{Fetched, decode_fetched, fetch_in, outcome};
use crate::instruction::{Base, Instruction, Register};
use crate::walk::Access;
use crate::walks::{Walks, page_of};
use crate::{Cause, Cpu, Device, Memory, Mode, Outcome, Segment, Width};
use addr::{Gpa, PAGE_BYTES, PageSize};

/// One instruction, and everything that it can access. The steps can be called one by one: [`fetch`](Self::fetch),
/// [`decode`](Self::decode), [`execute`](Self::execute).
pub struct Emulation<'a, C, M: Memory, D> {
    pub(crate) cpu: &'a mut C,
    pub(crate) memory: &'a M,
    pub(crate) device: &'a mut D,
    pub(crate) walks: &'a mut Walks<M>,
    /// The page where the hardware stopped, or [`NO_PAGE`].
    pub(crate) fault_page: Gpa,
    pub(crate) regime: Regime,
}

/// Instead of a page, if the hardware stopped at none.
pub(crate) const NO_PAGE: Gpa = Gpa(u64::MAX);

/// The place of an operand: on one page, or on two that need not be adjacent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    first: Gpa,
    /// Number of bytes on the first page, and the address of the rest.
    rest: Option<(u64, Gpa)>,
}

impl Place {
    fn is_on(&self, page: Gpa) -> bool {
        page_of(self.first) == page || self.rest.is_some_and(|(_, second)| page_of(second) == page)
    }

    /// The place of a part: `bytes` from `start` on.
    pub(crate) fn part(self, start: u64, bytes: u64) -> Self {
        match self.rest {
            Some((on_first, second)) if start >= on_first => {
                Self { first: Gpa(second.0 + (start - on_first)), rest: None }
            }
            Some((on_first, second)) if start + bytes > on_first => {
                Self { first: Gpa(self.first.0 + start), rest: Some((on_first - start, second)) }
            }
            _ => Self { first: Gpa(self.first.0 + start), rest: None },
        }
    }
}

impl<'a, C: Cpu, M: Memory, D: Device> Emulation<'a, C, M, D> {
    /// For the instruction at RIP. `cpu` must not change between this call and [`execute`](Self::execute).
    #[inline(always)]
    pub fn new(cpu: &'a mut C, memory: &'a M, device: &'a mut D, walks: &'a mut Walks<M>, cause: Cause) -> Self {
        let fault_page = match cause {
            Cause::Access(gpa) => page_of(gpa),
            Cause::Port => NO_PAGE,
        };
        let regime = Regime::of(cpu);
        Self { cpu, memory, device, walks, fault_page, regime }
    }

    /// The mode in which the code is decoded.
    #[inline]
    pub fn mode(&self) -> Mode {
        self.regime.mode
    }

    /// Reads the code at RIP, up to the end of the page.
    ///
    /// # Errors
    /// The outcome of an instruction that cannot be fetched: an exception, or no memory there.
    #[inline(always)]
    pub fn fetch(&mut self) -> Result<Fetched, Outcome> {
        fetch_in(self.cpu, &self.regime, self.memory, self.walks)
    }

    /// The linear address of the instruction.
    ///
    /// # Errors
    /// The exception that a fetch from there causes.
    #[inline]
    pub fn linear_rip(&self) -> Result<u64, Outcome> {
        linear(self.cpu, &self.regime, Segment::Cs, self.cpu.rip(), 1, Access::Execute).map_err(Outcome::Fault)
    }

    /// The linear and the guest physical address of the instruction.
    ///
    /// # Errors
    /// As for [`fetch`](Self::fetch).
    #[inline(always)]
    pub fn locate(&mut self) -> Result<(u64, Gpa), Outcome> {
        let linear = self.linear_rip()?;
        let found = self.walks.find(self.cpu, &self.regime, self.memory, linear, Access::Execute).map_err(outcome)?;
        Ok((linear, found.gpa))
    }

    /// The vCPU.
    pub fn cpu(&self) -> &C {
        self.cpu
    }

    /// Decodes `fetched`, and reads beyond the end of the page if the instruction crosses it.
    ///
    /// # Errors
    /// The bytes are no instruction, or too many, or the second page cannot be fetched.
    pub fn decode(&mut self, fetched: &Fetched) -> Result<Instruction, Outcome> {
        decode_fetched(self.cpu, self.memory, self.walks, fetched)
    }

    /// Reads the operand in memory, for an instruction that the caller executes itself.
    ///
    /// # Errors
    /// The operand cannot be read.
    pub fn load(&mut self, instruction: &Instruction) -> Result<u64, Outcome> {
        let (segment, offset) = (instruction.address.segment, self.offset(instruction));
        let place = self.find(segment, offset, instruction.width.bytes(), Access::Read)?;
        Ok(self.read(place, instruction.width))
    }

    /// The segment offset of the operand in memory.
    #[inline(always)]
    pub(crate) fn offset(&self, instruction: &Instruction) -> u64 {
        let Instruction { address, displacement, length, .. } = *instruction;
        let gprs = self.cpu.gprs();
        let base = match address.base {
            Some(Base::Register(number)) => gprs[usize::from(number & 15)],
            Some(Base::NextInstruction) => rip_after(self.cpu, self.regime.mode, length),
            None => 0,
        };
        let index = match address.index {
            Some(index) => gprs[usize::from(index.register & 15)].wrapping_mul(u64::from(index.scale)),
            None => 0,
        };
        address.width.truncate(base.wrapping_add(index).wrapping_add(displacement))
    }

    /// Finds `bytes`, at most a page, at `offset` in `segment`.
    #[inline(never)]
    pub(crate) fn find(&mut self, segment: Segment, offset: u64, bytes: u64, access: Access) -> Result<Place, Outcome> {
        let linear = linear(self.cpu, &self.regime, segment, offset, bytes, access).map_err(Outcome::Fault)?;
        let first = self.walks.find(self.cpu, &self.regime, self.memory, linear, access).map_err(outcome)?.gpa;
        let on_first = PAGE_BYTES - linear % PAGE_BYTES;
        if bytes <= on_first {
            return Ok(Place { first, rest: None });
        }
        let next = linear.wrapping_add(on_first);
        // A segment with a base may cross the end of the 32-bit address space.
        let next = if self.regime.mode == Mode::Bits64 { next } else { Width::Dword.truncate(next) };
        let second = self.walks.find(self.cpu, &self.regime, self.memory, next, access).map_err(outcome)?.gpa;
        Ok(Place { first, rest: Some((on_first, second)) })
    }

    /// Does [`find`](Self::find) and [`confirm`](Self::confirm) for the usual case: an operand on one page, which is
    /// the page where the hardware stopped. `None` if this is, or may be, another case.
    #[inline(always)]
    pub(crate) fn find_here(
        &mut self,
        segment: Segment,
        offset: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Option<Gpa>, Outcome> {
        if self.regime.mode != Mode::Bits64 || matches!(segment, Segment::Fs | Segment::Gs) {
            return Ok(None);
        }
        // Without segmentation, an operand on one page is canonical if its first byte is.
        let linear = linear(self.cpu, &self.regime, segment, offset, 1, access).map_err(Outcome::Fault)?;
        if linear % PAGE_BYTES + bytes > PAGE_BYTES {
            return Ok(None);
        }
        let gpa = self.walks.find(self.cpu, &self.regime, self.memory, linear, access).map_err(outcome)?.gpa;
        Ok((page_of(gpa) == self.fault_page).then_some(gpa))
    }

    /// Whether the hardware may have stopped at one of these places.
    pub(crate) fn confirm(&self, places: &[Place]) -> Result<(), Outcome> {
        if places.iter().any(|place| place.is_on(self.fault_page)) { Ok(()) } else { Err(Outcome::Retry) }
    }

    /// Reads an operand.
    pub(crate) fn read(&mut self, place: Place, width: Width) -> u64 {
        match place.rest {
            None => self.read_piece(place.first, width),
            Some((on_first, second)) => self.read_parted(place.first, on_first, second, width),
        }
    }

    /// Writes an operand.
    pub(crate) fn write(&mut self, place: Place, width: Width, value: u64) {
        match place.rest {
            None => self.write_piece(place.first, width, width.truncate(value)),
            Some((on_first, second)) => self.write_parted(place.first, on_first, second, width, value),
        }
    }

    /// Reads from one page, from memory or a device.
    #[inline(never)]
    fn read_piece(&mut self, gpa: Gpa, width: Width) -> u64 {
        if page_of(gpa) != self.fault_page {
            let mut bytes = [0; 8];
            #[expect(clippy::cast_possible_truncation, reason = "at most 8")]
            let wanted = &mut bytes[..width.bytes() as usize];
            if self.memory.read(gpa, wanted).is_some() {
                return u64::from_le_bytes(bytes);
            }
        }
        width.truncate(self.device.read(gpa, width))
    }

    /// Writes to one page, to memory or a device.
    #[inline(never)]
    fn write_piece(&mut self, gpa: Gpa, width: Width, value: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 8")]
        let bytes = width.bytes() as usize;
        let is_memory =
            page_of(gpa) != self.fault_page && self.memory.write(gpa, &value.to_le_bytes()[..bytes]).is_some();
        if !is_memory {
            self.device.write(gpa, width, value);
        }
    }

    /// Reads an operand on two pages.
    #[cold]
    fn read_parted(&mut self, first: Gpa, on_first: u64, second: Gpa, width: Width) -> u64 {
        let mut value = 0;
        for (gpa, width, shift) in pieces(first, on_first, second, width) {
            value |= self.read_piece(gpa, width) << shift;
        }
        value
    }

    #[cold]
    fn write_parted(&mut self, first: Gpa, on_first: u64, second: Gpa, width: Width, value: u64) {
        for (gpa, width, shift) in pieces(first, on_first, second, width) {
            self.write_piece(gpa, width, width.truncate(value >> shift));
        }
    }

    /// A register's value, zero-extended.
    #[inline(always)]
    pub(crate) fn register(&self, register: Register) -> u64 {
        register.of(self.cpu.gprs())
    }

    /// Sets the part of the register that `register` names.
    #[inline(always)]
    pub(crate) fn set_register(&mut self, register: Register, value: u64) {
        let whole = &mut self.cpu.gprs_mut()[usize::from(register.number & 15)];
        *whole = if register.high {
            *whole & !0xff00 | Width::Byte.truncate(value) << 8
        } else {
            register.width.merge(*whole, value)
        };
    }
}

/// The aligned pieces of an operand, from the lowest on: `on_first` bytes are at `first`, the rest at `second`. Each
/// piece comes with the position of its lowest bit in the operand.
fn pieces(first: Gpa, on_first: u64, second: Gpa, width: Width) -> impl Iterator<Item = (Gpa, Width, u64)> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let (gpa, left) = match done < on_first {
            true => (Gpa(first.0 + done), on_first - done),
            false => (Gpa(second.0 + done - on_first), width.bytes() - done),
        };
        let fits =
            |width: &Width| width.bytes() <= left && gpa.offset_in(PageSize::Size4K).is_multiple_of(width.bytes());
        let piece = Width::ALL.into_iter().rev().find(fits).filter(|_| left > 0)?;
        let shift = done * 8;
        done += piece.bytes();
        Some((gpa, piece, shift))
    })
}
