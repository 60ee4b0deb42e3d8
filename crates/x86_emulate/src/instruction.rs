//! A decoded instruction: 32 bytes of plain data, which can be stored anywhere.

use crate::{Segment, Width};

/// An instruction with an operand in memory, besides its own code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// What is done.
    pub operation: Operation,
    /// Which operands take part.
    pub form: Form,
    /// Width of the operand in memory; CMPXCHG8B and CMPXCHG16B have two operands of it.
    pub width: Width,
    /// The operand in a register, if the form has one.
    pub register: Register,
    /// The operand in memory. For a string instruction only the source's segment and the address width.
    pub address: Address,
    /// Added to the address; sign-extended. (Not part of `Address`, to avoid padding.)
    pub displacement: u64,
    /// The immediate operand, sign-extended to 64 bits, if the form has one.
    pub immediate: u64,
    /// Repetition of a string instruction.
    pub repeat: Repeat,
    /// LOCK is among the prefixes.
    pub locked: bool,
    /// In bytes.
    pub length: u8,
}

const _: () = assert!(size_of::<Instruction>() == 32);

macro_rules! coded {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$variant_doc:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The variant of this number.
            #[inline]
            const fn of(number: u8) -> Option<Self> {
                $(if number == Self::$variant as u8 {
                    return Some(Self::$variant);
                })*
                None
            }
        }
    };
}

coded! {
    /// The operation of an instruction (APM vol. 3, chapter 3).
    pub enum Operation {
        /// MOV and MOVNTI.
        Move,
        /// MOVZX.
        MoveZeroExtended,
        /// MOVSX and MOVSXD.
        MoveSignExtended,
        /// XCHG, always locked.
        Exchange,
        /// ADD.
        Add,
        /// OR.
        Or,
        /// ADC.
        AddWithCarry,
        /// SBB.
        SubtractWithBorrow,
        /// AND.
        And,
        /// SUB.
        Subtract,
        /// XOR.
        Xor,
        /// CMP: SUB for the flags only.
        Compare,
        /// TEST: AND for the flags only.
        Test,
        /// INC.
        Increment,
        /// DEC.
        Decrement,
        /// NOT.
        Not,
        /// NEG.
        Negate,
        /// BT.
        BitTest,
        /// BTS.
        BitSet,
        /// BTR.
        BitReset,
        /// BTC.
        BitComplement,
        /// CMPXCHG.
        CompareExchange,
        /// CMPXCHG8B and CMPXCHG16B.
        CompareExchangePair,
        /// XADD.
        ExchangeAdd,
        /// PUSH.
        Push,
        /// POP.
        Pop,
        /// STOS.
        StoreString,
        /// MOVS.
        MoveString,
        /// LODS.
        LoadString,
        /// CMPS.
        CompareString,
        /// SCAS.
        ScanString,
        /// INS.
        InString,
        /// OUTS.
        OutString,
    }
}

coded! {
    /// The operands of an instruction.
    pub enum Form {
        /// From memory to a register, or compared with it.
        FromMemory,
        /// From a register to memory.
        ToMemory,
        /// To memory, with an immediate operand.
        ToMemoryImmediate,
        /// Memory only, and what the operation implies.
        Memory,
    }
}

coded! {
    /// Repetition of a string instruction.
    pub enum Repeat {
        /// Once.
        Never,
        /// REP; for comparing instructions REPE, while elements are equal.
        WhileEqual,
        /// REPNE: while elements differ.
        WhileDifferent,
    }
}

/// A general register, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// In the order of their encoding, below 16.
    pub number: u8,
    /// Width of the part.
    pub width: Width,
    /// Bits 15:8 instead of 7:0: AH, CH, DH, BH.
    pub high: bool,
}

impl Register {
    /// Its value, zero-extended.
    #[inline(always)]
    pub(crate) fn of(self, gprs: &[u64; 16]) -> u64 {
        let whole = gprs[usize::from(self.number & 15)];
        if self.high { whole >> 8 & 0xff } else { self.width.truncate(whole) }
    }
}

/// An operand's address: segment : base + index * scale, and the instruction's displacement, modulo `width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The segment, named or implied.
    pub segment: Segment,
    /// The base, if there is one.
    pub base: Option<Base>,
    /// The scaled index, if there is one.
    pub index: Option<Index>,
    /// Address size.
    pub width: Width,
}

/// The base of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The general register of this number.
    Register(u8),
    /// RIP of the next instruction.
    NextInstruction,
}

/// The index of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Index {
    /// The general register's number.
    pub register: u8,
    /// 1, 2, 4 or 8.
    pub scale: u8,
}

/// In a packed instruction: no base or no index; and, below it, the next instruction as base.
const NONE: u8 = 0xff;
const NEXT_INSTRUCTION: u8 = 0xfe;

impl Instruction {
    /// A placeholder that was never decoded.
    pub(crate) const NONE: Self = Self {
        operation: Operation::Move,
        form: Form::FromMemory,
        width: Width::Byte,
        register: Register { number: 0, width: Width::Byte, high: false },
        address: Address { segment: Segment::Ds, base: None, index: None, width: Width::Qword },
        displacement: 0,
        immediate: 0,
        repeat: Repeat::Never,
        locked: false,
        length: 0,
    };

    /// The value that it writes to memory, if it does nothing else: a MOV of a register or of an immediate operand.
    #[must_use]
    pub fn stored(&self, gprs: &[u64; 16]) -> Option<u64> {
        match (self.operation, self.form) {
            (Operation::Move, Form::ToMemory) => Some(self.width.truncate(self.register.of(gprs))),
            (Operation::Move, Form::ToMemoryImmediate) => Some(self.width.truncate(self.immediate)),
            _ => None,
        }
    }

    /// The instruction as four words, for memory that is accessed a word at a time.
    #[must_use]
    pub fn pack(&self) -> [u64; 4] {
        let Self { register, address, .. } = self;
        let base = match address.base {
            None => NONE,
            Some(Base::NextInstruction) => NEXT_INSTRUCTION,
            Some(Base::Register(number)) => number,
        };
        let (index, scale) = address.index.map_or((NONE, 0), |index| (index.register, index.scale));
        let first = [
            self.operation as u8,
            self.form as u8,
            self.width as u8,
            register.number,
            register.width as u8,
            u8::from(register.high),
            address.segment as u8,
            base,
        ];
        let second = [index, scale, address.width as u8, self.repeat as u8, u8::from(self.locked), self.length, 0, 0];
        [u64::from_le_bytes(first), u64::from_le_bytes(second), self.displacement, self.immediate]
    }

    /// Reverses [`pack`](Self::pack); `None` for words that it never makes.
    #[must_use]
    pub fn unpack([first, second, displacement, immediate]: [u64; 4]) -> Option<Self> {
        let [operation, form, width, number, register_width, high, segment, base] = first.to_le_bytes();
        let [index, scale, address_width, repeat, locked, length, 0, 0] = second.to_le_bytes() else { return None };
        let register_number = |number: u8| (number < 16).then_some(number);
        let width_of = |code: u8| Width::ALL.get(usize::from(code)).copied();
        Some(Self {
            operation: Operation::of(operation)?,
            form: Form::of(form)?,
            width: width_of(width)?,
            register: Register { number: register_number(number)?, width: width_of(register_width)?, high: high != 0 },
            address: Address {
                segment: *Segment::ALL.get(usize::from(segment))?,
                base: match base {
                    NONE => None,
                    NEXT_INSTRUCTION => Some(Base::NextInstruction),
                    number => Some(Base::Register(register_number(number)?)),
                },
                index: match index {
                    NONE => None,
                    number => Some(Index { register: register_number(number)?, scale }),
                },
                width: width_of(address_width)?,
            },
            displacement,
            immediate,
            repeat: Repeat::of(repeat)?,
            locked: locked != 0,
            length,
        })
    }
}
