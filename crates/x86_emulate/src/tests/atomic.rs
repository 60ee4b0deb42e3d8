//! Exchanges: XCHG, XADD, CMPXCHG and its longer forms.

use super::{DATA, DEVICE, GENERAL_PROTECTION, Guest, RAX, RBP, RBX, RCX, RDX, STACK_FAULT, Seen};
use crate::{Exception, Mode, Outcome, Width};

const ZF: u64 = 1 << 6;
const ONES: u64 = u64::MAX;

#[test]
fn exchange_swaps_and_keeps_the_flags() {
    let mut guest = Guest::long(&[0x86, 0x23]).set(RAX, 0x1234); // xchg [rbx], ah
    guest.device.value = 0xab;
    guest.state.rflags = 0x8d7;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE, Width::Byte), Seen::Write(DEVICE, Width::Byte, 0x12)]);
    assert_eq!((guest.state.gprs[RAX], guest.state.rflags), (0xab34, 0x8d7));
}

#[test]
fn exchange_add_leaves_the_old_value_in_the_register() {
    let mut guest = Guest::long(&[0xf0, 0x0f, 0xc1, 0x0b]).set(RCX, ONES << 32 | 2); // lock xadd [rbx], ecx
    guest.device.value = 0xffff_ffff;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE, Width::Dword), Seen::Write(DEVICE, Width::Dword, 1)]);
    assert_eq!((guest.state.gprs[RCX], guest.state.rflags & 0x41), (0xffff_ffff, 1), "a carry, and not zero");
}

#[test]
fn compare_exchange_writes_in_any_case() {
    let run = |accumulator| {
        let mut guest = Guest::long(&[0xf0, 0x0f, 0xb1, 0x0b]).set(RAX, accumulator).set(RCX, 9); // lock cmpxchg [rbx], ecx
        guest.device.value = 5;
        let guest = guest.done();
        (guest.device.seen, guest.state.gprs[RAX], guest.state.rflags)
    };
    let read = Seen::Read(DEVICE, Width::Dword);
    let (seen, _, rflags) = run(5);
    assert_eq!((&seen[..], rflags & ZF), (&[read, Seen::Write(DEVICE, Width::Dword, 9)][..], ZF));
    // Not equal: the old value is written back, and goes into the accumulator, whose upper half is cleared.
    let (seen, rax, rflags) = run(ONES << 32 | 6);
    assert_eq!((&seen[..], rflags & ZF), (&[read, Seen::Write(DEVICE, Width::Dword, 5)][..], 0));
    assert_eq!(rax, 5);
    // The flags are those of accumulator minus memory: 4 - 5 borrows.
    assert_eq!((run(4).2 & 1, run(6).2 & 1), (1, 0));
}

#[test]
fn compare_exchange_of_a_byte_changes_that_byte_only() {
    let mut guest = Guest::long(&[0x0f, 0xb0, 0x2b]).set(RAX, 0x1_0077).set(RCX, 0x1200); // cmpxchg [rbx], ch
    guest.device.value = 0x78;
    let guest = guest.done();
    assert_eq!((guest.state.gprs[RAX], guest.state.rflags & ZF), (0x1_0078, 0));
}

#[test]
fn compare_exchange_that_faults_has_changed_nothing() {
    for accumulator in [5, 6] {
        let mut guest = Guest::long(&[0x0f, 0xb1, 0x0b]).set(RAX, accumulator);
        guest.device.value = 5;
        guest.ram.put_u64(0x4000 + 8 * (DEVICE >> 21 & 0x1ff), DEVICE | 0x85);
        let expected = Exception { vector: 14, error_code: 3, cr2: Some(DEVICE) };
        assert_eq!(guest.refused(), Outcome::Fault(expected), "it is a write, equal or not");
    }
}

/// cmpxchg8b [rbp], which compares with 2:1 and would write 4:3; `found` is in memory.
fn pair(found: [u64; 2]) -> Guest {
    let mut guest = Guest::long(&[0x0f, 0xc7, 0x4d, 0]); // cmpxchg8b [rbp]
    for (register, value) in [(RAX, ONES << 32 | 1), (RDX, ONES << 32 | 2), (RBX, 3), (RCX, 4), (RBP, DEVICE + 0x10)] {
        guest.state.gprs[register] = value;
    }
    guest.device.value = found[0];
    guest.device.step = found[1].wrapping_sub(found[0]);
    guest
}

/// The address is cut to 32 bits once, not for each half: the second half is at the next address.
#[test]
fn pair_whose_address_ends_at_4_gib_goes_on_behind_it() {
    let mut guest = Guest::long(&[0x64, 0x67, 0x0f, 0xc7, 0x4d, 0]); // cmpxchg8b fs:[ebp]
    guest.state.gprs[RBP] = 0xffff_fffd;
    guest.state.segments[4].base = (DEVICE + 0xffd).wrapping_sub(0xffff_fffd);
    let guest = guest.done();
    assert_eq!(guest.device.seen.first(), Some(&Seen::Read(DEVICE + 0xffd, Width::Byte)));
    assert!(guest.device.seen.contains(&Seen::Read(DEVICE + 0x1001, Width::Dword)), "{:x?}", guest.device.seen);
}

#[test]
fn pair_is_exchanged_when_both_halves_are_equal() {
    let reads = [Seen::Read(DEVICE + 0x10, Width::Dword), Seen::Read(DEVICE + 0x14, Width::Dword)];
    let writes =
        |low, high| [Seen::Write(DEVICE + 0x10, Width::Dword, low), Seen::Write(DEVICE + 0x14, Width::Dword, high)];
    let mut guest = pair([1, 2]);
    guest.state.rflags = 2;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [reads, writes(3, 4)].concat());
    assert_eq!(guest.state.rflags, 2 | ZF);

    for found in [[1, 3], [0, 2], [7, 8]] {
        let mut guest = pair(found);
        guest.state.rflags = 0x8d7;
        let guest = guest.done();
        assert_eq!(guest.device.seen, [reads, writes(found[0], found[1])].concat());
        assert_eq!([guest.state.gprs[RAX], guest.state.gprs[RDX]], found);
        assert_eq!(guest.state.rflags, 0x8d7 & !ZF, "the other flags stay");
    }
}

#[test]
fn longer_pair_must_be_aligned() {
    for (place, aligned) in [(0x10, true), (0x18, false), (0x11, false), (0xff8, false), (0xff0, true)] {
        let mut guest = Guest::long(&[0x48, 0x0f, 0xc7, 0x4d, 0]).set(RBP, DEVICE + place); // cmpxchg16b [rbp]
        if aligned {
            let guest = guest.set(RCX, 4).set(RBX, 3).done();
            assert_eq!(
                guest.device.seen[2..],
                [Seen::Write(DEVICE + place, Width::Qword, 3), Seen::Write(DEVICE + place + 8, Width::Qword, 4),]
            );
        } else {
            assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
        }
    }
    // The linear address must be aligned, not the offset: gs cmpxchg16b [rbp].
    let mut guest = Guest::long(&[0x65, 0x48, 0x0f, 0xc7, 0x4d, 0]).set(RBP, 0x18);
    guest.state.segments[5].base = DEVICE - 8;
    guest.done();
    // The stack segment's base means nothing in 64-bit mode.
    let mut guest = Guest::long(&[0x48, 0x0f, 0xc7, 0x4d, 0]).set(RBP, DEVICE + 0x20);
    guest.state.segments[2].base = 8;
    guest.done();
}

#[test]
fn shorter_pair_may_lie_on_two_pages_at_any_place() {
    for on_first in 1..8_u64 {
        // The second page is RAM.
        let mut guest = pair([0x4433_2211, 0x8877_6655]).set(RBP, 0x40_1000 - on_first);
        guest.ram.put_u64(0x3010, 0x5007);
        guest.ram.put_u64(0x5000, DEVICE | 7);
        guest.ram.put_u64(0x5008, DATA | 7);
        guest.ram.put(DATA, &[0xd1, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8]);
        guest.device.step = 0;
        guest.device.value = ONES;
        let guest = guest.done();
        // Not equal: read and written back in full.
        let ram: [u8; 8] = [0xd1, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8];
        assert_eq!(guest.ram.get(DATA), ram);
        let expected = u64::from_le_bytes(ram) << (8 * on_first) | !(ONES << (8 * on_first));
        assert_eq!(guest.state.gprs[RDX] << 32 | guest.state.gprs[RAX], expected, "{on_first} on the first page");
        let bytes = |wanted: bool| -> u64 {
            let width = |seen: &Seen| match *seen {
                Seen::Read(_, width) if !wanted => width.bytes(),
                Seen::Write(_, width, _) if wanted => width.bytes(),
                _ => 0,
            };
            guest.device.seen.iter().map(width).sum()
        };
        assert_eq!((bytes(false), bytes(true)), (on_first, on_first));
    }
    // It faults on the second page, and nothing is done.
    let mut guest = pair([1, 2]).set(RBP, 0x40_0ffc);
    guest.ram.put_u64(0x3010, 0x5007);
    guest.ram.put_u64(0x5000, DEVICE | 7);
    let expected = Exception { vector: 14, error_code: 2, cr2: Some(0x40_1000) };
    assert_eq!(guest.refused(), Outcome::Fault(expected));
}

#[test]
fn pair_obeys_its_segment_as_a_whole() {
    let mut guest = Guest::flat(Mode::Bits32, &[0x0f, 0xc7, 0x4d, 0]).set(RBP, 0x100);
    guest.state.segments[2].base = DEVICE;
    guest.state.segments[2].limit = 0x106;
    assert_eq!(guest.refused(), Outcome::Fault(STACK_FAULT));
    guest.state.segments[2].limit = 0x107;
    guest.done();
}
