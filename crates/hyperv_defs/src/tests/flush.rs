use alloc::vec;
use alloc::vec::Vec;

use addr::{Gva, PageSize};

use super::{bytes, flush_of, refusal, status};
use crate::{Call, Code, Control, FlushFlags, GvaPages, GvaRange, Offered, Scope, Status, Targets, fast_input, parse};

const SPACE: Control = Control::new(Code::FlushVirtualAddressSpace);
const LIST: Control = Control::new(Code::FlushVirtualAddressList).with_rep_count(1);
const SPACE_EX: Control = Control::new(Code::FlushVirtualAddressSpaceEx);
const LIST_EX: Control = Control::new(Code::FlushVirtualAddressListEx).with_rep_count(1);

const ALL_PROCESSORS: u64 = 1 << 0;
const ALL_SPACES: u64 = 1 << 1;
const NON_GLOBAL: u64 = 1 << 2;
const EXTENDED: u64 = 1 << 3;

fn list(control: Control, input: &[u8]) -> Vec<GvaPages> {
    match flush_of(control, input).scope {
        Scope::List(ranges) => {
            assert_eq!(ranges.len(), ranges.clone().count());
            ranges.collect()
        }
        Scope::Everything => panic!("a list was given"),
    }
}

fn pages(first: u64, count: u64, size: PageSize) -> (Gva, u64, PageSize) {
    (Gva(first), count, size)
}

fn parts(range: GvaPages) -> (Gva, u64, PageSize) {
    (range.first(), range.count(), range.size())
}

#[test]
fn flush_of_a_space_is_read_field_by_field() {
    let input = bytes(&[0x1234_5000, ALL_SPACES | NON_GLOBAL, 0b1010]);
    let flush = flush_of(SPACE, &input);
    assert_eq!(flush.address_space, 0x1234_5000);
    assert_eq!(flush.flags, FlushFlags::ALL_VIRTUAL_ADDRESS_SPACES | FlushFlags::NON_GLOBAL_MAPPINGS_ONLY);
    assert_eq!(flush.targets, Targets::Mask(0b1010));
    assert!(matches!(flush.scope, Scope::Everything));
}

/// (B14)
#[test]
fn list_begins_with_the_element_that_is_next() {
    let input = bytes(&[0, 0, 1, 0xdead_beef_dead_beef, 0x7000, 0x9001]);
    let next = list(LIST.with_rep_count(3).with_rep_start(1), &input);
    assert_eq!(next.iter().map(|range| range.first()).collect::<Vec<_>>(), [Gva(0x7000), Gva(0x9000)]);
    assert_eq!(list(LIST.with_rep_count(3).with_rep_start(2), &input).len(), 1);
    assert_eq!(list(LIST.with_rep_count(3), &input).len(), 3);
}

/// (B22, B23)
#[test]
fn registers_carry_what_memory_carries() {
    let words =
        [0x1000, 0, 0b11, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x7000, 0x8000, 0x9000, 0xa000, 0xb000];
    let input = fast_input(&words);
    let found = list(LIST.with_fast().with_rep_count(11), &input);
    assert_eq!(found, list(LIST.with_rep_count(11), &bytes(&words)));
    assert_eq!(found.last().map(|range| range.first()), Some(Gva(0xb000)));

    assert_eq!(flush_of(SPACE.with_fast(), &input).targets, Targets::Mask(0b11));
}

/// (C6)
#[test]
fn all_processors_outweighs_the_mask() {
    for mask in [0, 1, !0] {
        let input = bytes(&[0, ALL_PROCESSORS, mask, 0x1000]);
        assert_eq!(flush_of(SPACE, &input).targets, Targets::All);
        assert_eq!(flush_of(LIST, &input).targets, Targets::All);
    }
    let input = bytes(&[0, ALL_PROCESSORS, 0, 0b1, 0b100]);
    assert_eq!(flush_of(SPACE_EX.with_variable_words(1), &input).targets, Targets::All);
}

/// (C7)
#[test]
fn mask_of_absent_vps_is_no_error_and_reaches_nobody() {
    let input = bytes(&[0, 0, !0b111]);
    assert_eq!(flush_of(SPACE, &input).targets.indices(3).count(), 0);
}

/// (C8)
#[test]
fn empty_mask_is_an_error() {
    assert_eq!(status(SPACE, &[0, 0, 0]), Status::InvalidParameter);
    assert_eq!(status(SPACE, &[0, ALL_SPACES | NON_GLOBAL, 0]), Status::InvalidParameter);
    assert_eq!(status(LIST, &[0, 0, 0, 0x1000]), Status::InvalidParameter);
}

/// (C9)
#[test]
fn each_reserved_flag_is_an_error() {
    for bit in 4..64 {
        let flags = 1 << bit;
        assert_eq!(status(SPACE, &[0, flags, 1]), Status::InvalidParameter);
        assert_eq!(status(LIST, &[0, flags, 1, 0]), Status::InvalidParameter);
        assert_eq!(status(SPACE_EX, &[0, flags, 1, 0]), Status::InvalidParameter);
        assert_eq!(status(LIST_EX, &[0, flags, 1, 0, 0]), Status::InvalidParameter);
        assert_eq!(status(SPACE, &[0, flags | ALL_PROCESSORS, 1]), Status::InvalidParameter);
    }
}

/// (C10)
#[test]
fn address_space_may_be_anything() {
    for space in [0, 0xfff, 0x8000_0000_0000_0001, !0] {
        let input = bytes(&[space, 0, 1, 0x1000]);
        assert_eq!(flush_of(SPACE, &input).address_space, space);
        assert_eq!(flush_of(LIST, &input).address_space, space);
    }
}

/// (C14)
#[test]
fn list_cannot_spare_global_translations() {
    assert_eq!(status(LIST, &[0, NON_GLOBAL, 1, 0x1000]), Status::InvalidParameter);
    assert_eq!(status(LIST_EX, &[0, NON_GLOBAL, 1, 0, 0x1000]), Status::InvalidParameter);
    assert!(flush_of(SPACE_EX, &bytes(&[0, NON_GLOBAL, 1, 0])).flags.contains(FlushFlags::NON_GLOBAL_MAPPINGS_ONLY));
}

/// (C15 to C17)
#[test]
fn simple_range_counts_its_further_pages() {
    assert_eq!(parts(GvaRange(0x7000).simple()), pages(0x7000, 1, PageSize::Size4K));
    assert_eq!(parts(GvaRange(0x7fff).simple()), pages(0x7000, 4096, PageSize::Size4K));
    assert_eq!(parts(GvaRange(0xffff_8000_0000_0001).simple()), pages(0xffff_8000_0000_0000, 2, PageSize::Size4K));

    let mut words = vec![0, 0, 1];
    words.resize(3 + 509, 0x40_0fff);
    let found = list(LIST.with_rep_count(509), &bytes(&words));
    assert_eq!(found.iter().map(|range| range.small_pages()).sum::<u64>(), 509 * 4096);
}

#[test]
fn bit_11_counts_pages_unless_the_format_is_extended() {
    let input = bytes(&[0, 0, 1, 0x4000_0800]);
    assert_eq!(parts(list(LIST, &input)[0]), pages(0x4000_0000, 0x801, PageSize::Size4K));
    let input = bytes(&[0, EXTENDED, 1, 0x4000_0800]);
    assert_eq!(parts(list(LIST, &input)[0]), pages(0x4000_0000, 1, PageSize::Size2M));
}

/// (C19)
#[test]
fn range_that_is_not_canonical_is_a_range_like_others() {
    let input = bytes(&[0, 0, 1, 0x1000, 0x1234_5678_9abc_d003, 0x2000]);
    let found: Vec<_> = list(LIST.with_rep_count(3), &input).into_iter().map(parts).collect();
    let between = pages(0x1234_5678_9abc_d000, 4, PageSize::Size4K);
    assert_eq!(found, [pages(0x1000, 1, PageSize::Size4K), between, pages(0x2000, 1, PageSize::Size4K)]);
}

/// (C20)
#[test]
fn range_does_not_wrap_around() {
    let last = GvaRange(!0).simple();
    assert_eq!(parts(last), pages(0xffff_ffff_ffff_f000, 1, PageSize::Size4K));
    assert_eq!(last.addresses().collect::<Vec<_>>(), [Gva(0xffff_ffff_ffff_f000)]);
    assert_eq!(GvaRange(0xffff_ffff_ffff_dfff).simple().count(), 3);

    assert_eq!(parts(GvaRange(!0).extended()), pages(0xffff_ffff_c000_0000, 1, PageSize::Size1G));
    assert_eq!(parts(GvaRange(!(1 << 12)).extended()), pages(0xffff_ffff_ffe0_0000, 1, PageSize::Size2M));
}

/// (C21)
#[test]
fn extended_range_counts_pages_of_its_size() {
    let two_mib = GvaRange(0x4020_0000 | 1 << 11 | 7).extended();
    assert_eq!(parts(two_mib), pages(0x4020_0000, 8, PageSize::Size2M));
    assert_eq!(two_mib.small_pages(), 8 * 512);
    assert_eq!(two_mib.addresses().nth(7), Some(Gva(0x4020_0000 + 7 * 0x20_0000)));
    assert_eq!(two_mib.addresses().count(), 8);

    let one_gib = GvaRange(0x8000_0000 | 1 << 12 | 1 << 11 | 1).extended();
    assert_eq!(parts(one_gib), pages(0x8000_0000, 2, PageSize::Size1G));
    assert_eq!(one_gib.small_pages(), 2 << 18);

    assert_eq!(parts(GvaRange(0x7000 | 0x7ff).extended()), pages(0x7000, 2048, PageSize::Size4K));
    let with_reserved_bits = GvaRange(0x4020_0000 | 0xff << 13 | 1 << 11).extended();
    assert_eq!(parts(with_reserved_bits), pages(0x4020_0000, 1, PageSize::Size2M));

    let inside_a_page = GvaRange(0x8020_0000 | 1 << 12 | 1 << 11).extended();
    assert_eq!(inside_a_page.first(), Gva(0x8000_0000), "the whole page goes");
}

/// (C22)
#[test]
fn extended_format_needs_to_be_offered() {
    let input = [0, EXTENDED, 1, 0x1000];
    let plain = Offered::all().difference(Offered::EXTENDED_RANGES);
    assert_eq!(refusal(LIST, &input, plain), Status::InvalidParameter.into());
    assert_eq!(refusal(LIST_EX, &[0, EXTENDED, 1, 0, 0x1000], plain), Status::InvalidParameter.into());
    assert!(parse(LIST, &bytes(&input), Offered::all()).is_ok());
}

/// (C23)
#[test]
fn extended_format_needs_a_list() {
    assert_eq!(status(SPACE, &[0, EXTENDED, 1]), Status::InvalidParameter);
    assert_eq!(status(SPACE_EX, &[0, EXTENDED, 1, 0]), Status::InvalidParameter);
}

/// (C24)
#[test]
fn sparse_set_of_one_reaches_one() {
    let input = bytes(&[0, ALL_SPACES, 0, 0b10, 0b10]);
    let flush = flush_of(SPACE_EX.with_variable_words(1), &input);
    assert_eq!(flush.targets.indices(128).collect::<Vec<_>>(), [65]);
    assert!(flush.targets.contains(65) && !flush.targets.contains(1));
}

/// (C25, C26)
#[test]
fn format_all_means_all_with_banks_or_without() {
    assert_eq!(flush_of(SPACE_EX, &bytes(&[0, 0, 1, 0])).targets, Targets::All);
    let input = bytes(&[0, 0, 1, 0b11, 0, 0]);
    assert_eq!(flush_of(SPACE_EX.with_variable_words(2), &input).targets, Targets::All);
}

/// (C27)
#[test]
fn list_lies_behind_the_banks_whether_they_count_or_not() {
    for format in [0, 1] {
        let input = bytes(&[0, 0, format, 0b101, 0x21, 0x4, 0x7000, 0x9000]);
        let control = LIST_EX.with_variable_words(2).with_rep_count(2);
        let first: Vec<_> = list(control, &input).iter().map(GvaPages::first).collect();
        assert_eq!(first, [Gva(0x7000), Gva(0x9000)]);
        let rest: Vec<_> = list(control.with_rep_start(1), &input).iter().map(GvaPages::first).collect();
        assert_eq!(rest, [Gva(0x9000)]);
    }
}

/// (C28)
#[test]
fn unknown_format_of_a_set_is_an_error() {
    for format in [2, 3, 1 << 32, !0] {
        assert_eq!(status(SPACE_EX, &[0, 0, format, 0]), Status::InvalidParameter);
        assert_eq!(status(SPACE_EX, &[0, ALL_PROCESSORS, format, 0]), Status::InvalidParameter);
        assert_eq!(status(LIST_EX, &[0, 0, format, 0, 0x1000]), Status::InvalidParameter);
    }
}

/// (C29)
#[test]
fn variable_header_holds_exactly_the_banks() {
    let words = [0; 80];
    for format in [0, 1] {
        for (mask, told) in [(0, 1), (1, 0), (0b11, 1), (0b11, 3), (!0, 63), (1, 2), (!0, 0)] {
            let mut words = words;
            words[2] = format;
            words[3] = mask;
            let control = SPACE_EX.with_variable_words(told);
            assert_eq!(status(control, &words), Status::InvalidHypercallInput, "{mask:#x} {told}");
        }
    }
}

/// (C30, C31)
#[test]
fn empty_set_is_no_error_and_reaches_nobody() {
    let nothing = bytes(&[0, 0, 0, 0]);
    assert_eq!(flush_of(SPACE_EX, &nothing).targets.indices(4096).count(), 0);
    let empty_banks = bytes(&[0, 0, 0, 0b1001, 0, 0]);
    let flush = flush_of(SPACE_EX.with_variable_words(2), &empty_banks);
    assert_eq!(flush.targets.indices(4096).count(), 0);
}

/// (C32)
#[test]
fn full_set_reaches_all_that_exist_and_no_more() {
    let mut words = vec![0, 0, 0, !0];
    words.resize(4 + 64, !0);
    let input = bytes(&words);
    let flush = flush_of(SPACE_EX.with_variable_words(64), &input);
    for count in [1, 3, 64, 65, 100, 4096] {
        assert!(flush.targets.indices(count).eq(0..count));
    }
    assert!(flush.targets.indices(u32::MAX).eq(0..4096), "a set reaches no further");
}

/// What Linux 6.1 and FreeBSD 15 send, from their sources.
#[test]
fn requests_of_real_guests_are_understood() {
    let linux_unmap = bytes(&[0x1_0a5c_6000, 0, 0b0110, 0x7f12_3456_7000 | 32]);
    assert_eq!(parts(list(Control(1 << 32 | 0x0003), &linux_unmap)[0]), pages(0x7f12_3456_7000, 33, PageSize::Size4K));
    let linux_batch_for_all = bytes(&[0, ALL_SPACES | ALL_PROCESSORS | NON_GLOBAL, 0]);
    assert_eq!(flush_of(Control(0x0002), &linux_batch_for_all).targets, Targets::All);
    let freebsd_one_page = bytes(&[0x7654_3000, NON_GLOBAL, 0b1111]);
    assert!(matches!(parse(SPACE, &freebsd_one_page, Offered::FLUSH), Ok(Call::Flush(_))));
    let linux_large = bytes(&[0x1000, 0, 0, 0b11, 0, 0b1, 0x7000]);
    let flush = flush_of(LIST_EX.with_variable_words(2), &linux_large);
    assert_eq!(flush.targets.indices(96).collect::<Vec<_>>(), [64]);
}
