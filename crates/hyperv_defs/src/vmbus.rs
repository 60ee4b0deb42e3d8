//! VMBus, the bus of Hyper-V's own devices, as far as a host without such devices needs it: a guest asks for a version
//! and for channels, and ends the connection (Linux' `vmbus_channel_*`).
//!
//! Both sides talk by messages: the guest by HvCallPostMessage, the host by a slot of the guest's message page. A
//! message begins with its number and four bytes without a meaning.

use crate::hypercall::Status;
use crate::input::Words;

/// Connections that lead to the host's side of the bus. Guests use the second one from version 5.0 on.
const CONNECTIONS: [u32; 2] = [1, CONNECTION];
const CONNECTION: u32 = 4;
/// The type of all messages of the bus.
pub const MESSAGE_TYPE: u32 = 1;
/// Where answers go: the only SINT that guests name.
pub const SINT: u8 = 2;

/// From 5.0 on, a guest names the SINT for answers.
const VERSIONS: core::ops::RangeInclusive<u32> = 0x5_0000..=0x6_0000;

const REQUEST_OFFERS: u32 = 3;
const ALL_OFFERS_DELIVERED: u32 = 4;
const INITIATE_CONTACT: u32 = 14;
const VERSION_RESPONSE: u32 = 15;
const UNLOAD: u32 = 16;
const UNLOAD_RESPONSE: u32 = 17;

/// HvCallPostMessage, for the host's side of the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Use this version, if the host supports it. Answers go to this vCPU.
    Contact {
        /// The version: its parts have 16 bits each.
        version: u32,
        /// The vCPU that gets all answers.
        vcpu: u32,
    },
    /// Tell which channels there are.
    RequestOffers,
    /// The guest leaves the bus.
    Unload,
    /// Anything else. It has no meaning on a bus without channels.
    Other,
}

impl Posted {
    /// Input: connection and zero, type and size of the message, then 240 bytes of message.
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let words = Words::of(input);
        let [connection, kind, size] = [low(words.get(0)), low(words.get(1)), high(words.get(1))];
        if !CONNECTIONS.contains(&connection) {
            return Err(Status::InvalidConnectionId);
        }
        if kind != MESSAGE_TYPE || !(8..=240).contains(&size) {
            return Err(Status::InvalidParameter);
        }
        // The call has 256 bytes. Bytes behind the message are ignored.
        Ok(match (low(words.get(2)), size) {
            (INITIATE_CONTACT, 24..) => {
                let [version, vcpu] = [low(words.get(3)), high(words.get(3))];
                let [sint, vtl, ..] = words.get(4).to_le_bytes();
                if VERSIONS.contains(&version) && (sint, vtl) != (SINT, 0) {
                    return Err(Status::InvalidParameter);
                }
                Self::Contact { version, vcpu }
            }
            (REQUEST_OFFERS, _) => Self::RequestOffers,
            (UNLOAD, _) => Self::Unload,
            _ => Self::Other,
        })
    }
}

/// A message of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Whether the version is known.
    Version(bool),
    /// The guest knows all channels now.
    AllOffersDelivered,
    /// The host has forgotten the guest.
    Unloaded,
}

impl Reply {
    /// To a message.
    #[must_use]
    pub fn to(posted: Posted) -> Option<Self> {
        match posted {
            Posted::Contact { version, .. } => Some(Self::Version(VERSIONS.contains(&version))),
            Posted::RequestOffers => Some(Self::AllOffersDelivered),
            Posted::Unload => Some(Self::Unloaded),
            Posted::Other => None,
        }
    }

    /// The payload: 16 bytes, of which the guest reads at least eight.
    #[must_use]
    pub fn payload(self) -> [u8; 16] {
        let (number, rest) = match self {
            Self::Version(is_known) => (VERSION_RESPONSE, u64::from(CONNECTION) << 32 | u64::from(is_known)),
            Self::AllOffersDelivered => (ALL_OFFERS_DELIVERED, 0),
            Self::Unloaded => (UNLOAD_RESPONSE, 0),
        };
        let mut payload = [0; 16];
        payload[..4].copy_from_slice(&number.to_le_bytes());
        payload[8..].copy_from_slice(&rest.to_le_bytes());
        payload
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
const fn low(word: u64) -> u32 {
    word as u32
}

const fn high(word: u64) -> u32 {
    low(word >> 32)
}
