//! A serial line of a VM: what the guest writes waits here for the control port, and what is typed goes to the guest.
//!
//! The line holds a bounded number of bytes. When it is full the UART tells the guest to wait, as a slow terminal
//! would; a guest whose output nobody reads stalls only itself.

use alloc::vec::Vec;

use spin::Mutex;

use crate::arch;
use crate::arch::uart::{FIFO_BYTES, Register, Uart};

/// Bytes that may wait for the control port.
const CAPACITY: usize = 16 * 1024;

/// One serial line.
pub(crate) struct SerialLine(Mutex<State>);

struct State {
    uart: Uart,
    output: Vec<u8>,
    /// When the first byte of `output` was written, in nanoseconds of the host.
    since_ns: u64,
    /// The interrupt line as the interrupt controller last heard of it.
    asserted: bool,
}

/// The UART's interrupt line changed to this level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineChanged(pub(crate) bool);

impl SerialLine {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { uart: Uart::new(), output: Vec::new(), since_ns: 0, asserted: false }))
    }

    /// The guest reads a register.
    pub(crate) fn read(&self, offset: u16) -> (Register, Option<LineChanged>) {
        let state = &mut *self.0.lock();
        let value = state.uart.read(offset);
        (value, state.line_changed())
    }

    /// The guest writes a register.
    pub(crate) fn write(&self, offset: u16, value: Register) -> Option<LineChanged> {
        let state = &mut *self.0.lock();
        if let Some(byte) = state.uart.write(offset, value) {
            if state.output.is_empty() {
                state.since_ns = arch::tsc::nanos();
            }
            // A guest that ignores the UART's "wait" loses what does not fit.
            if state.output.len() < CAPACITY {
                state.output.push(byte);
            }
            if state.output.len() + FIFO_BYTES > CAPACITY {
                state.uart.set_transmit_room(false);
            }
        }
        state.line_changed()
    }

    /// Bytes were typed. Says how many were taken.
    pub(crate) fn receive(&self, bytes: &[u8]) -> (usize, Option<LineChanged>) {
        let state = &mut *self.0.lock();
        let taken = state.uart.receive(bytes);
        (taken, state.line_changed())
    }

    /// Takes up to `most` bytes of output, and when the first of them was written.
    pub(crate) fn take_output(&self, most: usize) -> Option<(u64, Vec<u8>, Option<LineChanged>)> {
        let state = &mut *self.0.lock();
        if state.output.is_empty() {
            return None;
        }
        let taken: Vec<u8> = state.output.drain(..most.min(state.output.len())).collect();
        let since = state.since_ns;
        state.uart.set_transmit_room(true);
        Some((since, taken, state.line_changed()))
    }
}

impl State {
    #[inline]
    fn line_changed(&mut self) -> Option<LineChanged> {
        let asserted = self.uart.interrupt();
        (core::mem::replace(&mut self.asserted, asserted) != asserted).then_some(LineChanged(asserted))
    }
}
