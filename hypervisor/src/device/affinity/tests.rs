use super::{affinity, vcpu_at};

#[test]
fn every_vcpu_is_found_by_its_affinity() {
    for number in (0..5000).chain([0xf_fffe, 0xf_ffff]) {
        assert_eq!(vcpu_at(affinity(number), number + 1), Some(number));
        assert_eq!(vcpu_at(affinity(number), number), None, "there are fewer");
    }
}

#[test]
fn clusters_have_sixteen() {
    assert_eq!((affinity(15), affinity(16), affinity(0x1234)), (0xf, 0x100, 0x1_2304));
}

#[test]
fn bits_that_no_vcpu_has_name_none() {
    for bit in (4..8).chain(24..64) {
        assert_eq!(vcpu_at(1 << bit, u32::MAX), None, "bit {bit}");
    }
}
