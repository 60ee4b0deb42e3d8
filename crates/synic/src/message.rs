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
/// Maximum length of a payload in bytes.
pub const PAYLOAD_BYTES: usize = 240;
/// Where the payload starts.
const PAYLOAD: usize = MESSAGE_BYTES - PAYLOAD_BYTES;

/// The message page is not there: the guest has not enabled it, or has no memory at that address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// A message on its way to a vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type (HV_MESSAGE_TYPE). Zero would say that the slot is free.
    kind: u32,
    /// The sender: a partition or a port; zero for the hypervisor.
    sender: u64,
    payload: [u8; PAYLOAD_BYTES],
    bytes: u8,
}

impl Message {
    /// A synthetic timer has expired (HvMessageTimerExpired).
    pub const TIMER_EXPIRED: u32 = 0x8000_0010;

    /// A message of this type. `None` if the type is 0 or the payload is longer than [`PAYLOAD_BYTES`].
    #[must_use]
    pub fn new(kind: u32, sender: u64, payload: &[u8]) -> Option<Self> {
        let bytes = u8::try_from(payload.len()).ok()?;
        let mut whole = [0; PAYLOAD_BYTES];
        whole.get_mut(..payload.len())?.copy_from_slice(payload);
        (kind != 0).then_some(Self { kind, sender, payload: whole, bytes })
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
        let mut whole = [0; PAYLOAD_BYTES];
        whole[..4].copy_from_slice(&payload.to_le_bytes());
        Self { kind: kind as u32, sender, payload: whole, bytes: 4 }
    }

    /// Its type.
    #[must_use]
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload[..self.bytes.into()]
    }

    /// The slot as the guest reads it, except for the type, which is written last. `more`: another message waits for
    /// the slot, so the guest must write EOM after it has freed the slot.
    #[must_use]
    pub fn encode(&self, more: bool) -> [u8; MESSAGE_BYTES] {
        let mut slot = [0; MESSAGE_BYTES];
        slot[4] = self.bytes;
        slot[5] = more.into();
        slot[8..PAYLOAD].copy_from_slice(&self.sender.to_le_bytes());
        slot[PAYLOAD..].copy_from_slice(&self.payload);
        slot
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

    /// Writes `body` from byte 4 of `slot` on, and after that its type, `kind`.
    ///
    /// # Errors
    /// When the page is not there.
    fn write(&self, slot: usize, kind: u32, body: &[u8; MESSAGE_BYTES]) -> Result<(), Absent>;
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
    page.write(slot, message.kind, &message.encode(more))?;
    Ok(Delivery::Done)
}
