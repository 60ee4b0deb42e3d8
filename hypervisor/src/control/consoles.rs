//! Output of serial lines: to the control port, or to the machine's own consoles if there is no port.
//!
//! Without a port, the machine's own consoles are a terminal for the VMs ([`Terminal`]), and the first pCPU polls them
//! for input.

use alloc::sync::Arc;
use alloc::vec::Vec;

use abi::control::{CONSOLE_CHUNK, Line, Message};

use super::WORK_NANOS;
use super::port::Port;
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::output::Turns;
use crate::terminal::{Key, Terminal};
use crate::vm::table::table;
use crate::vm::{LINES, Vm};

/// Maximum number of bytes of one console that are written to the log's UART in a turn, without a port. Most lines fit,
/// so they stay whole. At 115 200 Bd it takes 22 ms.
const LOG_CHUNK: usize = 256;
/// Maximum number of bytes that one poll writes there, if the UART is faster.
const LOG_LIMIT: usize = 4096;
/// Interval in nanoseconds between two polls for input. It is short enough that no user notices, and long enough that
/// reading a register (1 µs) costs nothing. While a user types the interval is shorter: a UART holds 16 bytes, which
/// arrive within 1.4 ms.
const TYPED_NANOS: u64 = 5_000_000;
const TYPING_NANOS: u64 = 500_000;
/// Time in nanoseconds after a key during which the user counts as typing.
const TYPING_LASTS_NANOS: u64 = 50_000_000;
/// Maximum number of typed bytes that are read at a time.
const TYPED_CHUNK: usize = 64;
/// Duration of a byte at 38 400 Bd, for the selftest: an emulated guest writes faster than that.
const SLOW_BYTE_NANOS: u64 = 1_000_000_000 / 3_840;

/// The destinations of serial lines.
pub(super) struct Consoles {
    /// Without a control port: the text on the machine's own consoles.
    terminal: Option<Terminal>,
    /// The time of the next poll for input, and the time until which the user counts as typing.
    look_at: u64,
    typing_until: u64,
    /// Whose turn it is to write.
    turns: Turns,
    /// Without a control port: guests' output waits until this time, so that the UARTs take at most half of this pCPU's
    /// time.
    log_rests_until: u64,
    /// Treat the log's UART as being as slow as a real one.
    log_is_slow: bool,
}

/// Input from the machine's own consoles.
pub(super) struct TypedKeys {
    /// The user asked to turn the machine off.
    pub(super) power_off: bool,
    /// More input may follow soon.
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

    /// Reads input from the machine's own consoles.
    pub(super) fn typed(&mut self) -> TypedKeys {
        let mut power_off = false;
        let Some(terminal) = &mut self.terminal else { return TypedKeys { power_off, may_go_on: false } };
        let now = Machine::now();
        if now >= self.look_at {
            let mut bytes = [0; TYPED_CHUNK];
            let count = crate::log::receive(&mut bytes);
            if count != 0 {
                self.typing_until = now + Machine::nanos_to_ticks(TYPING_LASTS_NANOS);
            }
            for &byte in &bytes[..count] {
                match terminal.typed(byte) {
                    Key::Taken => {}
                    Key::Guest(guest, byte) => {
                        let vm = table().running(guest).cloned();
                        if let Ok(vm) = vm {
                            // If the guest does not read, bytes that do not fit into its UART are lost.
                            let _ = vm.type_on(Line::Console, &[byte]);
                        }
                    }
                    Key::PowerOff => power_off = true,
                }
            }
            let pause = if now < self.typing_until { TYPING_NANOS } else { TYPED_NANOS };
            self.look_at = now + Machine::nanos_to_ticks(pause);
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

    /// A VM was removed.
    pub(super) fn removed(&mut self, number: u32) {
        if let Some(terminal) = &mut self.terminal {
            terminal.removed(number);
        }
    }

    /// Takes output of the guests, in turn, while there is room. Returns whether there is more for the log.
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

    /// Without a port this pCPU waits while the UARTs transmit. So with a slow UART this ends after one chunk.
    fn show_on_terminal(&mut self, turns: &mut Turns, sources: &[(&Arc<Vm>, Line)], port: &mut Port) -> bool {
        let since = Machine::now();
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
        let until = since + Machine::nanos_to_ticks(WORK_NANOS);
        let is_empty = self.send_while(|| Machine::now() < until);
        let now = Machine::now();
        self.log_rests_until = now + (now - since);
        has_more || !is_empty
    }

    /// Sends pending output of the machine's own consoles while `goes_on` returns true. Returns whether all of it was
    /// sent.
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
                let until = Machine::now() + Machine::nanos_to_ticks(SLOW_BYTE_NANOS * count as u64);
                while Machine::now() < until {
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

    /// Takes up to `most` bytes that the guest wrote to a line. Returns their number.
    fn output(&mut self, vm: &Arc<Vm>, line: Line, most: usize, port: &mut Port) -> usize {
        if most == 0 {
            return 0;
        }
        preemption_point();
        let tell = |asserted| Machine::serial_interrupt(vm, line, asserted);
        let Some((at_ns, bytes)) = vm.serial(line).take_output(most, tell) else { return 0 };
        let count = bytes.len();
        match &mut self.terminal {
            Some(terminal) if line == Line::Console => terminal.wrote(vm.number, &bytes),
            // The other line has no reader.
            Some(_) => {}
            None => port.say(&Message::Console { vm: vm.number, line, at_ns, bytes }),
        }
        count
    }
}
