//! Interrupt remapping tables: which interrupts a device may send (2.2.5).
//!
//! A device raises an interrupt by a write to 0xfeex_xxxx. With a table, the IOMMU ignores the address of that write
//! and takes bits 10:0 of its data for the number of an entry:
//!
//! ```text
//!  00:04.0 writes 2 to 0xfee0_0000
//!     │
//!     └─> device table ──> entry 0x0020: table, 512 entries ──> entry 2: vector 0x41 of APIC 3, or an event
//! ```
//!
//! Bits 10:8 of the data are the message's delivery mode as well. Only fixed (0) and arbitrated (1) ones are looked up;
//! all others are the device table entry's to refuse. So entries from 512 on are out of reach.
//!
//! Entries have 32 bits here, which name APIC ids up to 255. An IOMMU with guest virtual APICs turned on (GAEn) would
//! want 128.

/// RemapEn: the entry is in use. Without it the interrupt is stopped, and reported, because SupIOPF (bit 1) is clear.
const REMAPPED: u32 = 1 << 0;
/// Destination, bits 15:8: a physical APIC id, because DM (bit 6) is clear.
const DESTINATION_SHIFT: u32 = 8;
/// Vector, bits 23:16. IntType, bits 4:2, is 0: fixed.
const VECTOR_SHIFT: u32 = 16;

/// An entry of an interrupt remapping table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptEntry(pub u32);

impl InterruptEntry {
    /// Bytes of an entry.
    pub const BYTES: u64 = 4;
    /// log2 of the entries of a table that a device can reach.
    pub const ORDER: u32 = 9;
    /// Entries of such a table.
    pub const COUNT: usize = 1 << Self::ORDER;

    /// No interrupt passes.
    pub const BLOCKED: Self = Self(0);

    /// The interrupt `vector` of one processor, triggered by an edge.
    #[must_use]
    pub const fn fixed(apic_id: u8, vector: u8) -> Self {
        Self(REMAPPED | (apic_id as u32) << DESTINATION_SHIFT | (vector as u32) << VECTOR_SHIFT)
    }

    /// What a device writes, and where, to raise the interrupt of entry `index`; `None` if it cannot.
    ///
    /// The address is that of the local APICs. QEMU 7.2 refuses any other.
    #[must_use]
    pub fn message(index: usize) -> Option<(u32, u16)> {
        const APICS: u32 = 0xfee0_0000;
        let data = u16::try_from(index).ok().filter(|_| index < Self::COUNT)?;
        Some((APICS, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_bits_of_the_manual() {
        assert_eq!(InterruptEntry::fixed(3, 0x41).0, 0x0041_0301);
        assert_eq!(InterruptEntry::fixed(0xff, 0xff).0, 0x00ff_ff01, "reserved bits and the guest's mode stay clear");
        assert_eq!(InterruptEntry::BLOCKED.0 & REMAPPED, 0);
    }

    #[test]
    fn message_is_fixed_or_arbitrated_and_names_its_entry() {
        for index in 0..4096 {
            let message = InterruptEntry::message(index);
            assert_eq!(message.is_some(), index < 512, "{index}");
            if let Some((address, data)) = message {
                assert_eq!(address, 0xfee0_0000);
                assert!(data >> 8 & 7 <= 1, "other delivery modes are not looked up");
                assert_eq!(usize::from(data), index);
            }
        }
    }
}
