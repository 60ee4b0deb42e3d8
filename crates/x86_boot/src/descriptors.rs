//! The GDT for a kernel's first instructions, until it loads its own.
//!
//! Selectors 0x10 (code), 0x18 (data) and 0x20 (TSS, two slots) are the same in both modes, as in the Linux x86 boot
//! protocol; only the width of the code segment differs.

use addr::Gpa;

use crate::{DescriptorTable, GuestMemory, OutsideMemory};

/// Descriptor of a code segment over all addresses, as in `entry::long64`.
pub(crate) const CODE_64: u64 = 0x00af_9b00_0000_ffff;
/// The same, as in `entry::protected32`.
pub(crate) const CODE_32: u64 = 0x00cf_9b00_0000_ffff;

const DATA: u64 = 0x00cf_9300_0000_ffff;
/// The upper half, with bits 63:32 of the base, is in the next slot, and zero.
const TSS: u64 = 0x0000_8b00_0000_0067;

/// GDTR for the table that [`write`] writes to this address.
pub(crate) const fn gdtr(base: Gpa) -> DescriptorTable {
    DescriptorTable { base, limit: 8 * 6 - 1 }
}

pub(crate) fn write(base: Gpa, code: u64, memory: &mut impl GuestMemory) -> Result<(), OutsideMemory> {
    let mut table = [0; 8 * 6];
    for (to, descriptor) in table.chunks_exact_mut(8).zip([0, 0, code, DATA, TSS, 0]) {
        to.copy_from_slice(&descriptor.to_le_bytes());
    }
    memory.write(base, &table)
}
