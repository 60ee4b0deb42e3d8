//! Short texts for records.

use core::fmt;

/// A short text; what does not fit is dropped.
pub(super) struct Line {
    bytes: [u8; 64],
    length: usize,
}

impl Line {
    pub(super) fn of(content: fmt::Arguments<'_>) -> Self {
        let mut line = Self { bytes: [0; 64], length: 0 };
        // `Line` never fails, it cuts.
        let _ = fmt::Write::write_fmt(&mut line, content);
        line
    }

    pub(super) fn text(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or("")
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes().filter(u8::is_ascii).take(self.bytes.len() - self.length) {
            self.bytes[self.length] = byte;
            self.length += 1;
        }
        Ok(())
    }
}
