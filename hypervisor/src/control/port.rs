//! The control port as messages: frames in, frames out.
//!
//! Tools speak from two places: from the computer that the machine is connected to, over the machine's own control
//! port, and from a program in a parent VM, over that VM's [port](crate::vm::tool_port). Each has a [`Link`] of its
//! own.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use abi::control::{Answer, FrameError, Message, Receiver, Refusal, Request, encode_in_steps};
use log::error;

use crate::arch::{Arch, ControlPort as _, Machine};
use crate::cpu::preemption::preemption_point;
use crate::vm::Vm;
use crate::vm::tool_port::Session;

type ControlPort = <Machine as Arch>::ControlPort;

/// Bytes that may wait for the port before consoles are left where they are, and a parent's requests.
const OUTGOING_LIMIT: usize = 64 * 1024;
/// Room for unsent messages from the start. If the tool is slow, several answers wait, and memory that they needed
/// would stay in use.
const OUTGOING_ROOM: usize = 16 * 1024;
/// Number of bytes read from the port at a time, which is also the maximum of one poll: a fast sender must not occupy
/// the pCPU.
const INCOMING_CHUNK: usize = 512;
const INCOMING_LIMIT: usize = 8 * 1024;

/// Who speaks on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// The operator of the machine, outside.
    Host,
    /// A process in the parent with this number, which has its port open during this session.
    Parent(u32, Session),
}

/// A request that is to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asker {
    /// Who made it.
    pub(super) peer: Peer,
    /// Its number there.
    pub(super) id: u32,
}

/// Frames over a byte stream, in both directions.
struct Link {
    receiver: Receiver,
    /// Received bytes, and the part of them that was not looked at yet.
    incoming: [u8; INCOMING_CHUNK],
    unread: core::ops::Range<usize>,
    outgoing: VecDeque<u8>,
}

impl Link {
    fn new() -> Self {
        Self { receiver: Receiver::default(), incoming: [0; INCOMING_CHUNK], unread: 0..0, outgoing: VecDeque::new() }
    }

    /// The next request, or the next frame that is invalid. Reads up to `budget` bytes for it.
    fn next(
        &mut self,
        budget: &mut usize,
        mut receive: impl FnMut(&mut [u8]) -> usize,
    ) -> Option<Result<Request, FrameError>> {
        loop {
            for at in self.unread.by_ref() {
                if let Some(request) = self.receiver.push_in_steps(self.incoming[at], preemption_point) {
                    return Some(request);
                }
            }
            preemption_point();
            let most = INCOMING_CHUNK.min(*budget);
            let count = if most == 0 { 0 } else { receive(&mut self.incoming[..most]).min(most) };
            if count == 0 {
                return None;
            }
            *budget -= count;
            self.unread = 0..count;
        }
    }

    /// How many bytes may be added to the unsent messages before others wait.
    fn room(&self) -> usize {
        OUTGOING_LIMIT.saturating_sub(self.outgoing.len())
    }

    fn say(&mut self, message: &Message) {
        match encode_in_steps(message, preemption_point) {
            Ok(frame) => self.outgoing.extend(frame),
            Err(error) => error!("a message for the control port was lost: {error}"),
        }
    }

    /// Offers unsent bytes once. Returns how many were taken.
    fn transmit(&mut self, transmit: impl FnOnce(&[u8]) -> usize) -> usize {
        let (bytes, _) = self.outgoing.as_slices();
        if bytes.is_empty() {
            return 0;
        }
        let taken = transmit(bytes).min(bytes.len());
        self.outgoing.drain(..taken);
        // Free the memory that a large backlog needed.
        if self.outgoing.is_empty() && self.outgoing.capacity() > OUTGOING_LIMIT {
            self.outgoing.shrink_to(OUTGOING_LIMIT);
        }
        taken
    }
}

/// The machine's port, if there is one, and unsent messages.
pub(super) struct Port {
    port: Option<ControlPort>,
    link: Link,
}

impl Port {
    /// The machine's port, if it has one.
    pub(super) fn take() -> Self {
        let mut port = Self { port: ControlPort::take(), ..Self::none() };
        port.link.outgoing.reserve(OUTGOING_ROOM);
        port
    }

    /// No port.
    pub(super) fn none() -> Self {
        Self { port: None, link: Link::new() }
    }

    /// Whether the machine has one.
    pub(super) fn is_there(&self) -> bool {
        self.port.is_some()
    }

    /// Requests that have arrived, and frames that are invalid. Also returns whether more has arrived already.
    pub(super) fn receive(&mut self) -> (Vec<Result<Request, FrameError>>, bool) {
        let Some(port) = &mut self.port else { return (Vec::new(), false) };
        let mut budget = INCOMING_LIMIT;
        let requests = core::iter::from_fn(|| self.link.next(&mut budget, |into| port.receive(into))).collect();
        (requests, budget == 0)
    }

    /// How many bytes of console output may be added to the unsent messages.
    pub(super) fn room(&self) -> usize {
        self.link.room()
    }

    /// Sends a message as soon as the other side listens.
    pub(super) fn say(&mut self, message: &Message) {
        if self.port.is_some() {
            self.link.say(message);
        }
    }

    /// Passes as many bytes to the port as it accepts.
    pub(super) fn transmit(&mut self) {
        let Some(port) = &mut self.port else { return };
        while self.link.transmit(|bytes| port.transmit(bytes)) != 0 {}
    }

    /// Whether the other side has received everything.
    pub(super) fn is_drained(&mut self) -> bool {
        self.link.outgoing.is_empty() && self.port.as_mut().is_none_or(|port| port.is_drained())
    }
}

/// A process in the parent, from when it opens the port until it closes it.
pub(super) struct Visitor {
    vm: u32,
    session: Session,
    link: Link,
    /// A frame of this session was refused, and that was logged.
    pub(super) has_erred: bool,
}

impl Visitor {
    pub(super) fn new(vm: u32, session: Session) -> Self {
        Self { vm, session, link: Link::new(), has_erred: false }
    }

    /// Whether it is this one.
    pub(super) fn is(&self, vm: u32, session: Session) -> bool {
        self.peer() == Peer::Parent(vm, session)
    }

    pub(super) fn peer(&self) -> Peer {
        Peer::Parent(self.vm, self.session)
    }

    /// The next request, or the next frame that is invalid. None while the process does not read what it has asked for.
    /// `budget` bounds a poll ([`Self::BUDGET`]), and `goes_on` says whether there is time to read.
    pub(super) fn next(
        &mut self,
        vm: &Vm,
        budget: &mut usize,
        goes_on: impl Fn() -> bool,
    ) -> Option<Result<Request, FrameError>> {
        let port = Machine::tool_port(vm)?;
        if self.link.room() == 0 {
            return None;
        }
        let session = self.session;
        self.link.next(budget, |into| if goes_on() { port.receive(vm, session, into) } else { 0 })
    }

    /// Number of bytes that are read in a poll.
    pub(super) const BUDGET: usize = INCOMING_LIMIT;

    /// Sends a message as soon as the process reads.
    pub(super) fn say(&mut self, message: &Message) {
        self.link.say(message);
    }

    /// Passes unsent bytes to the port, in a limited number of its buffers. Returns whether there is more to do now:
    /// more of them may fit, or requests waited for this.
    pub(super) fn transmit(&mut self, vm: &Vm) -> bool {
        let Some(port) = Machine::tool_port(vm) else { return false };
        let taken = self.link.transmit(|bytes| port.transmit(vm, self.session, bytes));
        taken != 0 && !(self.link.outgoing.is_empty() && self.link.unread.is_empty())
    }
}

/// The reply to a request.
pub(super) const fn reply(id: u32, result: Result<Answer, Refusal>) -> Message {
    Message::Reply { id, result }
}
