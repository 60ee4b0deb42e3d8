//! The stack of a pCPU that reports a bug: which values on it look like return addresses.

#![expect(unsafe_code, reason = "reads the stack word by word")]

use addr::{Hva, PAGE_BYTES};

use super::machine::irq::follows_call;
use super::paging::is_mapped;

/// Maximum number of addresses.
const MOST: usize = 24;
/// Bytes of the stack to search.
const REACH: u64 = 64 << 10;

/// Calls `found` with the values on the stack, from `stack` upwards, that look like return addresses: in the text, and
/// behind a call instruction. Some may be left over from functions that have returned.
pub(super) fn for_each_return_address(stack: u64, found: &mut dyn FnMut(u64)) {
    let start = stack.next_multiple_of(8);
    // After an overflow the stack pointer is in the guard page, below the stack.
    let skip = if is_mapped(Hva(start)) { 0 } else { start.next_multiple_of(PAGE_BYTES) - start };
    (start + skip..start + skip + REACH)
        .step_by(8)
        .take_while(|&address| is_mapped(Hva(address)))
        .map(|address| {
            // SAFETY: mapped, as just checked; the stack of a pCPU that does nothing but this.
            unsafe { (address as *const u64).read_volatile() }
        })
        .filter(|&value| follows_call(value))
        .take(MOST)
        .for_each(found);
}
