//! Powers a machine off by ACPI: state S5, "soft off" (ACPI 6.5, 7.4.2.5 and 4.8.3.2.1).
//!
//! The object `_S5_` of the firmware's AML has the values for the sleep registers. This code does not interpret AML: on
//! all known machines the object is a package of constants, so it searches for its bytes.

/// AML: the name, and the encodings of a package and of the constants that one may hold (ACPI 6.5, 20.2).
mod aml {
    pub(super) const NAME: &[u8] = b"_S5_";
    pub(super) const PACKAGE: u8 = 0x12;
    pub(super) const ZERO: u8 = 0x00;
    pub(super) const ONE: u8 = 0x01;
    pub(super) const BYTE: u8 = 0x0a;
}

/// Values of the field SLP_TYP of the two PM1 control registers; a machine without the second one ignores its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepTypes {
    /// Of PM1a_CNT.
    pub a: u8,
    /// Of PM1b_CNT.
    pub b: u8,
}

/// The field has three bits.
const LARGEST_TYPE: u8 = 7;

/// Looks for `_S5_` in the bytes of a DSDT or SSDT.
pub fn find(table: &[u8]) -> Option<SleepTypes> {
    let after_name = table.windows(aml::NAME.len()).enumerate().filter(|(_, window)| *window == aml::NAME);
    after_name.filter_map(|(at, _)| package(&table[at + aml::NAME.len()..])).next()
}

/// The first two numbers of a package that begins here.
fn package(bytes: &[u8]) -> Option<SleepTypes> {
    let (&aml::PACKAGE, rest) = bytes.split_first()? else { return None };
    // The length's own length is in its two highest bits.
    let length_bytes = 1 + usize::from(rest.first()? >> 6);
    let (&elements, rest) = rest.get(length_bytes..)?.split_first()?;
    if elements == 0 {
        return None;
    }
    let (a, rest) = number(rest)?;
    let b = if elements > 1 { number(rest)?.0 } else { a };
    (a <= LARGEST_TYPE && b <= LARGEST_TYPE).then_some(SleepTypes { a, b })
}

fn number(bytes: &[u8]) -> Option<(u8, &[u8])> {
    match bytes {
        [aml::ZERO, rest @ ..] => Some((0, rest)),
        [aml::ONE, rest @ ..] => Some((1, rest)),
        [aml::BYTE, value, rest @ ..] => Some((*value, rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{SleepTypes, find};

    #[test]
    fn package_of_constants_is_found_behind_its_name() {
        for (bytes, types) in [
            // QEMU's q35: Name (_S5, Package (0x04) { Zero, Zero, Zero, Zero })
            (&b"\x08_S5_\x12\x06\x04\0\0\0\0"[..], Some((0, 0))),
            // As many real machines have it.
            (b"junk\x08_S5_\x12\x0a\x04\x0a\x05\x0a\x05\0\0junk", Some((5, 5))),
            (b"_S5_\x12\x06\x02\x01\x0a\x07", Some((1, 7))),
            // A length of two bytes; a package of one number.
            (b"_S5_\x12\x46\0\x01\x0a\x03", Some((3, 3))),
            // The name alone, as in a reference, and then the object.
            (b"_S5_\x70_S5_\x12\x06\x02\x01\x01", Some((1, 1))),
        ] {
            assert_eq!(find(bytes), types.map(|(a, b)| SleepTypes { a, b }), "{bytes:x?}");
        }
    }

    #[test]
    fn other_bytes_are_no_package_and_do_no_harm() {
        for bytes in [
            &b""[..],
            b"_S5",
            b"_S5_",
            b"_S5_\x12",
            b"_S5_\x12\xc6",
            b"_S5_\x12\x06\0",
            b"_S5_\x12\x06\x02\x0a",
            b"_S5_\x12\x06\x02\x0a\x08\0",
            b"_S5_\x12\x06\x02\x0b\x05\0\0",
        ] {
            assert_eq!(find(bytes), None, "{bytes:x?}");
        }
    }
}
