//! Registers of distributor and redistributors that both have: their offsets and constant values.
//!
//! Other registers, and accesses with a wrong width or alignment, read zero and ignore writes.

use super::INTIDS;
use crate::device::affinity::affinity;

/// Width of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Half,
    /// 32 bits.
    Word,
    /// 64 bits.
    Double,
}

impl Width {
    pub(super) const fn bytes(self) -> u32 {
        match self {
            Self::Byte => 1,
            Self::Half => 2,
            Self::Word => 4,
            Self::Double => 8,
        }
    }
}

/// A register with fields for several INTIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    /// A bit each, 32 INTIDs from `word * 32` on.
    Group {
        word: usize,
    },
    /// Two registers show the same; ones written to the first set bits, ones written to the second clear them.
    Enable {
        word: usize,
        set: bool,
    },
    Pending {
        word: usize,
        set: bool,
    },
    Active {
        word: usize,
        set: bool,
    },
    /// A byte each, from `first` on.
    Priority {
        first: usize,
    },
    /// Two bits each, of which the upper one is set for an edge: 16 INTIDs from `half * 16` on.
    Config {
        half: usize,
    },
}

impl Register {
    /// The register at `offset` from the distributor, or from the SGI frame of a redistributor, which are laid out
    /// alike. It may be of INTIDs that do not exist.
    pub(super) fn at(offset: u32, width: Width) -> Option<Self> {
        let index = |first: u32| (offset - first) as usize / 4;
        if let 0x400..0x800 = offset
            && let Width::Byte | Width::Word = width
            && offset.is_multiple_of(width.bytes())
        {
            return Some(Self::Priority { first: (offset - 0x400) as usize });
        }
        if width != Width::Word || !offset.is_multiple_of(4) {
            return None;
        }
        match offset {
            0x080..0x100 => Some(Self::Group { word: index(0x080) }),
            0x100..0x180 => Some(Self::Enable { word: index(0x100), set: true }),
            0x180..0x200 => Some(Self::Enable { word: index(0x180), set: false }),
            0x200..0x280 => Some(Self::Pending { word: index(0x200), set: true }),
            0x280..0x300 => Some(Self::Pending { word: index(0x280), set: false }),
            0x300..0x380 => Some(Self::Active { word: index(0x300), set: true }),
            0x380..0x400 => Some(Self::Active { word: index(0x380), set: false }),
            0xc00..0xd00 => Some(Self::Config { half: index(0xc00) }),
            _ => None,
        }
    }
}

/// Splits an offset in the redistributors' region: the vCPU's number, and the offset in its two frames.
#[must_use]
pub const fn frame(offset: u64) -> (u64, u32) {
    (offset / super::REDISTRIBUTOR_SIZE, (offset % super::REDISTRIBUTOR_SIZE) as u32)
}

/// Where the SGI frame begins, in a redistributor.
pub(super) const SGI_FRAME: u32 = 0x1_0000;

/// Offsets in the distributor.
pub(super) mod gicd {
    pub(crate) const CTLR: u32 = 0x0000;
    pub(crate) const TYPER: u32 = 0x0004;
    pub(crate) const IIDR: u32 = 0x0008;
    /// 64 bits for each INTID; those of private ones are reserved.
    pub(crate) const IROUTER: u32 = 0x6000;
    pub(crate) const PIDR2: u32 = 0xffe8;
}

/// Offsets in the first frame of a redistributor.
pub(super) mod gicr {
    pub(crate) const IIDR: u32 = 0x0004;
    pub(crate) const TYPER: u32 = 0x0008;
    pub(crate) const WAKER: u32 = 0x0014;
    pub(crate) const PIDR2: u32 = 0xffe8;
}

/// GICD_CTLR.
pub(super) mod ctlr {
    pub(crate) const ENABLE_GROUP_1: u32 = 1 << 1;
    /// Affinity routing, always.
    pub(crate) const ARE: u32 = 1 << 4;
    /// One security state, always.
    pub(crate) const DS: u32 = 1 << 6;
    /// Something that was switched off may still arrive.
    pub(crate) const RWP: u32 = 1 << 31;
}

/// GICR_WAKER.
pub(super) mod waker {
    pub(crate) const PROCESSOR_SLEEP: u32 = 1 << 1;
    pub(crate) const CHILDREN_ASLEEP: u32 = 1 << 2;
}

/// GICD_TYPER: number of INTIDs, ten bits for their numbers, and that an SPI goes to one chosen CPU.
pub(super) const TYPER: u32 = (INTIDS / 32 - 1) | 9 << 19 | 1 << 25;

/// No implementer, our own product number: in no list of errata.
pub(super) const IIDR: u32 = (b'D' as u32) << 24;

/// Architecture version 3.
pub(super) const PIDR2: u32 = 0x3b;

/// Identity registers in the first frame of vCPU `number`'s redistributor, the same for every reader. Other registers
/// read zero here.
#[must_use]
pub(super) fn read_identity(number: u32, vcpus: u32, offset: u32, width: Width) -> u64 {
    let typer = || {
        let last = u64::from(number + 1 == vcpus) << 4;
        affinity(number) << 32 | u64::from(number & 0xffff) << 8 | last
    };
    match (offset, width) {
        (gicr::TYPER, Width::Double) => typer(),
        (gicr::TYPER, Width::Word) => typer() & 0xffff_ffff,
        (offset, Width::Word) if offset == gicr::TYPER + 4 => typer() >> 32,
        (gicr::IIDR, Width::Word) => IIDR.into(),
        (gicr::PIDR2, Width::Word) => PIDR2.into(),
        _ => 0,
    }
}
