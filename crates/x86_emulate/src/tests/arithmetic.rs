//! Results and flags, compared with arithmetic in more bits.

use crate::arithmetic::{bit, change, combine};
use crate::{Operation, Width};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

const CF: u32 = 0;
const PF: u32 = 2;
const AF: u32 = 4;
const ZF: u32 = 6;
const SF: u32 = 7;
const OF: u32 = 11;
/// The flags register with all arithmetic flags clear: arithmetic does not change these bits.
const OTHERS: u64 = 0x3f_f72a;

/// The result and the flags; all flags were set before.
fn run(operation: Operation, width: Width, left: u64, right: u64, carry: bool) -> (u64, u64) {
    let computed = combine(operation, width, left, right, carry).expect("two operands");
    (computed.value, computed.flags_after(0x3f_ffff))
}

fn flag(flags: u64, bit: u32) -> bool {
    flags >> bit & 1 != 0
}

proptest! {
    #[test]
    fn flags_agree_with_arithmetic_in_more_bits(
        left in any::<u64>(), right in any::<u64>(), near in any::<bool>(), bytes in 0..4_u32, carry in any::<bool>(),
    ) {
        let width = Width::ALL[bytes as usize];
        // Adjacent operands are rare among random ones, and interesting.
        let right = if near { left.wrapping_add(right % 3).wrapping_sub(1) } else { right };
        let (left, right) = (width.truncate(left), width.truncate(right));
        let signed = |value| i128::from(width.sign_extend(value).cast_signed());
        // The low bits of a wide result, as they would be stored.
        let low = |value: i128| width.truncate(u64::try_from(value & i128::from(u64::MAX)).expect("masked"));
        let fits = |value: i128| signed(low(value)) == value;

        for (operation, more) in [(Operation::Add, 0), (Operation::AddWithCarry, i128::from(carry))] {
            let (sum, flags) = run(operation, width, left, right, carry);
            let wide = i128::from(left) + i128::from(right) + more;
            prop_assert_eq!(sum, low(wide));
            prop_assert_eq!(flag(flags, CF), wide >> width.bits() != 0);
            prop_assert_eq!(flag(flags, AF), i128::from(left % 16 + right % 16) + more > 15);
            prop_assert_eq!(flag(flags, OF), !fits(signed(left) + signed(right) + more));
            prop_assert_eq!(flags & OTHERS, OTHERS);
        }

        for (operation, less) in [(Operation::Subtract, 0), (Operation::SubtractWithBorrow, i128::from(carry))] {
            let (difference, flags) = run(operation, width, left, right, carry);
            prop_assert_eq!(difference, low(signed(left) - signed(right) - less));
            prop_assert_eq!(flag(flags, CF), i128::from(left) < i128::from(right) + less);
            prop_assert_eq!(flag(flags, AF), i128::from(left % 16) < i128::from(right % 16) + less);
            prop_assert_eq!(flag(flags, OF), !fits(signed(left) - signed(right) - less));
            prop_assert_eq!(flag(flags, ZF), difference == 0);
            prop_assert_eq!(flag(flags, SF), signed(difference) < 0);
        }
        let all = [Operation::Compare, Operation::CompareExchange, Operation::CompareString, Operation::ScanString];
        for alike in all {
            let subtract = run(Operation::Subtract, width, left, right, carry);
            prop_assert_eq!(run(alike, width, left, right, carry), subtract);
        }

        for (operation, value) in [
            (Operation::And, left & right),
            (Operation::Test, left & right),
            (Operation::Or, left | right),
            (Operation::Xor, left ^ right),
        ] {
            let (result, flags) = run(operation, width, left, right, carry);
            prop_assert_eq!(result, value);
            prop_assert_eq!(flag(flags, PF), (value & 0xff).count_ones() % 2 == 0);
            prop_assert_eq!((flag(flags, ZF), flag(flags, SF)), (value == 0, signed(value) < 0));
            prop_assert!(!flag(flags, CF) && !flag(flags, OF));
        }
    }

    #[test]
    fn changes_of_one_operand_are_sums_that_may_keep_the_carry(value in any::<u64>(), bytes in 0..4_u32) {
        let width = Width::ALL[bytes as usize];
        let corners = [0, 1, u64::MAX, 1 << (width.bits() - 1), (1 << (width.bits() - 1)) - 1, value];
        for value in corners.map(|value| width.truncate(value)) {
            let changed = |operation, before| {
                let computed = change(operation, width, value).expect("one operand");
                (computed.value, computed.flags_after(before))
            };
            for before in [0, 0x3f_ffff_u64] {
                let carry = before & 1;
                let (sum, flags) = run(Operation::Add, width, value, 1, false);
                let expected = flags & 0x8d4 | before & !0x8d5 | carry;
                prop_assert_eq!(changed(Operation::Increment, before), (sum, expected));
                let (difference, flags) = run(Operation::Subtract, width, value, 1, false);
                let expected = flags & 0x8d4 | before & !0x8d5 | carry;
                prop_assert_eq!(changed(Operation::Decrement, before), (difference, expected));
                let (negated, flags) = run(Operation::Subtract, width, 0, value, false);
                prop_assert_eq!(changed(Operation::Negate, before), (negated, flags & 0x8d5 | before & !0x8d5));
                prop_assert_eq!(changed(Operation::Not, before), (width.truncate(!value), before));
            }
        }
    }

    #[test]
    fn bits_are_tested_and_changed_one_by_one(value in any::<u64>(), number in 0..64_u64, flags in any::<u64>()) {
        let was = value >> number & 1;
        for (operation, becomes) in [
            (Operation::BitTest, was),
            (Operation::BitSet, 1),
            (Operation::BitReset, 0),
            (Operation::BitComplement, 1 - was),
        ] {
            let computed = bit(operation, value, number).expect("a bit operation");
            prop_assert_eq!(computed.value, value & !(1 << number) | becomes << number);
            prop_assert_eq!(computed.flags_after(flags), flags & !1 | was);
        }
    }
}
