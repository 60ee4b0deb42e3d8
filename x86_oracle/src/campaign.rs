//! Runs many cases on both sides.

use crate::arch::Processor;
use crate::compare::{Difference, compare, name};
use crate::coverage::{Class, Coverage};
use crate::emulator::{Emulator, Way};
use crate::generate::{Abilities, Made, Trial, generate};
use crate::machine::{Case, Ended, PAGE, WINDOW_BYTES, index};
use crate::operands::{Operand, decode, is_canonical, operands, segment};
use crate::random::Random;
use iced_x86::FastFormatter;
use std::fmt;
use x86_emulate::{Base, Instruction, MAX_LENGTH, Mode, Operation, Repeat, Segment, Vendor, Width};

/// Changes the emulator's result, as if it were wrong: the comparison must notice.
pub type Alteration<'a> = &'a dyn Fn(&Case, &Instruction, &mut Ended, &mut [u8]);

/// A run over many cases, which follow from a seed.
pub struct Campaign {
    processor: Processor,
    emulator: Emulator,
    random: Random,
    abilities: Abilities,
    vendor: Vendor,
    coverage: Coverage,
    /// Of the processor, after the case.
    window: Vec<u8>,
}

/// Result of one attempt.
#[derive(Debug)]
pub enum Step {
    /// No case: the bytes are not an instruction that is compared, or its operands cannot be placed.
    Skipped,
    /// The emulator does not know the instruction at the start of these bytes, and should.
    Refused(Mode, [u8; MAX_LENGTH]),
    /// Both sides agree.
    Same,
    /// They do not.
    Different(Box<Mismatch>),
}

/// A case on which the two sides do not agree.
#[derive(Debug)]
pub struct Mismatch {
    /// The start state.
    pub case: Case,
    /// As the emulator decodes it.
    pub instruction: Instruction,
    /// Linear addresses and sizes of its operands.
    pub operands: Vec<(u64, u64)>,
    /// The processor's result.
    pub native: Ended,
    /// The emulator's result, if it can be compared.
    pub emulated: Option<Ended>,
    /// What is not equal.
    pub differences: Vec<Difference>,
}

impl Campaign {
    /// The cases of this seed.
    #[must_use]
    pub fn new(processor: Processor, seed: u64) -> Self {
        let abilities = Abilities {
            segments: processor.has_segments(),
            bases: processor.has_bases(),
            holes: has_48_bit_addresses(),
        };
        let identity = processor.identity();
        let mut campaign = Self {
            processor,
            emulator: Emulator::new(identity.vendor()),
            random: Random::new(seed),
            abilities,
            vendor: identity.vendor(),
            coverage: Coverage::of_processor(identity),
            window: vec![0; WINDOW_BYTES],
        };
        campaign.fill();
        campaign
    }

    /// Fills both windows with random bytes. They stay, except for what cases write.
    fn fill(&mut self) {
        let bytes: Vec<u8> = (0..WINDOW_BYTES).map(|_| self.random.byte()).collect();
        self.processor.write(0, &bytes);
        self.emulator.window().copy_from_slice(&bytes);
    }

    /// The coverage so far.
    #[must_use]
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// Whether 16- and 32-bit code is compared.
    #[must_use]
    pub fn has_segments(&self) -> bool {
        self.abilities.segments
    }

    /// Whether FS and GS have bases of the case's own.
    #[must_use]
    pub fn has_bases(&self) -> bool {
        self.abilities.bases
    }

    /// Makes a case and compares.
    pub fn step(&mut self, alteration: Option<Alteration<'_>>) -> Step {
        let trial = match generate(&mut self.random, self.abilities) {
            Made::Trial(trial) => trial,
            Made::Disputed => {
                self.coverage.note("skipped: not an instruction to iced-x86");
                return Step::Skipped;
            }
            Made::Refused(mode, bytes) => return Step::Refused(mode, bytes),
            Made::Unknown | Made::Unconfined => return Step::Skipped,
        };
        for (offset, bytes) in &trial.memory {
            self.processor.write(*offset, bytes);
            self.emulator.window()[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }

        let native = self.processor.run(&trial.case);
        self.processor.read(&mut self.window);
        let way = if self.random.one_in(2) { Way::Learnt } else { Way::Long };
        let random = &mut self.random;
        let emulated = self.emulator.run(&trial.case, way, || index(random.next()));
        let (case, instruction) = (trial.case.case(), &trial.decoded);
        self.coverage.count(Class::of(case.mode, instruction));
        note_events(&mut self.coverage, &trial, &native);

        let (emulated, differences) = match emulated {
            Err(misdeed) => (None, vec![Difference::Misdeed(misdeed)]),
            Ok((mut emulated, was_learnt)) => {
                if was_learnt {
                    self.coverage.note("from what was learnt of the place");
                }
                let window = self.emulator.window();
                if let Some(alter) = alteration {
                    alter(case, instruction, &mut emulated, window);
                }
                let mut differences =
                    compare(self.vendor, case, instruction, (&native, &self.window), (&emulated, window));
                if instruction.operation == Operation::CompareString
                    && let [Difference::Exception(Some(_), Some(_))] = differences[..]
                    && self.emulator.exception_of_destination(case, &native.gprs) == native.exception
                {
                    // Both operands fault. No manual says which is checked first; the emulator begins with the source.
                    self.coverage.note("CMPS, both operands fault, the second first");
                    differences.clear();
                }
                (Some(emulated), differences)
            }
        };
        if differences.is_empty() {
            return Step::Same;
        }
        // The next case starts from the same memory on both sides again.
        self.emulator.window().copy_from_slice(&self.window);
        Step::Different(Box::new(Mismatch {
            case: case.clone(),
            instruction: *instruction,
            operands: places(case),
            native,
            emulated,
            differences,
        }))
    }
}

fn places(case: &Case) -> Vec<(u64, u64)> {
    let found = decode(case).map(|instruction| operands(case, &instruction, &case.gprs));
    found.into_iter().flatten().flatten().map(|operand| (operand.linear, operand.bytes)).collect()
}

/// Counts the events of a case besides its class.
fn note_events(coverage: &mut Coverage, trial: &Trial, native: &Ended) {
    let (case, instruction) = (trial.case.case(), &trial.decoded);
    if let Some(exception) = native.exception {
        coverage.note(&format!("exception {}", exception.vector));
    }
    if instruction.locked {
        coverage.note("locked");
    }
    if instruction.operation.is_string() {
        coverage.note(match instruction.repeat {
            Repeat::Never => "string, not repeated",
            Repeat::WhileEqual => "string, repeated (while equal)",
            Repeat::WhileDifferent => "string, repeated (while different)",
        });
        if case.flags & 0x400 != 0 {
            coverage.note("string, downwards");
        }
    }
    let default = match case.mode {
        Mode::Bits64 => Width::Qword,
        Mode::Bits32 => Width::Dword,
        Mode::Bits16 => Width::Word,
    };
    if instruction.address.width != default {
        coverage.note("address of the other size");
    }
    if instruction.address.base == Some(Base::NextInstruction) {
        coverage.note("address relative to RIP");
    }
    if matches!(instruction.address.segment, Segment::Fs | Segment::Gs) {
        coverage.note("segment FS or GS");
        if is_effective_address_odd(case) {
            coverage.note("effective address not canonical, linear is");
        }
    }
    if instruction.register.high {
        coverage.note("AH, CH, DH or BH");
    }
    let is_pair = instruction.operation == Operation::CompareExchangePair;
    if places(case).iter().any(|(linear, bytes)| linear % PAGE + bytes > PAGE) {
        coverage.note(if is_pair { "pair over the end of a page" } else { "operand over the end of a page" });
    }
    if u64::from(case.place) % PAGE + u64::from(case.length) > PAGE {
        coverage.note("code over the end of a page");
    }
}

/// Whether a byte of an operand through FS or GS has a non-canonical effective address, while all linear addresses are
/// canonical: vendors differ here.
fn is_effective_address_odd(case: &Case) -> bool {
    let Some(instruction) = decode(case) else { return false };
    let [operand, _] = operands(case, &instruction, &case.gprs);
    operand.is_some_and(|Operand { linear, bytes }| {
        let effective = linear.wrapping_sub(case.base(segment(instruction.memory_segment())));
        let is_whole = |first: u64| is_canonical(first) && is_canonical(first.wrapping_add(bytes - 1));
        case.mode == Mode::Bits64 && is_whole(linear) && !is_whole(effective)
    })
}

/// Whether linear addresses have 48 bits. Linux reports processors on which it allows more.
fn has_48_bit_addresses() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| !text.split_whitespace().any(|word| word == "la57"))
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let case = &self.case;
        let mut text = String::new();
        if let Some(instruction) = decode(case) {
            FastFormatter::new().format(&instruction, &mut text);
        }
        writeln!(f, "{:?} {:02x?} {text}", case.mode, case.instruction())?;
        writeln!(f, "  {:?}", self.instruction)?;
        for (linear, bytes) in &self.operands {
            writeln!(f, "  operand of {bytes} bytes at {linear:#x}")?;
        }
        writeln!(
            f,
            "  flags {:#x}, segments {:?}, bases {:x?}, RIP {:#x}",
            case.flags,
            case.segments,
            case.bases,
            case.rip()
        )?;
        for (number, value) in case.gprs.iter().enumerate() {
            write!(f, "  {:4}{value:#018x}", name(number))?;
            if number % 4 == 3 {
                writeln!(f)?;
            }
        }
        for difference in &self.differences {
            writeln!(f, "  {difference}")?;
        }
        writeln!(f, "  natively {:x?}", self.native)?;
        write!(f, "  emulated {:x?}", self.emulated)
    }
}
