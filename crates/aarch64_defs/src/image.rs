//! The Image of a Linux kernel: its header, and the places of kernel, device tree and initrd in memory (Linux,
//! Documentation/arch/arm64/booting.rst).

use core::fmt;

/// Alignment of kernel, device tree and initrd: the kernel requires it, and the device tree must not cross such a
/// boundary.
pub const GRAIN: u64 = 2 << 20;

/// Bytes of the header.
const HEADER_BYTES: usize = 64;
const MAGIC: &[u8] = b"ARM\x64";
/// Flags: the kernel is big-endian.
const BIG_ENDIAN: u64 = 1 << 0;
/// Before Linux 3.17 the size was zero, and the offset always this.
const OLD_OFFSET: u64 = 0x8_0000;

/// Offsets from the start of RAM, which is aligned to [`GRAIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Load address and entry of the kernel.
    pub kernel: u64,
    /// Start of the [`GRAIN`] reserved for the device tree.
    pub device_tree: u64,
    /// Start of the initrd.
    pub initrd: u64,
}

/// Why a kernel cannot be booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageError {
    /// The file is no Image. Its first bytes, zeros after its end.
    NotAnImage([u8; 4]),
    /// The kernel is built for big-endian processors.
    BigEndian,
    /// The header has an invalid offset or size.
    BadHeader,
    /// The guest has too little memory.
    MemoryTooSmall {
        /// Bytes for kernel, device tree and initrd.
        needs: u64,
        /// Bytes of memory.
        has: u64,
    },
}

impl core::error::Error for ImageError {}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NotAnImage([a, b, c, d]) => write!(
                f,
                "not a kernel: the file starts with {a:02x} {b:02x} {c:02x} {d:02x} and has no \"ARM\\x64\" at byte 56; \
                 expected an uncompressed Linux Image for arm64"
            ),
            Self::BigEndian => write!(f, "the kernel is built for big-endian processors"),
            Self::BadHeader => write!(f, "the kernel's header asks for an offset or a size that makes no sense"),
            Self::MemoryTooSmall { needs, has } => write!(
                f,
                "kernel and initrd need at least {} MiB of guest memory, the guest has {} MiB",
                needs.div_ceil(1 << 20),
                has >> 20
            ),
        }
    }
}

/// Decides the places in `memory_bytes` of RAM.
///
/// # Errors
/// `kernel` is no Image, or does not fit together with an initrd of `initrd_bytes`.
pub fn place(kernel: &[u8], initrd_bytes: u64, memory_bytes: u64) -> Result<Placement, ImageError> {
    let mut first = [0; 4];
    first.iter_mut().zip(kernel).for_each(|(to, from)| *to = *from);
    let header = kernel.get(..HEADER_BYTES).filter(|header| &header[56..60] == MAGIC);
    let Some(header) = header else { return Err(ImageError::NotAnImage(first)) };
    let word = |at: usize| header[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let (text_offset, image_bytes, flags) = (word(8), word(16), word(24));
    if flags & BIG_ENDIAN != 0 {
        return Err(ImageError::BigEndian);
    }
    let offset = if image_bytes == 0 { OLD_OFFSET } else { text_offset };
    // The size includes memory beyond the file, such as zeroed data.
    let bytes = image_bytes.max(kernel.len() as u64);
    if offset >= GRAIN || bytes > 1 << 40 {
        return Err(ImageError::BadHeader);
    }

    let device_tree = (offset + bytes).next_multiple_of(GRAIN);
    let initrd = device_tree + GRAIN;
    if initrd.checked_add(initrd_bytes).is_none_or(|needs| needs > memory_bytes) {
        let needs = initrd.saturating_add(initrd_bytes);
        return Err(ImageError::MemoryTooSmall { needs, has: memory_bytes });
    }
    Ok(Placement { kernel: offset, device_tree, initrd })
}

#[cfg(test)]
mod tests;
