//! The host's own console as a terminal of the VMs: it shows one VM's output, and sends input to that VM.
//!
//! It shows either one VM's console, byte by byte, or the *log*: whole lines of all VMs, with their names in front.
//! Input goes to the VM that is shown. Ctrl-] and a key choose another one. The last kilobytes of each console are
//! kept, and shown again when it is chosen. The hypervisor's own log always appears at once, and does not use this
//! code.
//!
//! Nothing waits here. [`Terminal::next`] returns pending output piece by piece. While much of it is pending,
//! [`Terminal::room`] makes the shown guests wait.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::output::Tail;

/// The key that commands begin with: Ctrl-], as in `dunlin run`.
const PREFIX: u8 = 0x1d;
/// Bytes that are kept of each console.
const KEPT: usize = 4096;
/// A line of the log is broken when it is longer.
const LONGEST_LINE: usize = 256;
/// Bytes of pending output at which guests must wait.
const WAITING: usize = 4096;

/// The shown console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Lines of all VMs.
    Log,
    /// The console of the VM with this number.
    Guest(u32),
}

/// A key's meaning for other code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    /// Nothing.
    Taken,
    /// The VM with this number gets the byte.
    Guest(u32, u8),
    /// Power the machine off. All VMs have ended.
    PowerOff,
}

/// The terminal.
pub(crate) struct Terminal {
    shown: Shown,
    /// The last key was the prefix.
    is_command: bool,
    /// The user was told that the log takes no input.
    has_warned: bool,
    /// In ascending order of their numbers.
    guests: Vec<Guest>,
    /// The pending output.
    waiting: VecDeque<u8>,
}

struct Guest {
    number: u32,
    name: String,
    has_ended: bool,
    /// The end of all that it wrote.
    tail: Box<Tail<KEPT>>,
    /// The line that it writes, the part that was not shown in the log yet.
    line: Vec<u8>,
}

impl Guest {
    fn new(number: u32, name: &str) -> Self {
        Self { number, name: name.into(), has_ended: false, tail: Box::new(Tail::new()), line: Vec::new() }
    }
}

impl Terminal {
    /// The terminal of VMs with these numbers and names: a single VM's console is shown from the start, of several the
    /// log.
    pub(crate) fn new<'a>(names: impl Iterator<Item = (u32, &'a str)>) -> Self {
        let guests: Vec<_> = names.map(|(number, name)| Guest::new(number, name)).collect();
        Self {
            shown: if let [only] = guests.as_slice() { Shown::Guest(only.number) } else { Shown::Log },
            is_command: false,
            has_warned: false,
            guests,
            waiting: VecDeque::new(),
        }
    }

    /// A VM was added. The shown console does not change.
    pub(crate) fn added(&mut self, number: u32, name: &str) {
        let at = self.guests.partition_point(|guest| guest.number < number);
        self.guests.insert(at, Guest::new(number, name));
    }

    /// Removes a VM with its kept output. If its console is shown, the log is shown instead.
    pub(crate) fn removed(&mut self, number: u32) {
        self.guests.retain(|guest| guest.number != number);
        if self.shown == Shown::Guest(number) {
            self.show(Shown::Log);
        }
    }

    fn find(&self, number: u32) -> Option<&Guest> {
        self.guests.iter().find(|guest| guest.number == number)
    }

    /// How many bytes of a guest's output fit now.
    pub(crate) fn room(&self, guest: u32) -> usize {
        match self.shown {
            Shown::Guest(shown) if shown != guest => KEPT,
            _ => WAITING.saturating_sub(self.waiting.len()),
        }
    }

    /// Adds output of a guest.
    pub(crate) fn wrote(&mut self, guest: u32, bytes: &[u8]) {
        let found = self.guests.iter_mut().find(|other| other.number == guest);
        let Some(Guest { name, tail, line, .. }) = found else { return };
        tail.push(bytes);
        match self.shown {
            Shown::Guest(shown) if shown == guest => self.waiting.extend(bytes),
            Shown::Guest(_) => {}
            Shown::Log => {
                for &byte in bytes {
                    match byte {
                        b'\n' => write_line(&mut self.waiting, name, line),
                        b'\r' => {}
                        _ => line.push(byte),
                    }
                    if line.len() >= LONGEST_LINE {
                        write_line(&mut self.waiting, name, line);
                    }
                }
            }
        }
    }

    /// A guest has written its last byte.
    pub(crate) fn ended(&mut self, guest: u32) {
        let found = self.guests.iter_mut().find(|other| other.number == guest);
        let Some(Guest { name, has_ended, line, .. }) = found else { return };
        *has_ended = true;
        if !line.is_empty() {
            write_line(&mut self.waiting, name, line);
        }
    }

    /// The next pending output, one contiguous piece.
    pub(crate) fn next(&self) -> &[u8] {
        self.waiting.as_slices().0
    }

    /// So many bytes of that were sent.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.waiting.drain(..bytes.min(self.waiting.len()));
    }

    /// A key was pressed.
    pub(crate) fn typed(&mut self, key: u8) -> Key {
        if !core::mem::take(&mut self.is_command) {
            if key == PREFIX {
                self.is_command = true;
                return Key::Taken;
            }
            return self.input(key);
        }
        match key {
            PREFIX => return self.input(key),
            b'l' => self.show(Shown::Log),
            b'n' => self.show(self.following()),
            b'o' if self.guests.iter().all(|guest| guest.has_ended) => return Key::PowerOff,
            b'o' => self.say("VMs run; when all have ended, Ctrl-] o turns the machine off"),
            b'0'..=b'9' if self.find((key - b'0').into()).is_some() => self.show(Shown::Guest((key - b'0').into())),
            _ => self.help(),
        }
        Key::Taken
    }

    fn input(&mut self, key: u8) -> Key {
        match self.shown {
            Shown::Guest(shown) if self.find(shown).is_some_and(|guest| !guest.has_ended) => {
                return Key::Guest(shown, key);
            }
            _ if self.has_warned => {}
            _ => {
                let title = self.title();
                self.say(&format!("{title} takes no input; Ctrl-] n shows the next console"));
                self.has_warned = true;
            }
        }
        Key::Taken
    }

    /// The console that the next key selects: the VMs in order, then the log.
    fn following(&self) -> Shown {
        let next = match self.shown {
            Shown::Log => self.guests.first(),
            Shown::Guest(shown) => self.guests.iter().find(|guest| guest.number > shown),
        };
        next.map_or(Shown::Log, |guest| Shown::Guest(guest.number))
    }

    /// Shows another console. Pending output belongs to the old one, and is dropped: it is kept there.
    fn show(&mut self, shown: Shown) {
        self.shown = shown;
        self.has_warned = false;
        self.waiting.clear();
        let title = self.title();
        self.say(&title);
        // Lines of the log begin with the next output.
        self.guests.iter_mut().for_each(|guest| guest.line.clear());
        if let Shown::Guest(shown) = shown
            && let Some(guest) = self.guests.iter().find(|guest| guest.number == shown)
        {
            self.waiting.extend(guest.tail.whole_lines());
        }
    }

    /// Name of the shown console, for people.
    fn title(&self) -> String {
        match self.shown {
            Shown::Log => "the log of all VMs".into(),
            Shown::Guest(shown) => match self.find(shown) {
                Some(guest) if guest.has_ended => {
                    format!("the console of {} (VM {shown}), which has ended", guest.name)
                }
                Some(guest) => format!("the console of {} (VM {shown})", guest.name),
                None => "nothing".into(),
            },
        }
    }

    fn help(&mut self) {
        let title = self.title();
        self.say(&format!(
            "{title}; Ctrl-] and then: n the next, l the log, 0 to 9 that VM's console, o off, Ctrl-] itself"
        ));
    }

    /// Writes a line of the terminal itself. It is dropped if there is no room.
    fn say(&mut self, text: &str) {
        if self.waiting.len() < WAITING {
            self.waiting.extend(b"\r\n--- ");
            self.waiting.extend(text.as_bytes());
            self.waiting.extend(b" ---\r\n");
        }
    }
}

/// Writes a line of the log, which is then empty.
fn write_line(waiting: &mut VecDeque<u8>, name: &str, line: &mut Vec<u8>) {
    waiting.extend(name.as_bytes());
    waiting.extend(b"| ");
    waiting.extend(line.drain(..));
    waiting.extend(b"\r\n");
}

#[cfg(test)]
mod tests;
