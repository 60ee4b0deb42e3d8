//! What has been compared, and what could be compared.

use crate::identity::Identity;
use std::collections::BTreeMap;
use std::fmt;
use x86_emulate::{Form, Instruction, Mode, Operation, Width};

/// Instructions that differ in their operands only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// How code is decoded.
    pub mode: Mode,
    /// The operation.
    pub operation: Operation,
    /// With which operands.
    pub form: Form,
    /// How wide the one in memory is.
    pub width: Width,
}

impl Class {
    pub(crate) fn of(mode: Mode, instruction: &Instruction) -> Self {
        let Instruction { operation, form, width, .. } = *instruction;
        Self { mode, operation, form, width }
    }

    /// All classes in a mode, except port I/O.
    #[must_use]
    pub fn all(mode: Mode) -> Vec<Self> {
        use Form::{FromMemory, Memory, ToMemory, ToMemoryImmediate};
        use Operation::{
            Add, AddWithCarry, And, BitComplement, BitReset, BitSet, BitTest, Compare, CompareExchange,
            CompareExchangePair, CompareString, Decrement, Exchange, ExchangeAdd, InString, Increment, LoadString,
            Move, MoveSignExtended, MoveString, MoveZeroExtended, Negate, Not, Or, OutString, Pop, Push, ScanString,
            StoreString, Subtract, SubtractWithBorrow, Test, Xor,
        };
        use Width::{Byte, Dword, Qword, Word};
        let mut classes = Vec::new();
        for &operation in Operation::ALL {
            let (forms, widths): (&[Form], &[Width]) = match operation {
                Move | Add | Or | AddWithCarry | SubtractWithBorrow | And | Subtract | Xor | Compare => {
                    (&[FromMemory, ToMemory, ToMemoryImmediate], &Width::ALL)
                }
                MoveZeroExtended => (&[FromMemory], &[Byte, Word]),
                MoveSignExtended if mode == Mode::Bits64 => (&[FromMemory], &[Byte, Word, Dword]),
                MoveSignExtended => (&[FromMemory], &[Byte, Word]),
                Test => (&[ToMemory, ToMemoryImmediate], &Width::ALL),
                Exchange | CompareExchange | ExchangeAdd => (&[ToMemory], &Width::ALL),
                BitTest | BitSet | BitReset | BitComplement => (&[ToMemory, ToMemoryImmediate], &[Word, Dword, Qword]),
                CompareExchangePair => (&[Memory], &[Dword, Qword]),
                Push | Pop if mode == Mode::Bits64 => (&[Memory], &[Word, Qword]),
                Push | Pop => (&[Memory], &[Word, Dword]),
                Increment | Decrement | Not | Negate | StoreString | MoveString | LoadString | CompareString
                | ScanString => (&[Memory], &Width::ALL),
                InString | OutString => continue,
            };
            for &form in forms {
                let exist = widths.iter().filter(|&&width| mode == Mode::Bits64 || width != Qword);
                classes.extend(exist.map(|&width| Self { mode, operation, form, width }));
            }
        }
        classes
    }

    fn key(self) -> [u8; 4] {
        [self.operation as u8, self.form as u8, self.width as u8, self.mode as u8]
    }
}

/// Counts of comparisons.
#[derive(Clone, Debug)]
pub struct Coverage {
    identity: Identity,
    classes: BTreeMap<[u8; 4], u64>,
    /// By name: events besides the instruction itself.
    events: BTreeMap<String, u64>,
}

impl Coverage {
    /// Nothing yet, on this processor.
    pub(crate) fn of_processor(identity: Identity) -> Self {
        Self { identity, classes: BTreeMap::new(), events: BTreeMap::new() }
    }

    pub(crate) fn count(&mut self, class: Class) {
        *self.classes.entry(class.key()).or_default() += 1;
    }

    pub(crate) fn note(&mut self, event: &str) {
        if let Some(count) = self.events.get_mut(event) {
            *count += 1;
        } else {
            self.events.insert(event.to_owned(), 1);
        }
    }

    /// How often a class was compared.
    #[must_use]
    pub fn of(&self, class: Class) -> u64 {
        self.classes.get(&class.key()).copied().unwrap_or(0)
    }

    /// How often something happened; names are those that are printed.
    #[must_use]
    pub fn events(&self, event: &str) -> u64 {
        self.events.get(event).copied().unwrap_or(0)
    }
}

/// The processor; a line for each operation, with the numbers of its widths in 64-, 32- and 16-bit code; then events.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.identity)?;
        writeln!(
            f,
            "{:20} {:>10} {:>10} {:>10}   of them 8, 16, 32, 64 bits",
            "operation", "64-bit", "32-bit", "16-bit"
        )?;
        for &operation in Operation::ALL {
            let sum = |place: usize, value: u8| -> u64 {
                let those = self.classes.iter().filter(|(key, _)| key[0] == operation as u8 && key[place] == value);
                those.map(|(_, count)| count).sum()
            };
            let [long, protected, short] = [Mode::Bits64, Mode::Bits32, Mode::Bits16].map(|mode| sum(3, mode as u8));
            if long + protected + short > 0 {
                let name = format!("{operation:?}");
                write!(f, "{name:20} {long:10} {protected:10} {short:10}  ")?;
                for width in Width::ALL {
                    write!(f, " {}", sum(2, width as u8))?;
                }
                writeln!(f)?;
            }
        }
        for (event, count) in &self.events {
            writeln!(f, "{event:40} {count}")?;
        }
        Ok(())
    }
}
