use super::{Gpa, GpaRange, PageSize};

#[test]
fn page_and_offset_split_an_address_without_loss() {
    let address = Gpa(0x1234_5678_9abc);
    for size in PageSize::LARGEST_FIRST {
        assert_eq!(address.page(size).0 + address.offset_in(size), address.0);
        assert!(address.page(size).is_aligned(size));
    }
}

#[test]
fn sizes_and_levels_are_inverse() {
    for size in PageSize::LARGEST_FIRST {
        assert_eq!(PageSize::at_level(size.level()), Some(size));
    }
    assert_eq!(PageSize::at_level(3), None);
    assert_eq!(PageSize::Size1G.bytes(), 1 << 30);
}

#[test]
fn range_past_the_end_of_the_address_space_does_not_exist() {
    assert!(GpaRange::new(Gpa(u64::MAX), 1).is_none());
    assert!(GpaRange::new(Gpa(u64::MAX), 0).is_some());
}

#[test]
fn range_holds_its_first_byte_and_not_its_end() {
    let range = GpaRange::new(Gpa(0x1000), 0x1000).expect("fits");
    assert!(range.contains(Gpa(0x1000)));
    assert!(range.contains(Gpa(0x1fff)));
    assert!(!range.contains(Gpa(0x2000)));
    assert!(!range.contains(Gpa(0xfff)));
}

#[test]
fn neighbours_do_not_overlap() {
    let low = GpaRange::new(Gpa(0), 0x1000).expect("fits");
    let high = GpaRange::new(Gpa(0x1000), 0x1000).expect("fits");
    let both = GpaRange::new(Gpa(0x800), 0x1000).expect("fits");
    assert!(!low.overlaps(&high));
    assert!(low.overlaps(&both) && both.overlaps(&high));
}
