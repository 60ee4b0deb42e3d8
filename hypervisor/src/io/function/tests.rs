//! A made-up function, guests that write anything anywhere, and functions that lie.

use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};

use super::messages::{ENTRY_BYTES, Table};
use super::view::Wanted;
use super::window::{Placed, Reached, homes};
use super::{BARS, Description, Messages, Part, Raw, Reset, Unfit};
use crate::device::interrupt::{Kind, Target};
use crate::device::pci::Pci;
use crate::device::pci::config_space::BYTES;

/// A function like virtio's: BAR 0 are ports, BAR 1 has the table of 3 messages and other registers, BAR 4 is wide.
/// Capabilities: vendor's, PCI Express with a reset, MSI-X, virtio's back door, power.
pub(crate) fn raw() -> Raw {
    let mut raw = Raw { config: [0; BYTES], sizes: [0; BARS] };
    put(&mut raw, 0x00, &[0xf4, 0x1a, 0x42, 0x10, 0x07, 0x05, 0x10, 0x00, 1, 0, 0, 1]);
    put(&mut raw, 0x2c, &[0xf4, 0x1a, 0x00, 0x11]);
    put(&mut raw, 0x34, &[0x40]);
    bar(&mut raw, 0, 0xc001, 0xffff_ff81);
    bar(&mut raw, 1, 0xfebd_0000, 0xffff_c000);
    bar(&mut raw, 4, 0x8000_000c, 0xffff_000c);
    bar(&mut raw, 5, 0x38, u32::MAX);
    put(&mut raw, 0x40, &[9, 0x50, 16, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    put(&mut raw, 0x50, &[0x10, 0x90, 0x02, 0x00, 0x21, 0x80, 0x00, 0x10, 0x30, 0x28]);
    put(&mut raw, 0x90, &[0x11, 0xa0, 2, 0x80, 1, 0x10, 0, 0, 1, 0x18, 0, 0]);
    put(&mut raw, 0xa0, &[9, 0xc0, 20, 5]);
    put(&mut raw, 0xc0, &[1, 0, 3, 0]);
    raw
}

fn put(raw: &mut Raw, at: usize, bytes: &[u8]) {
    raw.config[at..at + bytes.len()].copy_from_slice(bytes);
}

fn bar(raw: &mut Raw, index: usize, value: u32, size: u32) {
    put(raw, 0x10 + 4 * index, &value.to_le_bytes());
    raw.sizes[index] = size;
}

fn description() -> Description {
    Description::new(raw()).expect("a VM can have it")
}

fn unfit(change: impl FnOnce(&mut Raw)) -> Option<Unfit> {
    let mut raw = raw();
    change(&mut raw);
    Description::new(raw).err()
}

const WINDOW: (u64, u64) = (0xc000_0000, 0x2000_0000);

fn window() -> GpaRange {
    GpaRange::new(Gpa(WINDOW.0), WINDOW.1).expect("a range")
}

fn placed(description: &Description) -> Vec<Placed> {
    let ranges: Vec<HpaRange> = description.bars.iter().map(|bar| bar.range).collect();
    let homes = homes(window(), &ranges).expect("there is room");
    description.bars.iter().zip(homes).map(|(bar, home)| Placed { bar: *bar, home }).collect()
}

/// A guest's bus with the function in slot 1, and the places of its memory.
fn guest(description: &Description) -> (Pci, Vec<Placed>) {
    let placed = placed(description);
    let home = |index| placed.iter().find(|placed| placed.bar.index == index).map(|placed| placed.home);
    (Pci::with_functions([description.view(home)]), placed)
}

/// Where slot 1 is in the memory window.
const SLOT: u64 = 8 << 12;

fn dword(pci: &Pci, at: u64) -> u32 {
    u32::try_from(pci.read_memory(SLOT + at, 4) & 0xffff_ffff).expect("32 bits")
}

fn wanted(description: &Description, pci: &Pci) -> Wanted {
    description.wanted(pci.space(0).expect("slot 1"))
}

#[test]
fn guest_finds_identity_memory_and_messages_of_its_function() {
    let description = description();
    let (pci, placed) = guest(&description);
    assert_eq!([0, 8, 0x2c].map(|at| dword(&pci, at)), [0x1042_1af4, 0x0100_0001, 0x1100_1af4]);
    assert_eq!(dword(&pci, 4), 0x0010_0402, "memory is on, no line, capabilities");
    let bars: Vec<u32> = (0..7).map(|index| dword(&pci, 0x10 + 4 * index)).collect();
    // The longest first. The ports are missing, and the wide one is below 4 GiB.
    assert_eq!(bars, [0, 0xc001_0000, 0, 0, 0xc000_000c, 0, 0]);
    assert_eq!(placed.iter().map(|placed| placed.bar.range.start.0).collect::<Vec<_>>(), [0xfebd_0000, 0x38_8000_0000]);
    assert_eq!(pci.read_memory(SLOT + 0x3c, 2) & 0xffff, 0x00ff, "no pin");

    // MSI-X, vendor's, PCI Express. Power and the back door are missing, and so is the reset.
    let mut at = dword(&pci, 0x34) & 0xff;
    let mut list = Vec::new();
    while at != 0 {
        let [kind, next, ..] = dword(&pci, at.into()).to_le_bytes();
        list.push((kind, at));
        at = next.into();
    }
    assert_eq!(list, [(0x11, 0x90), (9, 0x40), (0x10, 0x50)]);
    assert_eq!(dword(&pci, 0x90), 0x0002_4011);
    assert_eq!(dword(&pci, 0x94), 0x1001, "the table is where the function's is");
    assert_eq!(dword(&pci, 0x50) >> 16, 0x92, "an endpoint of the root complex");
    assert_eq!(dword(&pci, 0x54), 0x8021, "without a reset");
    assert_eq!(pci.read_memory(SLOT + 0x43, 2) & 0xffff, 0x0401, "where virtio's registers are");
    assert_eq!((dword(&pci, 0xa0), dword(&pci, 0xc0)), (0, 0));
}

#[test]
fn guest_asks_for_sizes_and_moves_nothing() {
    let description = description();
    let (mut pci, _) = guest(&description);
    for (at, size) in [(0x10, 0), (0x14, 0xffff_c000), (0x18, 0), (0x20, 0xffff_000c), (0x24, u32::MAX), (0x30, 0)] {
        let before = dword(&pci, at);
        pci.write_memory(SLOT + at, 4, u32::MAX.into());
        assert_eq!(dword(&pci, at), size, "{at:#x}");
        // Over its RAM, over the local APIC, and by parts.
        for (bytes, value) in [(4, 0x10_0000), (4, 0xfee0_0000), (2, 0), (1, 0xff), (4, before.into())] {
            pci.write_memory(SLOT + at, bytes, value);
            assert_eq!(dword(&pci, at), before, "{bytes} bytes {value:#x} at {at:#x}");
        }
    }
}

#[test]
fn guest_turns_bus_mastering_and_messages_on_and_off() {
    let description = description();
    let (mut pci, _) = guest(&description);
    assert_eq!(wanted(&description, &pci), Wanted::default());
    let written = pci.write_memory(SLOT + 4, 2, 0xffff);
    assert_eq!(written.behind_bridge().collect::<Vec<_>>(), [0]);
    assert!(wanted(&description, &pci).is_master);
    assert_eq!(dword(&pci, 4) & 0xffff, 0x0546, "neither ports nor what PCI Express has not");
    pci.write_memory(SLOT + 0x92, 2, 0xffff);
    assert_eq!(wanted(&description, &pci), Wanted { is_master: true, sends: true, is_masked: true, message: None });
    assert_eq!(dword(&pci, 0x90), 0xc002_4011, "the number of messages stays");
    pci.write_memory(SLOT + 0x92, 2, 0x8000);
    pci.write_memory(SLOT + 4, 1, 0);
    assert_eq!(wanted(&description, &pci), Wanted { sends: true, ..Wanted::default() });
    // The bridge is none of the functions.
    assert_eq!(pci.write_memory(4, 2, 0xffff).behind_bridge().count(), 0);
    assert_eq!(pci.write_memory(SLOT - 4, 8, u64::MAX).behind_bridge().collect::<Vec<_>>(), [0]);
}

#[test]
fn function_with_msi_alone_has_one_message_that_the_guest_writes_into_its_capability() {
    for is_wide in [false, true] {
        let mut raw = raw();
        let control = if is_wide { 0x1_88 } else { 0x1_08 };
        put(&mut raw, 0x90, &[5, 0, 0, 0]);
        put(&mut raw, 0x92, &u16::to_le_bytes(control));
        let description = Description::new(raw).expect("a VM can have it");
        assert_eq!(description.messages, Messages::Msi { at: 0x90, is_wide, has_mask: true });
        let (mut pci, _) = guest(&description);
        assert_eq!(dword(&pci, 0x90) >> 16, if is_wide { 0x80 } else { 0 }, "one message, no masks");
        let data = if is_wide { 12 } else { 8 };
        pci.write_memory(SLOT + 0x94, 8, if is_wide { 0xfee0_1004 } else { 0xff31_fee0_1007 });
        pci.write_memory(SLOT + 0x90 + data, 2, 0x31);
        pci.write_memory(SLOT + 0x92, 2, 0xffff);
        let message = Some((0xfee0_1004, 0x31));
        assert_eq!(wanted(&description, &pci), Wanted { sends: true, message, ..Wanted::default() });
    }
}

#[test]
fn guest_that_writes_anything_anywhere_changes_nothing_but_what_it_may() {
    let description = description();
    let (mut pci, _) = guest(&description);
    let shown =
        |pci: &Pci| -> Vec<u8> { (0..0x100).map(|at| pci.read_memory(SLOT + at, 1).to_le_bytes()[0]).collect() };
    let before = shown(&pci);
    let mut random = fastrand::Rng::with_seed(22);
    for _ in 0..200_000 {
        let bytes = [1, 2, 4, 8][random.usize(..4)];
        let value = [u64::MAX, 0, random.u64(..)][random.usize(..3)];
        if random.bool() {
            pci.write_memory(SLOT + random.u64(..0x1100) - 8, bytes, value);
        } else {
            pci.write_port(0xcf8, 4, 1 << 31 | random.u32(..0x1000));
            pci.write_port(0xcfc + random.u16(..4), bytes.min(4).to_le_bytes()[0], random.u32(..));
        }
        let _ = wanted(&description, &pci);
    }
    // BARs go home, whatever they were.
    pci.write_memory(SLOT + 0x10, 8, 0);
    pci.write_memory(SLOT + 0x20, 8, 0);
    let after = shown(&pci);
    let may_change = [4, 5, 0xc, 0x3c, 0x93];
    for at in (0..0x100).filter(|at| !may_change.contains(at)) {
        assert_eq!(after[at], before[at], "{at:#x}");
    }
}

#[test]
fn message_of_the_guest_is_read_as_its_local_apics_would_read_it() {
    let mut table = Table::new(4);
    let mut message = |address: u64, data: u32| {
        table.set(2, address, data, false);
        table.message(2)
    };
    let fixed = message(0xfee0_1000, 0x4031).expect("a message");
    assert_eq!((fixed.vector, fixed.kind, fixed.target), (0x31, Kind::Fixed, Target::Physical(1)));
    assert!(!fixed.level);
    // A level is an edge here: a message has no line that could be held.
    assert!(message(0xfee0_1000, 0xc031).is_some_and(|message| !message.level));
    assert_eq!(
        message(0xfee0_300c, 0x131).map(|message| (message.kind, message.target)),
        Some((Kind::LowestPriority, Target::Logical(3)))
    );
    assert_eq!(message(0xfeef_f000, 0x31).map(|message| message.target), Some(Target::AllIncludingSelf));
    assert_eq!(message(0xfee0_0000, 0x400).map(|message| message.kind), Some(Kind::Nmi));
    for vector in 0..16 {
        assert_eq!(message(0xfee0_0000, vector), None, "a vector of the processor");
    }
    // SMI, INIT, start-up, external; not the local APICs' addresses.
    for data in [0x231, 0x531, 0x631, 0x731, 0x331] {
        assert_eq!(message(0xfee0_0000, data), None, "{data:#x}");
    }
    for address in [0, 0xfed0_0000, 0xfef0_0000, 0x1_fee0_0000, u64::MAX] {
        assert_eq!(message(address, 0x31), None, "{address:#x}");
    }
    assert_eq!(table.message(4), None);
}

#[test]
fn table_takes_words_and_pairs_of_them_and_nothing_else() {
    let mut table = Table::new(3);
    assert_eq!(table.read(12, 4) & 0xffff_ffff, 1, "masked");
    assert_eq!(table.write(16, 8, 0x1_fee0_2000), 1..2);
    assert_eq!(table.write(24, 4, 0x41), 1..2);
    assert_eq!(table.write(28, 4, 0xffff_fffe), 1..2);
    assert_eq!((table.read(16, 8), table.read(24, 8)), (0x1_fee0_2000, 0x41), "reserved bits stay clear");
    assert!(!table.is_masked(1) && table.is_masked(0) && table.is_masked(3) && table.is_masked(usize::MAX));
    for (offset, bytes) in [(0, 1), (0, 2), (1, 4), (2, 4), (4, 8), (12, 8), (48, 4), (u64::MAX - 7, 8), (44, 8)] {
        assert_eq!(table.write(offset, bytes, u64::MAX), 0..0, "{bytes} bytes at {offset}");
    }
    assert_eq!(table.read(0, 8), 0);
    assert_eq!(table.read(46, 8) >> 16, u64::MAX >> 16, "ones behind the table");
    assert_eq!(table.read(u64::MAX, 8) & 0xff, 0xff);
}

#[test]
fn no_table_makes_a_function_send_what_guests_must_not_have() {
    let mut random = fastrand::Rng::with_seed(5);
    let mut table = Table::new(8);
    for _ in 0..100_000 {
        let touched = table.write(random.u64(..160), [1, 2, 4, 8][random.usize(..4)], random.u64(..));
        assert!(touched.end <= 8);
        for entry in touched {
            if let Some(message) = table.message(entry) {
                assert!(matches!(message.kind, Kind::Fixed | Kind::LowestPriority | Kind::Nmi));
                assert!(message.vector >= 16 || message.kind == Kind::Nmi);
            }
        }
        let _ = table.read(random.u64(..), 8);
    }
}

#[test]
fn all_of_a_functions_memory_is_mapped_but_the_pages_with_its_table() {
    let description = description();
    for placed in placed(&description) {
        let pieces: Vec<_> = placed.pieces(&description.messages).collect();
        let found: Vec<_> = pieces.iter().map(|piece| (piece.hpa.0, piece.gpa.bytes(), piece.is_mapped)).collect();
        let expected = if placed.bar.index == 1 {
            vec![(0xfebd_0000, 0x1000, true), (0xfebd_1000, 0x1000, false), (0xfebd_2000, 0x2000, true)]
        } else {
            vec![(0x38_8000_0000, 0x1_0000, true)]
        };
        assert_eq!(found, expected);
        for piece in pieces {
            assert_eq!(piece.gpa.start.0 - placed.home.0, piece.hpa.0 - placed.bar.range.start.0);
        }
    }
}

#[test]
fn access_to_a_closed_page_reaches_the_table_or_a_register_and_never_both() {
    let description = description();
    let placed = placed(&description)[0];
    let reached = |offset: u64, bytes| placed.reached(&description.messages, Gpa(placed.home.0 + offset), bytes);
    let register = |offset, bytes| Part { bar: 1, offset, bytes };
    assert_eq!(reached(0x1000, 4), Reached::Table(0));
    assert_eq!(reached(0x1028, 8), Reached::Table(0x28));
    assert_eq!(reached(0x1030, 4), Reached::Register(register(0x1030, 4)), "behind three entries");
    assert_eq!(reached(0x1800, 8), Reached::Pending(register(0x1800, 8)));
    assert_eq!(reached(0x1808, 8), Reached::Register(register(0x1808, 8)));
    for (offset, bytes) in [(0x102c, 8), (0x1fff, 2), (0x1001, 4), (0x3ffc, 8), (0x4000, 1), (u64::MAX - 7, 8)] {
        let gpa = Gpa(placed.home.0.wrapping_add(offset));
        assert_eq!(placed.reached(&description.messages, gpa, bytes), Reached::Nothing, "{bytes} bytes at {offset:#x}");
    }
}

#[test]
fn homes_do_not_overlap_and_are_where_the_window_is() {
    let mut random = fastrand::Rng::with_seed(9);
    for _ in 0..2000 {
        let bars: Vec<HpaRange> = (0..random.usize(1..12))
            .map(|_| {
                let bytes = 1 << random.u32(4..27);
                HpaRange::new(Hpa(random.u64(1..0xffff) * bytes), bytes).expect("a range")
            })
            .collect();
        let needed: u64 = bars.iter().map(|bar| bar.bytes().max(PAGE_BYTES)).sum();
        let Some(found) = homes(window(), &bars) else {
            assert!(needed > WINDOW.1, "{bars:?}");
            continue;
        };
        let pages: Vec<GpaRange> = bars
            .iter()
            .zip(&found)
            .map(|(bar, home)| {
                assert_eq!(home.0 % bar.bytes(), 0);
                assert_eq!(home.0 % PAGE_BYTES, bar.start.0 % PAGE_BYTES);
                GpaRange::new(Gpa(home.0 & !(PAGE_BYTES - 1)), bar.bytes().max(PAGE_BYTES)).expect("a range")
            })
            .collect();
        for (index, one) in pages.iter().enumerate() {
            assert!(one.start >= window().start && one.end() <= window().end());
            assert!(pages[..index].iter().all(|other| !other.overlaps(one)));
        }
    }
    let large = HpaRange::new(Hpa(1 << 40), 1 << 30).expect("a range");
    assert_eq!(homes(window(), &[large]), None);
}

#[test]
fn function_that_no_vm_can_have_is_refused_with_the_reason() {
    assert_eq!(unfit(|raw| raw.config[0xe] = 1), Some(Unfit::Bridge));
    assert_eq!(unfit(|raw| raw.config[0xe] = 0x82), Some(Unfit::Bridge));
    assert_eq!(unfit(|raw| raw.config[0xb] = 6), Some(Unfit::Bridge), "a host bridge");
    assert_eq!(unfit(|raw| raw.config[0xe] = 0x83), Some(Unfit::Header(3)));
    assert_eq!(unfit(|raw| raw.config[0x6] = 0), Some(Unfit::NoMessages), "no capabilities");
    assert_eq!(unfit(|raw| raw.config[0x90] = 0x12), Some(Unfit::NoMessages));
    assert_eq!(unfit(|raw| raw.config[0xc0] = 0x14), Some(Unfit::Fixed));
    assert_eq!(unfit(|raw| bar(raw, 1, 0, 0xffff_c000)), Some(Unfit::NoAddress(1)));
    assert_eq!(unfit(|raw| bar(raw, 1, 0xfebd_1000, 0xffff_c000)), Some(Unfit::BadBar(1)), "not aligned");
    assert_eq!(unfit(|raw| bar(raw, 1, 0xfebd_0000, 0xff0f_c000)), Some(Unfit::BadBar(1)), "bits are missing");
    assert_eq!(
        unfit(|raw| {
            bar(raw, 4, 0x8000_0008, 0xffff_0008);
            bar(raw, 5, 4, 0xffff_c004);
        }),
        Some(Unfit::BadBar(5)),
        "there is no register for the rest"
    );
    assert_eq!(unfit(|raw| bar(raw, 2, 0x6, 0xffff_c006)), Some(Unfit::BadBar(2)), "an unknown kind");
    // The table: in ports, in no BAR, behind the end, over the bits of messages that wait.
    for (at, value) in [(0x94, 0x1000), (0x94, 0x1002), (0x94, 0x1007), (0x94, 0x3fe1), (0x98, 0x1001), (0x98, 0x4001)]
    {
        assert_eq!(unfit(|raw| put(raw, at, &u32::to_le_bytes(value))), Some(Unfit::BadTable), "{value:#x}");
    }
    assert_eq!(unfit(|raw| raw.config[0x93] = 0x07), Some(Unfit::BadTable), "more entries than memory");
}

#[test]
fn reset_is_known_from_either_capability() {
    assert_eq!(description().reset, Some(Reset::Express(0x58)));
    let without = |change: fn(&mut Raw)| {
        let mut raw = raw();
        raw.config[0x57] = 0;
        change(&mut raw);
        Description::new(raw).expect("a VM can have it").reset
    };
    assert_eq!(without(|_| ()), None);
    assert_eq!(without(|raw| put(raw, 0xc0, &[0x13, 0, 6, 3])), Some(Reset::Advanced(0xc4)));
    assert_eq!(without(|raw| put(raw, 0xc0, &[0x13, 0, 6, 1])), None);
}

#[test]
fn function_that_claims_anything_harms_nobody() {
    let mut random = fastrand::Rng::with_seed(77);
    let mut fit = 0;
    for round in 0..100_000 {
        let mut raw = raw();
        // A few lies in what is true, or all of it is noise.
        let lies = if round % 4 == 0 { 400 } else { random.usize(1..6) };
        for _ in 0..lies {
            let at = if random.bool() { random.usize(..BYTES) } else { random.usize(0x34..0xd0) };
            raw.config[at] = [random.u8(..), 0x40, 0xfc, 0, 0xff, 0x11][random.usize(..6)];
        }
        if random.u8(..4) == 0 {
            raw.sizes[random.usize(..BARS)] = random.u32(..);
        }
        let Ok(description) = Description::new(raw) else { continue };
        fit += 1;
        let ranges: Vec<HpaRange> = description.bars.iter().map(|bar| bar.range).collect();
        if homes(window(), &ranges).is_none() {
            continue;
        }
        let (mut pci, placed) = guest(&description);
        // Its list of capabilities ends.
        let (mut at, mut steps) = (dword(&pci, 0x34) & 0xff, 0);
        while at != 0 && steps < 100 {
            at = dword(&pci, u64::from(at)) >> 8 & 0xff;
            steps += 1;
        }
        assert!(steps < 100, "the guest's list runs in circles");
        pci.write_memory(SLOT + random.u64(..256), 4, random.u64(..));
        let _ = wanted(&description, &pci);
        for placed in placed {
            let mut next = placed.bar.range.start.0 & !(PAGE_BYTES - 1);
            for piece in placed.pieces(&description.messages) {
                assert_eq!(piece.hpa.0, next);
                next += piece.gpa.bytes();
                if let Messages::MsiX { table, count, .. } = description.messages
                    && piece.is_mapped
                    && table.bar == placed.bar.index
                {
                    let start = placed.bar.range.start.0 + table.offset;
                    let bytes = (count * ENTRY_BYTES) as u64;
                    assert!(next <= start || piece.hpa.0 >= start + bytes, "a guest reaches the table");
                }
            }
            assert_eq!(next, placed.bar.range.end().0.next_multiple_of(PAGE_BYTES));
        }
    }
    assert!(fit > 10_000, "{fit}");
}
