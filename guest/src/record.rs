//! Records: one line each on COM1, a kind and then `key=value` words. Text with spaces is in double quotes.

use core::fmt::{self, Write};

use spin::Mutex;

use crate::arch::{interrupts, serial};

/// Writes a record: `record!("record", experiment = name, ticks = 5)`.
macro_rules! record {
    ($kind:literal $(, $key:ident = $value:expr)* $(,)?) => {
        $crate::record::emit(format_args!(concat!($kind, $(" ", stringify!($key), "={}",)*), $($value),*))
    };
}
pub(crate) use record;

/// Text in double quotes. It replaces characters that would end the quotes.
pub(crate) struct Text<'a>(pub(crate) &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            f.write_char(if c == '"' || c.is_control() { '\'' } else { c })?;
        }
        f.write_char('"')
    }
}

/// One line at most; the rest is dropped.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 2 - self.length;
        let part = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.length..self.length + part.len()].copy_from_slice(part);
        self.length += part.len();
        Ok(())
    }
}

static TURN: Mutex<()> = Mutex::new(());

/// Sends one line, whole. A CPU that died while sending does not silence the others for ever.
pub(crate) fn emit(content: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], length: 0 };
    // `Line` never fails, it cuts.
    let _ = line.write_fmt(content);
    line.bytes[line.length] = b'\r';
    line.bytes[line.length + 1] = b'\n';
    let bytes = &line.bytes[..line.length + 2];

    interrupts::held_off(|| {
        let mut turn = TURN.try_lock();
        for _ in 0..50_000_000 {
            if turn.is_some() {
                break;
            }
            core::hint::spin_loop();
            turn = TURN.try_lock();
        }
        serial::send(bytes);
    });
}
