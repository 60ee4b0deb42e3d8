use alloc::vec::Vec;

use super::bytes;
use crate::{SparseSet, Targets};

fn sparse(valid_banks: u64, banks: &[u8]) -> Targets<'_> {
    Targets::Sparse(SparseSet::new(valid_banks, banks).expect("as many banks as bits"))
}

/// The example of the manual's chapter.
#[test]
fn vps_0_5_and_130_are_two_banks() {
    let banks = bytes(&[0x21, 0x4]);
    let targets = sparse(0b101, &banks);
    assert_eq!(targets.indices(4096).collect::<Vec<_>>(), [0, 5, 130]);
    assert_eq!(targets.indices(131).collect::<Vec<_>>(), [0, 5, 130]);
    assert_eq!(targets.indices(130).collect::<Vec<_>>(), [0, 5]);
    assert_eq!(targets.indices(5).collect::<Vec<_>>(), [0]);
    assert_eq!(targets.banks(4096).collect::<Vec<_>>(), [(0, 0x21), (2, 0x4)]);
    assert!((0..5000).filter(|vp| targets.contains(*vp)).eq([0, 5, 130]));
}

#[test]
fn the_last_bank_is_found() {
    let banks = bytes(&[1 << 63, 1 << 63]);
    let targets = sparse(1 << 63 | 1, &banks);
    assert_eq!(targets.indices(u32::MAX).collect::<Vec<_>>(), [63, 4095]);
    assert!(targets.contains(4095) && !targets.contains(4096) && !targets.contains(u32::MAX));
}

#[test]
fn with_no_vcpu_nobody_is_named() {
    let banks = bytes(&[!0]);
    for targets in [Targets::All, Targets::Mask(!0), sparse(1, &banks)] {
        assert_eq!(targets.indices(0).count(), 0);
        assert_eq!(targets.banks(0).count(), 0);
    }
}

#[test]
fn mask_reaches_64_and_all_reaches_everybody() {
    assert!(Targets::Mask(!0).indices(4096).eq(0..64));
    assert!(Targets::All.indices(5000).eq(0..5000));
    assert_eq!(Targets::All.banks(65).collect::<Vec<_>>(), [(0, !0), (1, 1)]);
    assert_eq!(Targets::All.banks(u32::MAX).last(), Some((u32::MAX / 64, !0 >> 1)));
    assert!(Targets::All.contains(u32::MAX) && !Targets::Mask(!0).contains(64));
}

#[test]
fn exhausted_iterators_stay_so() {
    let mut indices = Targets::Mask(0b1).indices(1);
    assert_eq!((indices.next(), indices.next(), indices.next()), (Some(0), None, None));
}

#[test]
fn set_needs_as_many_banks_as_its_mask_has_bits() {
    let banks = bytes(&[1, 2]);
    assert!(SparseSet::new(0b11, &banks).is_some());
    assert!(SparseSet::new(0b111, &banks).is_none());
    assert!(SparseSet::new(0b1, &banks).is_none());
    assert!(SparseSet::new(0b1, &banks[..9]).is_none());
    assert!(SparseSet::new(0, &[]).is_some());
}
