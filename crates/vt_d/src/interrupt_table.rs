//! The interrupt remapping table: which interrupts devices may raise (9.9, 5.1).
//!
//! A device raises an interrupt by a write to 0xfeex_xxxx. With remapping on, bit 4 of the address tells how the write
//! is read. If it is set, the address has the number of an entry (5.1.2.2). If it is clear, the write is of the old,
//! compatible format, and the IOMMU stops it unless it was told to let all of them pass.
//!
//! ```text
//!  00:04.0 writes 0 to 0xfee0_0858
//!     │
//!     └─> table, one for all devices ──> entry 0x42: vector 0x41 of APIC 3, of device 00:04.0, or a fault
//! ```
//!
//! All devices share the table, so each entry names the one device that may use it.

use addr::Hpa;

/// P: the entry is in use.
const PRESENT: u64 = 1 << 0;
/// Vector, bits 23:16. DLM, bits 7:5, is 0: fixed. TM, bit 4, is 0: an edge. DM, bit 2, is 0: a physical APIC id.
const VECTOR_SHIFT: u32 = 16;
/// DST, bits 63:32: an xAPIC's id is in its second byte.
const DESTINATION_SHIFT: u32 = 40;
/// SVT, bits 19:18 of the second word: 1 compares the requester with SID. SQ, bits 17:16, is 0: all of its bits.
const VERIFY_REQUESTER: u64 = 1 << 18;

/// An entry of the interrupt remapping table: two words of 64 bits, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptEntry(pub [u64; 2]);

impl InterruptEntry {
    /// Bytes of an entry.
    pub const BYTES: u64 = 16;
    /// Entries of a table that has one for each vector of each xAPIC.
    pub const COUNT: u64 = 1 << 16;
    /// Bytes of such a table.
    pub const TABLE_BYTES: u64 = Self::COUNT * Self::BYTES;

    /// The interrupt `vector` of one processor, triggered by an edge, for the device `source`.
    #[must_use]
    pub const fn fixed(apic_id: u8, vector: u8, source: u16) -> Self {
        Self([
            PRESENT | (vector as u64) << VECTOR_SHIFT | (apic_id as u64) << DESTINATION_SHIFT,
            VERIFY_REQUESTER | source as u64,
        ])
    }

    /// Whether it is in use, and this device's.
    #[must_use]
    pub const fn is_of(self, source: u16) -> bool {
        self.0[0] & PRESENT != 0 && self.0[1] == VERIFY_REQUESTER | source as u64
    }

    /// The number of the entry for a vector, in a table of [`COUNT`](Self::COUNT) entries. Each vector of a processor
    /// is one device's, so this is no other device's entry.
    #[must_use]
    pub const fn index(apic_id: u8, vector: u8) -> u16 {
        (apic_id as u16) << 8 | vector as u16
    }

    /// What the device writes, and where, to raise the interrupt of entry `index`. The data, 0, is added to the number
    /// (SHV, bit 3).
    #[must_use]
    pub const fn message(index: u16) -> (u32, u16) {
        const ADDRESS: u32 = 0xfee0_0000 | 1 << 4 | 1 << 3;
        (ADDRESS | (index as u32 & 0x7fff) << 5 | (index as u32 >> 15) << 2, 0)
    }
}

/// The value of [`INTERRUPT_TABLE`](crate::registers::INTERRUPT_TABLE) for a table of [`InterruptEntry::COUNT`] entries
/// (S, bits 3:0) that have ids of xAPICs (EIME, bit 11, is clear).
#[must_use]
pub const fn interrupt_table(base: Hpa) -> u64 {
    base.0 | (InterruptEntry::COUNT.ilog2() - 1) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_bits_of_the_manual() {
        assert_eq!(InterruptEntry::fixed(3, 0x41, 0x20).0, [0x0000_0300_0041_0001, 0x4_0020]);
        assert_eq!(InterruptEntry::fixed(0xff, 0xff, 0xffff).0, [0x0000_ff00_00ff_0001, 0x4_ffff]);
        assert_eq!(interrupt_table(Hpa(0x1230_0000)), 0x1230_000f);
    }

    #[test]
    fn entry_is_of_the_device_that_it_names_while_it_is_in_use() {
        let entry = InterruptEntry::fixed(3, 0x41, 0x20);
        assert!(entry.is_of(0x20) && !entry.is_of(0x21));
        assert!(!InterruptEntry([0, entry.0[1]]).is_of(0x20), "it was taken from the device");
    }

    #[test]
    fn message_is_of_the_new_format_and_names_its_entry() {
        assert_eq!(InterruptEntry::message(0x42), (0xfee0_0858, 0));
        for index in 0..=u16::MAX {
            let (address, data) = InterruptEntry::message(index);
            assert_eq!((address >> 20, address >> 4 & 1, address & 3), (0xfee, 1, 0), "{index:#x}");
            let handle = address >> 5 & 0x7fff | (address >> 2 & 1) << 15;
            assert_eq!(handle + u32::from(data), u32::from(index));
        }
    }

    #[test]
    fn each_vector_of_each_processor_has_an_entry_of_its_own() {
        let all = |apic_id| (0..=u8::MAX).map(move |vector| InterruptEntry::index(apic_id, vector));
        assert!((0..=u8::MAX).flat_map(all).eq(0..=u16::MAX));
    }
}
