use alloc::vec;
use alloc::vec::Vec;

use super::{bytes, ipi_of, status};
use crate::{Code, Control, Status, Targets, fast_input};

const IPI: Control = Control::new(Code::SendSyntheticClusterIpi);
const IPI_EX: Control = Control::new(Code::SendSyntheticClusterIpiEx);

/// (D1, D2)
#[test]
fn memory_and_registers_say_the_same() {
    let input = bytes(&[0xfd, 0b1010]);
    let ipi = ipi_of(IPI, &input);
    assert_eq!((ipi.vector, ipi.targets), (0xfd, Targets::Mask(0b1010)));

    let mut words = [!0; 14];
    words[0] = 0xfd;
    words[1] = 0b1010;
    assert_eq!(ipi_of(IPI.with_fast(), &fast_input(&words)), ipi);
}

/// (D3, D5)
#[test]
fn anything_beside_the_vector_is_an_error() {
    for bit in 8..64 {
        for control in [IPI, IPI.with_fast()] {
            assert_eq!(status(control, &[0x40 | 1 << bit, 1]), Status::InvalidParameter, "bit {bit}");
        }
        assert_eq!(status(IPI_EX, &[0x40 | 1 << bit, 1, 0]), Status::InvalidParameter, "bit {bit}");
    }
    // The use-bit together with trust level 1.
    assert_eq!(status(IPI, &[0x40 | 0x11 << 32, 1]), Status::InvalidParameter);
}

/// (D4)
#[test]
fn vectors_of_exceptions_cannot_be_sent() {
    for vector in 0..=0x101 {
        let words = [vector, 1];
        let words_ex = [vector, 1, 0];
        if (0x10..=0xff).contains(&vector) {
            assert_eq!(u64::from(ipi_of(IPI, &bytes(&words)).vector), vector);
            assert_eq!(u64::from(ipi_of(IPI_EX, &bytes(&words_ex)).vector), vector);
        } else {
            assert_eq!(status(IPI, &words), Status::InvalidParameter);
            assert_eq!(status(IPI_EX, &words_ex), Status::InvalidParameter);
        }
    }
}

/// (D6) The parser does not care whether the sender is a target: it is in the set like others.
#[test]
fn every_vp_can_be_a_target() {
    for vp in 0..64 {
        let input = bytes(&[0x40, 1 << vp]);
        assert_eq!(ipi_of(IPI, &input).targets.indices(64).collect::<Vec<_>>(), [vp]);
    }
}

/// (D7)
#[test]
fn interrupt_for_nobody_is_no_error() {
    assert_eq!(ipi_of(IPI, &bytes(&[0x40, 0])).targets.indices(64).count(), 0);
    assert_eq!(ipi_of(IPI, &bytes(&[0x40, 1 << 63])).targets.indices(63).count(), 0);
}

/// (D8)
#[test]
fn sparse_sets_reach_whom_they_name() {
    let reached = |variable_words, words: &[u64]| {
        let input = bytes(words);
        ipi_of(IPI_EX.with_variable_words(variable_words), &input).targets.indices(66).collect::<Vec<_>>()
    };
    assert_eq!(reached(1, &[0x40, 0, 0b10, 0b10]), [65]);
    assert_eq!(reached(2, &[0x40, 0, 0b11, 0b10, 0b10]), [1, 65]);
    assert_eq!(reached(0, &[0x40, 1, 0]), (0..66).collect::<Vec<_>>());
    assert_eq!(reached(0, &[0x40, 0, 0]), vec![0; 0]);
    assert_eq!(reached(1, &[0x40, 0, 0b10, 0]), vec![0; 0]);
}

/// (D9)
#[test]
fn ill_formed_set_is_an_error() {
    assert_eq!(status(IPI_EX, &[0x40, 2, 0]), Status::InvalidParameter);
    assert_eq!(status(IPI_EX, &[0x40, !0, 0]), Status::InvalidParameter);
    assert_eq!(status(IPI_EX.with_variable_words(1), &[0x40, 0, 0b11, 1]), Status::InvalidHypercallInput);
    assert_eq!(status(IPI_EX.with_variable_words(2), &[0x40, 0, 0b1, 1, 1]), Status::InvalidHypercallInput);
    assert_eq!(status(IPI_EX.with_variable_words(1), &[0x40, 1, 0, 1]), Status::InvalidHypercallInput);
}
