//! VMIDs: what the TLB tells VMs apart by (Arm ARM, D8.16).
//!
//! A guest flushes TLBs of all its vCPUs by one instruction, and the processor does so for the VMID of the one that
//! asks. So all vCPUs of a VM share one, for the VM's life. It is found by the root of the VM's stage 2, of which there
//! is one per VM. A number that was another VM's before is flushed everywhere before it is given out again.

#![expect(unsafe_code, reason = "flushing a VMID's entries")]

use core::arch::asm;

use aarch64_defs::registers::vttbr_el2;
use addr::Hpa;
use spin::Mutex;

/// VMIDs in use: what has 8 bits exists everywhere. Number 0 is nobody's.
pub(super) const COUNT: u32 = 256;

#[derive(Clone, Copy)]
struct Slot {
    root: Hpa,
    /// vCPUs, and the VM that is being made.
    users: u32,
}

static SLOTS: Mutex<[Option<Slot>; COUNT as usize]> = Mutex::new([None; COUNT as usize]);

/// All numbers are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoneLeft;

/// Takes part in the number of the VM with this stage-2 root; the first to do so chooses one.
///
/// # Errors
/// When there is none left.
pub(super) fn join(root: Hpa) -> Result<u16, NoneLeft> {
    let mut slots = SLOTS.lock();
    let mut numbered = (0u16..).zip(slots.iter_mut()).skip(1);
    if let Some((number, slot)) =
        numbered.find_map(|(number, slot)| Some((number, slot.as_mut().filter(|slot| slot.root == root)?)))
    {
        slot.users += 1;
        return Ok(number);
    }
    let mut numbered = (0u16..).zip(slots.iter_mut()).skip(1);
    let (number, slot) = numbered.find(|(_, slot)| slot.is_none()).ok_or(NoneLeft)?;
    *slot = Some(Slot { root, users: 1 });
    flush_everywhere(root, number);
    Ok(number)
}

/// Ends what [`join`] began.
pub(super) fn leave(number: u16) {
    if let Some(slot) = SLOTS.lock().get_mut(usize::from(number))
        && let Some(used) = slot
    {
        used.users -= 1;
        if used.users == 0 {
            *slot = None;
        }
    }
}

/// VTTBR_EL2 for a VM.
pub(super) const fn vttbr(root: Hpa, number: u16) -> u64 {
    root.0 | (number as u64) << vttbr_el2::VMID_SHIFT
}

/// Drops all entries of a VMID from all TLBs.
fn flush_everywhere(root: Hpa, number: u16) {
    // SAFETY: the register is a guest's, and whoever enters one sets it anew; entries of the TLB are copies.
    unsafe {
        asm!(
            "mrs {before}, vttbr_el2",
            "msr vttbr_el2, {vttbr}",
            "isb",
            "dsb ishst",
            "tlbi vmalls12e1is",
            "dsb ish",
            "msr vttbr_el2, {before}",
            "isb",
            before = out(reg) _,
            vttbr = in(reg) vttbr(root, number),
            options(nostack, preserves_flags),
        );
    }
}
