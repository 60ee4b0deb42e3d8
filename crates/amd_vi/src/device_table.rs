//! Entries of the device table: what a device may do (2.2.2.1).
//!
//! An entry that is not valid (V clear) lets all accesses of the device pass. So a table full of zeroes protects
//! nothing, and there is no way in this crate to make such an entry.
//!
//! The IOMMU may read an entry while the driver changes it. It reads at least 8 bytes at once. The first word alone
//! decides about DMA: [`DeviceTableEntry::blocked`] differs from an entry with translation in that word. So the order
//! of stores matters: when a device gets rights, the first word is stored last; when it loses them, first.

use addr::{Hpa, PAGE_BYTES};

/// Bits of the first word.
const VALID: u64 = 1 << 0;
const TRANSLATION_VALID: u64 = 1 << 1;
const MODE_SHIFT: u32 = 9;
const MAY_READ: u64 = 1 << 61;
const MAY_WRITE: u64 = 1 << 62;
/// Bits 51:12.
const ROOT: u64 = 0x000f_ffff_ffff_f000;

/// SysMgt, bits 41:40 of the second word.
const SYSTEM_MANAGEMENT_SHIFT: u32 = 40;

/// Bits of the third word.
const INTERRUPT_MAP_VALID: u64 = 1 << 0;
/// IntTabLen: log2 of the number of entries.
const INTERRUPT_TABLE_LENGTH_SHIFT: u32 = 1;
/// Bits 51:6.
const INTERRUPT_TABLE: u64 = 0x000f_ffff_ffff_ffc0;
/// INIT, ExtInt and NMI pass, bits 58:56; LINT0 and LINT1 pass, bits 63:62.
const PASS_SHIFT: u32 = 56;
/// IntCtl, bits 61:60: 0 aborts fixed and arbitrated interrupts, 2 remaps them.
const REMAP: u64 = 2 << 60;

/// IntCtl: 1 lets fixed and arbitrated interrupts pass as they are.
const FORWARD: u64 = 1 << 60;

/// The settings of an IVHD entry (table 99): bits 2:0 and 7:6 are those that let special interrupts pass.
const SETTINGS_PASS: u64 = 0b1100_0111;

/// What happens to a device's interrupts: its writes to 0xfeex_xxxx.
///
/// INIT, NMI and external interrupts are not looked up in a table. Unless all pass, they arrive only from a device that
/// firmware says needs them ([`DeviceTableEntry::with_special_interrupts`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupts {
    /// None arrives.
    Blocked,
    /// Each goes where the device wants it to go: any vector, and INIT, NMI and external ones as well.
    Unmapped,
    /// Those of any vector go where the device wants them to go.
    Forwarded,
    /// Each is looked up in this table of 2^`order` entries, which starts at a multiple of 128 bytes
    /// ([`InterruptEntry`](crate::InterruptEntry)).
    Remapped {
        /// First byte of the table.
        table: Hpa,
        /// log2 of the number of its entries, at most 11.
        order: u32,
    },
}

/// One entry: four words of 64 bits, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTableEntry(pub [u64; 4]);

impl DeviceTableEntry {
    /// Bytes of an entry.
    pub const BYTES: u64 = 32;
    /// Bytes of a table with an entry for every device of a PCI segment.
    pub const TABLE_BYTES: u64 = Self::BYTES << 16;

    /// No access to memory passes. `empty` is an empty table. It decides nothing; but without one the entry's mode
    /// would be 0, "no translation", and an error in the two bits that block would open everything.
    #[must_use]
    pub const fn blocked(empty: Hpa, levels: u32, interrupts: Interrupts) -> Self {
        Self::new(empty, levels, 0, 0, interrupts)
    }

    /// All accesses go through the I/O page tables of `levels` levels (1 to 6) at `root`, and allow what those allow.
    /// The IOMMU keeps translations under `domain`: all entries with this number must have the same root.
    #[must_use]
    pub const fn translated(root: Hpa, levels: u32, domain: u16, interrupts: Interrupts) -> Self {
        Self::new(root, levels, domain, MAY_READ | MAY_WRITE, interrupts)
    }

    /// Addresses of memory are not translated, and every access passes. For a device that the hypervisor itself
    /// drives, and trusts.
    #[must_use]
    pub const fn untranslated(domain: u16, interrupts: Interrupts) -> Self {
        Self::new(Hpa(0), 0, domain, MAY_READ | MAY_WRITE, interrupts)
    }

    const fn new(root: Hpa, levels: u32, domain: u16, rights: u64, interrupts: Interrupts) -> Self {
        let first = VALID | TRANSLATION_VALID | (levels as u64) << MODE_SHIFT | root.0 & ROOT | rights;
        let third = match interrupts {
            Interrupts::Blocked => INTERRUPT_MAP_VALID,
            Interrupts::Unmapped => 0,
            Interrupts::Forwarded => INTERRUPT_MAP_VALID | FORWARD,
            Interrupts::Remapped { table, order } => {
                INTERRUPT_MAP_VALID | (order as u64) << INTERRUPT_TABLE_LENGTH_SHIFT | table.0 & INTERRUPT_TABLE | REMAP
            }
        };
        Self([first, domain as u64, third, 0])
    }

    /// The same entry with what firmware says in IVRS about how the device reaches the system management range.
    #[must_use]
    pub const fn with_system_management(mut self, settings: u8) -> Self {
        self.0[1] |= (settings as u64 >> 4 & 3) << SYSTEM_MANAGEMENT_SHIFT;
        self
    }

    /// The same entry with the special interrupts (INIT, NMI, external, LINT) that the device must be able to send, as
    /// firmware says in IVRS. For an interrupt controller that the hypervisor programs: any of them stops a processor.
    #[must_use]
    pub const fn with_special_interrupts(mut self, settings: u8) -> Self {
        self.0[2] |= (settings as u64 & SETTINGS_PASS) << PASS_SHIFT;
        self
    }

    /// The word that decides about accesses to memory.
    #[must_use]
    pub const fn access_word(self) -> u64 {
        self.0[0]
    }

    /// Whether some access to memory may pass.
    #[must_use]
    pub const fn allows_access(self) -> bool {
        self.0[0] & VALID == 0 || self.0[0] & (MAY_READ | MAY_WRITE) != 0
    }
}

const _: () = assert!(DeviceTableEntry::TABLE_BYTES == 512 * PAGE_BYTES, "the most that the register can say");

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT_TABLE: Hpa = Hpa(0x1234_5000);

    #[test]
    fn entries_have_the_bits_of_the_manual() {
        let DeviceTableEntry(words) = DeviceTableEntry::translated(ROOT_TABLE, 4, 7, Interrupts::Unmapped);
        assert_eq!(words, [0x6000_0000_1234_5803, 7, 0, 0]);

        let DeviceTableEntry(words) = DeviceTableEntry::untranslated(1, Interrupts::Unmapped);
        assert_eq!(words, [0x6000_0000_0000_0003, 1, 0, 0]);

        let interrupts = Interrupts::Remapped { table: Hpa(0x7780), order: 8 };
        let DeviceTableEntry(words) = DeviceTableEntry::translated(ROOT_TABLE, 4, 7, interrupts);
        assert_eq!(words[2], 0x2000_0000_0000_7791);
        let DeviceTableEntry(words) = DeviceTableEntry::blocked(ROOT_TABLE, 4, Interrupts::Forwarded);
        assert_eq!(words[2], 0x1000_0000_0000_0001);
    }

    #[test]
    fn special_interrupts_pass_where_firmware_wants_it_and_otherwise_only_unmapped() {
        const PASS: u64 = 7 << 56 | 3 << 62;
        let table = Interrupts::Remapped { table: Hpa(!0x7f), order: 9 };
        for interrupts in [Interrupts::Blocked, Interrupts::Forwarded, table] {
            let entry = DeviceTableEntry::translated(ROOT_TABLE, 4, 7, interrupts);
            assert_eq!(entry.0[2] & (PASS | INTERRUPT_MAP_VALID), INTERRUPT_MAP_VALID, "{interrupts:?}");
            assert_eq!(entry.with_special_interrupts(1 << 2).0[2] & PASS, 1 << 58, "NMI");
        }
        let entry = DeviceTableEntry::translated(ROOT_TABLE, 4, 7, Interrupts::Unmapped);
        assert_eq!(entry.0[2] & INTERRUPT_MAP_VALID, 0, "nothing is looked at");
    }

    #[test]
    fn blocked_entry_is_valid_and_has_no_rights_and_no_interrupts() {
        let blocked = DeviceTableEntry::blocked(ROOT_TABLE, 4, Interrupts::Blocked);
        assert_eq!(blocked.0, [0x0000_0000_1234_5803, 0, 1, 0]);
        assert!(!blocked.allows_access());
        assert!(DeviceTableEntry::untranslated(1, Interrupts::Blocked).allows_access());
        assert!(DeviceTableEntry([0; 4]).allows_access(), "an entry that is not valid lets all pass");
    }

    #[test]
    fn only_the_first_word_gives_rights() {
        let blocked = DeviceTableEntry::blocked(ROOT_TABLE, 4, Interrupts::Blocked);
        for entry in [
            DeviceTableEntry::translated(Hpa(0xf_ffff_ffff_f000), 6, u16::MAX, Interrupts::Unmapped),
            DeviceTableEntry::untranslated(u16::MAX, Interrupts::Blocked),
        ] {
            let torn = DeviceTableEntry([blocked.0[0], entry.0[1], entry.0[2], entry.0[3]]);
            assert!(!torn.allows_access());
        }
    }

    #[test]
    fn settings_of_firmware_go_to_their_bits_and_give_no_access() {
        let blocked = DeviceTableEntry::blocked(ROOT_TABLE, 4, Interrupts::Unmapped);
        let blocked = blocked.with_system_management(0xff).with_special_interrupts(0xff);
        assert_eq!(blocked.0[1], 3 << 40);
        assert_eq!(blocked.0[2], 7 << 56 | 3 << 62, "IntCtl, bits 61:60, is not firmware's");
        assert!(!blocked.allows_access());
    }
}
