//! The terminal as a guest's console: raw mode, in both directions, until Ctrl-].

use std::io::{self, IsTerminal, Read};
use std::sync::mpsc::Sender;
use std::thread;

use crossterm::terminal::{disable_raw_mode, enable_raw_mode};

/// Ctrl-].
const LEAVE: u8 = 0x1d;

/// Whether a user is present: input and output are both a terminal.
pub(crate) fn has_terminal() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Input from the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    /// Keys for the guest.
    Keys(Vec<u8>),
    /// Ctrl-], or the terminal is gone.
    Leave,
}

/// A terminal in raw mode; as it was when dropped.
#[derive(Debug)]
pub(crate) struct RawTerminal;

impl RawTerminal {
    /// Switches to raw mode and sends input to `events`.
    pub(crate) fn open<E: Send + 'static>(
        events: &Sender<E>,
        wrap: impl Fn(Typed) -> E + Send + 'static,
    ) -> io::Result<Self> {
        enable_raw_mode()?;
        let events = events.clone();
        // The thread ends with the process: a read of a terminal cannot be called off.
        thread::spawn(move || {
            let mut bytes = [0; 512];
            let mut stdin = io::stdin().lock();
            loop {
                let count = match stdin.read(&mut bytes) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(count) => count,
                    Err(_) => 0,
                };
                for typed in split(&bytes[..count]) {
                    let last = typed == Typed::Leave;
                    if events.send(wrap(typed)).is_err() || last {
                        return;
                    }
                }
            }
        });
        Ok(Self)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // If that fails, there is no terminal any more.
        let _ = disable_raw_mode();
    }
}

/// Splits input into events. Empty input means that the terminal was closed.
fn split(bytes: &[u8]) -> Vec<Typed> {
    let leave = bytes.iter().position(|&byte| byte == LEAVE);
    let keys = &bytes[..leave.unwrap_or(bytes.len())];
    let mut typed = Vec::new();
    if !keys.is_empty() {
        typed.push(Typed::Keys(keys.to_vec()));
    }
    if leave.is_some() || bytes.is_empty() {
        typed.push(Typed::Leave);
    }
    typed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_before_ctrl_bracket_reach_the_guest_and_those_after_do_not() {
        assert_eq!(split(b"ls\x1dx"), [Typed::Keys(b"ls".to_vec()), Typed::Leave]);
        assert_eq!(split(b"\x03"), [Typed::Keys(vec![3])]);
        assert_eq!(split(b""), [Typed::Leave]);
    }
}
