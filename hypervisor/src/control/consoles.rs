//! Serial lines on their way out: to the control port, or to the machine's own consoles where there is none.
//!
//! Where there is no port, the machine's own consoles are a terminal for the VMs ([`Terminal`]), and the first pCPU
//! looks there now and then whether something was typed.

use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::{CONSOLE_CHUNK, Line, Message};

use super::WORK_NANOS;
use super::port::Port;
use crate::arch::{clock, platform};
use crate::output::Turns;
use crate::terminal::{Key, Terminal};
use crate::vm::table::table;
use crate::vm::{LINES, Vm};

/// Bytes that one turn of a console takes of the log's UART, where there is no port: enough for most lines, so that
/// they stay whole. At 115 200 Bd they take 22 ms.
const LOG_CHUNK: usize = 256;
/// Bytes that one poll writes there at most, where the UART is faster.
const LOG_LIMIT: usize = 4096;
/// How often it is looked whether something was typed, in nanoseconds: so often that nobody notices, and so seldom that
/// reading a register each time, a microsecond, is nothing. While somebody types it is more often: a UART holds 16
/// bytes, which come in 1.4 ms.
const TYPED_NANOS: u64 = 5_000_000;
const TYPING_NANOS: u64 = 500_000;
/// For so long after a key somebody types, in nanoseconds.
const TYPING_LASTS_NANOS: u64 = 50_000_000;
/// Most bytes that are taken at a time of what was typed.
const TYPED_CHUNK: usize = 64;
/// What a byte takes at 38 400 Bd, for the selftest: less than an emulated guest writes in that time.
const SLOW_BYTE_NANOS: u64 = 1_000_000_000 / 3_840;

/// Where serial lines go.
pub(super) struct Consoles {
    /// Without a port: what the machine's own consoles show.
    terminal: Option<Terminal>,
    /// When it is looked next whether something was typed there, and until when somebody is taken to be typing.
    look_at: u64,
    typing_until: u64,
    /// Whose console is next.
    turns: Turns,
    /// Without a port: what guests wrote waits until then, so that the UARTs take half of this pCPU's time at most.
    log_rests_until: u64,
    /// The log's UART is taken for as slow as a real one.
    log_is_slow: bool,
}

/// What was typed on the machine's own consoles.
pub(super) struct TypedKeys {
    /// The machine is to be turned off.
    pub(super) power_off: bool,
    /// More may come soon.
    pub(super) may_go_on: bool,
}

impl Consoles {
    /// To the port; or to a terminal, of VMs with these numbers and names.
    pub(super) fn new<'a>(terminal: Option<impl Iterator<Item = (u32, &'a str)>>, log_is_slow: bool) -> Self {
        Self {
            terminal: terminal.map(Terminal::new),
            look_at: 0,
            typing_until: 0,
            turns: Turns::new(),
            log_rests_until: 0,
            log_is_slow,
        }
    }

    /// Takes what was typed on the machine's own consoles.
    pub(super) fn typed(&mut self) -> TypedKeys {
        let mut power_off = false;
        let Some(terminal) = &mut self.terminal else { return TypedKeys { power_off, may_go_on: false } };
        let now = clock::now();
        if now >= self.look_at {
            let mut bytes = [0; TYPED_CHUNK];
            let count = crate::log::receive(&mut bytes);
            if count != 0 {
                self.typing_until = now + clock::nanos_to_ticks(TYPING_LASTS_NANOS);
            }
            for &byte in &bytes[..count] {
                match terminal.typed(byte) {
                    Key::Taken => {}
                    Key::Guest(guest, byte) => {
                        let vm = table().running(guest).cloned();
                        if let Ok(vm) = vm {
                            // A guest that does not read loses what its UART has no room for.
                            let _ = vm.type_on(Line::Console, &[byte]);
                        }
                    }
                    Key::PowerOff => power_off = true,
                }
            }
            let pause = if now < self.typing_until { TYPING_NANOS } else { TYPED_NANOS };
            self.look_at = now + clock::nanos_to_ticks(pause);
        }
        TypedKeys { power_off, may_go_on: now < self.typing_until }
    }

    /// A VM was added.
    pub(super) fn added(&mut self, number: u32, name: &str) {
        if let Some(terminal) = &mut self.terminal {
            terminal.added(number, name);
        }
    }

    /// A VM has written its last byte.
    pub(super) fn ended(&mut self, number: u32) {
        if let Some(terminal) = &mut self.terminal {
            terminal.ended(number);
        }
    }

    /// A VM is forgotten.
    pub(super) fn removed(&mut self, number: u32) {
        if let Some(terminal) = &mut self.terminal {
            terminal.removed(number);
        }
    }

    /// Takes what guests wrote, in turn, as long as there is room. Says whether there is more for the log.
    pub(super) fn show(&mut self, port: &mut Port) -> bool {
        let running: Vec<Arc<Vm>> = table().all_alive().cloned().collect();
        let sources: Vec<_> = running.iter().flat_map(|vm| LINES.map(|line| (vm, line))).collect();
        let mut turns = core::mem::take(&mut self.turns);
        let has_more = if port.is_there() {
            let room = port.room();
            let allowed = |taken: usize| CONSOLE_CHUNK.min(room.saturating_sub(taken));
            turns.deal(sources.len(), allowed, |source, most| {
                let (vm, line) = sources[source];
                self.output(vm, line, most, port)
            });
            // The port's pace decides, not this pCPU's.
            false
        } else {
            self.show_on_terminal(&mut turns, &sources, port)
        };
        self.turns = turns;
        has_more
    }

    /// Without a port: the UARTs take as long as they take, and this pCPU waits for them. So this ends after one chunk
    /// where they are slow.
    fn show_on_terminal(&mut self, turns: &mut Turns, sources: &[(&Arc<Vm>, Line)], port: &mut Port) -> bool {
        let since = clock::now();
        let rests = since < self.log_rests_until;
        let has_more = turns.deal(
            sources.len(),
            |taken| LOG_CHUNK.min(LOG_LIMIT.saturating_sub(taken)),
            |source, most| {
                let (vm, line) = sources[source];
                let room = self.terminal.as_ref().map_or(most, |terminal| terminal.room(vm.number));
                self.output(vm, line, most.min(room), port)
            },
        );
        if rests {
            return false;
        }
        let until = since + clock::nanos_to_ticks(WORK_NANOS);
        let is_empty = self.send_while(|| clock::now() < until);
        let now = clock::now();
        self.log_rests_until = now + (now - since);
        has_more || !is_empty
    }

    /// Sends what waits for the machine's own consoles, as long as `goes_on`. Says whether nothing waits any more.
    pub(super) fn send_while(&mut self, goes_on: impl Fn() -> bool) -> bool {
        let Some(terminal) = &mut self.terminal else { return true };
        loop {
            let bytes = terminal.next();
            let bytes = &bytes[..bytes.len().min(LOG_CHUNK)];
            if bytes.is_empty() || !goes_on() {
                return bytes.is_empty();
            }
            crate::log::raw(bytes);
            let count = bytes.len();
            terminal.sent(count);
            if self.log_is_slow {
                let until = clock::now() + clock::nanos_to_ticks(SLOW_BYTE_NANOS * count as u64);
                while clock::now() < until {
                    core::hint::spin_loop();
                }
            }
        }
    }

    /// Whether there is a terminal, and it has shown all that was written.
    pub(super) fn all_is_shown(&self) -> bool {
        self.terminal.as_ref().is_some_and(|terminal| terminal.next().is_empty())
    }

    /// Takes all that a guest wrote which has ended.
    pub(super) fn last_output(&mut self, vm: &Arc<Vm>, port: &mut Port) {
        while LINES.into_iter().any(|line| self.output(vm, line, CONSOLE_CHUNK, port) != 0) {}
    }

    /// Takes up to `most` bytes that the guest wrote to a line. Says how many it took.
    fn output(&mut self, vm: &Arc<Vm>, line: Line, most: usize, port: &mut Port) -> usize {
        if most == 0 {
            return 0;
        }
        let tell = |asserted| platform::serial_interrupt(vm, line, asserted);
        let Some((at_ns, bytes)) = vm.serial(line).take_output(most, tell) else { return 0 };
        let count = bytes.len();
        match &mut self.terminal {
            Some(terminal) if line == Line::Console => terminal.wrote(vm.number, &bytes),
            // Nobody reads the other line.
            Some(_) => {}
            None => port.say(&Message::Console { vm: vm.number, line, at_ns, bytes }),
        }
        count
    }
}
