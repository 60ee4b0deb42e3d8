//! Debts of flushes that grow leaf by leaf.

use addr::{Gpa, GpaRange, PAGE_BYTES};
use proptest::prelude::{any, prop, prop_assert_eq, proptest};

use crate::Stale;

proptest! {
    #[test]
    fn debt_that_grows_leaf_by_leaf_is_the_same_as_merged_debts(
        leaves in prop::collection::vec((0_u64..64, 0_u32..2, any::<bool>(), any::<bool>()), 0..40)
    ) {
        let (mut grown, mut merged) = (Stale::EMPTY, Stale::EMPTY);
        for (page, level, is_local, is_sized) in leaves {
            let page = GpaRange::new(Gpa(page * PAGE_BYTES), PAGE_BYTES).expect("it is low");
            let leaf = if is_local { Stale::local(page, level) } else { Stale::leaf(page, level) };
            let leaf = if is_sized { leaf } else { leaf.of_any_size() };
            grown.add(leaf);
            merged = merged.merge(leaf);
            prop_assert_eq!(grown, merged);
        }
    }
}
