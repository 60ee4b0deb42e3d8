//! The windows of the hypervisor's own address space: the direct map, device registers, and stacks.
//!
//! Each architecture's `paging` says where the windows are, and makes the tables. Mappings are added here and never
//! changed or removed.

use core::sync::atomic::{AtomicU64, Ordering};

use addr::{Hpa, HpaRange, Hva, PAGE_BYTES};

use super::paging::{DATA, DEVICE, DIRECT_MAP, MMIO, STACKS, add, is_mapped};
use crate::frames::Frames;

/// First HPA that has no place in the direct map; RAM from there on is not used.
pub(super) const DIRECT_MAP_END: Hpa = Hpa(MMIO - DIRECT_MAP);
/// First HPA that has no place in the window for device registers.
pub(crate) const MMIO_END: Hpa = Hpa(STACKS - MMIO);

/// Where the next stack's lower guard page goes.
static NEXT_STACK: AtomicU64 = AtomicU64::new(STACKS);

/// Where the direct map has the byte at `hpa`, provided it is RAM outside of the image.
#[inline(always)]
pub(crate) const fn direct_map(hpa: Hpa) -> Hva {
    Hva(hpa.0.wrapping_add(DIRECT_MAP))
}

/// The HPA of an address in the direct map.
#[inline(always)]
pub(crate) const fn direct_map_inverse(hva: Hva) -> Hpa {
    Hpa(hva.0.wrapping_sub(DIRECT_MAP))
}

/// Maps device registers, uncached. Mapping the same ones again is harmless.
///
/// # Panics
/// When there is no memory for tables, or the address is beyond the window.
pub(crate) fn map_mmio(start: Hpa, bytes: u64) -> Hva {
    let range = HpaRange::new(start, bytes).filter(|range| range.end() <= MMIO_END);
    let range = whole_pages(&range.unwrap_or_else(|| panic!("device registers at {start} cannot be mapped")));
    add(Hva(MMIO + range.start.0), range, DEVICE);
    Hva(MMIO + start.0)
}

/// Makes a stack of `bytes` with unmapped pages at both ends and gives its top.
///
/// # Panics
/// When there is no memory for it: stacks are made at boot only.
pub(crate) fn map_stack(bytes: u64) -> Hva {
    let bottom = NEXT_STACK.fetch_add(bytes + PAGE_BYTES, Ordering::Relaxed) + PAGE_BYTES;
    let frames = Frames::allocate(bytes, PAGE_BYTES).expect("memory for a stack");
    let range = HpaRange::new(frames.hpa(), frames.bytes()).expect("RAM is within the address space");
    // The stack is never given back.
    core::mem::forget(frames);
    add(Hva(bottom), range, DATA);
    Hva(bottom + bytes)
}

/// Whether `address` is in the unmapped page below a stack.
pub(crate) fn is_guard(address: Hva) -> bool {
    address.0 >= STACKS && address.0 < NEXT_STACK.load(Ordering::Relaxed) && !is_mapped(address)
}

/// The pages that contain `range`.
pub(super) fn whole_pages(range: &HpaRange) -> HpaRange {
    let start = range.start.page(addr::PageSize::Size4K);
    HpaRange::new(start, (range.end().0 - start.0).next_multiple_of(PAGE_BYTES)).expect("checked by the caller")
}

/// The part of `range` below `end`.
pub(super) fn clamp(range: &HpaRange, end: Hpa) -> HpaRange {
    let bytes = range.bytes().min(end.0.saturating_sub(range.start.0));
    HpaRange::new(range.start, bytes).expect("shorter than a range that exists")
}
