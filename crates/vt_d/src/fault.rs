//! Faults that the IOMMU records in its registers (7.2, 11.4.14).

use core::fmt;

/// The second word: the record is in use.
const IN_USE: u64 = 1 << 63;
/// The second word: the access was a read.
const READ: u64 = 1 << 62;
const REASON_SHIFT: u32 = 32;

/// Reasons that are about interrupts (7.1.3).
const INTERRUPTS: core::ops::RangeInclusive<u8> = 0x20..=0x2f;
/// Number of the entry of the interrupt remapping table, in the first word.
const INDEX_SHIFT: u32 = 48;

/// An access of a device, or an interrupt, that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The device, by its requester ID.
    pub source: u16,
    /// Why (7.1.3).
    pub reason: u8,
    /// Whether it has read.
    pub is_read: bool,
    /// The page that it has used. For an interrupt: the number of the entry that it has named, from bit 48 on.
    pub address: u64,
}

impl Fault {
    /// Bytes of a record.
    pub const BYTES: u64 = 16;
    /// What the driver writes to a record's second word, so that it can be used again.
    pub const RELEASE: u64 = IN_USE;

    /// The fault in a record; `None` if there is none.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    pub const fn decode(words: [u64; 2]) -> Option<Self> {
        if words[1] & IN_USE == 0 {
            return None;
        }
        Some(Self {
            source: words[1] as u16,
            reason: (words[1] >> REASON_SHIFT) as u8,
            is_read: words[1] & READ != 0,
            address: words[0] & !0xfff,
        })
    }

    /// The number of the entry of the interrupt remapping table, if it is about an interrupt.
    #[must_use]
    pub fn interrupt(self) -> Option<u64> {
        INTERRUPTS.contains(&self.reason).then_some(self.address >> INDEX_SHIFT)
    }

    /// The reason in words.
    const fn why(self) -> &'static str {
        match self.reason {
            0x1 => "root entry not present",
            0x2 => "nobody owns the device",
            0x3 => "invalid context entry",
            0x4 => "address beyond the tables",
            0x5 => "not writable",
            0x6 => "not mapped or not readable",
            0x7..=0x9 => "a table cannot be read",
            0xa..=0xc => "reserved bits in a table",
            0x20 => "reserved bits in the message",
            0x21 => "no such entry",
            0x22 => "nobody was given the interrupt",
            0x23 => "the table cannot be read",
            0x24 => "reserved bits in the entry",
            0x25 => "message of the old format",
            0x26 => "the interrupt of another device",
            _ => "other reason",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.interrupt() {
            Some(index) => write!(f, "interrupt {index:#x}")?,
            None if self.is_read => write!(f, "read at {:#x}", self.address)?,
            None => write!(f, "write at {:#x}", self.address)?,
        }
        write!(f, ", reason {:#x}: {}", self.reason, self.why())
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn fault_names_device_address_and_reason() {
        let fault = Fault::decode([0x1234_5000, 1 << 63 | 5 << 32 | 0x20]).expect("a fault");
        assert_eq!((fault.source, fault.address), (0x20, 0x1234_5000));
        assert_eq!(fault.to_string(), "write at 0x12345000, reason 0x5: not writable");
        let fault = Fault::decode([0, 3 << 62 | 6 << 32]).expect("a fault");
        assert_eq!(fault.to_string(), "read at 0x0, reason 0x6: not mapped or not readable");
    }

    #[test]
    fn refused_interrupt_names_device_entry_and_reason() {
        let fault = Fault::decode([0x0341 << 48, 1 << 63 | 0x26 << 32 | 0x20]).expect("a fault");
        assert_eq!((fault.source, fault.interrupt()), (0x20, Some(0x341)));
        assert_eq!(fault.to_string(), "interrupt 0x341, reason 0x26: the interrupt of another device");
        let fault = Fault::decode([0, 1 << 63 | 0x25 << 32 | 0x20]).expect("a fault");
        assert_eq!(fault.to_string(), "interrupt 0x0, reason 0x25: message of the old format");
    }

    #[test]
    fn every_bit_pattern_can_be_shown_and_a_free_record_is_no_fault() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..10_000 {
            let words = [random.u64(..), random.u64(..)];
            assert_eq!(Fault::decode(words).is_some(), words[1] >> 63 != 0);
            assert!(Fault::decode(words).is_none_or(|fault| !fault.to_string().is_empty()));
        }
    }
}
