//! Widths of accesses.

/// Number of bits of one access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Width {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Word,
    /// 32 bits.
    Dword,
    /// 64 bits.
    Qword,
}

impl Width {
    /// All widths, the smallest first.
    pub const ALL: [Self; 4] = [Self::Byte, Self::Word, Self::Dword, Self::Qword];

    /// The width of this many bytes, if there is one.
    #[must_use]
    pub const fn from_bytes(bytes: u8) -> Option<Self> {
        match bytes {
            1 => Some(Self::Byte),
            2 => Some(Self::Word),
            4 => Some(Self::Dword),
            8 => Some(Self::Qword),
            _ => None,
        }
    }

    /// Number of bytes.
    #[must_use]
    #[inline]
    pub const fn bytes(self) -> u64 {
        1 << self as u8
    }

    /// Number of bits.
    #[must_use]
    #[inline]
    pub const fn bits(self) -> u32 {
        8 << self as u8
    }

    /// The low bits of `value` that fit; the other bits zero.
    #[must_use]
    #[inline]
    pub const fn truncate(self, value: u64) -> u64 {
        const MASKS: [u64; 4] = [0xff, 0xffff, 0xffff_ffff, u64::MAX];
        value & MASKS[self as usize]
    }

    /// The low bits of `value` that fit; the other bits copy the highest of them.
    #[must_use]
    #[inline]
    pub const fn sign_extend(self, value: u64) -> u64 {
        let unused = 64 - self.bits();
        ((value << unused).cast_signed() >> unused).cast_unsigned()
    }

    /// Whether `value`, as a signed number of this width, is negative.
    #[must_use]
    #[inline]
    pub const fn is_negative(self, value: u64) -> bool {
        value >> (self.bits() - 1) & 1 != 0
    }

    /// `whole` with its low bits of this width replaced. A width of 32 bits clears the upper half, as in a general
    /// register (APM vol. 1, 3.1.2).
    #[must_use]
    #[inline]
    pub const fn merge(self, whole: u64, value: u64) -> u64 {
        match self {
            Self::Qword | Self::Dword => self.truncate(value),
            Self::Word | Self::Byte => whole & !self.truncate(u64::MAX) | self.truncate(value),
        }
    }
}
