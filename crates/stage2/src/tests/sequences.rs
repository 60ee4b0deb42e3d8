//! Random sequences of operations against a naive model: a map of 4 KiB pages.

use super::{EPT, GIB, Guest, MIB, NPT, Pool, devices, range};
use crate::{Access, Ept, Format, Iommu, MapError, Memory, Npt, PageTableEntry, Replace, Source, Vmsa};
use addr::{Gpa, GpaRange, Hpa};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

extern crate std;
use std::collections::BTreeMap;
use std::vec::Vec;

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
    fn largest_leaf(&self) -> u32 {
        0
    }
    fn host_limit(&self) -> Hpa {
        Hpa(1 << 40)
    }
    fn expresses(&self, _: Access) -> bool {
        true
    }
    fn replace(&self) -> Replace {
        Replace::Freely
    }
    fn denials_are_cached(&self) -> bool {
        false
    }
    fn records_writes(&self) -> bool {
        false
    }
    fn table(&self, hpa: Hpa, _: u32) -> u64 {
        hpa.0 | 1
    }
    fn quiet(&self) -> u64 {
        1 << 50
    }
    fn idle(&self) -> u64 {
        1 << 51
    }
    fn broken(&self, _: u64) -> u64 {
        unreachable!("only large leaves are broken")
    }
    fn is_broken(&self, _: u64) -> bool {
        false
    }
    fn unbroken(&self, bits: u64) -> u64 {
        bits
    }
    fn leaf(&self, hpa: Hpa, _: u32, access: Access, _: Memory) -> u64 {
        hpa.0 | 1 | Self::rights(access)
    }
    fn decode(&self, level: u32, bits: u64) -> PageTableEntry {
        let hpa = Hpa(bits & 0xff_ffff_f000);
        match (bits & 1, level) {
            (0, _) => PageTableEntry::Empty,
            (_, 0) => {
                let access = Access { read: bits & 2 == 0, write: bits & 4 == 0, execute: bits & 8 == 0 };
                PageTableEntry::Leaf { hpa, access }
            }
            _ => PageTableEntry::Table(hpa),
        }
    }
    fn with_access(&self, bits: u64, access: Access) -> u64 {
        bits & !0xe | Self::rights(access)
    }
    fn part(&self, _: u64, _: u32, _: u64) -> u64 {
        unreachable!("there are no large leaves to split")
    }
    fn whole(&self, _: u64, _: u32) -> u64 {
        unreachable!("there are no large leaves to make")
    }
    fn gathered(&self, bits: u64, _: u64) -> u64 {
        bits
    }
    fn attributes(&self, bits: u64) -> u64 {
        bits & 0xf
    }
    fn is_touched(&self, _: u64) -> bool {
        true
    }
    fn touched(&self, bits: u64) -> u64 {
        bits
    }
    fn aged(&self, bits: u64) -> u64 {
        bits
    }
    fn is_writable(&self, bits: u64) -> bool {
        bits & 4 == 0
    }
    fn is_executable(&self, _: u64) -> bool {
        true
    }
    fn is_written(&self, _: u64, _: Source) -> bool {
        true
    }
    fn write_protected(&self, bits: u64) -> u64 {
        bits
    }
    fn recorded(&self, bits: u64) -> u64 {
        bits
    }
    fn writable(&self, bits: u64) -> u64 {
        bits
    }
    fn released(&self, bits: u64) -> u64 {
        bits
    }
}

impl Odd {
    fn rights(access: Access) -> u64 {
        (u64::from(!access.read) << 1) | (u64::from(!access.write) << 2) | (u64::from(!access.execute) << 3)
    }
}

/// One call of the tree.
#[derive(Clone, Copy, Debug)]
enum Step {
    Map(GpaRange, Hpa, Access),
    Unmap(GpaRange),
    Protect(GpaRange, Access),
    ProtectPage(Gpa, Access),
}

/// Ranges in a window of 3 GiB, with ends near the borders of large pages.
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

/// The model: a map from guest page number to host page number and rights. To be fast it has only the pages where
/// something can change: the ends of all ranges and their neighbours.
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

/// Takes the steps on a tree and on the model, and compares them after each. `also` compares the tree with what the
/// model has for a page.
fn run<F: Format>(
    format: F,
    pool_size: usize,
    steps: &[Step],
    also: impl Fn(&Guest<F>, &Pool, Gpa, Option<(u64, Access)>),
) -> Result<(), proptest::test_runner::TestCaseError> {
    let pool = Pool::of(pool_size);
    let mut tree = Guest::new(format, &pool).expect("pool");
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

                // Each lost right needs a flush.
                for (page, old) in before {
                    let Some((_, old)) = old else { continue };
                    let kept = model.pages[&page].is_some_and(|(_, new)| new.includes(old));
                    prop_assert!(kept || stale.range().contains(Gpa(page << 12)), "page {page:#x} is not owed");
                }
            }
            // A leaf of 1 GiB may have been split once, and then not again; this changes no translation.
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
            also(&tree, &pool, gpa, *to);
        }
    }

    tree.destroy(&pool);
    prop_assert_eq!(pool.left(), pool_size);
    Ok(())
}

/// A device of the VM reaches the same host page as the guest, with the same right to write.
fn devices_agree(tree: &Guest<Npt>, pool: &Pool, gpa: Gpa, to: Option<(u64, Access)>) {
    let found = devices::walk(pool, tree.root(), 4, gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), access.write)), "a device's access to {gpa}");
}

/// The same behind the other vendor's IOMMU.
fn devices_of_vt_d_agree(tree: &Guest<Npt>, pool: &Pool, gpa: Gpa, to: Option<(u64, Access)>) {
    let found = devices::walk_by_vt_d(pool, tree.root(), gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), access.write)), "a device's access to {gpa}");
}

/// The processor of Intel reaches the same host page with the same rights, and nothing on the way is a
/// misconfiguration. Nor is it for a device behind VT-d.
fn intel_agrees(tree: &Guest<Ept>, pool: &Pool, gpa: Gpa, to: Option<(u64, Access)>) {
    let found = devices::walk_ept(pool, tree.root(), gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), access)), "an access to {gpa}");
    let found = devices::walk_by_vt_d(pool, tree.root(), gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), access.write)), "a device's access to {gpa}");
}

/// The same where large pages are not executable.
fn intel_agrees_on_small_code(tree: &Guest<Ept>, pool: &Pool, gpa: Gpa, to: Option<(u64, Access)>) {
    let is_large = tree.lookup(pool, gpa).is_some_and(|leaf| leaf.level > 0);
    let allowed = |access: Access| Access { execute: access.execute && !is_large, ..access };
    let found = devices::walk_ept(pool, tree.root(), gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), allowed(access))), "an access to {gpa}");
    let found = devices::walk_by_vt_d(pool, tree.root(), gpa);
    assert_eq!(found, to.map(|(host, access)| (Hpa(host << 12), access.write)), "a device's access to {gpa}");
}

fn nothing_else<F>(_: &Guest<F>, _: &Pool, _: Gpa, _: Option<(u64, Access)>) {}

proptest! {
    #[test]
    fn npt_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..24), pool in 1..24_usize, one_gib_pages in any::<bool>(),
    ) {
        run(Npt { one_gib_pages, iommu: Iommu::AmdVi }, pool, &steps, devices_agree)?;
        run(Npt { one_gib_pages, iommu: Iommu::VtD }, pool, &steps, devices_of_vt_d_agree)?;
    }
}

proptest! {
    #[test]
    fn ept_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..24), pool in 1..24_usize, one_gib_pages: bool, accessed_dirty: bool,
    ) {
        let ept = Ept { one_gib_pages, accessed_dirty, small_code: false };
        run(ept, pool, &steps, intel_agrees)?;
        run(Ept { small_code: true, ..ept }, pool, &steps, intel_agrees_on_small_code)?;
    }
}

proptest! {
    #[test]
    fn arm_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..24), pool in 1..24_usize, ipa_bits in 32..=48_u32, bbm in 0..=2_u32,
    ) {
        // A root may need up to 16 of the tables.
        run(Vmsa::new(ipa_bits, 48, false).expect("possible").with_bbm(bbm), pool + 16, &steps, nothing_else)?;
    }
}

proptest! {
    // Gigabytes in small pages: few cases, or the tests take minutes.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn npt_with_many_tables_agrees_with_the_model(steps in prop::collection::vec(any_step(), 1..12)) {
        run(NPT, 3000, &steps, devices_agree)?;
    }

    #[test]
    fn ept_with_many_tables_agrees_with_the_model(steps in prop::collection::vec(any_step(), 1..12)) {
        run(EPT, 3000, &steps, intel_agrees)?;
    }

    #[test]
    fn an_invented_format_agrees_with_the_model(
        steps in prop::collection::vec(any_step(), 1..12), pool in 1..1200_usize,
    ) {
        run(Odd, pool, &steps, nothing_else)?;
    }
}
