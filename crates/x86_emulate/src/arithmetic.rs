//! Results of operations, and the flags that they change (APM vol. 1, 3.1.4, and vol. 3 for each instruction).

use crate::Width;
use crate::cpu::bits::{AF, CF, OF, PF, SF, ZF};
use crate::instruction::Operation;

/// All six flags that arithmetic changes.
const ALL: u64 = CF | PF | AF | ZF | SF | OF;

/// A result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Computed {
    pub(crate) value: u64,
    /// New values of the flags in `changed`.
    flags: u64,
    changed: u64,
}

impl Computed {
    /// `rflags` afterwards.
    #[inline]
    pub(crate) fn flags_after(&self, rflags: u64) -> u64 {
        rflags & !self.changed | self.flags
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.flags & ZF != 0
    }
}

/// Combines two operands that fit into `width`; `carry` is the old CF. `None` if the operation does not have two
/// operands and a result.
///
/// Clears AF after logic, where it is undefined.
pub(crate) fn combine(operation: Operation, width: Width, left: u64, right: u64, carry: bool) -> Option<Computed> {
    Some(match operation {
        Operation::Or => logic(width, left | right),
        Operation::Xor => logic(width, left ^ right),
        Operation::And | Operation::Test => logic(width, left & right),
        Operation::Add | Operation::ExchangeAdd => add(width, left, right, false),
        Operation::AddWithCarry => add(width, left, right, carry),
        Operation::Subtract
        | Operation::Compare
        | Operation::CompareExchange
        | Operation::CompareString
        | Operation::ScanString => subtract(width, left, right, false),
        Operation::SubtractWithBorrow => subtract(width, left, right, carry),
        _ => return None,
    })
}

/// Changes one operand that fits into `width`. `None` if the operation does not have one operand.
pub(crate) fn change(operation: Operation, width: Width, value: u64) -> Option<Computed> {
    Some(match operation {
        // INC and DEC do not change the carry.
        Operation::Increment => keeping_carry(add(width, value, 1, false)),
        Operation::Decrement => keeping_carry(subtract(width, value, 1, false)),
        Operation::Negate => subtract(width, 0, value, false),
        Operation::Not => Computed { value: width.truncate(!value), flags: 0, changed: 0 },
        _ => return None,
    })
}

/// Tests bit `number`, which is below the operand's width, and changes it as the operation requires.
pub(crate) fn bit(operation: Operation, value: u64, number: u64) -> Option<Computed> {
    let bit = 1 << number;
    let new = match operation {
        Operation::BitTest => value,
        Operation::BitSet => value | bit,
        Operation::BitReset => value & !bit,
        Operation::BitComplement => value ^ bit,
        _ => return None,
    };
    let carry = if value & bit != 0 { CF } else { 0 };
    Some(Computed { value: new, flags: carry, changed: CF })
}

/// Compares a pair: sets or clears ZF only.
pub(crate) fn equal(is_equal: bool) -> Computed {
    Computed { value: 0, flags: if is_equal { ZF } else { 0 }, changed: ZF }
}

fn logic(width: Width, value: u64) -> Computed {
    Computed { value, flags: of_result(width, value), changed: ALL }
}

fn add(width: Width, left: u64, right: u64, carry: bool) -> Computed {
    let value = width.truncate(left.wrapping_add(right).wrapping_add(carry.into()));
    let overflows = width.is_negative((left ^ value) & (right ^ value));
    // A carry out: the result is smaller than an operand, or equal to it although more than zero was added.
    let carries = value < left || carry && value == left;
    finish(width, value, left ^ right, carries, overflows)
}

fn subtract(width: Width, left: u64, right: u64, borrow: bool) -> Computed {
    let value = width.truncate(left.wrapping_sub(right).wrapping_sub(borrow.into()));
    let overflows = width.is_negative((left ^ right) & (left ^ value));
    let borrows = left < right || borrow && left == right;
    finish(width, value, left ^ right, borrows, overflows)
}

fn finish(width: Width, value: u64, differ: u64, carries: bool, overflows: bool) -> Computed {
    let carry = if carries { CF } else { 0 };
    let overflow = if overflows { OF } else { 0 };
    // Bit 4 is not the sum of the operands' bits: there was a carry from bit 3.
    let auxiliary = (differ ^ value) & AF;
    Computed { value, flags: carry | overflow | auxiliary | of_result(width, value), changed: ALL }
}

fn keeping_carry(computed: Computed) -> Computed {
    Computed { flags: computed.flags & !CF, changed: ALL & !CF, ..computed }
}

/// Sign, zero, and the parity of the lowest byte.
fn of_result(width: Width, value: u64) -> u64 {
    let sign = if width.is_negative(value) { SF } else { 0 };
    let zero = if value == 0 { ZF } else { 0 };
    let parity = if (value & 0xff).count_ones().is_multiple_of(2) { PF } else { 0 };
    sign | zero | parity
}
