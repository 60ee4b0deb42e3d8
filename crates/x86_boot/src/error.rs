//! Why a kernel cannot be booted. Each variant carries the figures, so that the message says how to fix it.

use addr::Gpa;
use core::fmt;

/// Why a guest cannot be booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Neither a bzImage nor an ELF.
    NotAKernel {
        /// The first bytes of the file, zeros after its end.
        first: [u8; 4],
        /// Length of the file.
        bytes: usize,
    },
    /// The file ends before the kernel.
    Truncated {
        /// Bytes that the headers require.
        needs: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// A bzImage of a boot protocol before 2.12, the first that says whether there is a 64-bit entry.
    ProtocolTooOld {
        /// Protocol version of the kernel, major in the high byte.
        version: u16,
    },
    /// A zImage, which must be loaded below 1 MiB.
    LoadedLow,
    /// A bzImage whose load address cannot be RAM.
    LoadAddress {
        /// First address.
        start: u64,
        /// Bytes from there on.
        bytes: u64,
    },
    /// An invalid ELF, or one for another machine.
    BadElf(&'static str),
    /// An ELF without the note that names its PVH entry.
    NoPvhNote,
    /// An ELF whose entry is in none of its segments.
    EntryOutside {
        /// The entry's physical address.
        entry: u64,
    },
    /// A segment below 1 MiB, where boot information and tables are.
    SegmentTooLow {
        /// First address.
        start: u64,
        /// Bytes from there on.
        bytes: u64,
    },
    /// A segment in or above the hole below 4 GiB, where the guest has no usable RAM at its start.
    SegmentOutside {
        /// First address.
        start: u64,
        /// Bytes from there on.
        bytes: u64,
    },
    /// An ELF, which runs at one address only. The machine that the hypervisor runs on may have no RAM there.
    NotRelocatable,
    /// That machine has no RAM for the kernel, in one piece.
    NoRoom {
        /// Bytes that the kernel needs.
        needs: u64,
        /// Bytes of the largest piece.
        has: u64,
    },
    /// The guest has too little memory for this kernel.
    MemoryTooSmall {
        /// Bytes that the kernel needs.
        needs: u64,
        /// Bytes of guest memory.
        has: u64,
    },
    /// The initrd does not fit between the kernel and the end of the memory for it.
    InitrdTooLarge {
        /// Bytes of the initrd.
        bytes: u64,
        /// Bytes available for it.
        room: u64,
    },
    /// The kernel would truncate the command line.
    CmdlineTooLong {
        /// Bytes of the command line.
        bytes: usize,
        /// Maximum number of bytes for the kernel.
        limit: usize,
    },
    /// The command line contains a NUL, which would end it for the kernel.
    CmdlineHasNul {
        /// Bytes before the NUL.
        at: usize,
    },
    /// No vCPU, or more than the guest's local APICs can address.
    Vcpus {
        /// Requested number.
        vcpus: u32,
        /// Maximum number.
        limit: u32,
    },
    /// Guest memory is smaller than declared.
    Memory(OutsideMemory),
}

/// A write to an address where the guest has no RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsideMemory {
    /// First address of the write.
    pub gpa: Gpa,
    /// Length of the write.
    pub bytes: usize,
}

impl From<OutsideMemory> for Error {
    fn from(outside: OutsideMemory) -> Self {
        Self::Memory(outside)
    }
}

impl core::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NotAKernel { bytes: 0, .. } => write!(f, "not a kernel: the file is empty"),
            Self::NotAKernel { first: [a, b, c, d], bytes } => write!(
                f,
                "not a kernel: {bytes} bytes that start with {a:02x} {b:02x} {c:02x} {d:02x}; \
                 expected a Linux bzImage or an ELF with a PVH note"
            ),
            Self::Truncated { needs, has } => {
                write!(f, "the kernel is truncated: its headers speak of {needs} bytes, the file has {has}")
            }
            Self::ProtocolTooOld { version } => write!(
                f,
                "the kernel speaks boot protocol {}.{:02}, at least 2.12 (Linux 3.8) is needed",
                version >> 8,
                version & 0xff
            ),
            Self::LoadedLow => write!(f, "the kernel is a zImage, only bzImages can be booted"),
            Self::LoadAddress { start, bytes } => write!(
                f,
                "the kernel wants {bytes:#x} bytes at {start:#x}, outside of 0x100000 to {}",
                crate::layout::HOLE
            ),
            Self::BadElf(what) => write!(f, "the kernel is an ELF that cannot be booted: {what}"),
            Self::NoPvhNote => write!(
                f,
                "the kernel is an ELF without a PVH entry note; use the bzImage, or build it with CONFIG_PVH=y"
            ),
            Self::EntryOutside { entry } => {
                write!(f, "the kernel's PVH entry {entry:#x} lies in none of its segments")
            }
            Self::SegmentTooLow { start, bytes } => write!(
                f,
                "the kernel has a segment of {bytes:#x} bytes at {start:#x}, below 0x100000, where boot information lies"
            ),
            Self::SegmentOutside { start, bytes } => write!(
                f,
                "the kernel has a segment of {bytes:#x} bytes at {start:#x}, past the end of low memory at {}",
                crate::layout::HOLE
            ),
            Self::MemoryTooSmall { needs, has } => write!(
                f,
                "this kernel needs at least {} MiB of guest memory, the guest has {}",
                needs.div_ceil(1 << 20),
                Size(has)
            ),
            Self::NotRelocatable => write!(
                f,
                "the kernel is an ELF with a fixed address; a VM that owns the machine's devices boots a bzImage"
            ),
            Self::NoRoom { needs, has } => write!(
                f,
                "the kernel needs {} of memory in one piece, at its own address or above and below 4 GiB; \
                 the largest piece has {}",
                Size(needs),
                Size(has)
            ),
            Self::InitrdTooLarge { bytes, room } => write!(
                f,
                "the initrd has {}, between the kernel and the end of low guest memory there is room for {}; \
                 give the guest more memory or the kernel a smaller initrd",
                Size(bytes),
                Size(room)
            ),
            Self::CmdlineTooLong { bytes, limit } => {
                write!(f, "the command line has {bytes} bytes, this kernel takes {limit}")
            }
            Self::CmdlineHasNul { at } => write!(f, "the command line holds a NUL after {at} bytes"),
            Self::Vcpus { vcpus: 0, limit } => write!(f, "0 vCPUs: a guest has at least 1, here at most {limit}"),
            Self::Vcpus { vcpus, limit } => {
                write!(f, "{vcpus} vCPUs: with this kind of APIC there are at most {limit}")
            }
            Self::Memory(OutsideMemory { gpa, bytes }) => {
                write!(f, "{bytes} bytes at guest physical {gpa} are outside the guest's memory")
            }
        }
    }
}

/// Bytes, shown in MiB if exact or large, in bytes if small.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        match self.0 {
            small if small < MIB => write!(f, "{small} bytes"),
            bytes if bytes % MIB == 0 => write!(f, "{} MiB", bytes / MIB),
            bytes => write!(f, "{}.{} MiB", bytes / MIB, bytes % MIB * 10 / MIB),
        }
    }
}
