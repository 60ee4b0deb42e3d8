//! Reads and writes of guests: every register that Linux touches, its corner cases, and invalid accesses.

use fastrand::Rng;

use super::machine::Machine;
use crate::device::gic::{Read, Width, frame};

const WIDTHS: [Width; 4] = [Width::Byte, Width::Half, Width::Word, Width::Double];

fn read(machine: &mut Machine, offset: u32, width: Width) -> u64 {
    match machine.read_wide(0, offset, width) {
        Read::Value(value) => value,
        Read::Retry => panic!("nothing is held by others"),
    }
}

#[test]
fn distributor_says_what_it_is() {
    let mut machine = Machine::new(2, 4);
    assert_eq!(machine.read_d(0, 0xffe8) >> 4, 3, "GICv3");
    let typer = machine.read_d(0, 0x4);
    assert_eq!((typer & 0x1f, typer >> 19 & 0x1f), (7, 9), "256 INTIDs of ten bits");
    assert_eq!(typer & (1 << 16 | 1 << 17 | 1 << 8 | 1 << 26), 0, "no LPIs, no messages, no extended SPIs, no RSS");
    assert_ne!(machine.read_d(0, 0x8), 0);
    assert_eq!(machine.read_d(0, 0xc), 0);
    assert_eq!(machine.read_d(0, 0x0), 0x50, "affinity routing, one security state, nothing enabled");
    for (value, result) in [(u32::MAX, 0x52), (1, 0x50), (0x12, 0x52), (0, 0x50)] {
        machine.write_d(0, 0, value);
        assert_eq!(machine.read_d(0, 0), result);
    }
}

#[test]
fn bit_registers_of_spis_set_and_clear() {
    let mut machine = Machine::new(1, 4);
    for word in 1..8 {
        for (set, clear) in [(0x100, 0x180), (0x200, 0x280), (0x300, 0x380)] {
            let (set, clear) = (set + word * 4, clear + word * 4);
            machine.write_d(0, set, 0xf0f0_0001);
            machine.write_d(0, set, 0x0000_0100);
            assert_eq!((machine.read_d(0, set), machine.read_d(0, clear)), (0xf0f0_0101, 0xf0f0_0101));
            machine.write_d(0, clear, 0xf000_0101);
            assert_eq!((machine.read_d(0, set), machine.read_d(0, clear)), (0x00f0_0000, 0x00f0_0000));
            machine.write_d(0, clear, u32::MAX);
            assert_eq!(machine.read_d(0, set), 0);
        }
        assert_eq!(machine.read_d(0, 0x80 + word * 4), u32::MAX, "group 1");
    }
}

#[test]
fn bit_registers_of_private_interrupts_set_and_clear() {
    let mut machine = Machine::new(2, 4);
    for (set, clear) in [(0x1_0100, 0x1_0180), (0x1_0200, 0x1_0280), (0x1_0300, 0x1_0380)] {
        machine.write_r(1, set, 0xf0f0_0001);
        machine.write_r(1, set, 0x0000_0100);
        assert_eq!((machine.read_r(1, set), machine.read_r(1, clear)), (0xf0f0_0101, 0xf0f0_0101));
        assert_eq!(machine.read_r(0, set), 0, "the other has its own");
        machine.write_r(1, clear, 0xf000_0101);
        assert_eq!((machine.read_r(1, set), machine.read_r(1, clear)), (0x00f0_0000, 0x00f0_0000));
        machine.write_r(1, clear, u32::MAX);
        assert_eq!(machine.read_r(1, set), 0);
        assert_eq!((machine.read_r(1, set + 4), machine.read_r(1, set + 0x7c)), (0, 0));
    }
    assert_eq!(machine.read_r(0, 0x1_0080), u32::MAX);
    machine.write_r(0, 0x1_0080, 0);
    assert_eq!(machine.read_r(0, 0x1_0080), u32::MAX, "group 1, and stays there");
}

#[test]
fn priorities_are_bytes_of_five_bits() {
    let mut machine = Machine::new(1, 4);
    machine.write_d(0, 0x420, 0xffa7_8601);
    assert_eq!(machine.read_d(0, 0x420), 0xf8a0_8000);
    machine.write_wide(0, 0x421, Width::Byte, 0x17);
    assert_eq!(read(&mut machine, 0x421, Width::Byte), 0x10);
    assert_eq!(machine.read_d(0, 0x420), 0xf8a0_1000);
    machine.write_wide(0, 0x422, Width::Half, 0);
    machine.write_wide(0, 0x422, Width::Word, 0);
    assert_eq!(machine.read_d(0, 0x420), 0xf8a0_1000, "no half-words, nothing unaligned");

    machine.write_r(0, 0x1_041c, 0xffff_ffff);
    machine.write_r_wide(0, 0, 0x1_041f, Width::Byte, 0x4f);
    assert_eq!(machine.read_r(0, 0x1_041c), 0x48f8_f8f8);
    machine.write_r(0, 0x1_0420, u32::MAX);
    assert_eq!(machine.read_r(0, 0x1_0420), 0, "the SGI frame ends at 31");
}

#[test]
fn last_and_first_registers_are_those_of_intids_that_exist() {
    let mut machine = Machine::new(1, 4);
    let last = [(0xff, 0x80), (0xfb, 0xf8)];
    for (value, kept) in last {
        machine.write_wide(0, 0x4ff, Width::Byte, value);
        assert_eq!(read(&mut machine, 0x4ff, Width::Byte), if kept == 0x80 { 0xf8 } else { kept });
    }
    // Private ones are not in the distributor, others nowhere.
    for offset in [0x80, 0x100, 0x180, 0x200, 0x280, 0x300, 0x380, 0x400, 0x41c, 0xc00, 0xc04] {
        machine.write_d(0, offset, u32::MAX);
        assert_eq!(machine.read_d(0, offset), 0, "{offset:#x}");
    }
    for offset in [0xa0, 0x120, 0x17c, 0x220, 0x320, 0x500, 0x7f8, 0xc40, 0xcfc, 0x800, 0xd00, 0xf00, 0x40, 0x10] {
        machine.write_d(0, offset, u32::MAX);
        assert_eq!(machine.read_d(0, offset), 0, "{offset:#x}");
    }
}

#[test]
fn configuration_is_two_bits_of_which_one_counts() {
    let mut machine = Machine::new(1, 4);
    machine.write_d(0, 0xc08, u32::MAX);
    assert_eq!(machine.read_d(0, 0xc08), 0xaaaa_aaaa);
    machine.write_d(0, 0xc3c, 0x8000_0006);
    assert_eq!((machine.read_d(0, 0xc3c), machine.read_d(0, 0xc38)), (0x8000_0002, 0));

    machine.write_r(0, 0x1_0c00, 0);
    assert_eq!(machine.read_r(0, 0x1_0c00), 0xaaaa_aaaa, "SGIs are edges");
    machine.write_r(0, 0x1_0c04, u32::MAX);
    assert_eq!(machine.read_r(0, 0x1_0c04), 0xaaaa_aaaa & !(2 << 22), "the timer's is linked and a level");
}

#[test]
fn routes_are_64_bits_wide_or_two_words() {
    let mut machine = Machine::new(1, 4);
    machine.write_wide(0, 0x6100, Width::Double, u64::MAX);
    assert_eq!(read(&mut machine, 0x6100, Width::Double), 0x00ff_ffff, "three levels, no choice of any");
    machine.write_d(0, 0x6104, u32::MAX);
    assert_eq!((machine.read_d(0, 0x6104), machine.read_d(0, 0x6100)), (0, 0x00ff_ffff));
    machine.write_d(0, 0x6100, 0x0102);
    assert_eq!(read(&mut machine, 0x6100, Width::Double), 0x0102);
    for offset in [0x6000, 0x60f8, 0x6800, 0x7fd8, 0x6101, 0x67fc] {
        machine.write_wide(0, offset, Width::Double, 7);
        assert_eq!(read(&mut machine, offset, Width::Double), 0, "{offset:#x}");
    }
    machine.write_wide(0, 0x67f8, Width::Double, 7);
    assert_eq!(read(&mut machine, 0x67f8, Width::Double), 7);
}

#[test]
fn redistributors_are_told_apart_by_anybody() {
    let mut machine = Machine::new(18, 4);
    let typer = |machine: &mut Machine, whose| machine.read_r_wide(3, whose, 0x8, Width::Double);
    assert_eq!(typer(&mut machine, 0), 0);
    assert_eq!(typer(&mut machine, 3), 3 << 32 | 3 << 8);
    assert_eq!(typer(&mut machine, 16), 0x100 << 32 | 16 << 8);
    assert_eq!(typer(&mut machine, 17), 0x101 << 32 | 17 << 8 | 1 << 4, "the last one says so");
    assert_eq!(typer(&mut machine, 18), 0);
    for whose in [3, 17] {
        assert_eq!(machine.read_r_wide(3, whose, 0x8, Width::Word), u64::from(whose << 8 | (whose / 17) << 4));
        assert_eq!(machine.read_r_wide(3, whose, 0xc, Width::Word), u64::from(((whose / 16) << 8) | (whose % 16)));
        assert_eq!(machine.read_r_wide(3, whose, 0xffe8, Width::Word) >> 4, 3);
        assert_ne!(machine.read_r_wide(3, whose, 0x4, Width::Word), 0);
        assert_eq!(machine.read_r_wide(3, whose, 0x0, Width::Word), 0);
    }
    // The rest of another's is out of reach.
    machine.write_r_wide(3, 17, 0x1_0100, Width::Word, 0xffff);
    assert_eq!((machine.read_r(17, 0x1_0100), machine.read_r_wide(17, 3, 0x1_0100, Width::Word)), (0, 0));
    assert_eq!([0, 0x1_ffff, 0x2_0000, 0x5_0104].map(frame), [(0, 0), (0, 0x1_ffff), (1, 0), (2, 0x1_0104)]);
}

#[test]
fn redistributor_wakes_when_told() {
    let mut machine = Machine::new(1, 4);
    assert_eq!(machine.read_r(0, 0x14), 6);
    machine.write_r(0, 0x14, 0);
    assert_eq!(machine.read_r(0, 0x14), 0);
    machine.write_r(0, 0x14, 4);
    assert_eq!(machine.read_r(0, 0x14), 0, "the children follow");
    machine.write_r(0, 0x14, 2);
    assert_eq!(machine.read_r(0, 0x14), 6);
}

#[test]
fn pending_register_shows_lines_latches_and_list_registers() {
    let mut machine = Machine::running(1, 4);
    machine.set_line(40, true);
    machine.cpu(0).gic.raise(3);
    machine.settle_all();
    assert_eq!(machine.read_r(0, 0x1_0200), 8);
    assert_eq!(machine.try_read_d(0, 0x204), Read::Value(0x100), "what is one's own needs no answer");
    machine.write_d(0, 0x284, 0x100);
    assert_eq!(machine.read_d(0, 0x204), 0x100, "a level is pending as long as its line is");
    machine.set_line(40, false);
    assert_eq!(machine.read_d(0, 0x204), 0);
}

#[test]
fn setting_a_level_pending_lasts_until_it_is_acknowledged() {
    let mut machine = Machine::running(1, 4);
    machine.write_d(0, 0x204, 0x100);
    machine.write_r(0, 0x1_0200, 1 << 20);
    machine.settle_all();
    assert_eq!(machine.read_d(0, 0x204), 0x100);
    for _ in 0..2 {
        assert!(machine.cpu(0).acknowledge().is_some());
        machine.cpu(0).end();
        machine.settle_all();
    }
    assert_eq!(machine.cpu(0).acknowledge(), None);
    assert_eq!(machine.read_d(0, 0x204), 0);
}

#[test]
fn nothing_that_a_guest_writes_breaks_anything() {
    let mut random = Rng::with_seed(42);
    let mut machine = Machine::running(3, 2);
    for _ in 0..60_000 {
        let vcpu = random.u32(..3);
        let width = WIDTHS[random.u32(..4) as usize];
        // Mostly where there are registers, and then mostly where bits mean something.
        let offset = match random.u32(..4) {
            0 => random.u32(..0x2_0010),
            1 => 0x6000 + random.u32(..0x900),
            _ => random.u32(..2) * 0x1_0000 + random.u32(..0xd08) / 4 * 4,
        };
        let value = random.u64(..) & random.u64(..);
        match random.u32(..6) {
            0 => machine.write_wide(vcpu, offset, width, value),
            1 => machine.write_r_wide(vcpu, random.u32(..4), offset, width, value),
            2 => {
                let _read = machine.read_wide(vcpu, offset, width);
            }
            3 => {
                let _read = machine.read_r_wide(vcpu, random.u32(..4), offset, width);
            }
            4 => machine.send(vcpu, random.u64(..)),
            _ => machine.set_line(random.u32(..300), value & 1 != 0),
        }
        if random.u32(..3) == 0 {
            machine.cpu(vcpu).acknowledge();
        }
        if random.u32(..3) == 0 {
            machine.cpu(vcpu).end();
        }
        let whose = random.u32(..3);
        machine.cpu(whose).timer = random.u32(..2) == 0;
        if random.u32(..20) == 0 {
            machine.settle_all();
        }
    }

    // And after a reset by the guest it works as ever.
    for word in 1..8 {
        machine.write_d(0, 0x180 + word * 4, u32::MAX);
        machine.write_d(0, 0x280 + word * 4, u32::MAX);
        machine.write_d(0, 0x380 + word * 4, u32::MAX);
    }
    for intid in 0..300 {
        machine.set_line(intid, false);
    }
    for vcpu in 0..3 {
        machine.cpu(vcpu).timer = false;
        machine.cpu(vcpu).stack.clear();
        machine.write_r(vcpu, 0x14, 0);
        machine.write_r(vcpu, 0x1_0180, u32::MAX);
        machine.write_r(vcpu, 0x1_0280, u32::MAX);
        machine.write_r(vcpu, 0x1_0380, u32::MAX);
    }
    machine.write_d(0, 0, 2);
    machine.write_d(0, 0x104, 2);
    machine.write_wide(0, 0x6000 + 33 * 8, Width::Double, 2);
    machine.write_wide(0, 0x421, Width::Byte, 0xa0);
    machine.set_line(33, true);
    machine.settle_all();
    assert_eq!(machine.cpu(2).acknowledge(), Some(33));
}
