//! Events that the IOMMU reports (2.5).

use core::fmt;

use crate::DeviceId;

/// Names of the flags of IO_PAGE_FAULT, from bit 48 of the first word on (table 46).
const FLAGS: [&str; 9] = ["GN", "NX", "US", "I", "PR", "RW", "PE", "RZ", "TR"];

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The device has an invalid device table entry, or none.
    IllegalDeviceTableEntry,
    /// The I/O page tables do not allow the access.
    PageFault,
    /// The IOMMU could not read the device table.
    DeviceTableHardwareError,
    /// The IOMMU could not read a page table.
    PageTableHardwareError,
    /// There is no such command. The IOMMU executes none until the driver starts the command buffer again.
    IllegalCommand,
    /// The IOMMU could not read a command.
    CommandHardwareError,
    /// A device did not answer an invalidation of its own TLB.
    DeviceTlbTimeout,
    /// The device made a request that is not allowed to it: among others, one for an interrupt that its device table
    /// entry stops. (One that an interrupt remapping table stops is a [`PageFault`](Self::PageFault) with the flag I.)
    InvalidDeviceRequest,
    /// Any other code.
    Other(u8),
}

/// An event, read from the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it is about.
    pub kind: Kind,
    /// The device, for kinds that have one.
    pub device: DeviceId,
    /// The domain of the device, for page faults.
    pub domain: u16,
    /// Bits 59:48 of the first word.
    pub flags: u16,
    /// The address that the device used; for some kinds, the address of what the IOMMU could not read.
    pub address: u64,
}

impl Event {
    /// Bytes of an event.
    pub const BYTES: u64 = 16;

    /// The event in these words; `None` if the IOMMU has not written it yet, to a log that was zero.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    pub const fn decode(words: [u64; 2]) -> Option<Self> {
        let kind = match words[0] >> 60 {
            0 => return None,
            1 => Kind::IllegalDeviceTableEntry,
            2 => Kind::PageFault,
            3 => Kind::DeviceTableHardwareError,
            4 => Kind::PageTableHardwareError,
            5 => Kind::IllegalCommand,
            6 => Kind::CommandHardwareError,
            7 => Kind::DeviceTlbTimeout,
            8 => Kind::InvalidDeviceRequest,
            code => Kind::Other(code as u8),
        };
        Some(Self {
            kind,
            device: DeviceId(words[0] as u16),
            domain: (words[0] >> 32) as u16,
            flags: (words[0] >> 48 & 0xfff) as u16,
            address: words[1],
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IllegalDeviceTableEntry => "ILLEGAL_DEV_TABLE_ENTRY",
            Self::PageFault => "IO_PAGE_FAULT",
            Self::DeviceTableHardwareError => "DEV_TAB_HARDWARE_ERROR",
            Self::PageTableHardwareError => "PAGE_TAB_HARDWARE_ERROR",
            Self::IllegalCommand => "ILLEGAL_COMMAND_ERROR",
            Self::CommandHardwareError => "COMMAND_HARDWARE_ERROR",
            Self::DeviceTlbTimeout => "IOTLB_INV_TIMEOUT",
            Self::InvalidDeviceRequest => "INVALID_DEVICE_REQUEST",
            Self::Other(code) => return write!(f, "event {code:#x}"),
        })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} at {:#x}", self.kind, self.device, self.address)?;
        if self.kind == Kind::PageFault {
            write!(f, ", domain {}, flags", self.domain)?;
            let set = FLAGS.iter().enumerate().filter(|(bit, _)| self.flags >> bit & 1 != 0);
            set.map(|(_, name)| name).try_for_each(|name| write!(f, " {name}"))?;
        }
        if self.kind == Kind::InvalidDeviceRequest {
            write!(f, ", flags {:#x}", self.flags)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn page_fault_names_device_address_domain_and_flags() {
        let event = Event::decode([0x2030_0003_0000_0020, 0x1234_5678]).expect("an event");
        assert_eq!((event.kind, event.device, event.domain), (Kind::PageFault, DeviceId(0x20), 3));
        assert_eq!(event.to_string(), "IO_PAGE_FAULT of 00:04.0 at 0x12345678, domain 3, flags PR RW");
    }

    #[test]
    fn refused_interrupts_are_told_from_refused_accesses() {
        let fault = Event::decode([0x2008_0000_0000_0020, 0xfdf8_0041]).expect("an event");
        assert_eq!(fault.to_string(), "IO_PAGE_FAULT of 00:04.0 at 0xfdf80041, domain 0, flags I");
        let request = Event::decode([0x8a00_0000_0000_0020, 0xfdf8_0041]).expect("an event");
        assert_eq!(request.to_string(), "INVALID_DEVICE_REQUEST of 00:04.0 at 0xfdf80041, flags 0xa00");
    }

    #[test]
    fn entry_that_was_not_written_yet_is_no_event() {
        assert_eq!(Event::decode([0, 0x1000]), None);
    }

    #[test]
    fn every_bit_pattern_can_be_shown() {
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..10_000 {
            let words = [random.u64(..), random.u64(..)];
            assert_eq!(Event::decode(words).is_some(), words[0] >> 60 != 0);
            assert!(Event::decode(words).is_none_or(|event| !event.to_string().is_empty()));
        }
    }
}
