//! Translation in each paging mode, by tables written byte by byte.

use super::{CODE, DEVICE, Ram, flat, long, page_fault, translate};
use crate::{Access, CpuState, Memory, Mode, Stop, path, probe};
use addr::Gpa;
use proptest::prelude::{any, prop, proptest};

#[test]
fn without_paging_addresses_stay_as_they_are() {
    assert_eq!(translate(&flat(), &Ram::default(), 0xfee0_0030, Access::Write), Ok(Gpa(0xfee0_0030)));
}

#[test]
fn two_levels_map_4_kib_pages_and_4_mib_pages_above_4_gib() {
    let ram = Ram::default();
    ram.put(0x1000, &[0; 4096]);
    ram.put(0x2000, &[0; 4096]);
    ram.put(0x1000 + 4, &0x2003_u32.to_le_bytes());
    ram.put(0x2000 + 4 * 3, &0x0008_9003_u32.to_le_bytes());
    // 4 MiB at 0x12_0040_0000: bits 39:32 of the address go to bits 20:13.
    ram.put(0x1000 + 4 * 2, &(0x0040_0083_u32 | 0x12 << 13).to_le_bytes());
    ram.put(0x1000 + 4 * 3, &0x0060_0083_u32.to_le_bytes());
    let state = CpuState { cr0: 0x8001_0001, cr3: 0x1000, cr4: 0x10, ..flat() };

    assert_eq!(translate(&state, &ram, 0x40_3123, Access::Read), Ok(Gpa(0x8_9123)));
    assert_eq!(translate(&state, &ram, 0x80_1234, Access::Write), Ok(Gpa(0x12_0040_1234)));
    assert_eq!(u32::from_le_bytes(ram.get(0x1008)), 0x0040_00e3 | 0x12 << 13);
    assert_eq!(translate(&state, &ram, 0x40_4000, Access::Write), page_fault(2, 0x40_4000));
    assert_eq!(translate(&state, &ram, 0xc0_0000, Access::Read), page_fault(9, 0xc0_0000));

    // Without PSE, bit 7 has no meaning and the entry points to a table, here one that does not exist.
    let without = CpuState { cr4: 0, ..state };
    assert_eq!(translate(&without, &ram, 0xc0_0000, Access::Read), Err(Stop::Unbacked(Gpa(0x60_0000))));
}

#[test]
fn pae_walks_three_levels_from_a_32_byte_table() {
    let ram = Ram::default();
    ram.put(0x1000, &[0; 4096]);
    ram.put(0x2000, &[0; 4096]);
    ram.put(0x1020 + 8 * 3, &0x2001_u64.to_le_bytes());
    ram.put(0x1020, &0x2003_u64.to_le_bytes());
    ram.put(0x2000 + 8 * 0x1f7, &(DEVICE | 0x83).to_le_bytes());
    let state = CpuState { cr0: 0x8001_0001, cr3: 0x1020, cr4: 0x20, ..flat() };

    assert_eq!(translate(&state, &ram, DEVICE + 0x10_0020, Access::Write), Ok(Gpa(DEVICE + 0x10_0020)));
    assert_eq!(ram.get_u64(0x2000 + 8 * 0x1f7), DEVICE | 0xe3);
    assert_eq!(ram.get_u64(0x1038), 0x2001, "the top level has no Accessed bit");
    assert_eq!(translate(&state, &ram, 0, Access::Read), page_fault(9, 0), "rights at the top level are reserved");
}

#[test]
fn four_levels_set_accessed_and_only_a_write_sets_dirty() {
    let ram = Ram::default();
    let state = long(&ram);
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);

    assert_eq!(translate(&state, &ram, DEVICE + 0x80, Access::Read), Ok(Gpa(DEVICE + 0x80)));
    assert_eq!([0x1000, 0x2018, leaf].map(|at| ram.get_u64(at)), [0x2027, 0x4027, DEVICE | 0xa7]);
    assert_eq!(translate(&state, &ram, DEVICE + 0x80, Access::Write), Ok(Gpa(DEVICE + 0x80)));
    assert_eq!([0x1000, 0x2018, leaf].map(|at| ram.get_u64(at)), [0x2027, 0x4027, DEVICE | 0xe7]);
}

#[test]
fn five_levels_walk_one_more() {
    let ram = Ram::default();
    let mut state = long(&ram);
    ram.put(0x6000, &[0; 4096]);
    ram.put(0x6000 + 8 * 5, &0x1007_u64.to_le_bytes());
    state.cr4 |= 1 << 12;
    state.cr3 = 0x6000;
    assert_eq!(translate(&state, &ram, 5 << 48 | DEVICE, Access::Read), Ok(Gpa(DEVICE)));
    assert_eq!(translate(&state, &ram, DEVICE, Access::Read), page_fault(0, DEVICE));
}

#[test]
fn table_that_points_to_itself_ends_the_walk_at_the_last_level() {
    let ram = Ram::default();
    let state = long(&ram);
    ram.put(0x1000, &0x1007_u64.to_le_bytes());
    assert_eq!(translate(&state, &ram, 0x123, Access::Read), Ok(Gpa(0x1123)));
    assert_eq!(translate(&state, &ram, CODE, Access::Read), page_fault(0, CODE));
}

/// Memory whose every word changes between a read and the following exchange.
struct Restless;

impl Memory for Restless {
    type Word = ();

    fn find(&self, _: Gpa) -> Option<()> {
        Some(())
    }
    fn load(&self, (): (), _: usize) -> u64 {
        0x1007
    }
    fn compare_exchange(&self, (): (), _: u64, _: u64) -> bool {
        false
    }
    fn read(&self, _: Gpa, _: &mut [u8]) -> Option<()> {
        None
    }
    fn write(&self, _: Gpa, _: &[u8]) -> Option<()> {
        None
    }
}

#[test]
fn tables_that_never_rest_end_the_walk_too() {
    assert_eq!(translate(&long(&Ram::default()), &Restless, 0, Access::Read), Err(Stop::Contended));
}

proptest! {
    #[test]
    fn random_tables_never_panic(
        words in prop::collection::vec(any::<u64>(), 64), linear in any::<u64>(), cr4 in any::<u64>(),
        efer in any::<u64>(), cr0 in any::<u64>(), cpl in 0..4_u8, physical_bits in any::<u8>(),
    ) {
        // Four pages of random entries that mostly point to one another.
        let ram = Ram::default();
        for word in 0..4 * 512_u32 {
            let random = words[usize::try_from(word).expect("small") % words.len()].rotate_left(word / 64);
            ram.put(u64::from(word) * 8, &(random & 0x8000_0000_0000_3fff).to_le_bytes());
        }
        let state = CpuState { cr0, cr3: words[0] & 0x3fff, cr4, efer, cpl, physical_bits, ..flat() };
        for access in [Access::Read, Access::Write, Access::Execute] {
            // A walk of the same tables without side effects has the same result, regardless of rights.
            let looked = path(&state, &ram, linear).map(|path| path.gpa.0 | linear & 0xfff);
            if let Ok(gpa) = translate(&state, &ram, linear, access) {
                assert_eq!(looked, Some(gpa.0));
            }
        }
    }
}

#[test]
fn pages_of_one_gib_are_leaves_of_the_third_level() {
    let ram = Ram::default();
    let state = long(&ram);
    ram.put_u64(0x2008, 0x80_0000_0087 - 0x40_0000_0000);
    assert_eq!(translate(&state, &ram, 0x4123_4567, Access::Write), Ok(Gpa(0x40_0123_4567)));
    assert_eq!(ram.get_u64(0x2008), 0x40_0000_00e7);
    // With three levels, the same bit is reserved at the top.
    ram.put_u64(0x1020, 0x2081);
    let legacy = CpuState { cr0: 0x8001_0001, cr3: 0x1020, cr4: 0x20, ..flat() };
    assert_eq!(translate(&legacy, &ram, 0, Access::Read), page_fault(9, 0));
}

#[test]
fn both_entries_of_a_word_are_told_apart() {
    // Two 32-bit entries share a 64-bit word; bits are set in the right one.
    let ram = Ram::default();
    let state = CpuState { cr0: 0x8001_0001, cr3: 0x1000, cr4: 0x10, ..flat() };
    ram.put(0x1000, &0x0040_0083_u32.to_le_bytes());
    ram.put(0x1004, &0x0080_0083_u32.to_le_bytes());
    assert_eq!(translate(&state, &ram, 0x40_0010, Access::Write), Ok(Gpa(0x80_0010)));
    assert_eq!(ram.get_u64(0x1000), 0x0080_00e3_0040_0083);
    assert_eq!(translate(&state, &ram, 0x10, Access::Read), Ok(Gpa(0x40_0010)));
    assert_eq!(ram.get_u64(0x1000), 0x0080_00e3_0040_00a3);
}

#[test]
fn look_names_the_tables_and_changes_nothing() {
    let ram = Ram::default();
    let state = long(&ram);
    let before = ram.pages.borrow().clone();
    let way = path(&state, &ram, DEVICE + 0x123).expect("mapped");
    assert_eq!((way.tables(), way.gpa), (&[Gpa(0x1000), Gpa(0x2000), Gpa(0x4000)][..], Gpa(DEVICE)));
    assert_eq!(path(&state, &ram, 0x4000_0000), None);
    assert_eq!(*ram.pages.borrow(), before);
    let unpaged = path(&CpuState::flat(Mode::Bits32, 0), &ram, 0x1_2345_6789).expect("no tables at all");
    assert_eq!((unpaged.tables(), unpaged.gpa), (&[][..], Gpa(0x2345_6000)));
}

#[test]
fn probe_without_bits_follows_the_same_rights_and_changes_nothing() {
    let ram = Ram::default();
    ram.put(0x1000, &[0; 4096]);
    ram.put(0x2000, &[0; 4096]);
    ram.put(0x1000 + 4, &0x2007_u32.to_le_bytes());
    ram.put(0x2000 + 4 * 3, &0x0008_9005_u32.to_le_bytes());
    let state = CpuState { cr0: 0x8001_0001, cr3: 0x1000, ..flat() };
    let user = CpuState { cpl: 3, ..state.clone() };

    assert_eq!(probe(&state, &ram, 0x40_3123, Access::Read, false), Ok(Gpa(0x8_9000)));
    assert_eq!(probe(&user, &ram, 0x40_3123, Access::Write, false), page_fault(7, 0x40_3123));
    assert_eq!(probe(&state, &ram, 0x40_4123, Access::Read, false), page_fault(0, 0x40_4123));
    let entries = || (u32::from_le_bytes(ram.get(0x1004)), u32::from_le_bytes(ram.get(0x200c)));
    assert_eq!(entries(), (0x2007, 0x0008_9005));
    assert_eq!(probe(&state, &ram, 0x40_3123, Access::Read, true), Ok(Gpa(0x8_9000)));
    assert_eq!(entries(), (0x2027, 0x0008_9025));
}
