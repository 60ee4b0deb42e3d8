//! The tree against a naive model: a map of 4 KiB pages.

use crate::{Access, ENTRIES, Entry, Format, Leaf, MapError, Memory, Npt, Pages, Stale, Table, Tree, Vmsa};
use addr::{Gpa, GpaRange, Hpa, PageSize};
use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

extern crate std;
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

/// A pool of a few tables, at host addresses that start above zero.
struct Pool {
    tables: Vec<Table>,
    free: RefCell<BTreeSet<usize>>,
}

const POOL_START: u64 = 0x7_0000_0000;

impl Pool {
    fn of(count: usize) -> Self {
        let table = || core::array::from_fn::<_, ENTRIES, _>(|_| AtomicU64::new(0));
        Self { tables: (0..count).map(|_| table()).collect(), free: RefCell::new((0..count).collect()) }
    }

    fn left(&self) -> usize {
        self.free.borrow().len()
    }

    fn number(hpa: Hpa) -> usize {
        assert!(hpa.is_aligned(PageSize::Size4K) && hpa.0 >= POOL_START, "{hpa} is no table");
        usize::try_from((hpa.0 - POOL_START) >> 12).expect("small")
    }
}

impl Pages for Pool {
    fn table(&self, hpa: Hpa) -> &Table {
        let number = Self::number(hpa);
        assert!(!self.free.borrow().contains(&number), "table {hpa} is used after it was freed");
        &self.tables[number]
    }

    fn allocate(&self) -> Option<Hpa> {
        let number = self.free.borrow_mut().pop_last()?;
        for entry in &self.tables[number] {
            entry.store(0, Ordering::Relaxed);
        }
        Some(Hpa(POOL_START + ((number as u64) << 12)))
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        let count = count as usize;
        let is_free = |first: &usize| (*first..first + count).all(|number| self.free.borrow().contains(&number));
        let first = (0..self.tables.len()).step_by(count).find(is_free)?;
        self.free.borrow_mut().retain(|number| !(first..first + count).contains(number));
        Some(Hpa(POOL_START + ((first as u64) << 12)))
    }

    fn free(&self, hpa: Hpa) {
        let number = Self::number(hpa);
        assert!(self.free.borrow_mut().insert(number), "table {hpa} is freed twice");
    }
}

/// An invented format: three levels, leaves of 4 KiB only, rights in other places and inverted.
#[derive(Clone, Copy, Debug)]
struct Odd;

impl Format for Odd {
    fn levels(&self) -> u32 {
        3
    }
    fn input_bits(&self) -> u32 {
        39
    }
    fn largest_leaf(&self) -> PageSize {
        PageSize::Size4K
    }
    fn host_limit(&self) -> Hpa {
        Hpa(1 << 40)
    }
    fn expresses(&self, _: Access) -> bool {
        true
    }
    fn table(&self, hpa: Hpa) -> u64 {
        hpa.0 | 1
    }
    fn leaf(&self, hpa: Hpa, _: PageSize, access: Access, _: Memory) -> u64 {
        hpa.0 | 1 | Self::rights(access)
    }
    fn decode(&self, level: u32, bits: u64) -> Entry {
        let hpa = Hpa(bits & 0xff_ffff_f000);
        match (bits & 1, level) {
            (0, _) => Entry::Empty,
            (_, 0) => {
                let access = Access { read: bits & 2 == 0, write: bits & 4 == 0, execute: bits & 8 == 0 };
                Entry::Leaf { hpa, access }
            }
            _ => Entry::Table(hpa),
        }
    }
    fn with_access(&self, bits: u64, access: Access) -> u64 {
        bits & !0xe | Self::rights(access)
    }
    fn part(&self, _: u64, _: PageSize, _: u64) -> u64 {
        unreachable!("there are no large leaves to split")
    }
}

impl Odd {
    fn rights(access: Access) -> u64 {
        (u64::from(!access.read) << 1) | (u64::from(!access.write) << 2) | (u64::from(!access.execute) << 3)
    }
}

const NPT: Npt = Npt { one_gib_pages: true };
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const DIRTY: u64 = 1 << 6;

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(start), bytes).expect("fits")
}

fn leaf_at(tree: &Tree<impl Format>, pool: &Pool, gpa: u64) -> Option<Leaf> {
    tree.lookup(pool, Gpa(gpa))
}

/// The last entry that a processor reads for `gpa`: a walk written down once more, by bits.
fn hardware_walk(pool: &Pool, root: Hpa, gpa: u64) -> &AtomicU64 {
    let mut table = root;
    for shift in [39, 30, 21, 12] {
        let entry = &pool.table(table)[(gpa >> shift & 0x1ff) as usize];
        let bits = entry.load(Ordering::Relaxed);
        if shift == 12 || bits & 1 == 0 || bits & 0x80 != 0 {
            return entry;
        }
        table = Hpa(bits & 0xf_ffff_ffff_f000);
    }
    unreachable!("the walk ends at the last level")
}

#[test]
fn largest_leaves_that_both_alignments_allow_are_used() {
    let pool = Pool::of(16);
    let mut tree = Tree::new(NPT, &pool).expect("pool");

    // From 1 GiB - 2 MiB - 4 KiB: a small page, a 2 MiB page, a 1 GiB page, a small one again.
    let start = GIB - 2 * MIB - 4096;
    let stale = tree.map(&pool, range(start, GIB + 2 * MIB + 8192), Hpa(4 * GIB + start), Access::ALL).expect("maps");
    assert!(stale.is_empty());

    for (gpa, size) in [
        (start, PageSize::Size4K),
        (GIB - 2 * MIB, PageSize::Size2M),
        (GIB + 12345, PageSize::Size1G),
        (2 * GIB, PageSize::Size4K),
    ] {
        let leaf = leaf_at(&tree, &pool, gpa).expect("mapped");
        assert_eq!((leaf.size, leaf.translate(Gpa(gpa))), (size, Hpa(4 * GIB + gpa)));
    }
    assert_eq!(leaf_at(&tree, &pool, start - 1), None);
    assert_eq!(leaf_at(&tree, &pool, 2 * GIB + 4096), None);
    tree.destroy(&pool);
    assert_eq!(pool.left(), 16);
}

#[test]
fn host_memory_that_is_aligned_differently_gets_smaller_leaves() {
    let pool = Pool::of(600);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(GIB + 2 * MIB), Access::ALL).expect("maps");
    let _ = tree.map(&pool, range(GIB, GIB), Hpa(4 * GIB + 4096), Access::ALL).expect("maps");

    assert_eq!(leaf_at(&tree, &pool, 5 * MIB).expect("mapped").size, PageSize::Size2M);
    let small = leaf_at(&tree, &pool, GIB + 5 * MIB).expect("mapped");
    assert_eq!((small.size, small.hpa), (PageSize::Size4K, Hpa(4 * GIB + 5 * MIB + 4096)));
}

#[test]
fn processor_without_1_gib_pages_gets_none() {
    let pool = Pool::of(4);
    let mut tree = Tree::new(Npt { one_gib_pages: false }, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(0), Access::ALL).expect("maps");
    assert_eq!(leaf_at(&tree, &pool, 0).expect("mapped").size, PageSize::Size2M);
}

#[test]
fn npt_entries_are_spelled_as_the_manual_says() {
    let (hpa, size) = (Hpa(0x12_3450_0000), PageSize::Size4K);
    assert_eq!(NPT.table(hpa), 0x12_3450_0007);
    assert_eq!(NPT.leaf(hpa, size, Access::ALL, Memory::Normal), 0x12_3450_0007);
    assert_eq!(NPT.leaf(hpa, size, Access::READ, Memory::Normal), 0x8000_0012_3450_0005);
    let gigabyte = NPT.leaf(Hpa(0x4000_0000), PageSize::Size1G, Access::READ_WRITE, Memory::Normal);
    assert_eq!(gigabyte, 0x8000_0000_4000_0087);
    assert_eq!(NPT.leaf(hpa, size, Access::READ_WRITE, Memory::Device), 0x8000_0012_3450_001f);
    assert_eq!(NPT.part(0x4000_0087 | DIRTY, PageSize::Size2M, 3), 0x4060_0087 | DIRTY);
    assert_eq!(NPT.part(0x4060_0087 | DIRTY, PageSize::Size4K, 511), 0x407f_f007 | DIRTY);
}

/// Descriptors as the manual has them, without our own code: attributes of a leaf of normal memory with all rights.
const NORMAL_ALL: u64 = 0b1111 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10;

#[test]
fn arm_descriptors_are_spelled_as_the_manual_says() {
    let vmsa = Vmsa::new(40, 40, false).expect("possible");
    let hpa = Hpa(0x12_4000_0000);
    assert_eq!(vmsa.table(hpa), hpa.0 | 0b11);
    assert_eq!(vmsa.leaf(hpa, PageSize::Size4K, Access::ALL, Memory::Normal), hpa.0 | 0b11 | NORMAL_ALL);
    assert_eq!(vmsa.leaf(hpa, PageSize::Size1G, Access::ALL, Memory::Normal), hpa.0 | 0b01 | NORMAL_ALL);

    // XN is bit 54, S2AP[1] bit 7, Device-nGnRE 0b0001.
    let read = vmsa.leaf(hpa, PageSize::Size2M, Access::READ, Memory::Normal);
    assert_eq!(read, hpa.0 | 0b01 | (NORMAL_ALL & !(1 << 7)) | 1 << 54);
    let device = vmsa.leaf(hpa, PageSize::Size4K, Access::READ_WRITE, Memory::Device);
    assert_eq!(device, hpa.0 | 0b11 | 0b0001 << 2 | 0b11 << 6 | 0b11 << 8 | 1 << 10 | 1 << 54);

    let forced = Vmsa::new(40, 40, true).expect("possible");
    let normal = forced.leaf(hpa, PageSize::Size4K, Access::ALL, Memory::Normal);
    assert_eq!(normal >> 2 & 0b1111, 0b0110, "write-back, whatever stage 1 says");
    assert_eq!(vmsa.part(hpa.0 | 0b01 | NORMAL_ALL, PageSize::Size2M, 3), (hpa.0 + 3 * (2 << 20)) | 0b01 | NORMAL_ALL);
    assert_eq!(vmsa.part(hpa.0 | 0b01 | NORMAL_ALL, PageSize::Size4K, 511), (hpa.0 + 511 * 4096) | 0b11 | NORMAL_ALL);
}

#[test]
fn reserved_arm_descriptors_map_nothing() {
    let vmsa = Vmsa::new(40, 40, false).expect("possible");
    assert_eq!(vmsa.decode(0, 0x8000_0001), Entry::Empty, "a block at the last level");
    assert_eq!(vmsa.decode(1, 0x8000_0002), Entry::Empty, "not valid");
    assert!(!vmsa.expresses(Access { read: false, write: false, execute: true }), "fetches need the right to read");
}

#[test]
fn arm_walks_start_where_concatenated_roots_allow() {
    // IPA bits -> levels, SL0, tables at the root (Arm ARM, D8.2.2, tables for the 4 KiB granule).
    for (bits, levels, sl0, tables) in [
        (32, 2, 0, 4),
        (34, 2, 0, 16),
        (35, 3, 1, 1),
        (39, 3, 1, 1),
        (40, 3, 1, 2),
        (43, 3, 1, 16),
        (44, 4, 2, 1),
        (48, 4, 2, 1),
    ] {
        let vmsa = Vmsa::new(bits, 48, false).expect("possible");
        assert_eq!((vmsa.levels(), vmsa.sl0(), vmsa.t0sz()), (levels, sl0, 64 - u64::from(bits)), "{bits} bits");
        let pool = Pool::of(16);
        let tree = Tree::new(vmsa, &pool).expect("pool");
        assert_eq!(16 - pool.left(), tables, "{bits} bits");
        assert_eq!(tree.root().0 % (tables as u64 * 4096), 0, "the root is aligned to its size");
        tree.destroy(&pool);
        assert_eq!(pool.left(), 16);
    }
    for (ipa_bits, pa_bits) in [(31, 40), (41, 40), (49, 52)] {
        assert!(Vmsa::new(ipa_bits, pa_bits, false).is_none(), "{ipa_bits} of {pa_bits} bits");
    }
}

#[test]
fn second_of_two_root_tables_maps_the_upper_half() {
    let pool = Pool::of(8);
    let mut tree = Tree::new(Vmsa::new(40, 40, false).expect("possible"), &pool).expect("pool");
    let end = 1 << 40;
    assert!(tree.map(&pool, range(end - GIB, GIB), Hpa(GIB), Access::ALL).expect("maps").is_empty());
    let last = pool.table(Hpa(tree.root().0 + 4096))[511].load(Ordering::Relaxed);
    assert_eq!(last, GIB | 0b01 | NORMAL_ALL);
    assert_eq!(leaf_at(&tree, &pool, end - 1).map(|leaf| leaf.translate(Gpa(end - 1))), Some(Hpa(2 * GIB - 1)));
    assert_eq!(tree.map(&pool, range(end, 4096), Hpa(0), Access::ALL), Err(MapError::Beyond(Gpa(end))));
    let beyond = tree.map(&pool, range(0, 4096), Hpa(end), Access::ALL);
    assert_eq!(beyond, Err(MapError::BeyondHost(Hpa(end))));
}

#[test]
fn every_entry_on_the_way_is_a_user_entry() {
    let pool = Pool::of(16);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 8 * MIB + 4096), Hpa(0), Access::READ).expect("maps");
    let _ = tree.unmap(&pool, range(4 * MIB, 4096)).expect("unmaps");
    for entry in pool.tables.iter().flatten().map(|entry| entry.load(Ordering::Relaxed)) {
        assert!(entry == 0 || entry & 5 == 5, "{entry:#x}");
    }
}

#[test]
fn unmap_in_the_middle_of_a_large_page_splits_it_and_owes_only_the_middle() {
    let pool = Pool::of(5);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, GIB), Hpa(GIB), Access::ALL).expect("maps");

    let hole = range(3 * MIB, 8192);
    let stale = tree.unmap(&pool, hole).expect("splits with two tables");
    assert_eq!(stale, Stale::of(hole));
    assert_eq!(stale.range(), hole);

    assert_eq!(leaf_at(&tree, &pool, 3 * MIB), None);
    let size = |gpa| leaf_at(&tree, &pool, gpa).map(|leaf| (leaf.size, leaf.translate(Gpa(gpa))));
    assert_eq!(size(3 * MIB - 1), Some((PageSize::Size4K, Hpa(GIB + 3 * MIB - 1))));
    assert_eq!(size(3 * MIB + 8192), Some((PageSize::Size4K, Hpa(GIB + 3 * MIB + 8192))));
    assert_eq!(size(4 * MIB), Some((PageSize::Size2M, Hpa(GIB + 4 * MIB))));
    assert_eq!(pool.left(), 1);
    tree.destroy(&pool);
    assert_eq!(pool.left(), 5);
}

#[test]
fn rights_that_grow_owe_no_flush_and_rights_that_shrink_do() {
    let pool = Pool::of(4);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let page = range(0x5000, 4096);
    let _ = tree.map(&pool, page, Hpa(0x9000), Access::READ).expect("maps");

    assert!(tree.protect(&pool, page, Access::ALL).expect("grows").is_empty());
    assert!(tree.protect(&pool, page, Access::ALL).expect("same").is_empty());
    assert_eq!(tree.protect(&pool, page, Access::READ_EXECUTE), Ok(Stale::of(page)));
    // Neither more nor less: execute goes, write comes.
    assert_eq!(tree.protect(&pool, page, Access::READ_WRITE), Ok(Stale::of(page)));
    assert_eq!(leaf_at(&tree, &pool, 0x5000).map(|leaf| leaf.access), Some(Access::READ_WRITE));
}

#[test]
fn protecting_a_part_of_a_large_page_with_what_it_has_does_not_split_it() {
    let pool = Pool::of(3);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    assert!(tree.protect(&pool, range(4096, 4096), Access::ALL).expect("no table needed").is_empty());
    assert_eq!(tree.protect(&pool, range(4096, 4096), Access::READ), Err(MapError::OutOfTables));
    assert_eq!(leaf_at(&tree, &pool, 4096).expect("mapped").size, PageSize::Size2M);
}

#[test]
fn one_page_of_a_large_one_is_protected_and_the_others_keep_their_rights() {
    let pool = Pool::of(8);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    assert!(tree.map(&pool, range(0, 2 * MIB), Hpa(4 * GIB), Access::ALL).expect("maps").is_empty());
    let stale = tree.protect_page(&pool, Gpa(0x5_0123), Access::READ_EXECUTE).expect("one table is enough");
    assert_eq!(stale.range(), range(0x5_0000, 4096));
    for (gpa, access) in [(0x4_f000, Access::ALL), (0x5_0000, Access::READ_EXECUTE), (0x5_1000, Access::ALL)] {
        let leaf = leaf_at(&tree, &pool, gpa).expect("mapped");
        assert_eq!((leaf.hpa, leaf.access), (Hpa(4 * GIB + gpa), access), "{gpa:#x}");
    }

    let left = pool.left();
    assert!(tree.protect_page(&pool, Gpa(0x5_0000), Access::ALL).expect("grows").is_empty(), "growing owes nothing");
    assert!(tree.protect_page(&pool, Gpa(8 * GIB), Access::READ).expect("a hole").is_empty());
    assert_eq!(pool.left(), left, "no further table");
}

#[test]
fn dirty_bit_of_the_hardware_survives_protect_and_split() {
    let pool = Pool::of(4);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(0, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    hardware_walk(&pool, tree.root(), 0).fetch_or(DIRTY, Ordering::Relaxed);

    let _ = tree.protect(&pool, range(4096, 4096), Access::READ).expect("splits");
    for gpa in [0, 4096, 2 * MIB - 4096] {
        assert_ne!(hardware_walk(&pool, tree.root(), gpa).load(Ordering::Relaxed) & DIRTY, 0, "{gpa:#x}");
    }
}

#[test]
fn overlap_is_refused_and_names_the_page_in_the_way() {
    let pool = Pool::of(8);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let _ = tree.map(&pool, range(2 * MIB, 2 * MIB), Hpa(0), Access::ALL).expect("maps");
    let left = pool.left();
    let error = tree.map(&pool, range(0, 3 * MIB), Hpa(0), Access::ALL);
    assert_eq!(error, Err(MapError::Overlaps(range(2 * MIB, 2 * MIB))));
    assert_eq!(leaf_at(&tree, &pool, 0), None);
    assert_eq!(pool.left(), left);
}

#[test]
fn bad_ranges_are_refused() {
    let pool = Pool::of(8);
    let mut tree = Tree::new(NPT, &pool).expect("pool");
    let end = 1 << 48;
    let mut map = |range, hpa, access| tree.map(&pool, range, Hpa(hpa), access);

    assert_eq!(map(range(1, 4096), 0, Access::ALL), Err(MapError::Misaligned(range(1, 4096))));
    assert_eq!(map(range(0, 4095), 0, Access::ALL), Err(MapError::Misaligned(range(0, 4095))));
    assert_eq!(map(range(0, 4096), 7, Access::ALL), Err(MapError::MisalignedHost(Hpa(7))));
    assert_eq!(map(range(end - 4096, 8192), 0, Access::ALL), Err(MapError::Beyond(Gpa(end))));
    assert_eq!(map(range(end + 4096, 4096), 0, Access::ALL), Err(MapError::Beyond(Gpa(end + 4096))));
    assert_eq!(map(range(0, 8192), (1 << 52) - 4096, Access::ALL), Err(MapError::BeyondHost(Hpa(1 << 52))));
    assert_eq!(map(range(0, 8192), u64::MAX - 4095, Access::ALL), Err(MapError::BeyondHost(Hpa(u64::MAX - 4095))));
    let write_only = Access { read: false, write: true, execute: false };
    assert_eq!(map(range(0, 4096), 0, write_only), Err(MapError::Inexpressible(write_only)));
    assert_eq!(map(range(end - 4096, 4096), 0, Access::ALL), Ok(Stale::EMPTY));
    assert_eq!(map(range(0x5000, 0), 0, Access::ALL), Ok(Stale::EMPTY));
    assert_eq!(leaf_at(&tree, &pool, u64::MAX), None);
    assert!(leaf_at(&tree, &pool, end - 1).is_some());
}

#[test]
fn debts_merge_into_one_that_covers_both() {
    let both = Stale::of(range(0x1000, 0x1000)).merge(Stale::EMPTY).merge(Stale::of(range(0x8000, 0x1000)));
    assert_eq!(both.range(), range(0x1000, 0x8000));
    assert!(Stale::EMPTY.merge(Stale::EMPTY).is_empty());
    assert_eq!(Stale::EMPTY.range().bytes(), 0);
}

/// One call on the tree.
#[derive(Clone, Copy, Debug)]
enum Step {
    Map(GpaRange, Hpa, Access),
    Unmap(GpaRange),
    Protect(GpaRange, Access),
    ProtectPage(Gpa, Access),
}

/// Ranges in a window of 3 GiB whose ends like the borders of large pages.
fn any_range() -> impl Strategy<Value = GpaRange> {
    let edge = || {
        let page = prop_oneof![3 => Just(0_u64), 1 => 0..3_u64, 1 => 510..512_u64];
        (0..3_u64, prop_oneof![2 => 0..3_u64, 1 => 510..512_u64], page)
            .prop_map(|(gib, two_mib, page)| gib << 30 | two_mib << 21 | page << 12)
    };
    (edge(), edge()).prop_map(|(a, b)| range(a.min(b), a.max(b) - a.min(b)))
}

fn any_access() -> impl Strategy<Value = Access> {
    (any::<bool>(), any::<bool>()).prop_map(|(write, execute)| Access { read: true, write, execute })
}

fn any_step() -> impl Strategy<Value = Step> {
    // The distance between the two addresses decides which leaves are possible.
    let shift = prop_oneof![3 => Just(4 * GIB), 1 => Just(4 * GIB + 6 * MIB), 1 => Just(8 * GIB + 0x3000)];
    prop_oneof![
        2 => (any_range(), shift, any_access())
            .prop_map(|(range, shift, access)| Step::Map(range, Hpa(range.start.0 + shift), access)),
        1 => any_range().prop_map(Step::Unmap),
        1 => (any_range(), any_access()).prop_map(|(range, access)| Step::Protect(range, access)),
        1 => (any_range(), any_access()).prop_map(|(range, access)| Step::ProtectPage(range.start, access)),
    ]
}

/// The model: 4 KiB page number of the guest to page number of the host and rights. To stay quick it follows only the
/// pages at which something can change, the ends of all ranges and their neighbours.
#[derive(Default)]
struct Model {
    pages: BTreeMap<u64, Option<(u64, Access)>>,
}

impl Model {
    fn watching(steps: &[Step]) -> Self {
        let mut pages = BTreeMap::new();
        for step in steps {
            let range = match *step {
                Step::Map(range, ..) | Step::Unmap(range) | Step::Protect(range, _) => range,
                Step::ProtectPage(gpa, _) => range(gpa.0, 4096),
            };
            for edge in [range.start.0, range.end().0] {
                for page in [(edge >> 12).saturating_sub(1), edge >> 12, (edge >> 12) + 1] {
                    pages.insert(page, None);
                }
            }
        }
        Self { pages }
    }

    fn mapped_in(&self, range: GpaRange) -> bool {
        self.pages.iter().any(|(page, to)| range.contains(Gpa(page << 12)) && to.is_some())
    }

    fn apply(&mut self, step: Step) {
        for (page, to) in &mut self.pages {
            let gpa = Gpa(page << 12);
            match step {
                Step::Map(range, hpa, access) if range.contains(gpa) => {
                    *to = Some(((hpa.0 + gpa.0 - range.start.0) >> 12, access));
                }
                Step::Unmap(range) if range.contains(gpa) => *to = None,
                Step::Protect(range, access) if range.contains(gpa) => {
                    *to = to.map(|(host, _)| (host, access));
                }
                Step::ProtectPage(page, access) if page == gpa => *to = to.map(|(host, _)| (host, access)),
                _ => {}
            }
        }
    }
}

fn run(format: impl Format, pool_size: usize, steps: &[Step]) -> Result<(), proptest::test_runner::TestCaseError> {
    let pool = Pool::of(pool_size);
    let mut tree = Tree::new(format, &pool).expect("pool");
    let mut model = Model::watching(steps);

    for step in steps {
        let before: Vec<_> = model.pages.iter().map(|(page, to)| (*page, *to)).collect();
        let left = pool.left();
        let result = match *step {
            Step::Map(range, hpa, access) => tree.map(&pool, range, hpa, access),
            Step::Unmap(range) => tree.unmap(&pool, range),
            Step::Protect(range, access) => tree.protect(&pool, range, access),
            Step::ProtectPage(gpa, access) => tree.protect_page(&pool, gpa, access),
        };

        match result {
            Ok(stale) => {
                if let Step::Map(range, ..) = *step {
                    prop_assert!(!model.mapped_in(range), "mapped over something");
                }
                model.apply(*step);

                // Whatever lost a right is owed.
                for (page, old) in before {
                    let Some((_, old)) = old else { continue };
                    let kept = model.pages[&page].is_some_and(|(_, new)| new.includes(old));
                    prop_assert!(kept || stale.range().contains(Gpa(page << 12)), "page {page:#x} is not owed");
                }
            }
            // A leaf of 1 GiB may have been split once, and then not again; that changes no translation.
            Err(MapError::OutOfTables) if matches!(step, Step::ProtectPage(..)) => prop_assert!(pool.left() <= left),
            Err(MapError::OutOfTables) => prop_assert_eq!(pool.left(), left),
            Err(MapError::Overlaps(page)) => {
                prop_assert_eq!(pool.left(), left);
                prop_assert!(tree.lookup(&pool, page.start).is_some());
            }
            Err(error) => prop_assert!(false, "{error}"),
        }

        for (page, to) in &model.pages {
            let gpa = Gpa(page << 12);
            let found = tree.lookup(&pool, gpa).map(|leaf| (leaf.translate(gpa).0 >> 12, leaf.access));
            prop_assert_eq!(found, *to, "at page {:#x} after {:x?}", page, step);
        }
    }

    tree.destroy(&pool);
    prop_assert_eq!(pool.left(), pool_size);
    Ok(())
}

proptest! {
    #[test]
    fn npt_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..24), pool in 1..24_usize, one_gib_pages in any::<bool>(),
    ) {
        run(Npt { one_gib_pages }, pool, &steps)?;
    }
}

proptest! {
    #[test]
    fn arm_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..24), pool in 1..24_usize, ipa_bits in 32..=48_u32,
    ) {
        // A root may need up to 16 of the tables.
        run(Vmsa::new(ipa_bits, 48, false).expect("possible"), pool + 16, &steps)?;
    }
}

proptest! {
    // Gigabytes in small pages: few cases, or the tests take minutes.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn npt_with_many_tables_agrees_with_the_model(steps in prop::collection::vec(any_step(), 1..12)) {
        run(NPT, 3000, &steps)?;
    }

    #[test]
    fn an_invented_format_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..12), pool in 1..1200_usize,
    ) {
        run(Odd, pool, &steps)?;
    }
}
