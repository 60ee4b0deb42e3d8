//! Checks the memory windows into PCI configuration space that firmware names in ACPI's table MCFG (PCI Firmware
//! Specification 3.3, 4.1.2). Whoever believes it writes to what is there, as if it were a device's configuration.

use core::fmt;

use addr::{Hpa, HpaRange, PAGE_BYTES};

/// Bytes of a bus's configuration space (PCI Express 7.2.2): 32 devices of 8 functions, 4 KiB each.
pub const BUS_BYTES: u64 = 1 << 20;
/// Interrupt controllers have their registers at these addresses: the I/O APIC and the local APIC.
const CONTROLLERS: [Hpa; 2] = [Hpa(0xfec0_0000), Hpa(0xfee0_0000)];

/// A window into the configuration space of a PCI segment, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where bus 0 would be.
    pub base: Hpa,
    /// First bus.
    pub first_bus: u8,
    /// Last bus.
    pub last_bus: u8,
}

/// Why a window is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// The last bus comes before the first.
    Backwards,
    /// The address is no multiple of a bus's bytes.
    Misaligned,
    /// It ends beyond this address.
    Beyond(Hpa),
    /// RAM, or registers of an interrupt controller, are there.
    Taken,
    /// A window before it has some of its buses.
    Again,
    /// It shows another device than the machine's ports for configuration do.
    Other {
        /// Vendor and device that the window shows.
        by_window: u32,
        /// Those that ports show.
        by_ports: u32,
    },
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backwards => f.write_str("its last bus comes before the first"),
            Self::Misaligned => f.write_str("its address is no multiple of 1 MiB"),
            Self::Beyond(end) => write!(f, "it ends beyond {end}"),
            Self::Taken => f.write_str("RAM or an interrupt controller is there"),
            Self::Again => f.write_str("another one has some of its buses"),
            Self::Other { by_window, by_ports } => {
                write!(f, "it shows {by_window:#x} as the first device, and ports show {by_ports:#x}")
            }
        }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, buses {:02x} to {:02x}", self.base, self.first_bus, self.last_bus)
    }
}

impl Window {
    /// Whether it has this bus.
    pub fn has(&self, bus: u8) -> bool {
        (self.first_bus..=self.last_bus).contains(&bus)
    }

    /// Checks it against the windows before it and what is `taken` by RAM, on a machine whose addresses end at `end`.
    ///
    /// # Errors
    /// Why it cannot be what it says.
    pub fn check(&self, before: &[Self], mut taken: impl Iterator<Item = HpaRange>, end: Hpa) -> Result<(), Unusable> {
        if self.last_bus < self.first_bus {
            return Err(Unusable::Backwards);
        }
        if !self.base.0.is_multiple_of(BUS_BYTES) {
            return Err(Unusable::Misaligned);
        }
        let bus = |number: u64| self.base.0.checked_add(number * BUS_BYTES);
        let range = bus(self.first_bus.into())
            .zip(bus(u64::from(self.last_bus) + 1))
            .and_then(|(start, end)| HpaRange::new(Hpa(start), end - start));
        let range = range.filter(|range| range.end() <= end).ok_or(Unusable::Beyond(end))?;
        let mut controllers = CONTROLLERS.iter().filter_map(|page| HpaRange::new(*page, PAGE_BYTES));
        if controllers.any(|page| page.overlaps(&range)) || taken.any(|taken| taken.overlaps(&range)) {
            return Err(Unusable::Taken);
        }
        let has_buses = |other: &&Self| other.first_bus <= self.last_bus && self.first_bus <= other.last_bus;
        if before.iter().find(has_buses).is_some() { Err(Unusable::Again) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Unusable, Window};
    use addr::{Hpa, HpaRange};

    const END: Hpa = Hpa(1 << 40);
    const GOOD: Window = Window { base: Hpa(0xb000_0000), first_bus: 0, last_bus: 255 };

    /// The verdict on a machine with 2 GiB of RAM.
    fn check(window: Window, before: &[Window]) -> Result<(), Unusable> {
        window.check(before, HpaRange::new(Hpa(0), 2 << 30).into_iter(), END)
    }

    #[test]
    fn windows_of_different_buses_are_used() {
        let upper = Window { first_bus: 64, ..GOOD };
        assert_eq!(check(GOOD, &[]), Ok(()));
        assert_eq!(check(upper, &[Window { last_bus: 63, ..GOOD }]), Ok(()));
        // Bus 0 would be in RAM, but the window begins later.
        assert_eq!(check(Window { base: Hpa(0x7c00_0000), ..upper }, &[]), Ok(()));
    }

    #[test]
    fn window_that_cannot_be_one_is_refused_with_the_reason() {
        for (window, why) in [
            (Window { first_bus: 1, last_bus: 0, ..GOOD }, Unusable::Backwards),
            (Window { base: Hpa(0xb000_1000), ..GOOD }, Unusable::Misaligned),
            (Window { base: Hpa(0), ..GOOD }, Unusable::Taken),
            (Window { base: Hpa(0x7ff0_0000), last_bus: 0, ..GOOD }, Unusable::Taken),
            (Window { base: Hpa(0xf000_0000), ..GOOD }, Unusable::Taken),
            (Window { base: Hpa(0xff_f800_0000), ..GOOD }, Unusable::Beyond(END)),
            (Window { base: Hpa(0xffff_ffff_fff0_0000), ..GOOD }, Unusable::Beyond(END)),
        ] {
            assert_eq!(check(window, &[]), Err(why), "{window}");
        }
        assert_eq!(check(Window { first_bus: 8, ..GOOD }, &[GOOD]), Err(Unusable::Again));
    }

    #[test]
    fn no_window_makes_the_check_panic() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..10_000 {
            let base = Hpa(random.u64(..) >> random.u32(0..64) << random.u32(0..21));
            let window = Window { base, first_bus: random.u8(..), last_bus: random.u8(..) };
            if check(window, &[]).is_ok() {
                assert!(window.first_bus <= window.last_bus && base.0 + (256 << 20) <= END.0 + (256 << 20));
            }
        }
    }
}
