//! BT and similar, whose bit number in a register may exceed the operand.

use super::{DEVICE, GENERAL_PROTECTION, Guest, RBX, RCX, Seen};
use crate::{Mode, Outcome, Segment, Width};

#[test]
fn number_in_a_register_selects_the_operand_too() {
    for (code, width, bits) in [
        (&[0x66, 0x0f, 0xa3, 0x0b][..], Width::Word, 16_i64), // bt [rbx], cx
        (&[0x0f, 0xa3, 0x0b], Width::Dword, 32),              // bt [rbx], ecx
        (&[0x48, 0x0f, 0xa3, 0x0b], Width::Qword, 64),        // bt [rbx], rcx
    ] {
        for number in [0, 1, bits - 1, bits, bits + 5, 10 * bits + 3, 0x2000, -1, -bits, -bits - 1, -0x1fff] {
            let mut guest = Guest::long(code).set(RBX, DEVICE + 0x800).set(RCX, number.cast_unsigned());
            // Only the wanted bit is set.
            guest.device.value = 1 << number.rem_euclid(bits);
            let guest = guest.done();
            let place = (DEVICE + 0x800).wrapping_add_signed(number.div_euclid(bits) * bits / 8);
            assert_eq!(guest.device.seen, [Seen::Read(place, width)], "bit {number}");
            assert_eq!(guest.state.rflags & 1, 1);
        }
    }
}

#[test]
fn number_is_as_wide_as_the_operand() {
    // bt [rbx], cx: the upper bits of RCX do not count, and bit 15 is the sign
    let guest = Guest::long(&[0x66, 0x0f, 0xa3, 0x0b]).set(RBX, DEVICE + 0x800).set(RCX, 0x1234_ffff).done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0x7fe, Width::Word)]);
}

#[test]
fn immediate_number_stays_within_the_operand() {
    for (number, bit) in [(0_u8, 0), (31, 31), (32, 0), (0xff, 31)] {
        let mut guest = Guest::long(&[0x0f, 0xba, 0x2b, number]); // bts dword [rbx], number
        guest.device.value = 0;
        let guest = guest.done();
        let expected = [Seen::Read(DEVICE, Width::Dword), Seen::Write(DEVICE, Width::Dword, 1 << bit)];
        assert_eq!(guest.device.seen, expected, "bit {number}");
        assert_eq!(guest.state.rflags & 1, 0);
    }
}

#[test]
fn set_reset_and_complement_write_back() {
    for (code, from_zero, from_ones) in [
        (&[0x0f, 0xab, 0x0b][..], 8, 0xffff_ffff), // bts [rbx], ecx
        (&[0x0f, 0xb3, 0x0b], 0, 0xffff_fff7),     // btr [rbx], ecx
        (&[0x0f, 0xbb, 0x0b], 8, 0xffff_fff7),     // btc [rbx], ecx
    ] {
        for (before, after) in [(0, from_zero), (0xffff_ffff, from_ones)] {
            let mut guest = Guest::long(code).set(RCX, 35);
            guest.device.value = before;
            guest.state.rflags = 0x8d6;
            let guest = guest.done();
            let expected = [Seen::Read(DEVICE + 4, Width::Dword), Seen::Write(DEVICE + 4, Width::Dword, after)];
            assert_eq!(guest.device.seen, expected);
            assert_eq!(guest.state.rflags, 0x8d6 | before & 1);
        }
    }
}

#[test]
fn selected_operand_wraps_with_the_address_size_and_obeys_the_segment() {
    // bt [bx], cx in 16-bit code: -1 from offset 0 is the word at 0xfffe.
    let mut guest = Guest::flat(Mode::Bits16, &[0x0f, 0xa3, 0x0f]).set(RBX, 0).set(RCX, 0xffff);
    guest.state.segments[Segment::Ds as usize].base = DEVICE - 0xf000;
    let mut limited = Guest::flat(Mode::Bits16, &[0x0f, 0xa3, 0x0f]).set(RBX, 0).set(RCX, 0xffff);
    limited.state.segments = guest.state.segments;
    limited.state.segments[Segment::Ds as usize].limit = 0xfffe;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0xffe, Width::Word)]);
    assert_eq!(limited.refused(), Outcome::Fault(GENERAL_PROTECTION));

    // The hardware stopped at another page than the one that the address names.
    let guest = Guest::long(&[0x48, 0x0f, 0xa3, 0x0b]).set(RBX, DEVICE + 0x1000).set(RCX, u64::MAX).done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0xff8, Width::Qword)]);
    let mut guest = Guest::long(&[0x48, 0x0f, 0xa3, 0x0b]).set(RCX, 0x8000);
    assert_eq!(guest.refused(), Outcome::Retry);
}
