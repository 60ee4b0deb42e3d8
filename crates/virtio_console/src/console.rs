//! The console device (5.3) with several ports, of which there is one.
//!
//! Port 0 is for consoles of kernels, and there is none: a driver's buffers for it are never used. Our port is
//! number 1, as on the machines that drivers know best.

use core::num::NonZeroU64;

use crate::memory::GuestMemory;
use crate::queue::{Broken, Done, QUEUE_SIZE, Queue};
use crate::transport::{Transport, VERSION_1, Written, register};

/// Name of the port. A guest finds it by this name.
pub const NAME: &str = "dunlin";

/// Queues (5.3.2). "Receive" and "transmit" are the driver's words.
pub(crate) mod queue {
    pub(crate) const CONTROL_RECEIVE: usize = 2;
    pub(crate) const CONTROL_TRANSMIT: usize = 3;
    pub(crate) const PORT_RECEIVE: usize = 4;
    pub(crate) const PORT_TRANSMIT: usize = 5;
    pub(crate) const COUNT: usize = 6;
}

/// The number of our port, and the number of ports with the one that is not there.
pub(crate) const PORT: u32 = 1;
const PORTS: u32 = 2;

/// VIRTIO_CONSOLE_F_MULTIPORT (5.3.3).
pub(crate) const MULTIPORT: u64 = 1 << 1;

/// Control messages: port, event, value (5.3.6.2).
pub(crate) mod event {
    pub(crate) const DEVICE_READY: u16 = 0;
    pub(crate) const PORT_ADD: u16 = 1;
    pub(crate) const PORT_READY: u16 = 3;
    pub(crate) const PORT_OPEN: u16 = 6;
    pub(crate) const PORT_NAME: u16 = 7;
}
pub(crate) const CONTROL_BYTES: usize = 8;

/// Control messages that wait for a buffer, in the order in which they are sent.
const WAITING: [(u8, u16); 3] = [(1, event::PORT_ADD), (2, event::PORT_NAME), (4, event::PORT_OPEN)];
const ADD: u8 = 1;
const NAME_AND_OPEN: u8 = 2 | 4;

/// The time during which one process has the port open. No other one of this device has the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session(NonZeroU64);

/// The device.
#[derive(Debug)]
pub struct Console {
    transport: Transport<{ queue::COUNT }>,
    /// Control messages for the driver: see [`WAITING`].
    waiting: u8,
    session: Option<Session>,
    /// The number of sessions so far.
    sessions: u64,
    /// The host had bytes for which there was no buffer.
    host_waits: bool,
    /// The host was told to look, and has not looked since.
    host_is_told: bool,
}

impl Default for Console {
    fn default() -> Self {
        Self::new()
    }
}

impl Console {
    /// A device after reset.
    #[must_use]
    pub fn new() -> Self {
        Self {
            transport: Transport::new(VERSION_1 | MULTIPORT),
            waiting: 0,
            session: None,
            sessions: 0,
            host_waits: false,
            host_is_told: false,
        }
    }

    /// Whether the interrupt line is asserted: until the driver has acknowledged all that has happened (4.2.2.1).
    #[must_use]
    pub fn interrupt(&self) -> bool {
        self.transport.interrupt()
    }

    /// The guest reads `bytes` bytes at `offset` in the page of registers. Registers have 32 bits, and a read of
    /// another width finds nothing. Fields of the configuration have widths of their own (4.2.2.2).
    #[must_use]
    pub fn read(&self, offset: u16, bytes: u8) -> u32 {
        match offset.checked_sub(register::CONFIGURATION) {
            Some(offset) => configuration(offset, bytes.min(4)),
            None if bytes == 4 => self.transport.read(offset),
            None => 0,
        }
    }

    /// The guest writes a value of `bytes` bytes. Returns whether the host must now look at the port: something has
    /// arrived, there is room again, or the session has changed. After that it is not told again before it has looked.
    #[must_use = "else the guest waits until the host looks by itself"]
    pub fn write(&mut self, offset: u16, bytes: u8, value: u32, memory: &impl GuestMemory) -> bool {
        if bytes != 4 || offset >= register::CONFIGURATION {
            return false;
        }
        let session = self.session;
        let was_live = self.transport.is_live();
        let mut matters = false;
        match self.transport.write(offset, value) {
            Written::Setting => {}
            Written::Reset => {
                self.waiting = 0;
                self.session = None;
            }
            Written::Notify(number) => {
                matters = match number {
                    queue::PORT_TRANSMIT => self.session.is_some(),
                    queue::PORT_RECEIVE => self.session.is_some() && self.host_waits,
                    _ => false,
                };
                let handled = match number {
                    queue::CONTROL_RECEIVE => self.send_control(memory),
                    queue::CONTROL_TRANSMIT => self.take_control(memory),
                    _ => Ok(()),
                };
                if handled.is_err() {
                    self.transport.break_down();
                }
            }
        }
        if was_live && !self.transport.is_live() {
            self.session = None;
        }
        (matters || session != self.session) && !core::mem::replace(&mut self.host_is_told, true)
    }

    /// The host looks at the port: the session, if a process of the guest has it open now.
    pub fn look(&mut self) -> Option<Session> {
        self.host_is_told = false;
        self.session
    }

    /// Copies bytes that the process of this session has written to `into`. Returns their number.
    pub fn receive(&mut self, session: Session, into: &mut [u8], memory: &impl GuestMemory) -> usize {
        self.move_bytes(session, queue::PORT_TRANSMIT, memory, |queue| queue.take(memory, into))
    }

    /// Copies bytes for the process of this session to its buffers, as many as there is room for. Returns their number.
    pub fn transmit(&mut self, session: Session, bytes: &[u8], memory: &impl GuestMemory) -> usize {
        let taken = self.move_bytes(session, queue::PORT_RECEIVE, memory, |queue| queue.give(memory, bytes));
        self.host_waits = taken < bytes.len();
        taken
    }

    /// Uses a queue of the port. Nothing happens when this session is over.
    fn move_bytes(
        &mut self,
        session: Session,
        number: usize,
        memory: &impl GuestMemory,
        act: impl FnOnce(&mut Queue) -> Result<Done, Broken>,
    ) -> usize {
        if self.session != Some(session) || !self.transport.is_live() {
            return 0;
        }
        let done = act(&mut self.transport.queues[number]);
        let told = done.and_then(|done| self.tell(number, done.used, memory).map(|()| done.bytes));
        told.unwrap_or_else(|Broken| {
            self.transport.break_down();
            self.session = None;
            0
        })
    }

    /// Notifies the driver of used chains, if it wants that.
    fn tell(&mut self, number: usize, used: bool, memory: &impl GuestMemory) -> Result<(), Broken> {
        if used && self.transport.queues[number].wants_interrupt(memory)? {
            self.transport.notify_driver();
        }
        Ok(())
    }

    /// Takes the driver's control messages.
    fn take_control(&mut self, memory: &impl GuestMemory) -> Result<(), Broken> {
        let mut used = false;
        // The driver may add more meanwhile. It then notifies again.
        for _ in 0..QUEUE_SIZE {
            let mut message = [0; CONTROL_BYTES];
            let taken = self.transport.queues[queue::CONTROL_TRANSMIT].take_one(memory, &mut message)?;
            let Some(bytes) = taken else { break };
            used = true;
            if bytes == CONTROL_BYTES {
                self.obey(message, memory)?;
            }
        }
        self.tell(queue::CONTROL_TRANSMIT, used, memory)?;
        self.send_control(memory)
    }

    /// A message that means nothing here is ignored.
    fn obey(&mut self, message: [u8; CONTROL_BYTES], memory: &impl GuestMemory) -> Result<(), Broken> {
        let [a, b, c, d, e, f, g, h] = message;
        let (port, event, value) =
            (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]));
        match (event, port, value) {
            (event::DEVICE_READY, _, 1) => self.waiting |= ADD,
            // The host is always there, so its end is open from the beginning.
            (event::PORT_READY, PORT, 1) => self.waiting |= NAME_AND_OPEN,
            (event::PORT_OPEN, PORT, value @ (0 | 1)) => {
                // What the process before has written, and nobody has read, is not this one's.
                let used = self.transport.queues[queue::PORT_TRANSMIT].discard(memory)?;
                self.tell(queue::PORT_TRANSMIT, used, memory)?;
                self.session = if value == 1 { Some(self.new_session()) } else { None };
                self.host_waits = false;
            }
            _ => {}
        }
        Ok(())
    }

    fn new_session(&mut self) -> Session {
        self.sessions = self.sessions.wrapping_add(1);
        Session(NonZeroU64::new(self.sessions).unwrap_or(NonZeroU64::MIN))
    }

    /// Sends the control messages that wait, as far as there are buffers.
    fn send_control(&mut self, memory: &impl GuestMemory) -> Result<(), Broken> {
        let mut used = false;
        for (bit, event) in WAITING {
            if self.waiting & bit == 0 {
                continue;
            }
            let mut message = [0; CONTROL_BYTES + NAME.len()];
            message[..4].copy_from_slice(&PORT.to_le_bytes());
            message[4..6].copy_from_slice(&event.to_le_bytes());
            message[6..8].copy_from_slice(&1_u16.to_le_bytes());
            message[CONTROL_BYTES..].copy_from_slice(NAME.as_bytes());
            let bytes = if event == event::PORT_NAME { message.len() } else { CONTROL_BYTES };
            if !self.transport.queues[queue::CONTROL_RECEIVE].give_one(memory, &message[..bytes])? {
                break;
            }
            used = true;
            self.waiting &= !bit;
        }
        self.tell(queue::CONTROL_RECEIVE, used, memory)
    }
}

/// Columns and rows, which have no meaning without a feature; the number of ports; a register for output (5.3.4).
fn configuration(offset: u16, bytes: u8) -> u32 {
    let mut fields = [0; 12];
    fields[4..8].copy_from_slice(&PORTS.to_le_bytes());
    let mut value = [0; 4];
    for (at, byte) in value.iter_mut().take(bytes.into()).enumerate() {
        *byte = fields.get(usize::from(offset) + at).copied().unwrap_or(0);
    }
    u32::from_le_bytes(value)
}
