//! Little-endian fields: read from files that may be truncated, written to tables that are built in place.

/// The `N` bytes at `offset`, if the file has them.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk::<N>().copied()
}

pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array_at(bytes, offset).map(u16::from_le_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array_at(bytes, offset).map(u32::from_le_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array_at(bytes, offset).map(u64::from_le_bytes)
}

/// Writes `value` at `offset` of a table of fixed layout; all offsets are inside it.
pub(crate) fn put(table: &mut [u8], offset: usize, value: &[u8]) {
    table[offset..offset + value.len()].copy_from_slice(value);
}
