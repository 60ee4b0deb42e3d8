use std::vec::Vec;

use super::{IoApic, PINS, State};
use crate::device::interrupt::{Kind, Message, Target};

const LOGICAL: u32 = 1 << 11;
const REMOTE_IRR: u32 = 1 << 14;
const LEVEL: u32 = 1 << 15;
const MASK: u32 = 1 << 16;

fn write(io_apic: &mut IoApic, register: u32, value: u32) -> Option<Message> {
    assert_eq!(io_apic.write(0x00, register), None);
    io_apic.write(0x10, value)
}

fn read(io_apic: &mut IoApic, register: u32) -> u32 {
    assert_eq!(io_apic.write(0x00, register), None);
    io_apic.read(0x10)
}

fn low(pin: usize) -> u32 {
    0x10 + 2 * u32::try_from(pin).expect("small")
}

fn with_pin(pin: usize, entry: u32) -> IoApic {
    let mut io_apic = IoApic::new(0);
    assert_eq!(write(&mut io_apic, low(pin) + 1, 3 << 24), None);
    assert_eq!(write(&mut io_apic, low(pin), entry), None);
    io_apic
}

fn fixed(vector: u8, level: bool) -> Message {
    Message { vector, kind: Kind::Fixed, target: Target::Physical(3), level }
}

fn end(io_apic: &mut IoApic, vector: u8) -> Vec<Message> {
    io_apic.end_of_interrupt(vector).collect()
}

#[test]
fn identity_tells_version_and_pins() {
    let mut io_apic = IoApic::new(5);
    assert_eq!(read(&mut io_apic, 0), 5 << 24);
    assert_eq!(read(&mut io_apic, 1), 0x0017_0011);
    assert_eq!(read(&mut io_apic, 2), 5 << 24);
    write(&mut io_apic, 0, 0xf9ff_ffff);
    assert_eq!(read(&mut io_apic, 0), 9 << 24);
    write(&mut io_apic, 1, 0);
    assert_eq!(read(&mut io_apic, 1), 0x0017_0011);
}

#[test]
fn all_pins_are_masked_after_reset() {
    let mut io_apic = IoApic::new(0);
    for pin in 0..PINS {
        assert_eq!(read(&mut io_apic, low(pin)), MASK);
        assert_eq!(read(&mut io_apic, low(pin) + 1), 0);
        assert_eq!(io_apic.set_line(pin, true), None);
    }
}

#[test]
fn entries_keep_what_is_writable() {
    let mut io_apic = IoApic::new(0);
    write(&mut io_apic, low(23), u32::MAX);
    write(&mut io_apic, low(23) + 1, u32::MAX);
    assert_eq!(read(&mut io_apic, low(23)), 0x0001_afff);
    assert_eq!(read(&mut io_apic, low(23) + 1), 0xff00_0000);
}

#[test]
fn register_and_offset_without_meaning_read_zero() {
    let mut io_apic = IoApic::new(3);
    for register in [3, 0x0f, 0x40, 0xff] {
        write(&mut io_apic, register, u32::MAX);
        assert_eq!(read(&mut io_apic, register), 0);
    }
    for offset in [4, 0x14, 0x40, 0xfff] {
        assert_eq!(io_apic.write(offset, u32::MAX), None);
        assert_eq!(io_apic.read(offset), 0);
    }
    write(&mut io_apic, 0x17, 0);
    assert_eq!(io_apic.read(0), 0x17);
}

#[test]
fn edge_is_sent_once_each_time_the_line_rises() {
    let mut io_apic = with_pin(4, 0x34);
    assert_eq!(io_apic.set_line(4, true), Some(fixed(0x34, false)));
    assert_eq!(io_apic.set_line(4, true), None);
    assert_eq!(io_apic.set_line(4, false), None);
    assert_eq!(io_apic.set_line(4, true), Some(fixed(0x34, false)));
    assert_eq!(end(&mut io_apic, 0x34), []);
}

#[test]
fn edge_at_a_masked_pin_is_lost() {
    let mut io_apic = with_pin(4, 0x34 | MASK);
    assert_eq!(io_apic.set_line(4, true), None);
    assert_eq!(write(&mut io_apic, low(4), 0x34), None);
}

#[test]
fn level_is_sent_again_after_the_end_while_the_line_is_asserted() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL);
    assert_eq!(io_apic.set_line(9, true), Some(fixed(0x49, true)));
    assert_eq!(read(&mut io_apic, low(9)), 0x49 | LEVEL | REMOTE_IRR);
    assert_eq!(io_apic.set_line(9, true), None);
    assert_eq!(end(&mut io_apic, 0x48), []);
    assert_eq!(end(&mut io_apic, 0x49), [fixed(0x49, true)]);

    assert_eq!(io_apic.set_line(9, false), None);
    assert_eq!(end(&mut io_apic, 0x49), []);
    assert_eq!(read(&mut io_apic, low(9)), 0x49 | LEVEL);
    assert_eq!(io_apic.set_line(9, true), Some(fixed(0x49, true)));
}

#[test]
fn line_that_falls_and_rises_before_the_end_is_sent_at_the_end() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL);
    assert!(io_apic.set_line(9, true).is_some());
    assert_eq!(io_apic.set_line(9, false), None);
    assert_eq!(io_apic.set_line(9, true), None);
    assert_eq!(end(&mut io_apic, 0x49), [fixed(0x49, true)]);
}

#[test]
fn end_of_a_shared_vector_reaches_all_its_pins() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL);
    write(&mut io_apic, low(11) + 1, 3 << 24);
    write(&mut io_apic, low(11), 0x49 | LEVEL);
    assert!(io_apic.set_line(9, true).is_some());
    assert!(io_apic.set_line(11, true).is_some());
    assert_eq!(end(&mut io_apic, 0x49), [fixed(0x49, true), fixed(0x49, true)]);
}

#[test]
fn level_found_at_unmasking_is_sent() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL | MASK);
    assert_eq!(io_apic.set_line(9, true), None);
    assert_eq!(write(&mut io_apic, low(9), 0x49 | LEVEL), Some(fixed(0x49, true)));
    assert_eq!(write(&mut io_apic, low(9), 0x49 | LEVEL), None);
}

#[test]
fn level_ended_while_masked_is_sent_at_unmasking() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL);
    assert!(io_apic.set_line(9, true).is_some());
    assert_eq!(write(&mut io_apic, low(9), 0x49 | LEVEL | MASK), None);
    assert_eq!(end(&mut io_apic, 0x49), []);
    assert_eq!(write(&mut io_apic, low(9), 0x49 | LEVEL), Some(fixed(0x49, true)));
}

#[test]
fn switching_to_edge_and_back_clears_a_stuck_remote_irr() {
    let mut io_apic = with_pin(9, 0x49 | LEVEL);
    assert!(io_apic.set_line(9, true).is_some());
    assert_eq!(write(&mut io_apic, low(9), 0x49 | MASK), None);
    assert_eq!(read(&mut io_apic, low(9)), 0x49 | MASK);
    assert_eq!(write(&mut io_apic, low(9), 0x49 | LEVEL), Some(fixed(0x49, true)));
}

#[test]
fn entry_names_kind_and_target() {
    let physical = Target::Physical(3);
    let table = [
        (0x0000_0134, 3, Some((Kind::LowestPriority, physical))),
        (0x0000_0434, 3, Some((Kind::Nmi, physical))),
        (0x0000_0534, 3, Some((Kind::Init, physical))),
        (0x0000_8434, 3, Some((Kind::Nmi, physical))),
        (0x34 | LOGICAL, 3, Some((Kind::Fixed, Target::Logical(3)))),
        (0x34, 0xff, Some((Kind::Fixed, Target::AllIncludingSelf))),
        (0x34 | LOGICAL, 0xff, Some((Kind::Fixed, Target::AllIncludingSelf))),
        (0x0000_0234, 3, None),
        (0x0000_0334, 3, None),
        (0x0000_0634, 3, None),
        (0x0000_0734, 3, None),
    ];
    for (entry, destination, expected) in table {
        let mut io_apic = IoApic::new(0);
        write(&mut io_apic, low(0) + 1, destination << 24);
        write(&mut io_apic, low(0), entry);
        let message = io_apic.set_line(0, true);
        assert_eq!(message.map(|message| (message.kind, message.target)), expected, "{entry:#x}");
        assert!(message.is_none_or(|message| message.vector == 0x34 && !message.level));
        assert_eq!(read(&mut io_apic, low(0)) & REMOTE_IRR, 0);
    }
}

#[test]
fn pin_that_does_not_exist_is_ignored() {
    let mut io_apic = IoApic::new(0);
    assert_eq!(io_apic.set_line(PINS, true), None);
    assert_eq!(io_apic.set_line(usize::MAX, true), None);
}

/// An asserted, unmasked level line is either on its way (remote IRR) or has just been sent: it is never lost, whatever
/// the guest writes. And only an unmasked pin sends.
fn any_accesses(mut random: fuzz::Decisions, steps: usize) {
    let mut io_apic = IoApic::new(0);
    let mut asserted = [false; PINS];
    for _ in 0..steps {
        if random.are_over() {
            return;
        }
        let pin = random.usize(..PINS);
        match random.u8(..5) {
            0 => {
                asserted[pin] = random.bool();
                let is_masked = read(&mut io_apic, low(pin)) & MASK != 0;
                let sent = io_apic.set_line(pin, asserted[pin]);
                assert!(sent.is_none() || asserted[pin] && !is_masked, "pin {pin}: {sent:?}");
            }
            1 => {
                io_apic.write(if random.bool() { 0 } else { random.u8(..).into() }, random.u32(..));
            }
            2 => {
                let vector = 0x30 + random.u32(..8);
                write(&mut io_apic, low(pin), vector | if random.u8(..4) == 0 { random.u32(..) } else { LEVEL });
            }
            3 => {
                let vector = 0x30 + random.u8(..8);
                for sent in io_apic.end_of_interrupt(vector) {
                    assert_eq!((sent.vector, sent.level), (vector, true), "what ended comes again");
                }
            }
            _ => {
                write(&mut io_apic, random.u32(..0x100), random.u32(..));
            }
        }
        for (pin, asserted) in asserted.iter().enumerate() {
            let entry = read(&mut io_apic, low(pin));
            assert_eq!(io_apic.is_asserted(pin), *asserted);
            let is_fixed_level = entry & LEVEL != 0 && entry >> 8 & 7 < 2;
            if *asserted && is_fixed_level && entry & MASK == 0 {
                assert_ne!(entry & REMOTE_IRR, 0, "pin {pin}");
            }
        }
    }
}

#[test]
fn asserted_level_is_never_forgotten() {
    any_accesses(fuzz::Decisions::of_seed(1), 50_000);
}

#[test]
fn asserted_level_is_never_forgotten_after_any_accesses() {
    fuzz::target("io_apic", |bytes| any_accesses(fuzz::Decisions::of_bytes(bytes), bytes.len()));
}

/// One access of a guest or a device, in a random order of everything.
fn access(io_apic: &mut IoApic, rng: &mut fastrand::Rng) -> (Vec<Message>, u32) {
    let pin = rng.usize(..PINS);
    let messages = match rng.u32(..6) {
        0 | 1 => io_apic.set_line(pin, rng.bool()).into_iter().collect(),
        2 => write(io_apic, low(pin), (0x30 + rng.u32(..8)) | if rng.bool() { LEVEL } else { rng.u32(..) })
            .into_iter()
            .collect(),
        3 => write(io_apic, rng.u32(..0x50), rng.u32(..)).into_iter().collect(),
        4 => end(io_apic, 0x30 + rng.u8(..8)),
        _ => io_apic.write(0, rng.u32(..0x50)).into_iter().collect(),
    };
    (messages, io_apic.read(0x10))
}

#[test]
fn restored_one_sends_what_the_saved_one_does() {
    let mut rng = fastrand::Rng::with_seed(4);
    for round in 0..1_000 {
        let mut saved = IoApic::new(rng.u8(..));
        for _ in 0..rng.u32(..200) {
            let _sent = access(&mut saved, &mut rng);
        }
        let mut restored = IoApic::with_state(&saved.state());
        assert_eq!(restored.state(), saved.state());
        let mut same = rng.clone();
        for _ in 0..100 {
            assert_eq!(access(&mut restored, &mut same), access(&mut saved, &mut rng), "round {round}");
        }
    }
}

#[test]
fn bits_that_none_has_are_not_restored() {
    let all = State { entries: [u64::MAX; PINS], lines: u32::MAX, selected: 0xff, id: 0xff };
    let mut io_apic = IoApic::with_state(&all);
    assert_eq!(read(&mut io_apic, low(5)), 0x0001_afff, "an edge has no remote IRR");
    assert_eq!((read(&mut io_apic, low(5) + 1), read(&mut io_apic, 0)), (0xff00_0000, 0x0f00_0000));
    assert!(io_apic.is_asserted(PINS - 1) && !io_apic.is_asserted(PINS));
}
