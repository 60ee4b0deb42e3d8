//! Chooses the machine's consoles: serial ports, and the screen.
//!
//! By default these are the serial port that the firmware uses, or else COM1 if a UART answers there, and the screen.
//! `console=` names others: `serial` (that port without the screen), `com1` to `com4`, a port such as `0x2f8`,
//! `screen`, `none`, or several separated by commas. If the value is invalid, all existing consoles are used, so that
//! the user can read the error.

use core::fmt;

use addr::Hpa;

/// Maximum number of serial ports in use at the same time.
pub const MOST_UARTS: usize = 4;

/// Ports of COM1 to COM4, as all PCs have them.
const COM: [u16; 4] = [0x3f8, 0x2f8, 0x3e8, 0x2e8];
/// I/O ports that a UART has.
const PORTS: u16 = 8;

/// Where a UART's eight registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// From this I/O port on.
    Ports(u16),
    /// In memory: the distance of two registers in bytes, and the access size, 1, 2 or 4.
    Memory {
        /// The first register.
        start: Hpa,
        /// From one register to the next.
        distance: u8,
        /// Number of bytes per access.
        access_bytes: u8,
    },
}

impl Place {
    /// From this I/O port on, if all of them exist.
    pub fn ports(first: u16) -> Option<Self> {
        (first != 0 && first.checked_add(PORTS - 1).is_some()).then_some(Self::Ports(first))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ports(port) => match COM.iter().position(|com| com == port) {
                Some(at) => write!(f, "COM{} (port {port:#x})", at + 1),
                None => write!(f, "the UART at port {port:#x}"),
            },
            Self::Memory { start, .. } => write!(f, "the UART at {start}"),
        }
    }
}

/// A serial port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uart {
    /// Where its registers are.
    pub place: Place,
    /// The firmware uses it as a console: its speed does not change, because the other end knows that speed.
    pub is_of_firmware: bool,
}

impl Uart {
    /// A console of the firmware.
    pub const fn of_firmware(place: Place) -> Self {
        Self { place, is_of_firmware: true }
    }

    const fn at(port: u16) -> Self {
        Self { place: Place::Ports(port), is_of_firmware: false }
    }
}

/// The consoles that are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consoles {
    uarts: [Option<Uart>; MOST_UARTS],
    /// Whether the screen is one of them.
    pub has_screen: bool,
}

impl Consoles {
    /// The default while the machine is unknown.
    pub const FIRST: Self = Self { uarts: [Some(Uart::at(COM[0])), None, None, None], has_screen: true };

    /// The serial ports among them.
    pub fn uarts(&self) -> impl Iterator<Item = Uart> {
        self.uarts.iter().copied().flatten()
    }

    fn of(uarts: impl Iterator<Item = Uart>, has_screen: bool) -> Self {
        let mut consoles = Self { has_screen, ..Self::default() };
        uarts.for_each(|uart| consoles.add(uart));
        consoles
    }

    /// Adds a UART, unless it is there or there are as many as there can be.
    fn add(&mut self, uart: Uart) {
        if self.uarts().any(|there| there.place == uart.place) {
            return;
        }
        if let Some(free) = self.uarts.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(uart);
        }
    }
}

/// An error in the value of `console=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Complaint<'a> {
    /// This word means nothing.
    Unknown(&'a str),
    /// `none` or an empty value, together with others.
    NotAlone,
    /// None of these serial ports exists, and nothing else was named.
    NotThere(Uart),
}

impl fmt::Display for Complaint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(word) => write!(
                f,
                "unknown word \"{word}\" in console=; valid are com1 to com4, a port such as 0x2f8, serial, screen and none, \
                 separated by commas"
            )?,
            Self::NotAlone => f.write_str("console= has none together with others")?,
            Self::NotThere(uart) => write!(f, "console=: {} does not answer", uart.place)?,
        }
        f.write_str("; all existing consoles are used")
    }
}

/// Chooses the consoles from the value of `console=`, if there is one. `firmware` is the serial port that the firmware
/// reports; `answers` checks whether a UART exists.
pub fn choose<'a>(
    option: Option<&'a str>,
    firmware: Option<Uart>,
    mut answers: impl FnMut(&Uart) -> bool,
) -> (Consoles, Option<Complaint<'a>>) {
    let asks_usual = option.is_none_or(|value| value.split(',').any(|word| word == "serial"));
    let usual = firmware.into_iter().chain([Uart::at(COM[0])]).find(|uart| asks_usual && answers(uart));
    let complaint = match option.map(|value| parse(value, firmware, usual)) {
        None => return (Consoles::of(usual.into_iter(), true), None),
        Some(Ok(named)) => {
            let there = Consoles::of(named.uarts().filter(|uart| answers(uart)), named.has_screen);
            match named.uarts().next() {
                Some(missing) if there.uarts().next().is_none() && !there.has_screen => Complaint::NotThere(missing),
                _ => return (there, None),
            }
        }
        Some(Err(complaint)) => complaint,
    };
    let all = firmware.into_iter().chain([Uart::at(COM[0]), Uart::at(COM[1])]);
    (Consoles::of(all.filter(|uart| answers(uart)), true), Some(complaint))
}

/// The consoles that a value names. `usual` is the default serial port, if there is one.
fn parse(value: &str, firmware: Option<Uart>, usual: Option<Uart>) -> Result<Consoles, Complaint<'_>> {
    if value == "none" {
        return Ok(Consoles::default());
    }
    let mut consoles = Consoles::default();
    for word in value.split(',') {
        match word {
            "none" => return Err(Complaint::NotAlone),
            "screen" => consoles.has_screen = true,
            "serial" => consoles.add(usual.unwrap_or(Uart::at(COM[0]))),
            _ => {
                let port = port(word).ok_or(Complaint::Unknown(word))?;
                // Its speed does not change even if it is named.
                let known = firmware.filter(|uart| uart.place == Place::Ports(port));
                consoles.add(known.unwrap_or(Uart::at(port)));
            }
        }
    }
    Ok(consoles)
}

/// The first I/O port that a word means.
fn port(word: &str) -> Option<u16> {
    if let Some(number) = word.strip_prefix("com") {
        return COM.get(number.parse::<usize>().ok()?.checked_sub(1)?).copied().filter(|_| number.len() == 1);
    }
    let port = u16::from_str_radix(word.strip_prefix("0x")?, 16).ok()?;
    Place::ports(port).map(|_| port)
}

#[cfg(test)]
mod tests {
    use super::{COM, Complaint, Consoles, Place, Uart, choose};
    use addr::Hpa;

    const BMC: Uart = Uart::of_firmware(Place::Memory { start: Hpa(0xfedc_9000), distance: 4, access_bytes: 4 });

    /// The places of the serial ports that are chosen on a machine that has these, and whether the screen is.
    fn chosen<'a>(
        option: Option<&'a str>,
        firmware: Option<Uart>,
        there: &[u16],
    ) -> (Vec<Place>, bool, Option<Complaint<'a>>) {
        let answers = |uart: &Uart| match uart.place {
            Place::Ports(port) => there.contains(&port),
            Place::Memory { .. } => true,
        };
        let (consoles, complaint) = choose(option, firmware, answers);
        (consoles.uarts().map(|uart| uart.place).collect(), consoles.has_screen, complaint)
    }

    fn ports(ports: &[u16]) -> Vec<Place> {
        ports.iter().map(|&port| Place::Ports(port)).collect()
    }

    #[test]
    fn without_a_word_it_is_firmwares_port_or_com1_and_the_screen() {
        assert_eq!(chosen(None, None, &COM), (ports(&[0x3f8]), true, None));
        assert_eq!(chosen(None, None, &[0x2f8]), (vec![], true, None));
        assert_eq!(chosen(None, Some(BMC), &COM), (vec![BMC.place], true, None));
        let com2 = Some(Uart::of_firmware(Place::Ports(0x2f8)));
        assert_eq!(chosen(None, com2, &COM), (ports(&[0x2f8]), true, None));
        // Firmware's tables are wrong.
        assert_eq!(chosen(None, com2, &[0x3f8]), (ports(&[0x3f8]), true, None));
    }

    #[test]
    fn consoles_are_those_that_are_named_and_there() {
        for (value, uarts, has_screen) in [
            ("com1", &[0x3f8][..], false),
            ("com2", &[0x2f8], false),
            ("0x2f8", &[0x2f8], false),
            ("com2,screen", &[0x2f8], true),
            ("screen,com1,com2,0x3f8,com3", &[0x3f8, 0x2f8, 0x3e8], true),
            ("screen", &[], true),
            ("none", &[], false),
            // COM4 is not there, the other is.
            ("com4,com1", &[0x3f8], false),
            ("com4,screen", &[], true),
        ] {
            let there = [0x3f8, 0x2f8, 0x3e8];
            assert_eq!(chosen(Some(value), Some(BMC), &there), (ports(uarts), has_screen, None), "{value}");
        }
    }

    #[test]
    fn serial_is_the_port_that_is_used_without_a_word_and_not_the_screen() {
        assert_eq!(chosen(Some("serial"), None, &COM), (ports(&[0x3f8]), false, None));
        assert_eq!(chosen(Some("serial"), Some(BMC), &COM), (vec![BMC.place], false, None));
        assert_eq!(chosen(Some("serial,com2"), None, &COM), (ports(&[0x3f8, 0x2f8]), false, None));
        // Firmware's tables are wrong.
        let com2 = Some(Uart::of_firmware(Place::Ports(0x2f8)));
        assert_eq!(chosen(Some("serial"), com2, &[0x3f8]), (ports(&[0x3f8]), false, None));
        let not_there = Some(Complaint::NotThere(Uart::at(0x3f8)));
        assert_eq!(chosen(Some("serial"), None, &[0x2f8]), (ports(&[0x2f8]), true, not_there));
        assert_eq!(chosen(Some("serial,screen"), None, &[]), (vec![], true, None));
    }

    #[test]
    fn bad_value_is_complained_of_on_all_consoles() {
        for (value, complaint) in [
            ("com5", Complaint::Unknown("com5")),
            ("com0", Complaint::Unknown("com0")),
            ("com01", Complaint::Unknown("com01")),
            ("com", Complaint::Unknown("com")),
            ("COM1", Complaint::Unknown("COM1")),
            ("ttyS0", Complaint::Unknown("ttyS0")),
            ("0x2f8x", Complaint::Unknown("0x2f8x")),
            ("0x", Complaint::Unknown("0x")),
            ("0xfff9", Complaint::Unknown("0xfff9")),
            ("0x10000", Complaint::Unknown("0x10000")),
            ("0", Complaint::Unknown("0")),
            ("", Complaint::Unknown("")),
            ("com1,", Complaint::Unknown("")),
            ("com1,none", Complaint::NotAlone),
            ("com4", Complaint::NotThere(Uart::at(0x2e8))),
        ] {
            let there = [0x3f8, 0x2f8];
            assert_eq!(chosen(Some(value), None, &there), (ports(&there), true, Some(complaint)), "{value}");
            let all = [&[BMC.place], &ports(&there)[..]].concat();
            assert_eq!(chosen(Some(value), Some(BMC), &there), (all, true, Some(complaint)), "{value}");
        }
    }

    #[test]
    fn speed_of_firmwares_port_is_left_also_where_it_is_named() {
        let com2 = Uart::of_firmware(Place::Ports(0x2f8));
        let (consoles, _) = choose(Some("com1,com2"), Some(com2), |_| true);
        let kept: Vec<_> = consoles.uarts().map(|uart| (uart.place, uart.is_of_firmware)).collect();
        assert_eq!(kept, [(Place::Ports(0x3f8), false), (Place::Ports(0x2f8), true)]);
    }

    #[test]
    fn no_more_ports_are_used_than_there_is_room_for() {
        let (consoles, complaint) = choose(Some("0x100,0x200,0x300,0x400,0x500,0x100"), None, |_| true);
        assert_eq!((consoles.uarts().count(), complaint), (super::MOST_UARTS, None));
        assert_eq!(Consoles::FIRST.uarts().count(), 1);
    }
}
