//! Operands in RAM, in a device, and on two pages.

use fastrand::Rng;

use super::random::Source;
use super::{DATA, DEVICE, Guest, RAX, RBX, RCX, Seen, Vec, run_long};
use crate::{Exception, Outcome, Width};

/// A guest whose pages from 0x40_0000 on are at the given addresses.
fn scattered(code: &[u8], pages: [u64; 2]) -> Guest {
    let guest = Guest::long(code);
    guest.ram.put_u64(0x3010, 0x5007);
    for (place, page) in pages.into_iter().enumerate() {
        guest.ram.put_u64(0x5000 + place as u64 * 8, page | 7);
    }
    guest
}

const WINDOW: u64 = 0x40_0000;

#[test]
fn operand_from_ram_into_a_device_is_parted_at_the_page_end() {
    let guest = scattered(&[0x48, 0x8b, 0x03], [DATA, DEVICE]); // mov rax, [rbx]
    guest.ram.put(DATA + 0xffd, &[1, 2, 3]);
    let mut guest = guest.set(RBX, WINDOW + 0xffd);
    guest.device.value = 0x1111_2222_3333_44f4;
    let guest = guest.done();
    // Three bytes of RAM; then five of the device: a dword and a byte, at aligned places.
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE, Width::Dword), Seen::Read(DEVICE + 4, Width::Byte)]);
    assert_eq!(guest.state.gprs[RAX], 0xf433_3344_f403_0201);
}

#[test]
fn operand_from_a_device_into_ram_is_parted_at_the_page_end() {
    let guest = scattered(&[0x48, 0x89, 0x03], [DEVICE, DATA]); // mov [rbx], rax
    guest.ram.put(DATA, &[0xee; 8]);
    let guest = guest.set(RBX, WINDOW + 0xffb).set(RAX, 0x0807_0605_0403_0201).done();
    let expected =
        [Seen::Write(DEVICE + 0xffb, Width::Byte, 1), Seen::Write(DEVICE + 0xffc, Width::Dword, 0x0504_0302)];
    assert_eq!(guest.device.seen, expected);
    assert_eq!(guest.ram.get(DATA), [6, 7, 8, 0xee, 0xee, 0xee, 0xee, 0xee]);
}

#[test]
fn read_modify_write_of_a_parted_operand_reads_all_of_it_first() {
    // add [rbx], ecx: carries from the device's byte into RAM
    let guest = scattered(&[0x01, 0x0b], [DEVICE, DATA]);
    guest.ram.put(DATA, &[0xff, 0xff, 0x00]);
    let mut guest = guest.set(RBX, WINDOW + 0xfff).set(RCX, 1);
    guest.device.value = 0xff;
    let guest = guest.done();
    let expected = [Seen::Read(DEVICE + 0xfff, Width::Byte), Seen::Write(DEVICE + 0xfff, Width::Byte, 0)];
    assert_eq!(guest.device.seen, expected);
    assert_eq!(guest.ram.get(DATA), [0, 0, 1]);
}

#[test]
fn pieces_of_every_width_at_every_place_are_aligned_and_make_up_the_operand() {
    let stores = [&[0x66, 0x89, 0x03][..], &[0x89, 0x03], &[0x48, 0x89, 0x03]];
    for (width, code) in Width::ALL.into_iter().skip(1).zip(stores) {
        for on_first in 1..width.bytes() {
            // Both pages belong to the device. The second is below the first, and the hardware does not report it.
            let guest = scattered(code, [DEVICE, DEVICE - 0x5000]);
            let mut guest = guest.set(RBX, WINDOW + 0x1000 - on_first).set(RAX, 0x8877_6655_4433_2211);
            assert_eq!(guest.run(), Outcome::Done { length: u8::try_from(code.len()).expect("short") });

            let mut bytes = Vec::new();
            for (place, seen) in guest.device.seen.iter().enumerate() {
                let &Seen::Write(gpa, piece, value) = seen else { panic!("{seen:?}") };
                assert!(gpa.is_multiple_of(piece.bytes()), "piece {place}: {seen:?}");
                let written = bytes.len() as u64;
                let expected = if written < on_first {
                    DEVICE + 0x1000 - on_first + written
                } else {
                    DEVICE - 0x5000 + written - on_first
                };
                assert_eq!(gpa, expected);
                bytes.extend(value.to_le_bytes().into_iter().take(usize::try_from(piece.bytes()).expect("small")));
            }
            assert_eq!(bytes, 0x8877_6655_4433_2211_u64.to_le_bytes()[..bytes.len()]);
            assert_eq!(bytes.len() as u64, width.bytes());
        }
    }
}

#[test]
fn operand_that_is_not_aligned_within_a_page_is_one_access() {
    let (_, seen, _) = run_long(&[0x8b, 0x03], |state| state.gprs[RBX] = DEVICE + 0x21, 0);
    assert_eq!(seen, [Seen::Read(DEVICE + 0x21, Width::Dword)]);
}

#[test]
fn fault_on_the_second_page_leaves_the_first_alone() {
    let mut guest = scattered(&[0x48, 0x89, 0x03], [DEVICE, DATA]).set(RBX, WINDOW + 0xffc);
    guest.ram.put_u64(0x5008, DATA | 5); // may only be read
    let outcome = guest.refused();
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 14, error_code: 3, cr2: Some(WINDOW + 0x1000) }));
    guest.ram.put_u64(0x5008, 0);
    let outcome = guest.refused();
    assert_eq!(outcome, Outcome::Fault(Exception { vector: 14, error_code: 2, cr2: Some(WINDOW + 0x1000) }));
}

#[test]
fn reported_page_may_be_either_of_two_but_must_be_one() {
    for pages in [[DEVICE, DATA], [DATA, DEVICE], [DEVICE, DEVICE + 0x1000]] {
        let mut guest = scattered(&[0x89, 0x03], pages).set(RBX, WINDOW + 0xffe);
        assert_eq!(guest.run(), Outcome::Done { length: 2 }, "{pages:x?}");
    }
    for pages in [[DATA, DATA], [DEVICE + 0x1000, DATA], [DATA, DEVICE - 0x1000]] {
        let mut guest = scattered(&[0x89, 0x03], pages).set(RBX, WINDOW + 0xffe);
        assert_eq!(guest.refused(), Outcome::Retry, "{pages:x?}");
    }
    // If the operand is all on the first page, the second does not count.
    let mut guest = scattered(&[0x89, 0x03], [DATA, DEVICE]).set(RBX, WINDOW + 0xffc);
    assert_eq!(guest.refused(), Outcome::Retry);
}

#[test]
fn reported_page_is_the_device_even_if_there_is_memory_behind_it() {
    // Like a write to a ROM page, or to a page that is read-only in stage 2 for another reason.
    let guest = Guest::long(&[0x89, 0x03]);
    guest.ram.put(DEVICE, &[7; 8]);
    let guest = guest.set(RAX, 1).done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE, Width::Dword, 1)]);
    assert_eq!(guest.ram.get(DEVICE), [7; 8]);
}

#[test]
fn memory_that_cannot_be_written_hands_the_write_to_the_device() {
    let mut guest = scattered(&[0x89, 0x03], [DEVICE, DATA]).set(RBX, WINDOW + 0xffe).set(RAX, 0x4433_2211);
    guest.ram.put(DATA, &[7; 8]);
    guest.ram.read_only.insert(DATA >> 12);
    let guest = guest.done();
    let expected = [Seen::Write(DEVICE + 0xffe, Width::Word, 0x2211), Seen::Write(DATA, Width::Word, 0x4433)];
    assert_eq!(guest.device.seen, expected);
    assert_eq!(guest.ram.get(DATA), [7; 8]);
}

#[test]
fn parted_sum_is_the_sum_wherever_the_pages_lie() {
    let mut source = Rng::with_seed(5);
    for _ in 0..2000 {
        // add [rbx], rax across the end of the device's page, into RAM or from RAM.
        let ram_first = source.rarely(2);
        let on_first = 1 + source.below(7);
        let (value, old, more) = (source.word(), source.word(), source.word());
        let pages = if ram_first { [DATA, DEVICE] } else { [DEVICE, DATA] };
        let guest = scattered(&[0x48, 0x01, 0x03], pages);
        let mut guest = guest.set(RBX, WINDOW + 0x1000 - on_first as u64).set(RAX, more);
        let old = old.to_le_bytes();
        if ram_first {
            guest.ram.put(DATA + 0x1000 - on_first as u64, &old[..on_first]);
        } else {
            guest.ram.put(DATA, &old[on_first..]);
        }
        guest.device.value = value;
        let guest = guest.done();

        // The operand before and after: the device's bytes from its log, the others from RAM.
        let (mut before, mut after) = (old, [0; 8]);
        let place = |gpa: u64| match ram_first {
            true => on_first + usize::try_from(gpa - DEVICE).expect("small"),
            false => usize::try_from(gpa - (DEVICE + 0x1000 - on_first as u64)).expect("small"),
        };
        for seen in &guest.device.seen {
            let (to, gpa, width, value) = match *seen {
                Seen::Read(gpa, width) => (&mut before, gpa, width, value),
                Seen::Write(gpa, width, value) => (&mut after, gpa, width, value),
                _ => panic!("{seen:?}"),
            };
            let bytes = usize::try_from(width.bytes()).expect("small");
            to[place(gpa)..][..bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
        if ram_first {
            let ram: [u8; 8] = guest.ram.get(DATA + 0x1000 - on_first as u64);
            after[..on_first].copy_from_slice(&ram[..on_first]);
        } else {
            let ram: [u8; 8] = guest.ram.get(DATA);
            after[on_first..].copy_from_slice(&ram[..8 - on_first]);
        }
        assert_eq!(u64::from_le_bytes(after), u64::from_le_bytes(before).wrapping_add(more));
    }
}
