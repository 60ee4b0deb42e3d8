//! INS and OUTS, which are intercepted before they do anything.

use super::{DATA, DEVICE, Guest, RAX, RCX, RDI, RDX, RSI, RSP, Seen, Vec};
use crate::{BATCH, Cause, Exception, Mode, Outcome, Width};

const PORT: u16 = 0x3f8;

fn guest(code: &[u8]) -> Guest {
    let mut guest = Guest::long(code).set(RDX, 0xabcd_0000 | u64::from(PORT)).set(RSI, DATA).set(RDI, DATA + 0x100);
    guest.cause = Cause::Port;
    guest
}

#[test]
fn one_element_goes_in_or_out() {
    for (code, width) in [(&[0x6c][..], Width::Byte), (&[0x66, 0x6d], Width::Word), (&[0x6d], Width::Dword)] {
        let mut guest = guest(code);
        guest.ram.put(DATA + 0x100, &[0xee; 8]);
        guest.device.value = 0x8877_6655_4433_2211;
        let guest = guest.done();
        assert_eq!(guest.device.seen, [Seen::ReadPort(PORT, width)]);
        assert_eq!(guest.ram.get_u64(DATA + 0x100), stored(width, 0x8877_6655_4433_2211));
        assert_eq!(guest.state.gprs[RDI], DATA + 0x100 + width.bytes());
        assert_eq!(guest.state.gprs[RSI], DATA);
    }
    for (code, width) in [(&[0x6e][..], Width::Byte), (&[0x66, 0x6f], Width::Word), (&[0x6f], Width::Dword)] {
        let guest = guest(code);
        guest.ram.put_u64(DATA, 0x8877_6655_4433_2211);
        let guest = guest.done();
        assert_eq!(guest.device.seen, [Seen::WritePort(PORT, width, width.truncate(0x4433_2211))]);
        assert_eq!((guest.state.gprs[RSI], guest.state.gprs[RDI]), (DATA + width.bytes(), DATA + 0x100));
    }
}

/// `value` in the low bytes of the width, 0xee in the other bytes.
fn stored(width: Width, value: u64) -> u64 {
    width.truncate(value) | 0xeeee_eeee_eeee_eeee & !width.truncate(u64::MAX)
}

#[test]
fn repeated_output_ends_with_the_batch_and_goes_on() {
    let mut guest = guest(&[0xf3, 0x6e]).set(RCX, 100); // rep outsb
    let bytes: Vec<u8> = (0..100).collect();
    guest.ram.put(DATA, &bytes);
    assert_eq!(guest.run(), Outcome::Again);
    assert_eq!((guest.state.gprs[RCX], guest.device.seen.len()), (100 - u64::from(BATCH), BATCH as usize));
    assert_eq!(guest.run(), Outcome::Done { length: 2 });
    let expected: Vec<Seen> = (0..100).map(|value| Seen::WritePort(PORT, Width::Byte, value)).collect();
    assert_eq!(guest.device.seen, expected);
    assert_eq!((guest.state.gprs[RCX], guest.state.gprs[RSI]), (0, DATA + 100));
}

#[test]
fn input_into_a_device_and_output_from_one_reach_both() {
    let mut inward = guest(&[0x6d]).set(RDI, DEVICE + 8);
    inward.device.value = 0x1234;
    let inward = inward.done();
    assert_eq!(inward.device.seen, [Seen::ReadPort(PORT, Width::Dword), Seen::Write(DEVICE + 8, Width::Dword, 0x1234)]);
    let mut outward = guest(&[0x6f]).set(RSI, DEVICE + 8);
    outward.device.value = 0x1234;
    let outward = outward.done();
    assert_eq!(
        outward.device.seen,
        [Seen::Read(DEVICE + 8, Width::Dword), Seen::WritePort(PORT, Width::Dword, 0x1234)]
    );
}

#[test]
fn input_that_cannot_be_stored_is_not_read_from_the_port() {
    let mut guest = guest(&[0x6c]).set(RDI, 0x40_0000);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 2, cr2: Some(0x40_0000) }));
}

#[test]
fn output_takes_a_segment_override_and_input_does_not() {
    let mut outward = Guest::flat(Mode::Bits32, &[0x64, 0x6e]).set(RSI, 4); // fs outsb
    outward.cause = Cause::Port;
    for (segment, base) in outward.state.segments.iter_mut().zip([0x2000, 0, 0, 0x4000, 0x6000, 0x8000]) {
        segment.base = base;
    }
    let segments = outward.state.segments;
    outward.ram.put(0x6004, &[0x66]);
    assert_eq!(outward.done().device.seen, [Seen::WritePort(0, Width::Byte, 0x66)]);

    let mut inward = Guest::flat(Mode::Bits32, &[0x64, 0x6c]).set(RDI, 4); // fs insb
    inward.cause = Cause::Port;
    inward.state.segments = segments;
    inward.ram.put(0x2000, &[0; 8]);
    inward.device.value = 0x77;
    assert_eq!(inward.done().ram.get(0x2004), [0x77]);
}

#[test]
fn cause_and_instruction_must_match() {
    let mut wrong = guest(&[0x6c]);
    wrong.cause = Cause::Access(addr::Gpa(DATA));
    assert_eq!(wrong.refused(), Outcome::Retry, "a port instruction where an access was reported");
    for code in [&[0xa4][..], &[0xf3, 0xa5], &[0x8b, 0x07], &[0xff, 0x37], &[0x48, 0x0f, 0xc7, 0x0f]] {
        assert_eq!(guest(code).set(RAX, 1).set(RCX, 1).set(RSP, DATA + 0x200).refused(), Outcome::Retry, "{code:02x?}");
    }
}
