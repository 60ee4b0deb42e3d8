//! Exits that the VMM must handle, as messages of 256 bytes from the kernel.

use std::fmt;

/// Bytes of a message.
pub(crate) const LENGTH: usize = 256;

/// A message, parsed as far as this program needs it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message([u8; LENGTH]);

/// Its kind, with what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A port of one, two or four bytes was read or written.
    Port {
        port: u16,
        bytes: u8,
        is_write: bool,
        rax: u64,
    },
    /// A guest address that has no memory, or memory that the kernel could not provide.
    Memory {
        guest_address: u64,
        is_known: bool,
    },
    Other(u32),
}

impl Message {
    pub(crate) fn new(bytes: [u8; LENGTH]) -> Self {
        Self(bytes)
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.u32(0) {
            0x8000_0000 => Kind::Memory { guest_address: self.u64(16 + 56), is_known: false },
            0x8000_0001 => Kind::Memory { guest_address: self.u64(16 + 56), is_known: true },
            0x8001_0000 => Kind::Port {
                port: u16::from_le_bytes([self.0[56], self.0[57]]),
                bytes: self.0[58] & 7,
                is_write: self.0[16 + 5] == 1,
                rax: self.u64(16 + 48),
            },
            other => Kind::Other(other),
        }
    }

    /// The VP's address of the instruction.
    pub(crate) fn rip(&self) -> u64 {
        self.u64(16 + 24)
    }

    /// The address behind the instruction.
    pub(crate) fn next_rip(&self) -> u64 {
        self.rip() + u64::from(self.0[16 + 4] & 0xf)
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {:#x} at rip {:#x}: {:?}", self.u32(0), self.rip(), self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(type_: u32, parts: &[(usize, &[u8])]) -> Message {
        let mut bytes = [0; LENGTH];
        bytes[..4].copy_from_slice(&type_.to_le_bytes());
        for (at, part) in parts {
            bytes[*at..at + part.len()].copy_from_slice(part);
        }
        Message::new(bytes)
    }

    #[test]
    fn port_message_has_port_size_direction_and_value() {
        let parts: [(usize, &[u8]); 5] =
            [(20, &[0x21]), (21, &[1]), (40, &[5, 16]), (56, &[0xf8, 3, 0x19]), (64, &[b'4', 1])];
        let message = message(0x8001_0000, &parts);
        let rax = u64::from(b'4') + 256;
        assert_eq!(message.kind(), Kind::Port { port: 0x3f8, bytes: 1, is_write: true, rax });
        assert_eq!((message.rip(), message.next_rip()), (0x1005, 0x1006));
    }

    #[test]
    fn memory_messages_tell_no_memory_from_memory_that_is_not_there_now() {
        let parts: [(usize, &[u8]); 1] = [(72, &[0, 0x10, 2])];
        let kind = |type_| message(type_, &parts).kind();
        assert_eq!(kind(0x8000_0000), Kind::Memory { guest_address: 0x21000, is_known: false });
        assert_eq!(kind(0x8000_0001), Kind::Memory { guest_address: 0x21000, is_known: true });
        assert_eq!(kind(0x8000_0021), Kind::Other(0x8000_0021));
    }
}
