//! A serial port of a VM: holds the guest's output for the control port, and passes input to the guest.
//!
//! It holds a limited number of bytes. When it is full the UART tells the guest to wait, like a slow terminal; a guest
//! whose output has no reader delays only itself.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::arch::{Arch, Machine};
use crate::device::serial::SerialDevice;
use crate::device::wired::{Interrupts, Wired};
use crate::frames::{Exhausted, reserve};

type Uart = <Machine as Arch>::Uart;
type Register = <Uart as SerialDevice>::Register;

/// Bytes that may wait for the control port.
const CAPACITY: usize = 16 * 1024;

/// What a file keeps of a line. Output is not in it: this host shows that, and the guest finds room for more.
#[derive(Serialize, Deserialize)]
pub(crate) struct LineState {
    uart: <Uart as SerialDevice>::State,
    /// What the interrupt controller has last heard of its interrupt.
    is_heard: bool,
}

/// One serial port. Callers pass on changes of its interrupt line by `tell`: whether it is asserted now.
pub(crate) struct SerialLine(Wired<State>);

struct State {
    uart: Uart,
    /// Has room for all that it may hold: a guest that writes takes no memory.
    output: Vec<u8>,
    /// When the first byte of `output` was written, in nanoseconds of the host.
    since_ns: u64,
}

impl Interrupts for State {
    #[inline]
    fn interrupt(&self) -> bool {
        self.uart.interrupt()
    }
}

impl SerialLine {
    /// A line without any bytes.
    ///
    /// # Errors
    /// The host has no memory for the buffers.
    pub(crate) fn new() -> Result<Self, Exhausted> {
        let mut output = Vec::new();
        reserve(&mut output, CAPACITY)?;
        Ok(Self(Wired::new(State { uart: Uart::default(), output, since_ns: 0 })))
    }

    /// The guest reads a register.
    #[inline]
    pub(crate) fn read(&self, offset: u16, tell: impl FnOnce(bool)) -> Register {
        self.0.with(|state| state.uart.read(offset), tell)
    }

    /// The guest writes a register.
    #[inline]
    pub(crate) fn write(&self, offset: u16, value: Register, tell: impl FnOnce(bool)) {
        self.0.with(|state| state.write(offset, value), tell);
    }

    /// Input arrives. Returns the number of accepted bytes.
    pub(crate) fn receive(&self, bytes: &[u8], tell: impl FnOnce(bool)) -> usize {
        self.0.with(|state| state.uart.receive(bytes), tell)
    }

    /// Its state.
    pub(crate) fn state(&self) -> LineState {
        self.0.look(|state, is_heard| LineState { uart: state.uart.state(), is_heard })
    }

    /// Takes over a state. `None` for one that no UART has.
    pub(crate) fn set_state(&self, state: &LineState, tell: impl FnOnce(bool)) -> Option<()> {
        self.0.set_heard(state.is_heard);
        let take_over = |line: &mut State| {
            line.uart.set_state(&state.uart)?;
            line.uart.set_transmit_room(true);
            Some(())
        };
        self.0.with(take_over, tell)
    }

    /// Takes up to `most` bytes of output, and the time when the guest wrote the first of them.
    pub(crate) fn take_output(&self, most: usize, tell: impl FnOnce(bool)) -> Option<(u64, Vec<u8>)> {
        self.0.with(|state| state.take_output(most), tell)
    }
}

impl State {
    fn write(&mut self, offset: u16, value: Register) {
        let Some(byte) = self.uart.write(offset, value) else { return };
        if self.output.is_empty() {
            self.since_ns = Machine::nanos();
        }
        // A guest that ignores the UART's "wait" loses bytes without room.
        if self.output.len() < CAPACITY {
            self.output.push(byte);
        }
        if self.output.len() + Uart::FIFO_BYTES > CAPACITY {
            self.uart.set_transmit_room(false);
        }
    }

    fn take_output(&mut self, most: usize) -> Option<(u64, Vec<u8>)> {
        if self.output.is_empty() {
            return None;
        }
        let taken: Vec<u8> = self.output.drain(..most.min(self.output.len())).collect();
        self.uart.set_transmit_room(true);
        Some((self.since_ns, taken))
    }
}
