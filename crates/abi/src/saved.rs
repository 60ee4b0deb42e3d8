//! The file of a saved VM: its description, its state, and the content of its memory.
//!
//! ```text
//! 0   magic, version (u32), length (u32) and CRC-32 of the header
//! 20  Header   postcard: who has written the file, and the VM's description
//! ..  parts    each: kind (u8), address (u64), length (u32), CRC-32, and its bytes
//! ```
//!
//! The parts are the VM's state, in any number of pieces, then those bytes of its memory that are not all zero, in
//! ascending order, then an end, which tells their number. A part's sum also covers its number. So a file that ends too
//! early, has a changed byte, lacks a part, or has one twice, is found out before anything is created from it. All
//! numbers are little endian.
//!
//! The state is for the hypervisor alone. Raise [`VERSION`] when its content or this layout changes: a file is good for
//! the versions of Dunlin that have the same number.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::payload::VmConfig;

/// First eight bytes of a file.
pub const MAGIC: [u8; 8] = *b"DUNLINVM";
/// Version of the layout and of the hypervisor's state; readers accept only their own.
pub const VERSION: u32 = 2;
/// Bytes before the header.
pub const PREFIX_BYTES: usize = 20;
/// Bytes before the content of a part.
pub const PART_BYTES: usize = 17;
/// Maximum number of bytes of a header, and of the content of a part.
pub const MOST_BYTES: u32 = 1 << 20;

const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);

/// Description of a saved VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the hypervisor that has saved it.
    pub hypervisor: String,
    /// Its architecture, as in [`HostInfo`](crate::control::HostInfo).
    pub arch: String,
    /// The processor that it ran on, for people.
    pub processor: String,
    /// The VM's description. The places of its kernel and initrd mean nothing: its memory has what was loaded.
    pub config: VmConfig,
    /// Number of bytes of its state.
    pub state_bytes: u64,
}

/// What follows the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The next bytes of the state.
    State,
    /// Memory from this guest address on.
    Memory {
        /// The address.
        gpa: u64,
    },
    /// Nothing follows.
    End {
        /// Number of parts before this one.
        parts: u64,
    },
}

/// Why a file cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedError {
    /// It does not begin with [`MAGIC`].
    NotSaved,
    /// Written for another version, given here.
    Version(u32),
    /// It ends before its last part.
    Truncated,
    /// A sum is wrong: of the header (`None`), or of the part with this number.
    Damaged(Option<u64>),
    /// A sum is right, but the content means nothing.
    Undecodable,
}

impl fmt::Display for SavedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSaved => write!(f, "it is no saved VM (`dunlin save` writes one)"),
            Self::Version(found) => {
                write!(f, "it has version {found}, and this Dunlin reads version {VERSION}")
            }
            Self::Truncated => write!(f, "it is cut short: its end is missing"),
            Self::Damaged(None) => write!(f, "it is damaged: the sum of its header is wrong"),
            Self::Damaged(Some(part)) => write!(f, "it is damaged: the sum of part {part} is wrong"),
            Self::Undecodable => write!(f, "its content means nothing to this Dunlin"),
        }
    }
}

/// The beginning of a file.
///
/// # Errors
/// The header cannot be encoded, or is too long.
pub fn begin(header: &Header) -> Result<Vec<u8>, SavedError> {
    let encoded = postcard::to_allocvec(header).map_err(|_| SavedError::Undecodable)?;
    let length = u32::try_from(encoded.len()).ok().filter(|length| *length <= MOST_BYTES);
    let mut bytes = Vec::from(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&length.ok_or(SavedError::Undecodable)?.to_le_bytes());
    bytes.extend_from_slice(&CRC.checksum(&encoded).to_le_bytes());
    bytes.extend_from_slice(&encoded);
    Ok(bytes)
}

/// Length and sum of the header, from the first [`PREFIX_BYTES`] bytes of a file.
///
/// # Errors
/// Why this is not the beginning of a file that can be read.
pub fn prefix(bytes: &[u8]) -> Result<(u32, u32), SavedError> {
    let magic = bytes.get(..MAGIC.len()).ok_or(SavedError::NotSaved)?;
    if magic != MAGIC {
        return Err(SavedError::NotSaved);
    }
    match word(bytes, 8)? {
        VERSION => {}
        other => return Err(SavedError::Version(other)),
    }
    let (length, sum) = (word(bytes, 12)?, word(bytes, 16)?);
    if length > MOST_BYTES { Err(SavedError::Damaged(None)) } else { Ok((length, sum)) }
}

/// The header, from the bytes behind the prefix and their sum there.
///
/// # Errors
/// They have changed, or mean nothing.
pub fn header(bytes: &[u8], sum: u32) -> Result<Header, SavedError> {
    if CRC.checksum(bytes) != sum {
        return Err(SavedError::Damaged(None));
    }
    match postcard::take_from_bytes(bytes) {
        Ok((header, [])) => Ok(header),
        _ => Err(SavedError::Undecodable),
    }
}

/// The beginning of a part with this number, counted from 0. Its content follows.
#[must_use]
pub fn part(number: u64, part: Part, content: &[u8]) -> [u8; PART_BYTES] {
    let (kind, address) = match part {
        Part::State => (kind::STATE, 0),
        Part::Memory { gpa } => (kind::MEMORY, gpa),
        Part::End { parts } => (kind::END, parts),
    };
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut bytes = [0; PART_BYTES];
    bytes[0] = kind;
    bytes[1..9].copy_from_slice(&address.to_le_bytes());
    bytes[9..13].copy_from_slice(&length.to_le_bytes());
    let sum = sum(number, &bytes, content);
    bytes[13..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The beginning of a part that was read.
#[derive(Clone, Copy, Debug)]
pub struct PartHead {
    bytes: [u8; PART_BYTES],
    /// Number of bytes of its content.
    pub length: u32,
}

impl PartHead {
    /// From its bytes.
    ///
    /// # Errors
    /// Its length is impossible. `number` is the part's.
    pub fn read(bytes: [u8; PART_BYTES], number: u64) -> Result<Self, SavedError> {
        let length = word(&bytes, 9)?;
        if length > MOST_BYTES { Err(SavedError::Damaged(Some(number))) } else { Ok(Self { bytes, length }) }
    }

    /// What it is, if its content is the one that was written as the part with this number.
    ///
    /// # Errors
    /// Something has changed, or means nothing.
    pub fn check(&self, number: u64, content: &[u8]) -> Result<Part, SavedError> {
        if sum(number, &self.bytes, content) != word(&self.bytes, 13)? {
            return Err(SavedError::Damaged(Some(number)));
        }
        let address = self.bytes[1..9].try_into().map_or(0, u64::from_le_bytes);
        match self.bytes[0] {
            kind::STATE => Ok(Part::State),
            kind::MEMORY if address.checked_add(self.length.into()).is_some() => Ok(Part::Memory { gpa: address }),
            kind::END if address == number && content.is_empty() => Ok(Part::End { parts: address }),
            _ => Err(SavedError::Undecodable),
        }
    }
}

mod kind {
    pub(super) const STATE: u8 = 1;
    pub(super) const MEMORY: u8 = 2;
    pub(super) const END: u8 = 3;
}

/// The sum of a part: of its number, its beginning and its content.
fn sum(number: u64, beginning: &[u8; PART_BYTES], content: &[u8]) -> u32 {
    let mut digest = CRC.digest();
    digest.update(&number.to_le_bytes());
    digest.update(&beginning[..13]);
    digest.update(content);
    digest.finalize()
}

fn word(bytes: &[u8], at: usize) -> Result<u32, SavedError> {
    let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(SavedError::Truncated)?;
    Ok(u32::from_le_bytes(*bytes))
}
