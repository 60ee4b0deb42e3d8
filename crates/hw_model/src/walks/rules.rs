//! The manuals' rules for entries, implemented a second time: it shares nothing with the code under test.

/// The manual that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// Nested pages of SVM (APM vol. 2, 15.25): an entry that denies an access is walked again. Leaves of different
    /// sizes may be cached together as long as they agree.
    Nested,
    /// Extended page tables of VT-x with accessed and dirty bits (SDM vol. 3C, 29.4). Entries of stage 2 alone belong
    /// to its root, combined ones to a VPID and a root. An entry that denies an access may be used, but not twice: the
    /// EPT violation drops it.
    Extended,
    /// Stage 2 of Arm (Arm ARM, D8.16 and D8.17): an entry that denies may be cached.
    Arm {
        /// FEAT_BBM level. At 0, leaves of different sizes must never be cached together.
        bbm: u32,
        /// FEAT_HAFDBS: the hardware sets the access flag, and records writes in leaves with DBM.
        hafdbs: bool,
    },
}

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(Leaf),
}

/// A leaf, decoded by the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) output: u64,
    pub(super) read: bool,
    /// The write needs nothing else.
    pub(super) write: bool,
    /// The hardware records the write in the leaf first.
    pub(super) recorded: bool,
    pub(super) accessed: bool,
    /// Must not be cached (nT).
    pub(super) uncached: bool,
}

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

impl Rules {
    pub(super) fn decode(self, level: u32, bits: u64) -> Descriptor {
        let bit = |number: u32| bits >> number & 1 != 0;
        let is_present = if self == Self::Extended { bits & 0b111 != 0 } else { bit(0) };
        if !is_present {
            return Descriptor::Invalid;
        }
        let output = bits & ADDRESS;
        match self {
            Self::Extended if level > 0 && !bit(7) => Descriptor::Table(output),
            Self::Extended => Descriptor::Leaf(Leaf {
                output,
                read: bit(0),
                write: bit(1) && bit(9),
                recorded: bit(1) && !bit(9),
                accessed: bit(8),
                uncached: false,
            }),
            Self::Nested if level > 0 && !bit(7) => Descriptor::Table(output),
            Self::Nested => Descriptor::Leaf(Leaf {
                output,
                read: true,
                write: bit(1) && bit(6),
                recorded: bit(1) && !bit(6),
                accessed: bit(5),
                uncached: false,
            }),
            Self::Arm { .. } if level > 0 && bit(1) => Descriptor::Table(output),
            Self::Arm { .. } if level == 0 && !bit(1) => Descriptor::Invalid,
            Self::Arm { hafdbs, .. } => Descriptor::Leaf(Leaf {
                // Bit 16 of a block is nT, not part of the address.
                output: if level > 0 { output & !(1 << 16) } else { output },
                read: bit(6),
                write: bit(7),
                recorded: !bit(7) && bit(51) && hafdbs,
                accessed: bit(10),
                uncached: level > 0 && bit(16),
            }),
        }
    }

    /// An old entry: in a table of pages a leaf to `output` with all rights, in other tables a pointer to a table
    /// there.
    pub(super) fn earlier_life(self, output: u64) -> u64 {
        match self {
            Self::Nested => output | 0b110_0111,
            Self::Extended => output | 0b11 << 8 | 0b111,
            Self::Arm { .. } => output | 1 << 10 | 0b11 << 6 | 0b11,
        }
    }

    /// The leaf with the access flag.
    pub(super) fn with_accessed(self, bits: u64) -> u64 {
        match self {
            Self::Nested => bits | 1 << 5,
            Self::Extended => bits | 1 << 8,
            Self::Arm { .. } => bits | 1 << 10,
        }
    }

    /// The entry that points to a table, after a walk has used it.
    pub(super) fn with_used_table(self, bits: u64) -> u64 {
        match self {
            // The Accessed bit exists at all levels.
            Self::Nested => bits | 1 << 5,
            Self::Extended => bits | 1 << 8,
            Self::Arm { .. } => bits,
        }
    }

    /// The leaf with a write recorded.
    pub(super) fn with_write(self, bits: u64) -> u64 {
        match self {
            Self::Nested => bits | 1 << 6,
            Self::Extended => bits | 1 << 9,
            Self::Arm { .. } => bits | 1 << 7,
        }
    }

    /// Bits of leaves, and of entries that point to tables, which the hardware sets by itself.
    pub(super) fn recorded_bits(self) -> u64 {
        match self {
            Self::Nested => 1 << 6 | 1 << 5,
            Self::Extended => 1 << 9 | 1 << 8,
            Self::Arm { hafdbs: true, .. } => 1 << 10 | 1 << 7,
            Self::Arm { hafdbs: false, .. } => 0,
        }
    }

    /// Whether the hardware sets the access flag itself.
    pub(super) fn sets_accessed(self) -> bool {
        match self {
            Self::Nested | Self::Extended => true,
            Self::Arm { hafdbs, .. } => hafdbs,
        }
    }

    /// Whether an entry of the TLB may deny an access that the tables allow.
    pub(super) fn caches_denials(self) -> bool {
        matches!(self, Self::Arm { .. })
    }

    /// Whether walkers see stores in their order, and exchanges at once.
    pub(super) fn orders_stores(self) -> bool {
        matches!(self, Self::Nested | Self::Extended)
    }

    /// Whether a denial by the TLB drops the entries that denied, and those of the address.
    pub(super) fn denies_once(self) -> bool {
        self == Self::Extended
    }

    /// Whether leaves of two sizes may be cached for one address.
    pub(super) fn mixes_sizes(self) -> bool {
        !matches!(self, Self::Arm { bbm: 0 | 1, .. })
    }
}
