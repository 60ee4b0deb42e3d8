//! The states before and after a case, and the address space that both sides see.
//!
//! ```text
//! RESERVED       the process has nothing else in this range
//!   REGION       all segments with a base start here, so that 16-bit addresses reach what follows
//!     WINDOW     data: writable pages, then a read-only one
//!     CODE       two pages of INT3, with the instruction somewhere in them
//! ```
//!
//! The rest of the range is not mapped. Linear addresses are the same on the processor and in the emulator.

use std::ops::Range;
use x86_emulate::{Exception, MAX_LENGTH, Mode, Segment, SegmentRegister};

/// The part of the address space that instructions may touch.
pub(crate) const RESERVED: Range<u64> = 0x0f00_0000..0x4000_0000;
/// Where segments start that do not start at 0.
pub(crate) const REGION: u64 = 0x1000_0000;
/// Bytes in a page.
pub(crate) const PAGE: u64 = 0x1000;

/// Linear address of the data.
pub const WINDOW: u64 = REGION + 0x4000;
/// Bytes of data, on writable pages and a last read-only one.
pub const WINDOW_BYTES: usize = 5 * 0x1000;
/// Where the page starts that cannot be written.
pub(crate) const READ_ONLY: u64 = WINDOW + 4 * PAGE;
/// Where the window ends.
pub(crate) const WINDOW_END: u64 = WINDOW + WINDOW_BYTES as u64;

/// Linear address of the code.
pub(crate) const CODE: u64 = REGION + 0xc000;
/// Bytes of code.
pub(crate) const CODE_BYTES: usize = 2 * 0x1000;
/// The bytes around the instruction: INT3.
pub(crate) const AROUND: u8 = 0xcc;

/// An address or a number of bytes as an index: both have 64 bits here.
pub(crate) fn index(value: u64) -> usize {
    usize::try_from(value).expect("64 bits")
}

/// Flags that instructions can change, and that a case starts with: CF, PF, AF, ZF, SF, DF, OF.
pub(crate) const FLAGS: u64 = 0xcd5;

/// Numbers of general registers.
pub(crate) const RAX: usize = 0;
pub(crate) const RCX: usize = 1;
pub(crate) const RDX: usize = 2;
pub(crate) const RSP: usize = 4;
pub(crate) const RSI: usize = 6;
pub(crate) const RDI: usize = 7;

/// One instruction, and the state before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// How code is decoded.
    pub mode: Mode,
    /// The instruction, and zeros.
    pub bytes: [u8; MAX_LENGTH],
    /// Length of the instruction in bytes.
    pub length: u8,
    /// Its offset from the start of the code.
    pub place: u16,
    /// In the order of their encoding.
    pub gprs: [u64; 16],
    /// CF, PF, AF, ZF, SF, DF and OF.
    pub flags: u64,
    /// Outside 64-bit mode: numbers in the table of descriptors, in the order of [`Segment`].
    pub segments: [u8; 6],
    /// In 64-bit mode: the bases of FS and GS.
    pub bases: [u64; 2],
}

impl Case {
    /// The instruction.
    #[must_use]
    pub fn instruction(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// RIP: relative to CS.
    pub(crate) fn rip(&self) -> u64 {
        CODE + u64::from(self.place) - self.base(Segment::Cs)
    }

    /// The linear address at which a segment starts.
    pub(crate) fn base(&self, segment: Segment) -> u64 {
        match (self.mode, segment) {
            (Mode::Bits64, Segment::Fs) => self.bases[0],
            (Mode::Bits64, Segment::Gs) => self.bases[1],
            (Mode::Bits64, _) => 0,
            _ => self.descriptor(segment).base.into(),
        }
    }

    /// Outside 64-bit mode: the descriptor in a segment register.
    pub(crate) fn descriptor(&self, segment: Segment) -> &'static Descriptor {
        &DESCRIPTORS[usize::from(self.segments[segment as usize])]
    }

    /// Bytes of the stack pointer.
    pub(crate) fn stack_pointer_bytes(&self) -> usize {
        match self.mode {
            Mode::Bits64 => 8,
            _ if self.descriptor(Segment::Ss).is_big => 4,
            _ => 2,
        }
    }
}

/// The state afterwards, except memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// In the order of their encoding.
    pub gprs: [u64; 16],
    /// Relative to CS.
    pub rip: u64,
    /// All of RFLAGS.
    pub flags: u64,
    /// Why the instruction was not completed.
    pub exception: Option<Exception>,
}

/// Kind of a segment (APM vol. 2, 4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No segment.
    Absent,
    Data {
        can_be_written: bool,
        expands_down: bool,
    },
    Code {
        can_be_read: bool,
    },
}

/// A segment descriptor. Each is in the process's local descriptor table under its number here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) base: u32,
    /// In bytes. Above 1 MiB, its lowest 12 bits are ones.
    pub(crate) limit: u32,
    pub(crate) kind: Kind,
    /// 32-bit code or stack.
    pub(crate) is_big: bool,
}

const DATA: Kind = Kind::Data { can_be_written: true, expands_down: false };
const DOWN: Kind = Kind::Data { can_be_written: true, expands_down: true };
const CONSTANT: Kind = Kind::Data { can_be_written: false, expands_down: false };
const READABLE: Kind = Kind::Code { can_be_read: true };
const SECRET: Kind = Kind::Code { can_be_read: false };

const fn segment(base: u64, limit: u32, kind: Kind, is_big: bool) -> Descriptor {
    assert!(base <= u32::MAX as u64);
    #[expect(clippy::cast_possible_truncation, reason = "asserted")]
    let base = base as u32;
    Descriptor { base, limit, kind, is_big }
}

/// Segments that end, or begin, in the middle of the window.
const MIDDLE: u32 = 0x4000 + 0x1803;

/// All segments used outside 64-bit mode. The first is that of a null selector.
pub(crate) const DESCRIPTORS: [Descriptor; 20] = [
    segment(0, 0, Kind::Absent, false),
    segment(0, u32::MAX, DATA, true),
    segment(REGION, 0xffff, DATA, true),
    segment(REGION, 0xffff, DATA, false),
    segment(REGION + 0x123, 0x1_ffff, DATA, true),
    segment(0xffff_8000, u32::MAX, DATA, true),
    segment(REGION, 0xffff, CONSTANT, true),
    segment(REGION, MIDDLE, DATA, true),
    segment(REGION, MIDDLE, DATA, false),
    segment(REGION, MIDDLE, DOWN, true),
    segment(REGION, MIDDLE, DOWN, false),
    segment(REGION, 0xffff, READABLE, false),
    segment(REGION, 0xffff, SECRET, false),
    segment(0, u32::MAX, READABLE, false),
    segment(0, u32::MAX, READABLE, true),
    segment(REGION, 0xffff, READABLE, true),
    segment(REGION, 0xffff, SECRET, true),
    segment(0, u32::MAX, SECRET, true),
    segment(0, u32::MAX, DATA, false),
    segment(REGION, u32::MAX, DATA, true),
];

/// Numbers of descriptors for the segment registers: the first two are used most often.
pub(crate) mod choices {
    pub(crate) const DATA: [u8; 13] = [2, 1, 0, 3, 4, 5, 6, 7, 8, 9, 10, 15, 19];
    pub(crate) const STACK: [u8; 9] = [2, 3, 1, 4, 7, 8, 9, 10, 18];
    pub(crate) const CODE_16: [u8; 3] = [11, 12, 13];
    pub(crate) const CODE_32: [u8; 4] = [14, 15, 16, 17];
}

impl Descriptor {
    /// As the emulator wants it.
    pub(crate) fn register(&self) -> SegmentRegister {
        const PRESENT_FOR_ALL: u16 = 0xf1;
        let kind = match self.kind {
            Kind::Absent => return SegmentRegister::default(),
            Kind::Data { can_be_written, expands_down } => {
                u16::from(can_be_written) << 1 | u16::from(expands_down) << 2
            }
            Kind::Code { can_be_read } => u16::from(can_be_read) << 1 | 1 << 3,
        };
        let size = if self.is_big { SegmentRegister::BIG } else { 0 };
        SegmentRegister { base: self.base.into(), limit: self.limit, attributes: PRESENT_FOR_ALL | kind | size }
    }
}
