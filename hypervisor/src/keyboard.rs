//! A PC's keyboard as a terminal's: translates scan codes to the bytes that a terminal would send.
//!
//! The layout is US. Keys without a character send what Linux expects of a console (`console_codes(4)`).

use pc_keyboard::layouts::Us104Key;
use pc_keyboard::{DecodedKey, HandleControl, KeyCode, PS2Keyboard, ScancodeSet1};

/// Mask for a character typed with Ctrl.
const CONTROL: u8 = 0x1f;
const BACKSPACE: u8 = 0x08;
const DELETE: u8 = 0x7f;

/// A keyboard, and which of its keys are held.
pub struct Keyboard(PS2Keyboard<Us104Key, ScancodeSet1>);

impl Default for Keyboard {
    fn default() -> Self {
        Self::new()
    }
}

impl Keyboard {
    /// A keyboard of which no key is held.
    pub const fn new() -> Self {
        Self(PS2Keyboard::new(ScancodeSet1::new(), Us104Key, HandleControl::Ignore))
    }

    /// Takes a byte of a scan code of set 1, and calls `types` for each byte typed.
    pub fn scanned(&mut self, code: u8, mut types: impl FnMut(u8)) {
        // Codes that mean nothing are left out.
        let Ok(Some(event)) = self.0.add_byte(code) else { return };
        let Some(key) = self.0.process_keyevent(event) else { return };
        let sequence: &[u8] = match key {
            DecodedKey::Unicode(character) => {
                let Ok(byte) = u8::try_from(character) else { return };
                match byte {
                    b'\n' => b"\r",
                    BACKSPACE => &[DELETE],
                    DELETE => b"\x1b[3~",
                    b'@'..=b'~' if self.0.get_modifiers().is_ctrl() => return types(byte & CONTROL),
                    0..=0x7f => return types(byte),
                    _ => return,
                }
            }
            DecodedKey::RawKey(code) => match code {
                KeyCode::ArrowUp => b"\x1b[A",
                KeyCode::ArrowDown => b"\x1b[B",
                KeyCode::ArrowRight => b"\x1b[C",
                KeyCode::ArrowLeft => b"\x1b[D",
                KeyCode::Home => b"\x1b[1~",
                KeyCode::Insert => b"\x1b[2~",
                KeyCode::End => b"\x1b[4~",
                KeyCode::PageUp => b"\x1b[5~",
                KeyCode::PageDown => b"\x1b[6~",
                _ => return,
            },
        };
        sequence.iter().for_each(|&byte| types(byte));
    }
}

#[cfg(test)]
mod tests {
    use super::Keyboard;

    fn typed(codes: &[u8]) -> Vec<u8> {
        let (mut keyboard, mut bytes) = (Keyboard::new(), Vec::new());
        codes.iter().for_each(|&code| keyboard.scanned(code, |byte| bytes.push(byte)));
        bytes
    }

    #[test]
    fn keys_send_what_a_terminal_sends() {
        for (codes, bytes) in [
            // "a" and its release; "A" by Shift; "!"; Return, Backspace, Tab, Escape.
            (&[0x1e, 0x9e][..], &b"a"[..]),
            (&[0x2a, 0x1e, 0x9e, 0xaa, 0x1e], b"Aa"),
            (&[0x36, 0x02], b"!"),
            (&[0x1c, 0x0e, 0x0f, 0x01], b"\r\x7f\t\x1b"),
            // Ctrl-C by either key, Ctrl-], and the keys without Ctrl.
            (&[0x1d, 0x2e, 0xae, 0x1a, 0x1b, 0x9d, 0x2e], b"\x03\x1b\x1dc"),
            (&[0xe0, 0x1d, 0x1b, 0xe0, 0x9d, 0x1b], b"\x1d]"),
            // Ctrl with a digit is the digit.
            (&[0x1d, 0x02], b"1"),
            // Arrows, Home, Delete; Enter on the other block.
            (&[0xe0, 0x48, 0xe0, 0xc8, 0xe0, 0x4b], b"\x1b[A\x1b[D"),
            (&[0xe0, 0x47, 0xe0, 0x53], b"\x1b[1~\x1b[3~"),
            (&[0xe0, 0x1c], b"\r"),
            // F1, Shift alone, and invalid codes.
            (&[0x3b, 0x2a, 0xaa, 0xfa, 0x7f, 0xff, 0x1e], b"a"),
        ] {
            assert_eq!(typed(codes), bytes, "{codes:x?}");
        }
    }

    #[test]
    fn any_codes_do_no_harm() {
        let mut rng = fastrand::Rng::with_seed(1);
        let codes: Vec<u8> = (0..100_000).map(|_| rng.u8(..)).collect();
        assert!(typed(&codes).is_ascii());
    }
}
