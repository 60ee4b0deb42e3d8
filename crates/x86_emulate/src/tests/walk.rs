//! Translation in each paging mode, by tables written byte by byte.

use super::{CODE, DEVICE, Ram, flat, long};
use crate::{Access, CpuState, Exception, Memory, Stop, translate};
use addr::Gpa;
use proptest::prelude::{any, prop, proptest};

fn fault(error_code: u32, address: u64) -> Result<Gpa, Stop> {
    Err(Stop::Fault(Exception { vector: 14, error_code, cr2: Some(address) }))
}

fn entry(ram: &Ram, gpa: u64) -> u64 {
    ram.read_u64(Gpa(gpa)).expect("memory")
}

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
    assert_eq!(ram.read_u32(Gpa(0x1008)), Some(0x0040_00e3 | 0x12 << 13));
    assert_eq!(translate(&state, &ram, 0x40_4000, Access::Write), fault(2, 0x40_4000));
    assert_eq!(translate(&state, &ram, 0xc0_0000, Access::Read), fault(9, 0xc0_0000));

    // Without PSE, bit 7 means nothing and the entry names a table, here one that does not exist.
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
    assert_eq!(entry(&ram, 0x2000 + 8 * 0x1f7), DEVICE | 0xe3);
    assert_eq!(entry(&ram, 0x1038), 0x2001, "the top level has no Accessed bit");
    assert_eq!(translate(&state, &ram, 0, Access::Read), fault(9, 0), "rights at the top level are reserved");
}

#[test]
fn four_levels_set_accessed_and_only_a_write_sets_dirty() {
    let ram = Ram::default();
    let state = long(&ram);
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);

    assert_eq!(translate(&state, &ram, DEVICE + 0x80, Access::Read), Ok(Gpa(DEVICE + 0x80)));
    assert_eq!([0x1000, 0x2018, leaf].map(|at| entry(&ram, at)), [0x2027, 0x4027, DEVICE | 0xa7]);
    assert_eq!(translate(&state, &ram, DEVICE + 0x80, Access::Write), Ok(Gpa(DEVICE + 0x80)));
    assert_eq!([0x1000, 0x2018, leaf].map(|at| entry(&ram, at)), [0x2027, 0x4027, DEVICE | 0xe7]);
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
    assert_eq!(translate(&state, &ram, DEVICE, Access::Read), fault(0, DEVICE));
}

#[test]
fn refused_access_leaves_no_trace_and_says_why() {
    let ram = Ram::default();
    let mut state = long(&ram);
    let leaf = 0x4000 + 8 * (DEVICE >> 21 & 0x1ff);
    let attempt = |bits: u64, cpl, change: fn(&mut CpuState), access| {
        ram.put(leaf, &(DEVICE | bits).to_le_bytes());
        let before = ram.0.borrow().clone();
        let mut state = CpuState { cpl, ..state.clone() };
        change(&mut state);
        let result = translate(&state, &ram, DEVICE, access);
        if result.is_err() {
            assert_eq!(before, *ram.0.borrow());
        }
        result
    };
    let same: fn(&mut CpuState) = |_| {};
    let nx = 1 << 63;

    assert_eq!(attempt(0x83, 3, same, Access::Read), fault(5, DEVICE), "user in a supervisor page");
    assert_eq!(attempt(0x85, 3, same, Access::Write), fault(7, DEVICE), "user writes to a read-only page");
    assert_eq!(attempt(0x85, 0, same, Access::Write), fault(3, DEVICE), "supervisor too, by CR0.WP");
    assert_eq!(attempt(0x85, 0, |state| state.cr0 &= !0x1_0000, Access::Write), Ok(Gpa(DEVICE)));
    assert_eq!(attempt(0x86, 0, same, Access::Write), fault(2, DEVICE), "not present");
    assert_eq!(attempt(0x87 | nx, 0, same, Access::Execute), fault(0x11, DEVICE), "no execute");
    assert_eq!(attempt(0x87 | nx, 0, same, Access::Read), Ok(Gpa(DEVICE)));
    assert_eq!(attempt(0x87 | nx, 0, |state| state.efer &= !0x800, Access::Read), fault(9, DEVICE), "reserved");
    assert_eq!(attempt(0x87 | 1 << 45, 0, same, Access::Read), fault(9, DEVICE), "beyond the physical width");
    assert_eq!(attempt(0x87 | 1 << 20, 0, same, Access::Read), fault(9, DEVICE), "address within the page");
    assert_eq!(attempt(0x87, 0, |state| state.cr4 |= 1 << 20, Access::Execute), fault(0x11, DEVICE), "SMEP");
    assert_eq!(attempt(0x87, 0, |state| state.cr4 |= 1 << 21, Access::Read), fault(1, DEVICE), "SMAP");
    let override_smap: fn(&mut CpuState) = |state| {
        state.cr4 |= 1 << 21;
        state.rflags |= 1 << 18;
    };
    assert_eq!(attempt(0x87, 0, override_smap, Access::Read), Ok(Gpa(DEVICE)), "SMAP with RFLAGS.AC");

    state.cr3 = 0x7000;
    assert_eq!(translate(&state, &ram, DEVICE, Access::Read), Err(Stop::Unbacked(Gpa(0x7000))));
}

#[test]
fn table_that_points_to_itself_ends_the_walk_at_the_last_level() {
    let ram = Ram::default();
    let state = long(&ram);
    ram.put(0x1000, &0x1007_u64.to_le_bytes());
    assert_eq!(translate(&state, &ram, 0x123, Access::Read), Ok(Gpa(0x1123)));
    assert_eq!(translate(&state, &ram, CODE, Access::Read), fault(0, CODE));
}

/// Memory whose every word changes between a read and the exchange that follows.
struct Restless;

impl Memory for Restless {
    fn read(&self, _: Gpa, _: &mut [u8]) -> Option<()> {
        None
    }
    fn read_u32(&self, _: Gpa) -> Option<u32> {
        Some(0x1007)
    }
    fn read_u64(&self, _: Gpa) -> Option<u64> {
        Some(0x1007)
    }
    fn compare_exchange_u32(&self, _: Gpa, _: u32, _: u32) -> Option<bool> {
        Some(false)
    }
    fn compare_exchange_u64(&self, _: Gpa, _: u64, _: u64) -> Option<bool> {
        Some(false)
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
            let _ = translate(&state, &ram, linear, access);
        }
    }
}
