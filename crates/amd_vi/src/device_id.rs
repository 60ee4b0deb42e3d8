//! The number by which the IOMMU knows a device: the PCI requester ID (PCI Express 2.2.6.2).

use core::fmt;

/// Bus, device and function of a PCI function. A special device, such as an I/O APIC, has one that no function has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u16);

impl DeviceId {
    /// The function with these numbers; `None` if PCI has no such device or function.
    #[must_use]
    pub const fn new(bus: u8, device: u8, function: u8) -> Option<Self> {
        if device < 32 && function < 8 {
            Some(Self((bus as u16) << 8 | (device as u16) << 3 | function as u16))
        } else {
            None
        }
    }

    /// Its bus.
    #[must_use]
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Its device on the bus.
    #[must_use]
    pub const fn device(self) -> u8 {
        (self.0 >> 3 & 31) as u8
    }

    /// Its function in the device.
    #[must_use]
    pub const fn function(self) -> u8 {
        (self.0 & 7) as u8
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{:02x}.{}", self.bus(), self.device(), self.function())
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::DeviceId;

    #[test]
    fn device_is_shown_as_lspci_shows_it() {
        assert_eq!(DeviceId(0x0020).to_string(), "00:04.0");
        assert_eq!(DeviceId(0xfffd).to_string(), "ff:1f.5");
        assert_eq!(DeviceId::new(0xff, 31, 5), Some(DeviceId(0xfffd)));
        assert_eq!((DeviceId::new(0, 32, 0), DeviceId::new(0, 0, 8)), (None, None));
    }
}
