//! A message, and its delivery into a slot.
//!
//! ```text
//!  byte 0        4      5       8        16                         256
//!       +--------+------+-------+--------+---------------------------+
//!       | type   | size | flags | sender | payload, up to 240 bytes  |
//!       +--------+------+-------+--------+---------------------------+
//!                         bit 0: another message waits
//! ```

use hyperv_defs::{MessageType, PartitionId};

/// Bytes of a slot (TLFS, HV_MESSAGE).
pub const MESSAGE_BYTES: usize = 256;
/// Length of the longest payload in bytes, that of a timer's message. A slot has room for 240.
pub const PAYLOAD_BYTES: usize = 24;
/// The sender, in front of the payload.
const TAIL_HEADER: usize = size_of::<u64>();
/// Bytes behind the first word of a slot.
const TAIL_BYTES: usize = TAIL_HEADER + PAYLOAD_BYTES;

/// The message page is not there: the guest has not enabled it, or has no memory at that address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// A message on its way to a vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type (HV_MESSAGE_TYPE). Zero would say that the slot is free.
    kind: u32,
    /// Length of the payload.
    bytes: u8,
    /// The sender, a partition or a port, or zero for the hypervisor; then the payload.
    tail: [u8; TAIL_BYTES],
}

impl Message {
    /// A synthetic timer has expired (HvMessageTimerExpired).
    pub const TIMER_EXPIRED: u32 = 0x8000_0010;

    /// A message of this type. `None` if the type is 0 or the payload is longer than [`PAYLOAD_BYTES`].
    #[must_use]
    pub fn new(kind: u32, sender: u64, payload: &[u8]) -> Option<Self> {
        let bytes = u8::try_from(payload.len()).ok()?;
        let mut message = Self::empty(kind, sender);
        message.tail[TAIL_HEADER..].get_mut(..payload.len())?.copy_from_slice(payload);
        (kind != 0).then_some(Self { bytes, ..message })
    }

    /// Tells a parent that the intercept page of a child's vCPU has a message.
    #[must_use]
    pub fn opaque_intercept(child: PartitionId, vp_index: u32) -> Self {
        Self::of_four_bytes(MessageType::OpaqueIntercept, child.0, vp_index)
    }

    /// Tells a parent that the event ring of a SINT has new entries.
    #[must_use]
    pub fn sint_intercept(sint: u32) -> Self {
        Self::of_four_bytes(MessageType::SynicSintIntercept, 0, sint)
    }

    fn of_four_bytes(kind: MessageType, sender: u64, payload: u32) -> Self {
        let mut message = Self::empty(kind as u32, sender);
        message.tail[TAIL_HEADER..][..4].copy_from_slice(&payload.to_le_bytes());
        Self { bytes: 4, ..message }
    }

    fn empty(kind: u32, sender: u64) -> Self {
        let mut tail = [0; TAIL_BYTES];
        tail[..TAIL_HEADER].copy_from_slice(&sender.to_le_bytes());
        Self { kind, bytes: 0, tail }
    }

    /// Its type.
    #[must_use]
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.tail()[TAIL_HEADER..]
    }

    /// The slot's first word, which makes the message visible and is written last. `more`: another message waits for
    /// the slot, so the guest must write EOM after it has freed the slot.
    #[must_use]
    pub fn head(&self, more: bool) -> u64 {
        u64::from(self.kind) | u64::from(self.bytes) << 32 | u64::from(more) << 40
    }

    /// What is behind the first word.
    #[must_use]
    pub fn tail(&self) -> &[u8] {
        &self.tail[..TAIL_HEADER + usize::from(self.bytes)]
    }
}

/// The message page of one vCPU, a page of guest memory.
pub trait MessagePage {
    /// Reads the type of the message in `slot`, at once and not torn. All processors agree on the order of this and of
    /// [`set_pending`](Self::set_pending) (sequential consistency).
    ///
    /// # Errors
    /// When the page is not there.
    fn kind(&self, slot: usize) -> Result<u32, Absent>;

    /// Sets the flag that another message waits for `slot`.
    ///
    /// # Errors
    /// When the page is not there.
    fn set_pending(&self, slot: usize) -> Result<(), Absent>;

    /// Writes `tail` behind the first word of `slot`, and after that this word.
    ///
    /// # Errors
    /// When the page is not there.
    fn write(&self, slot: usize, head: u64, tail: &[u8]) -> Result<(), Absent>;
}

/// The result of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Delivery {
    /// It is in its slot.
    Done,
    /// The slot is occupied. The flag tells the guest to write EOM after it has freed the slot.
    Occupied,
}

/// Writes `message` into `slot` if the slot is free. Otherwise sets the flag that makes the guest write EOM. `more`:
/// another message waits behind this one.
///
/// # Errors
/// The guest has no memory at the page.
pub fn deliver(page: &impl MessagePage, slot: usize, message: &Message, more: bool) -> Result<Delivery, Absent> {
    if page.kind(slot)? != 0 {
        page.set_pending(slot)?;
        // The guest may have freed the slot before it could see the flag. Then it writes no EOM.
        if page.kind(slot)? != 0 {
            return Ok(Delivery::Occupied);
        }
    }
    page.write(slot, message.head(more), message.tail())?;
    Ok(Delivery::Done)
}
