//! The control port as messages: frames in, frames out.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use abi::control::{Answer, FrameError, Message, Receiver, Refusal, Request, encode};
use log::error;

use crate::arch::{Arch, ControlPort as _, Machine};

type ControlPort = <Machine as Arch>::ControlPort;

/// Bytes that may wait for the port before consoles are left where they are.
const OUTGOING_LIMIT: usize = 64 * 1024;
/// Room for unsent messages from the start. If the tool is slow, several answers wait, and memory that they needed
/// would stay in use.
const OUTGOING_ROOM: usize = 16 * 1024;
/// Number of bytes read from the port at a time, which is also the maximum of one poll: a fast sender must not occupy
/// the pCPU.
const INCOMING_CHUNK: usize = 512;
const INCOMING_LIMIT: usize = 8 * 1024;

/// The port, if there is one, and unsent messages.
pub(super) struct Port {
    port: Option<ControlPort>,
    receiver: Receiver,
    outgoing: VecDeque<u8>,
}

impl Port {
    /// The machine's port, if it has one.
    pub(super) fn take() -> Self {
        Self { port: ControlPort::take(), outgoing: VecDeque::with_capacity(OUTGOING_ROOM), ..Self::none() }
    }

    /// No port.
    pub(super) fn none() -> Self {
        Self { port: None, receiver: Receiver::default(), outgoing: VecDeque::new() }
    }

    /// Whether the machine has one.
    pub(super) fn is_there(&self) -> bool {
        self.port.is_some()
    }

    /// Requests that have arrived, and frames that are invalid. Also returns whether more has arrived already.
    pub(super) fn receive(&mut self) -> (Vec<Result<Request, FrameError>>, bool) {
        let mut requests = Vec::new();
        let Some(port) = &mut self.port else { return (requests, false) };
        let mut bytes = [0; INCOMING_CHUNK];
        for _ in 0..INCOMING_LIMIT / INCOMING_CHUNK {
            let count = port.receive(&mut bytes);
            requests.extend(bytes[..count].iter().filter_map(|&byte| self.receiver.push::<Request>(byte)));
            if count < bytes.len() {
                return (requests, false);
            }
        }
        (requests, true)
    }

    /// How many bytes of console output may be added to the unsent messages.
    pub(super) fn room(&self) -> usize {
        OUTGOING_LIMIT.saturating_sub(self.outgoing.len())
    }

    /// Sends a message as soon as the other side listens.
    pub(super) fn say(&mut self, message: &Message) {
        if self.port.is_none() {
            return;
        }
        match encode(message) {
            Ok(frame) => self.outgoing.extend(frame),
            Err(error) => error!("a message for the control port was lost: {error}"),
        }
    }

    /// Answers a request.
    pub(super) fn reply(&mut self, id: u32, result: Result<Answer, Refusal>) {
        self.say(&Message::Reply { id, result });
    }

    /// Passes as many bytes to the port as it accepts.
    pub(super) fn transmit(&mut self) {
        let Some(port) = &mut self.port else { return };
        while !self.outgoing.is_empty() {
            let (bytes, _) = self.outgoing.as_slices();
            let taken = port.transmit(bytes);
            if taken == 0 {
                break;
            }
            self.outgoing.drain(..taken);
        }
        // Free the memory that a large backlog needed.
        if self.outgoing.is_empty() && self.outgoing.capacity() > OUTGOING_LIMIT {
            self.outgoing.shrink_to(OUTGOING_LIMIT);
        }
    }

    /// Whether the other side has received everything.
    pub(super) fn is_drained(&mut self) -> bool {
        self.outgoing.is_empty() && self.port.as_mut().is_none_or(|port| port.is_drained())
    }
}
