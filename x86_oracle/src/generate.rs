//! Generates cases: an instruction, and registers that put its operands at interesting places.
//!
//! Registers are corner values or random. Then the registers of addresses are solved for, so that each operand is in
//! the window: anywhere, across the end of a page, where it cannot be written, after the last page.

use crate::assemble::assemble;
use crate::machine::{
    CODE_BYTES, Case, FLAGS, PAGE, RAX, RCX, RDI, RDX, READ_ONLY, REGION, RSI, RSP, WINDOW, WINDOW_END, choices, index,
};
use crate::operands::{
    Confined, address_bytes, decode, displacement_place, is_canonical, is_known, operands, segment,
    string_address_bytes, truncate,
};
use crate::random::Random;
use iced_x86::Register;
use x86_emulate::{Form, Instruction, MAX_LENGTH, Mode, Operation, Repeat, Segment};

/// The processor's features.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abilities {
    /// 16- and 32-bit code.
    pub(crate) segments: bool,
    /// FS and GS with any base.
    pub(crate) bases: bool,
    /// Linear addresses have 48 bits, not 57.
    pub(crate) holes: bool,
}

/// A case and the memory at its start.
pub(crate) struct Trial {
    pub(crate) case: Confined,
    /// As the emulator decodes it, to classify it and to know its undefined flags.
    pub(crate) decoded: Instruction,
    /// What is written to the window, with offsets.
    pub(crate) memory: Vec<(usize, Vec<u8>)>,
}

/// Result of an attempt.
pub(crate) enum Made {
    Trial(Box<Trial>),
    /// The emulator does not know the instruction, nor should it.
    Unknown,
    /// The emulator does not know the instruction at the start of these bytes, and should.
    Refused(Mode, [u8; MAX_LENGTH]),
    /// The emulator knows it, but `iced-x86` does not, or not of this length.
    Disputed,
    /// Its operands cannot be brought to where they may be.
    Unconfined,
}

pub(crate) fn generate(random: &mut Random, abilities: Abilities) -> Made {
    let modes = [Mode::Bits64, Mode::Bits64, Mode::Bits64, Mode::Bits32, Mode::Bits16];
    let mode = if abilities.segments { random.pick(&modes) } else { Mode::Bits64 };
    let text = assemble(random, mode);
    let decoded = match x86_emulate::decode(mode, &text) {
        Ok(decoded) => decoded,
        Err(_) if is_known(mode, &text) => return Made::Refused(mode, text),
        Err(_) => return Made::Unknown,
    };
    if matches!(decoded.operation, Operation::InString | Operation::OutString) {
        return Made::Unknown;
    }

    let mut bytes = [0; MAX_LENGTH];
    let length = usize::from(decoded.length);
    bytes[..length].copy_from_slice(&text[..length]);
    let visible = if mode == Mode::Bits64 { u64::MAX } else { 0xffff_ffff };
    let mut case = Case {
        mode,
        bytes,
        length: decoded.length,
        place: place(random),
        gprs: std::array::from_fn(|_| random.corner() & visible),
        flags: random.next() & FLAGS,
        segments: segments(random, abilities, mode),
        bases: if abilities.bases { [base(random), base(random)] } else { [0; 2] },
    };
    let Some(instruction) = decode(&case) else { return Made::Disputed };
    if !abilities.bases && instruction.memory_segment() == Register::FS {
        return Made::Unconfined;
    }

    Aim { random, case: &mut case, decoded: &decoded, abilities }.take(&instruction);
    let memory = memory(random, &case, &decoded);
    let Some(case) = Confined::new(case) else { return Made::Unconfined };
    // The displacement may have changed, and so the decoded instruction.
    let Ok(decoded) = x86_emulate::decode(mode, case.case().instruction()) else { return Made::Unconfined };
    Made::Trial(Box::new(Trial { case, decoded, memory }))
}

/// Where the instruction is: anywhere, or over the end of a page, or at it.
fn place(random: &mut Random) -> u16 {
    let page = PAGE;
    let place = if random.one_in(4) { page - random.below(16) } else { random.below(CODE_BYTES as u64 - 32) };
    u16::try_from(place).expect("two pages")
}

fn segments(random: &mut Random, abilities: Abilities, mode: Mode) -> [u8; 6] {
    let mut of = |choices: &[u8]| if random.one_in(2) { choices[0] } else { random.pick(choices) };
    let code = if mode == Mode::Bits16 { of(&choices::CODE_16) } else { of(&choices::CODE_32) };
    let fs = if abilities.bases { of(&choices::DATA) } else { 0 };
    [of(&choices::DATA), code, of(&choices::STACK), of(&choices::DATA), fs, of(&choices::DATA)]
}

fn base(random: &mut Random) -> u64 {
    let base = match random.below(4) {
        0 => 0,
        1 => REGION + random.below(PAGE),
        2 => random.next(),
        _ => random.corner(),
    };
    if is_canonical(base) { base } else { base & 0x7fff_ffff_ffff }
}

/// Brings the operands of one case to where they are wanted.
struct Aim<'a> {
    random: &'a mut Random,
    case: &'a mut Case,
    decoded: &'a Instruction,
    abilities: Abilities,
}

impl Aim<'_> {
    fn take(&mut self, instruction: &iced_x86::Instruction) {
        if let Some(width) = string_address_bytes(instruction) {
            return self.string(instruction, width);
        }
        let bytes = instruction.memory_size().size() as u64;
        let is_stack = matches!(self.decoded.operation, Operation::Push | Operation::Pop);
        // Now and then, the stack wraps around, or is anywhere.
        if is_stack && !self.random.one_in(16) {
            let target = self.target(bytes, 8);
            let grown = if self.decoded.operation == Operation::Push { bytes } else { 0 };
            let offset = target.wrapping_sub(self.case.base(Segment::Ss)).wrapping_add(grown);
            self.set(RSP, offset, self.case.stack_pointer_bytes());
        }

        let width = address_bytes(instruction);
        let operand_segment = segment(instruction.memory_segment());
        let mut target = self.target(bytes, width);
        self.reach(operand_segment, target, width);
        // Bits beyond the operand move it.
        let by_register = self.bit_register();
        if let Some(register) = by_register {
            self.choose_bit(register);
            target = target.wrapping_sub(self.moved_by(register));
        }
        let offset = target.wrapping_sub(self.case.base(operand_segment));
        self.solve(instruction, offset, width, is_stack, by_register);
    }

    fn string(&mut self, instruction: &iced_x86::Instruction, width: usize) {
        let bytes = instruction.memory_size().size() as u64;
        let source = self.target(bytes, width);
        let destination = match self.random.below(4) {
            0 => source.wrapping_add(self.random.below(16) * bytes),
            1 => source.wrapping_sub(self.random.below(16)),
            _ => self.target(bytes, width),
        };
        let from = segment(instruction.memory_segment());
        self.reach(from, source, width);
        for (register, segment, linear) in [(RSI, from, source), (RDI, Segment::Es, destination)] {
            let offset = linear.wrapping_sub(self.case.base(segment));
            self.set(register, offset, width);
        }
        if self.decoded.repeat != Repeat::Never {
            let count = match self.random.below(8) {
                0 => 0,
                1 | 2 => self.random.below(4),
                _ => self.random.below(200),
            };
            self.set(RCX, count, width);
        }
    }

    /// The target address of an operand.
    fn target(&mut self, bytes: u64, width: usize) -> u64 {
        let is_atomic = self.decoded.locked || self.decoded.operation == Operation::Exchange;
        let pair = if self.decoded.operation == Operation::CompareExchangePair {
            2 * self.decoded.width.bytes()
        } else {
            bytes
        };
        let written = READ_ONLY - WINDOW;
        let before = |random: &mut Random, end: u64| end - 1 - random.below(bytes.max(2) - 1);
        let target = match self.random.below(32) {
            0..=4 => {
                let page = self.random.below(written / PAGE - 1) + 1;
                before(self.random, WINDOW + page * PAGE)
            }
            5 => before(self.random, READ_ONLY),
            6 => before(self.random, WINDOW_END),
            7 => before(self.random, WINDOW),
            8 => READ_ONLY + self.random.below(PAGE - 16),
            9 => WINDOW_END + self.random.below(2 * PAGE),
            // Where segments end.
            10 => WINDOW + 0x1803 - self.random.below(12),
            11 if width == 8 && self.abilities.holes && self.case.mode == Mode::Bits64 => match self.random.below(3) {
                0 => 0x7fff_ffff_f000 + self.random.below(0x2000),
                1 => 0x8000_0000_0000 - self.random.below(12),
                _ => 0x8000_0000_0000 + (self.random.next() >> 18),
            },
            _ => WINDOW + self.random.below(written - 16),
        };
        // An atomic access across two cache lines stops all processors: a few are enough.
        let may_lie_anywhere = if is_atomic { self.random.one_in(256) } else { !self.random.one_in(4) };
        let needs = if pair == 16 { !self.random.one_in(16) } else { !may_lie_anywhere };
        if needs { target & !(pair.max(1) - 1) } else { target }
    }

    /// If the segment is FS or GS, sets its base so that the address reaches the target with this width, or so that
    /// vendors differ about the address.
    fn reach(&mut self, segment: Segment, target: u64, width: usize) {
        if self.case.mode != Mode::Bits64 || !self.abilities.bases {
            return;
        }
        if width == 8 {
            // Now and then so that the address is where the lower half of all addresses ends: not canonical, while the
            // target is.
            let offset = 0x8000_0000_0000 + self.random.below(0x40) - 16;
            let base = target.wrapping_sub(offset);
            if self.abilities.holes && self.random.one_in(8) && is_canonical(base) {
                self.set_base(segment, base);
            }
        } else if width == 4 {
            // Now and then so that the address is the last one there is, or nearly.
            let offset = if self.random.one_in(8) { u64::MAX - self.random.below(16) } else { self.random.corner() };
            let base = target.wrapping_sub(offset & 0xffff_ffff);
            self.set_base(segment, base);
        }
    }

    /// Sets a base, if the segment has one.
    fn set_base(&mut self, segment: Segment, base: u64) {
        match segment {
            Segment::Fs => self.case.bases[0] = base,
            Segment::Gs => self.case.bases[1] = base,
            _ => {}
        }
    }

    /// The register with the number of a bit.
    fn bit_register(&self) -> Option<usize> {
        let is_bit = matches!(
            self.decoded.operation,
            Operation::BitTest | Operation::BitSet | Operation::BitReset | Operation::BitComplement
        );
        (is_bit && self.decoded.form == Form::ToMemory).then_some(self.decoded.register.number.into())
    }

    fn choose_bit(&mut self, register: usize) {
        let number = match self.random.below(3) {
            0 => self.random.below(64),
            1 => self.random.below(0x4000).wrapping_sub(0x2000),
            _ => self.random.below(0x1_0000).wrapping_sub(0x8000),
        };
        let bytes = index(self.decoded.width.bytes());
        self.set(register, number, bytes);
    }

    /// Number of bytes by which a bit number moves the operand.
    fn moved_by(&self, register: usize) -> u64 {
        let width = self.decoded.width;
        let number = width.sign_extend(self.case.gprs[register]).cast_signed();
        (number >> width.bits().trailing_zeros()).wrapping_mul(width.bytes().cast_signed()).cast_unsigned()
    }

    /// Chooses registers, or else the displacement, such that the address is `offset`.
    fn solve(
        &mut self,
        instruction: &iced_x86::Instruction,
        offset: u64,
        width: usize,
        is_stack: bool,
        bit: Option<usize>,
    ) {
        let number = |register: Register| (register != Register::None).then(|| register.number());
        let relative = instruction.is_ip_rel_memory_operand();
        let base = if relative { None } else { number(instruction.memory_base()) };
        let index = number(instruction.memory_index());
        let scale = u64::from(instruction.memory_index_scale());
        let is_fixed = |register: usize| is_stack && register == RSP || bit == Some(register);

        if self.random.one_in(2) && (base.is_some() || index.is_some()) {
            let small = self.random.below(64).wrapping_sub(32);
            self.displace(small);
        }
        let displacement = match decode(self.case) {
            Some(instruction) if !relative => instruction.memory_displacement64(),
            _ => 0,
        };
        let rest = offset.wrapping_sub(displacement);
        match (base, index) {
            (None, None) => {
                let next = self.case.rip().wrapping_add(self.case.length.into());
                self.displace(if relative { offset.wrapping_sub(next) } else { offset });
            }
            (Some(base), None) if is_fixed(base) => {
                let grown = if self.decoded.operation == Operation::Pop { self.decoded.width.bytes() } else { 0 };
                if bit == Some(base) {
                    // The number of a bit is its own base: the address is an eighth more than it.
                    let wanted = rest.wrapping_add(self.moved_by(base));
                    self.set(base, truncate(wanted, width) / 9 * 8, width);
                } else {
                    let there = self.case.gprs[base].wrapping_add(grown);
                    self.displace(offset.wrapping_sub(there));
                }
            }
            (Some(base), None) => self.set(base, rest, width),
            (None, Some(index)) => self.set_index(index, rest, scale, width),
            (Some(base), Some(index)) if base == index => {
                let value = if scale == 1 { truncate(rest, width) / 2 } else { rest.wrapping_mul(inverse(scale + 1)) };
                self.set(base, value, width);
            }
            (Some(base), Some(index)) if is_fixed(base) => {
                let there = self.case.gprs[base];
                self.set_index(index, rest.wrapping_sub(there), scale, width);
            }
            (Some(base), Some(index)) => {
                let there = self.case.gprs[index].wrapping_mul(scale);
                self.set(base, rest.wrapping_sub(there), width);
            }
        }
    }

    /// An index that, times `scale`, is as near to `value` as can be. Bits that the multiplication loses are any.
    fn set_index(&mut self, index: usize, value: u64, scale: u64, width: usize) {
        let lost = self.random.next() << (width * 8 - scale.trailing_zeros() as usize - 1) << 1;
        let lost = if scale == 1 { 0 } else { lost };
        let quotient = truncate(value, width) / scale;
        self.set(index, quotient | lost, width);
    }

    /// Sets the lowest `bytes` of a register, and random bits above.
    fn set(&mut self, register: usize, value: u64, bytes: usize) {
        let visible = if self.case.mode == Mode::Bits64 { u64::MAX } else { 0xffff_ffff };
        let above = self.random.corner();
        let above = above & !truncate(u64::MAX, bytes);
        self.case.gprs[register] = (truncate(value, bytes) | above) & visible;
    }

    /// Writes a displacement of more than one byte into the instruction; a one-byte displacement stays.
    fn displace(&mut self, value: u64) {
        let Some((place, bytes)) = displacement_place(self.case) else { return };
        if bytes > 1 {
            self.case.bytes[place..place + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
    }
}

/// The multiplicative inverse of an odd number, modulo 2^64.
fn inverse(odd: u64) -> u64 {
    // Each step doubles the number of right bits; of any odd number three are right at first.
    (0..5).fold(odd, |inverse, _| inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse))))
}

/// Memory at the operands.
fn memory(random: &mut Random, case: &Case, decoded: &Instruction) -> Vec<(usize, Vec<u8>)> {
    let Some(instruction) = decode(case) else { return Vec::new() };
    let found = operands(case, &instruction, &case.gprs);
    let mut memory = Vec::new();
    if decoded.operation.is_string() {
        let element = element(random, case, decoded);
        // Elements that are all equal except one; or those that exist.
        if random.one_in(2) {
            return memory;
        }
        let count = if decoded.repeat == Repeat::Never { 1 } else { truncate(case.gprs[RCX], 1).clamp(1, 200) };
        for operand in found.into_iter().flatten() {
            let bytes = count * operand.bytes;
            let start = if case.flags & 0x400 == 0 {
                operand.linear
            } else {
                operand.linear.wrapping_sub(bytes - operand.bytes)
            };
            let mut values: Vec<u8> = element.iter().copied().cycle().take(index(bytes)).collect();
            if random.one_in(2) {
                let at = usize::try_from(random.below(bytes)).expect("small");
                values[at] ^= 1;
            }
            put(&mut memory, start, values);
        }
        return memory;
    }

    for operand in found.into_iter().flatten() {
        let mut values = Vec::new();
        let is_expected = random.one_in(2);
        for half in 0..operand.bytes.div_ceil(8) {
            let register = match (decoded.operation, half) {
                (Operation::CompareExchange, _) if is_expected => Some(RAX),
                (Operation::CompareExchangePair, half) if is_expected => Some(if half == 0 { RAX } else { RDX }),
                _ if random.one_in(8) => Some(decoded.register.number.into()),
                _ => None,
            };
            let value = register.map_or_else(|| random.corner(), |register| case.gprs[register]);
            values.extend(value.to_le_bytes());
        }
        // Two halves of 4 bytes are the lower halves of two registers.
        if decoded.operation == Operation::CompareExchangePair && operand.bytes == 8 && is_expected {
            values[4..8].copy_from_slice(&case.gprs[RDX].to_le_bytes()[..4]);
        }
        values.truncate(index(operand.bytes));
        put(&mut memory, operand.linear, values);
    }
    memory
}

/// An element of a string: often the value that it is compared with.
fn element(random: &mut Random, case: &Case, decoded: &Instruction) -> Vec<u8> {
    let value = if random.one_in(4) { random.corner() } else { case.gprs[RAX] };
    value.to_le_bytes()[..index(decoded.width.bytes())].to_vec()
}

/// Keeps the part inside the window.
fn put(memory: &mut Vec<(usize, Vec<u8>)>, start: u64, values: Vec<u8>) {
    let end = start.wrapping_add(values.len() as u64);
    if start >= end || end <= WINDOW || start >= WINDOW_END {
        return;
    }
    let skipped = WINDOW.saturating_sub(start);
    let kept = end.min(WINDOW_END) - start;
    memory.push((index(start + skipped - WINDOW), values[index(skipped)..index(kept)].to_vec()));
}
