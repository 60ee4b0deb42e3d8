//! The log: lines of text on the UART.
//!
//! ```text
//! [    1.234567] cpu0 info  4 pCPUs, 983 MiB free
//! ```
//!
//! Each line has the seconds since boot by the host's clock, the writing pCPU, the level, and the message. One lock
//! keeps lines whole. Lines from before the consoles are known are buffered. A panic must be printed even if the lock's
//! holder was stopped, so `emergency` waits a limited time for the lock and then writes anyway.

use core::fmt::{self, Write};

use log::{LevelFilter, Log, Metadata, Record};
use spin::Mutex;

use crate::arch::{Arch, HostConsole, Machine};
use crate::cpu;
use crate::output::Tail;

type Serial = <Machine as Arch>::Console;

static LOGGER: Logger = Logger {
    console: Mutex::new(Console { serial: Serial::CLOSED, is_open: false, is_mid_line: false, early: Tail::new() }),
};

/// Bytes of the log that are buffered before there is a console.
const EARLY_BYTES: usize = 2048;

/// How often [`emergency`] tries the lock: some milliseconds, in which the holder either ends its line or is stopped.
const LOCK_PATIENCE: u32 = 1_000_000;

/// Starts to buffer the log. Messages up to `info` count until [`set_level`] changes that.
pub(crate) fn init() {
    // Fails only when a logger is set already: ours.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(LevelFilter::Info);
}

/// Opens the consoles, and writes the buffered log. Does nothing if they are open, or while another pCPU writes.
pub(crate) fn open() {
    if let Some(mut console) = LOGGER.console.try_lock() {
        console.open();
    }
}

/// Sets the level to the one named (`off`, `error`, `warn`, `info`, `debug`, `trace`); an unknown name changes nothing.
pub(crate) fn set_level(name: &str) {
    if let Ok(level) = name.parse() {
        log::set_max_level(level);
    }
}

/// Lets `report` write lines of level "panic", whichever pCPU holds the lock.
pub(crate) fn emergency(report: impl FnOnce(&mut dyn Write)) {
    speak_anyway("panic", report);
}

/// Writes the very last line, whichever pCPU holds the lock.
pub fn last_words(words: impl fmt::Display) {
    speak_anyway("end", |out| {
        let _ = write!(out, "{words}");
    });
}

fn speak_anyway(level: &str, report: impl FnOnce(&mut dyn Write)) {
    let mut guard = (0..LOCK_PATIENCE).find_map(|_| LOGGER.console.try_lock());
    let mut second;
    let serial = match &mut guard {
        Some(console) => {
            console.open();
            console.begin_line();
            &mut console.serial
        }
        // The holder was stopped in the middle of a line, or is the panicking pCPU itself.
        None => {
            second = Serial::open();
            second.send(b"\r\n");
            &mut second
        }
    };
    let mut lines = Lines(|bytes: &[u8]| serial.send(bytes));
    begin_line(&mut lines, level);
    report(&mut lines);
    let _ = lines.write_str("\n");
}

/// Writes bytes as they are, between lines of the log.
pub(crate) fn raw(bytes: &[u8]) {
    let mut console = LOGGER.console.lock();
    console.send(bytes);
    console.is_mid_line = bytes.last().is_some_and(|&byte| byte != b'\n');
}

/// Reads input from the consoles; 0 if there is none, or another pCPU writes now.
pub(crate) fn receive(into: &mut [u8]) -> usize {
    LOGGER.console.try_lock().map_or(0, |mut console| console.serial.receive(into))
}

/// Waits a limited time until all output has left. For the end of the machine.
pub fn flush() {
    if let Some(mut console) = LOGGER.console.try_lock() {
        console.serial.flush();
    }
}

struct Logger {
    console: Mutex<Console>,
}

/// Where lines go.
struct Console {
    serial: Serial,
    is_open: bool,
    /// The last output was no whole line.
    is_mid_line: bool,
    /// The buffered log.
    early: Tail<EARLY_BYTES>,
}

impl Console {
    fn open(&mut self) {
        if !self.is_open {
            self.serial = Serial::open();
            self.is_open = true;
            let (older, newer) = self.early.as_slices();
            self.serial.send(older);
            self.serial.send(newer);
        }
    }

    /// Ends an unfinished line.
    fn begin_line(&mut self) {
        if core::mem::take(&mut self.is_mid_line) {
            self.send(b"\r\n");
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        if self.is_open { self.serial.send(bytes) } else { self.early.push(bytes) }
    }
}

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let level = match record.level() {
            log::Level::Error => "error",
            log::Level::Warn => "warn",
            log::Level::Info => "info",
            log::Level::Debug => "debug",
            log::Level::Trace => "trace",
        };
        let mut console = self.console.lock();
        console.begin_line();
        let mut lines = Lines(|bytes: &[u8]| console.send(bytes));
        begin_line(&mut lines, level);
        let _ = lines.write_fmt(*record.args());
        let _ = lines.write_str("\n");
    }

    fn flush(&self) {}
}

/// Writing to the consoles does not fail (output that they do not accept in time is dropped), so results are ignored
/// here.
fn begin_line(out: &mut dyn Write, level: &str) {
    let micros = Machine::nanos() / 1000;
    let cpu = cpu::try_this().map_or(0, |cpu| cpu.id.index());
    let _ = write!(out, "[{:5}.{:06}] cpu{cpu} {level:<5} ", micros / 1_000_000, micros % 1_000_000);
}

/// Ends lines the way a terminal on a serial line wants it.
struct Lines<F>(F);

impl<F: FnMut(&[u8])> Write for Lines<F> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for line in text.split_inclusive('\n') {
            match line.strip_suffix('\n') {
                Some(line) => {
                    (self.0)(line.as_bytes());
                    (self.0)(b"\r\n");
                }
                None => (self.0)(line.as_bytes()),
            }
        }
        Ok(())
    }
}
