extern crate std;
use std::string::ToString;

use super::{Abilities, Command, Entry, Event, Hpa, Place, Stage2, Unable, base, first_level, stream_table};

/// QEMU 11.1's, and QEMU 7.2's, which has stage 1 only.
const QEMU_11: Abilities = Abilities { idr0: 0x0d44_101b, idr1: 0x0273_0010, idr5: 0x74 };
const QEMU_7: Abilities = Abilities { idr0: 0x0d40_101a, ..QEMU_11 };

#[test]
fn smmu_guards_only_if_it_can_do_all_that_is_needed() {
    assert_eq!(QEMU_11.check(), Ok(()));
    assert_eq!(QEMU_7.check(), Err(Unable::Stage2));
    let with = |change: fn(&mut Abilities)| {
        let mut other = QEMU_11;
        change(&mut other);
        other.check()
    };
    assert_eq!(with(|it| it.idr0 &= !(3 << 2)), Err(Unable::Format));
    assert_eq!(with(|it| it.idr5 &= !(1 << 4)), Err(Unable::Format));
    assert_eq!(with(|it| it.idr0 &= !(1 << 4)), Err(Unable::Coherence));
    assert_eq!(with(|it| it.idr0 &= !(3 << 27)), Err(Unable::Streams), "linear");
    assert_eq!(with(|it| it.idr1 |= 1 << 30), Err(Unable::Streams), "preset");
    assert_eq!(with(|it| it.idr1 = it.idr1 & !0x3f | 8), Err(Unable::Streams), "8 bits");
    assert_eq!(with(|it| it.idr1 |= 1 << 29), Err(Unable::Queues));
    assert_eq!((QEMU_11.stream_bits(), QEMU_11.output_bits()), (16, 44));
    assert_eq!((QEMU_11.command_bits(8), QEMU_11.command_bits(30), QEMU_11.event_bits(30)), (8, 19, 19));
}

#[test]
fn entry_has_its_fields_where_the_manual_has_them() {
    // IHI 0070, 5.2.
    let of = Stage2 { vmid: 0x1234, root: Hpa(0x1_2345_6000), t0sz: 24, sl0: 1, output_bits: 44 };
    let Entry(words) = Entry::stage2(of);
    assert_eq!(words[0], 0b1101, "V, Config: stage 2 alone");
    assert_eq!(words[1] >> 44 & 3, 1, "SHCFG");
    assert_eq!(words[2] & 0xffff, 0x1234, "S2VMID");
    assert_eq!(words[2] >> 32 & 0x3f, 24, "S2T0SZ");
    assert_eq!(words[2] >> 38 & 3, 1, "S2SL0");
    assert_eq!((words[2] >> 40 & 3, words[2] >> 42 & 3, words[2] >> 44 & 3), (1, 1, 3), "S2IR0, S2OR0, S2SH0");
    assert_eq!((words[2] >> 46 & 3, words[2] >> 48 & 7), (0, 4), "S2TG: 4 KiB, S2PS: 44 bits");
    assert_eq!(words[2] >> 51, 0b1000_0101, "S2AA64, S2AFFD, S2R, and neither S2S nor S2ENDI");
    assert_eq!(words[3], 0x1_2345_6000, "S2TTB");
    assert_eq!(words[4..], [0; 4]);
    assert_eq!(Entry::NOTHING.0[0] & 1, 0, "not valid: refused, and reported");
    for (bits, size) in [(32, 0), (36, 1), (40, 2), (42, 3), (44, 4), (48, 5), (52, 6)] {
        assert_eq!(Entry::stage2(Stage2 { output_bits: bits, ..of }).0[2] >> 48 & 7, size, "{bits} bits");
    }
}

#[test]
fn commands_and_registers_are_those_of_the_manual() {
    // IHI 0070, 4.3 and 4.4.
    assert_eq!(Command::AllEntries.words(), [4, 31]);
    assert_eq!(Command::ForgetVm(2).words(), [0x2_0000_0028, 0]);
    assert_eq!(Command::ForgetAll.words(), [0x30, 0]);
    assert_eq!(Command::Sync.bytes(), [0x46, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(stream_table(16), 0x1_0210);
    assert_eq!(first_level(Hpa(0x8000_4000)), 0x8000_4009, "Span 9: 256 entries");
    assert_eq!(base(Hpa(0x8000_4000), 8), 1 << 62 | 0x8000_4008);
}

#[test]
fn place_in_a_queue_comes_round_with_another_bit() {
    let mut place = Place { value: 0, bits: 2 };
    let mut seen = std::vec::Vec::new();
    for _ in 0..9 {
        seen.push((place.index(), place.value >> 2));
        place = place.next();
    }
    assert_eq!(seen, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1), (0, 0)]);
    assert!(Place { value: 5, bits: 2 }.is(5 | 0x7f << 24) && !Place { value: 5, bits: 2 }.is(1));
}

#[test]
fn events_say_whose_access_was_refused_where_and_why() {
    let write = Event([0x10 | 8 << 32, 0, 0x4020_0000, 0]);
    assert_eq!(write.stream(), 8);
    assert_eq!(write.to_string(), "write at 0x40200000, which was refused: nothing is there");
    let read = Event([0x13, 1 << 35, 0x1000, 0]);
    assert_eq!(read.to_string(), "read at 0x1000, which was refused: no such right");
    assert!(Event([4, 0, 0, 0]).to_string().contains("nobody owns the device"));
    assert!(Event([0xff, 0, 0, 0]).to_string().starts_with("event 0xff"));
}
