//! String instructions on a device, once and repeated.

use super::{DATA, DEVICE, GENERAL_PROTECTION, Guest, RAX, RCX, RDI, RDX, RSI, Seen, Vec};
use crate::{BATCH, CpuState, Exception, Mode, Outcome, Segment, Width};

const DF: u64 = 1 << 10;
const ZF: u64 = 1 << 6;
const VALUE: u64 = 0x8877_6655_4433_2211;

fn many(count: u64, seen: impl Fn(u64) -> Seen) -> Vec<Seen> {
    (0..count).map(seen).collect()
}

#[test]
fn each_instruction_does_its_one_element() {
    // stosd into the device
    let guest = Guest::long(&[0xab]).set(RAX, VALUE).set(RDI, DEVICE).done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE, Width::Dword, 0x4433_2211)]);
    assert_eq!((guest.state.gprs[RDI], guest.state.gprs[RSI]), (DEVICE + 4, 0));

    // movsq from the device to RAM, and movsb from RAM to the device
    let mut guest = Guest::long(&[0x48, 0xa5]).set(RSI, DEVICE).set(RDI, DATA);
    guest.ram.put(DATA, &[0; 16]);
    guest.device.value = VALUE;
    let guest = guest.done();
    assert_eq!((&guest.device.seen[..], guest.ram.get_u64(DATA)), (&[Seen::Read(DEVICE, Width::Qword)][..], VALUE));
    assert_eq!((guest.state.gprs[RSI], guest.state.gprs[RDI]), (DEVICE + 8, DATA + 8));
    let guest = Guest::long(&[0xa4]).set(RSI, DATA).set(RDI, DEVICE + 3);
    guest.ram.put(DATA, &[0x5a]);
    assert_eq!(guest.done().device.seen, [Seen::Write(DEVICE + 3, Width::Byte, 0x5a)]);

    // lodsw: the rest of RAX stays; lodsd: it is cleared
    for (code, expected) in [(&[0x66, 0xad][..], 0xffff_ffff_ffff_2211), (&[0xad], 0x4433_2211)] {
        let mut guest = Guest::long(code).set(RAX, u64::MAX).set(RSI, DEVICE);
        guest.device.value = VALUE;
        let guest = guest.done();
        assert_eq!((guest.state.gprs[RAX], guest.state.rflags), (expected, 2));
    }

    // scasb: AL minus the device's byte; cmpsb: the source minus the destination
    let mut guest = Guest::long(&[0xae]).set(RAX, 0x10).set(RDI, DEVICE);
    guest.device.value = 0x11;
    let guest = guest.done();
    assert_eq!((guest.state.rflags & (1 | ZF), guest.state.gprs[RDI]), (1, DEVICE + 1));
    let mut guest = Guest::long(&[0xa6]).set(RSI, DEVICE).set(RDI, DATA);
    guest.ram.put(DATA, &[0x10]);
    guest.device.value = 0x11;
    let guest = guest.done();
    assert_eq!(
        (guest.state.rflags & (1 | ZF), guest.state.gprs[RDI], guest.state.gprs[RSI]),
        (0, DATA + 1, DEVICE + 1)
    );
}

#[test]
fn direction_flag_walks_down() {
    let mut guest = Guest::long(&[0xf3, 0x66, 0xa5]).set(RCX, 3).set(RSI, DATA + 4).set(RDI, DEVICE + 4); // rep movsw
    guest.ram.put(DATA, &[1, 2, 3, 4, 5, 6]);
    guest.state.rflags |= DF;
    let guest = guest.done();
    let expected = [(4, 0x605), (2, 0x403), (0, 0x201)].map(|(at, value)| Seen::Write(DEVICE + at, Width::Word, value));
    assert_eq!(guest.device.seen, expected);
    assert_eq!(guest.state.gprs[RSI], DATA - 2);
    assert_eq!((guest.state.gprs[RDI], guest.state.gprs[RCX]), (DEVICE - 2, 0));
}

#[test]
fn both_may_be_the_device_and_one_reported_page_is_enough() {
    for (from, to) in [(DEVICE, DEVICE + 0x100), (DEVICE, DEVICE + 0x1000), (DEVICE + 0x1000, DEVICE)] {
        let mut guest = Guest::long(&[0xf3, 0xa5]).set(RCX, 2).set(RSI, from).set(RDI, to); // rep movsd
        guest.device.step = 1;
        let guest = guest.done();
        let expected = [(0, 0), (4, 1)]
            .map(|(at, value)| [Seen::Read(from + at, Width::Dword), Seen::Write(to + at, Width::Dword, value)]);
        assert_eq!(guest.device.seen, expected.concat(), "each element is read, then written");
    }
    let mut guest = Guest::long(&[0xa5]).set(RSI, DEVICE + 0x1000).set(RDI, DEVICE + 0x2000);
    assert_eq!(guest.refused(), Outcome::Retry);
}

#[test]
fn repetition_of_no_elements_is_done_and_touches_nothing() {
    for code in [&[0xf3, 0xab][..], &[0xf3, 0xa5], &[0xf3, 0xad], &[0xf3, 0xa7], &[0xf2, 0xaf]] {
        // Not even the addresses are mapped.
        let guest = Guest::long(code).set(RCX, 0).set(RSI, 0x40_0000).set(RDI, 1 << 60).done();
        assert_eq!((&guest.device.seen[..], guest.state.rflags), (&[][..], 2));
        assert_eq!((guest.state.gprs[RSI], guest.state.gprs[RDI]), (0x40_0000, 1 << 60));
    }
}

#[test]
fn batch_ends_the_run_and_the_registers_say_how_much_is_left() {
    let batch = u64::from(BATCH);
    for count in [1, batch - 1, batch, batch + 1, 3 * batch, 3 * batch + 7] {
        let mut guest = Guest::long(&[0xf3, 0xaa]).set(RCX, count).set(RDI, DEVICE).set(RAX, 0x5a); // rep stosb
        let mut left = count;
        while left > batch {
            left -= batch;
            let before = guest.state.clone();
            assert_eq!(guest.run(), Outcome::Again);
            let mut expected = before;
            (expected.gprs[RCX], expected.gprs[RDI]) = (left, DEVICE + count - left);
            assert_eq!(guest.state, expected, "nothing else has changed, RIP least of all");
        }
        assert_eq!(guest.run(), Outcome::Done { length: 2 });
        assert_eq!(guest.device.seen, many(count, |at| Seen::Write(DEVICE + at, Width::Byte, 0x5a)));
        assert_eq!(guest.state.gprs[RCX], 0);
    }
}

#[test]
fn fault_in_the_middle_keeps_what_was_done() {
    // rep movsd from the end of mapped RAM to the device: the third element faults.
    let mut guest = Guest::long(&[0xf3, 0xa5]).set(RCX, 5).set(RSI, 0x1f_fff8).set(RDI, DEVICE);
    guest.ram.put(0x1f_fff8, &[1, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(guest.run(), Outcome::Again);
    assert_eq!(guest.device.seen, many(2, |at| Seen::Write(DEVICE + 4 * at, Width::Dword, at + 1)));
    assert_eq!([RCX, RSI, RDI].map(|register| guest.state.gprs[register]), [3, 0x20_0000, DEVICE + 8]);

    // On the next try the first element faults, and nothing is done.
    guest.device.seen.clear();
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 0, cr2: Some(0x20_0000) }));
}

#[test]
fn run_that_leaves_the_reported_page_goes_on() {
    // rep stosd over the end of the device's page into the next, and from the device into RAM.
    let guest = Guest::long(&[0xf3, 0xab]).set(RCX, 4).set(RDI, DEVICE + 0xff8).done();
    assert_eq!(guest.device.seen, many(4, |at| Seen::Write(DEVICE + 0xff8 + 4 * at, Width::Dword, 0)));
    // An element on two pages is split like any other operand.
    let guest = Guest::long(&[0xf3, 0xab]).set(RCX, 1).set(RDI, DEVICE + 0xffe).done();
    assert_eq!(guest.device.seen, many(2, |at| Seen::Write(DEVICE + 0xffe + 2 * at, Width::Word, 0)));
}

#[test]
fn comparing_runs_end_where_elements_differ_or_meet() {
    // The device's bytes are 0, 1, 2, ...; AL is compared with them.
    let scan = |prefix, al, start| {
        let mut guest = Guest::long(&[prefix, 0xae]).set(RCX, 10).set(RAX, al).set(RDI, DEVICE);
        (guest.device.value, guest.device.step) = (start, 1);
        let guest = guest.done();
        (guest.device.seen.len(), guest.state.gprs[RCX], guest.state.gprs[RDI] - DEVICE, guest.state.rflags & ZF)
    };
    assert_eq!(scan(0xf2, 5, 0), (6, 4, 6, ZF), "repne: up to the first that is equal");
    assert_eq!(scan(0xf2, 50, 0), (10, 0, 10, 0), "none is");
    assert_eq!(scan(0xf2, 9, 0), (10, 0, 10, ZF), "the last is");
    assert_eq!(scan(0xf3, 0, 0), (2, 8, 2, 0), "repe: up to the first that differs");
    assert_eq!(scan(0xf3, 1, 0), (1, 9, 1, 0), "which is the first");

    // rep and repne cmpsb against RAM
    let compare = |prefix, ram: [u8; 4]| {
        let mut guest = Guest::long(&[prefix, 0xa6]).set(RCX, 4).set(RSI, DEVICE).set(RDI, DATA);
        guest.ram.put(DATA, &ram);
        guest.device.step = 1;
        let guest = guest.done();
        (guest.state.gprs[RCX], guest.state.rflags & ZF)
    };
    assert_eq!(compare(0xf3, [0, 1, 2, 3]), (0, ZF));
    assert_eq!(compare(0xf3, [0, 1, 9, 3]), (1, 0));
    assert_eq!(compare(0xf2, [9, 9, 2, 3]), (1, ZF));
}

#[test]
fn comparison_that_ends_with_the_batch_is_done() {
    let batch = u64::from(BATCH);
    let mut guest = Guest::long(&[0xf2, 0xae]).set(RCX, 1000).set(RAX, batch - 1).set(RDI, DEVICE);
    guest.device.step = 1;
    assert_eq!(guest.run(), Outcome::Done { length: 2 });
    assert_eq!(guest.state.gprs[RCX], 1000 - batch);
}

#[test]
fn address_size_decides_which_parts_of_the_registers_count() {
    // 67 rep stosb in 64-bit code: ECX and EDI
    let high = 0xdead_beef_0000_0000;
    let guest = Guest::long(&[0x67, 0xf3, 0xaa]).set(RCX, high | 2).set(RDI, high | DEVICE).done();
    assert_eq!(guest.device.seen, many(2, |at| Seen::Write(DEVICE + at, Width::Byte, 0)));
    assert_eq!((guest.state.gprs[RCX], guest.state.gprs[RDI]), (0, DEVICE + 2));

    // rep movsb in 16-bit code: CX, SI and DI; the upper halves stay, and DI wraps
    let mut guest =
        Guest::flat(Mode::Bits16, &[0xf3, 0xa4]).set(RCX, 0x7_0002).set(RSI, 0x7_0000 | DATA).set(RDI, 0x7_ffff);
    guest.state.segments[Segment::Es as usize].base = DEVICE - 0xf000;
    guest.ram.put(DATA, &[1, 2]);
    guest.ram.put(DEVICE - 0xf000, &[0; 1]);
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 0xfff, Width::Byte, 1)]);
    assert_eq!(guest.ram.get(DEVICE - 0xf000), [2]);
    assert_eq!([RCX, RSI, RDI].map(|register| guest.state.gprs[register]), [0x7_0000, 0x7_0002 + DATA, 0x7_0001]);

    // 67 in 16-bit code: the 32-bit registers
    let mut guest = Guest::flat(Mode::Bits16, &[0x67, 0xaa]).set(RDI, high | DEVICE);
    guest.state.segments[Segment::Es as usize].limit = u32::MAX;
    assert_eq!(guest.done().state.gprs[RDI], DEVICE + 1);
}

#[test]
fn override_moves_the_source_and_never_the_destination() {
    let bases = |state: &mut CpuState| {
        for (segment, base) in state.segments.iter_mut().zip([0x1000, 0, 0x2000, 0x3000, 0x4000, 0x5000]) {
            segment.base = DEVICE + base;
        }
        state.segments[Segment::Cs as usize].base = 0;
    };
    for (prefix, base) in
        [(None, 0x3000), (Some(0x26), 0x1000), (Some(0x36), 0x2000), (Some(0x64), 0x4000), (Some(0x65), 0x5000)]
    {
        let code: Vec<u8> = prefix.into_iter().chain([0xa4]).collect();
        let mut guest = Guest::flat(Mode::Bits32, &code).set(RSI, 8).set(RDI, 0x10);
        bases(&mut guest.state);
        guest.cause = crate::Cause::Access(addr::Gpa(DEVICE + 0x1000));
        let guest = guest.done();
        let expected = [Seen::Read(DEVICE + base + 8, Width::Byte), Seen::Write(DEVICE + 0x1010, Width::Byte, 0)];
        assert_eq!(guest.device.seen, expected, "{code:02x?}");
    }
    // In 64-bit mode only FS and GS have bases: gs lodsb, and ss lodsb.
    let mut guest = Guest::long(&[0x65, 0xac]).set(RSI, 8);
    bases(&mut guest.state);
    guest.state.segments[Segment::Gs as usize].base = DEVICE;
    assert_eq!(guest.done().device.seen, [Seen::Read(DEVICE + 8, Width::Byte)]);
    let mut guest = Guest::long(&[0x36, 0xac]).set(RSI, DEVICE);
    bases(&mut guest.state);
    assert_eq!(guest.done().device.seen, [Seen::Read(DEVICE, Width::Byte)]);
}

#[test]
fn limits_of_both_segments_hold_for_each_element() {
    let mut guest = Guest::flat(Mode::Bits32, &[0xf3, 0xa5]).set(RCX, 4).set(RSI, DATA).set(RDI, 0); // rep movsd
    guest.ram.put(DATA, &[7; 16]);
    guest.state.segments[Segment::Es as usize].base = DEVICE;
    guest.state.segments[Segment::Es as usize].limit = 6;
    assert_eq!(guest.run(), Outcome::Again);
    assert_eq!((guest.device.seen.len(), guest.state.gprs[RCX]), (1, 3));
    guest.device.seen.clear();
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
}

#[test]
fn source_is_found_before_the_destination() {
    let mut guest = Guest::long(&[0xa4]).set(RSI, 0x40_0000).set(RDI, 0x80_0000).set(RDX, 1);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 0, cr2: Some(0x40_0000) }));
}
