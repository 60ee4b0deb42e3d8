//! Valid headers, and invalid ones.

extern crate std;

use std::vec;
use std::vec::Vec;

use super::{GRAIN, ImageError, Placement, place};

const MIB: u64 = 1 << 20;

fn image(offset: u64, size: u64, flags: u64, bytes: usize) -> Vec<u8> {
    let mut file = vec![0; bytes.max(64)];
    file[8..16].copy_from_slice(&offset.to_le_bytes());
    file[16..24].copy_from_slice(&size.to_le_bytes());
    file[24..32].copy_from_slice(&flags.to_le_bytes());
    file[56..60].copy_from_slice(b"ARM\x64");
    file
}

#[test]
fn parts_follow_each_other_without_overlap() {
    let file = image(0, 33 * MIB, 0xa, 4096);
    let placement = place(&file, 5 * MIB, 64 * MIB);
    assert_eq!(placement, Ok(Placement { kernel: 0, device_tree: 34 * MIB, initrd: 36 * MIB }));
}

#[test]
fn file_that_is_longer_than_its_header_says_keeps_its_room() {
    let file = image(0x1000, 64, 0xa, 3 << 20);
    assert_eq!(place(&file, 0, 64 * MIB).map(|placed| placed.device_tree), Ok(4 * MIB));
}

#[test]
fn kernel_from_before_the_size_was_told_goes_to_its_fixed_offset() {
    let file = image(0, 0, 0, 4096);
    assert_eq!(place(&file, 0, 64 * MIB).map(|placed| placed.kernel), Ok(0x8_0000));
}

#[test]
fn last_byte_of_the_initrd_may_be_the_last_of_memory() {
    let file = image(0, 4 * MIB, 0xa, 64);
    assert!(place(&file, 2 * MIB, 8 * MIB).is_ok());
    let error = place(&file, 2 * MIB + 1, 8 * MIB);
    assert_eq!(error, Err(ImageError::MemoryTooSmall { needs: 8 * MIB + 1, has: 8 * MIB }));
}

#[test]
fn what_is_no_image_is_refused_with_its_first_bytes() {
    assert_eq!(place(b"MZ", 0, GRAIN), Err(ImageError::NotAnImage([b'M', b'Z', 0, 0])));
    assert_eq!(place(&[], 0, GRAIN), Err(ImageError::NotAnImage([0; 4])));
    assert_eq!(place(&[0x1f; 64], 0, GRAIN), Err(ImageError::NotAnImage([0x1f; 4])));
    assert_eq!(place(&image(0, 0, 0, 64)[..63], 0, GRAIN), Err(ImageError::NotAnImage([0; 4])));
}

#[test]
fn nonsense_in_the_header_is_refused() {
    assert_eq!(place(&image(0, MIB, 1, 64), 0, 64 * MIB), Err(ImageError::BigEndian));
    for (offset, size) in [(GRAIN, MIB), (u64::MAX, MIB), (0, u64::MAX), (u64::MAX, u64::MAX)] {
        assert_eq!(place(&image(offset, size, 0, 64), u64::MAX, u64::MAX), Err(ImageError::BadHeader));
    }
}

#[test]
fn largest_initrd_does_not_overflow() {
    let error = place(&image(0, MIB, 0, 64), u64::MAX, 64 * MIB);
    assert!(matches!(error, Err(ImageError::MemoryTooSmall { needs: u64::MAX, .. })));
    let error = place(&image(0, MIB, 0, 64), u64::MAX, u64::MAX);
    assert!(error.is_err(), "it would end behind the last address: {error:?}");
}
