//! The simulated machine's IOMMU, and a device behind it that writes where it is told.
//!
//! The IOMMU keeps each translation until it is flushed. A device's write takes the one that does most harm: the
//! oldest.

use alloc::string::String;
use core::fmt::Display;
use core::sync::atomic::Ordering;

use addr::{Gpa, Hpa};
use hw_model::Tag;
use stage2::{Stale, What};

use super::machine::{Leaf, machine, word};
use crate::io::iommu::{Domain, Functions, Guard, RequesterId};
use crate::sync::point;

pub(crate) fn guard() -> Guard {
    Guard::On(String::from("a model"))
}

pub(crate) fn grant(functions: &Functions, domain: Domain, root: Hpa) {
    point();
    machine().hardware().granted.extend(each(functions).map(|number| (number, (domain.0, root.0))));
}

pub(crate) fn revoke(functions: &Functions, domain: Domain) {
    point();
    let mut hardware = machine().hardware();
    for number in each(functions) {
        hardware.granted.remove(&number);
    }
    hardware.io_tlb.flush_tag(0, Tag(domain.0.into()));
}

pub(crate) fn flush(domain: Domain, stale: Stale) {
    point();
    let mut hardware = machine().hardware();
    let (tag, range) = (Tag(domain.0.into()), stale.range());
    match stale.what() {
        What::Nothing => {}
        What::Whole => hardware.io_tlb.flush_tag(0, tag),
        What::Pages(_) | What::Range(_) => {
            (range.start.0 >> 12..range.end().0 >> 12).for_each(|page| hardware.io_tlb.flush_page(0, tag, page));
        }
    }
}

pub(crate) fn take_events(_: &mut dyn FnMut(RequesterId, &dyn Display)) {}

/// The function writes a word at this address of its own. Returns whether the IOMMU has let it.
pub(crate) fn device_writes(function: RequesterId, gpa: Gpa, value: u64) -> bool {
    point();
    let mut hardware = machine().hardware();
    let Some(&(domain, root)) = hardware.granted.get(&function.0) else { return false };
    let (tag, page) = (Tag(domain.into()), gpa.0 >> 12);
    let kept = hardware.io_tlb.answers(0, tag, page).into_iter().find(|leaf| leaf.is_writable);
    let leaf = kept.or_else(|| {
        let leaf = walk(Hpa(root), gpa).filter(|leaf| leaf.is_writable)?;
        hardware.io_tlb.walk(0, tag, page, leaf);
        Some(leaf)
    });
    let Some(Leaf { hpa, .. }) = leaf else { return false };
    word(hpa | gpa.0 & 0xfff).store(value, Ordering::SeqCst);
    true
}

/// Walks nested tables as an IOMMU does: it sets no bits, and takes rights from bits of their own.
fn walk(root: Hpa, gpa: Gpa) -> Option<Leaf> {
    let mut table = root.0;
    for level in (1..=4).rev() {
        let entry = word(table + (gpa.0 >> (3 + 9 * level) & 511) * 8).load(Ordering::SeqCst);
        if entry & PRESENT == 0 {
            return None;
        }
        table = entry & ADDRESS;
        if entry >> NEXT_LEVEL_SHIFT & 7 == 0 {
            let within = gpa.0 & ((1 << (3 + 9 * level)) - 1) & !4095;
            return Some(Leaf { hpa: table + within, is_writable: entry & WRITABLE != 0, is_dirty: false });
        }
    }
    None
}

const PRESENT: u64 = 1;
const NEXT_LEVEL_SHIFT: u32 = 9;
const WRITABLE: u64 = 1 << 62;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

fn each(functions: &Functions) -> impl Iterator<Item = u16> {
    (0..=u16::MAX).filter(|number| functions.contains(RequesterId(*number)))
}
