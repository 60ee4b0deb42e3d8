//! The VPs of a call: all, a mask of 64, or a sparse set (TLFS, "Sparse Virtual Processor Set").
//!
//! A sparse set consists of *banks* of 64 VPs. A mask tells which banks are given. The given ones follow as one word
//! each, in ascending order; so the position of bank `k` is the number of lower bits set in the mask. The VPs {0, 5,
//! 130} are the mask 0b101 (banks 0 and 2) and the banks 0x21 and 0x4.
//!
//! A guest's set may name VPs that do not exist. The iterators take the number of vCPUs, and return only existing ones.

use crate::hypercall::Status;
use crate::input::Words;

/// VPs in a bank, and in a plain mask.
pub const BANK_VPS: u32 = 64;

const FORMAT_SPARSE: u64 = 0;
const FORMAT_ALL: u64 = 1;

/// The VPs of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets<'a> {
    /// All that exist.
    All,
    /// VP i, if bit i is set.
    Mask(u64),
    /// A set that can exceed 64 VPs.
    Sparse(SparseSet<'a>),
}

/// A set of VPs in banks of 64, of which only some are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseSet<'a> {
    valid_banks: u64,
    /// One word for each bit set in `valid_banks`.
    banks: Words<'a>,
}

impl<'a> SparseSet<'a> {
    /// The set whose banks follow each other in `banks`, 8 bytes each. `None` if their number is not the number of bits
    /// in `valid_banks`.
    #[must_use]
    pub fn new(valid_banks: u64, banks: &'a [u8]) -> Option<Self> {
        let (banks, rest) = banks.as_chunks();
        (rest.is_empty() && banks.len() == valid_banks.count_ones() as usize)
            .then_some(Self { valid_banks, banks: Words(banks) })
    }

    /// Which banks are given; a given one may be empty.
    #[must_use]
    pub const fn valid_banks(&self) -> u64 {
        self.valid_banks
    }

    /// The 64 VPs from `64 * index` on; none for a bank that is not given.
    #[must_use]
    pub fn bank(&self, index: u32) -> u64 {
        match 1_u64.checked_shl(index) {
            Some(bit) if self.valid_banks & bit != 0 => {
                let before = self.valid_banks & (bit - 1);
                self.banks.get(before.count_ones() as usize)
            }
            _ => 0,
        }
    }
}

impl<'a> Targets<'a> {
    /// Reads a set at the beginning of `set`: format, mask of banks, and `variable_words` banks.
    pub(crate) fn parse(set: Words<'a>, variable_words: u16) -> Result<Self, Status> {
        let (format, valid_banks) = (set.get(0), set.get(1));
        let banks = set.skip(2).take(usize::from(variable_words));

        // The header must have exactly the given banks, whatever the format: this is part of the call's shape.
        if u32::from(variable_words) != valid_banks.count_ones() || banks.len() != usize::from(variable_words) {
            return Err(Status::InvalidHypercallInput);
        }
        match format {
            FORMAT_SPARSE => Ok(Self::Sparse(SparseSet { valid_banks, banks })),
            FORMAT_ALL => Ok(Self::All),
            _ => Err(Status::InvalidParameter),
        }
    }

    /// Whether the set names the VP with this index, which may not exist.
    #[must_use]
    pub fn contains(&self, vp: u32) -> bool {
        self.bank(vp / BANK_VPS) >> (vp % BANK_VPS) & 1 != 0
    }

    /// The 64 VPs from `64 * index` on, as the guest wrote them.
    #[must_use]
    pub fn bank(&self, index: u32) -> u64 {
        match self {
            Self::All => !0,
            Self::Mask(mask) if index == 0 => *mask,
            Self::Mask(_) => 0,
            Self::Sparse(set) => set.bank(index),
        }
    }

    /// The banks that name a VP below `count`, in ascending order, without VPs at `count` or above. One step for each
    /// given bank.
    #[must_use]
    pub fn banks(&self, count: u32) -> Banks<'a> {
        let all = (count / BANK_VPS).saturating_add(u32::from(!count.is_multiple_of(BANK_VPS)));
        let (next, end) = match self {
            Self::All => (0, all),
            Self::Mask(_) => (0, all.min(1)),
            Self::Sparse(set) => (set.valid_banks.trailing_zeros(), all.min(u64::BITS)),
        };
        Banks { targets: *self, count, next, end, position: 0 }
    }

    /// The VPs below `count` that the set names, in ascending order. One step for each of them and for each given bank.
    #[must_use]
    pub fn indices(&self, count: u32) -> Indices<'a> {
        Indices { banks: self.banks(count), base: 0, bits: 0 }
    }
}

/// Banks with a target in them: the bank's index and its VPs. See [`Targets::banks`].
#[derive(Clone, Debug)]
pub struct Banks<'a> {
    targets: Targets<'a>,
    count: u32,
    /// The next bank; none at `end` and above.
    next: u32,
    end: u32,
    /// Position of the bank `next` in a sparse set. A walk keeps it, so it need not count bits.
    position: usize,
}

impl Iterator for Banks<'_> {
    type Item = (u32, u64);

    fn next(&mut self) -> Option<(u32, u64)> {
        while self.next < self.end {
            let index = self.next;
            let claimed = match self.targets {
                Targets::All => {
                    self.next += 1;
                    !0
                }
                Targets::Mask(mask) => {
                    self.next += 1;
                    mask
                }
                Targets::Sparse(set) => {
                    let bank = set.banks.get(self.position);
                    self.position += 1;
                    // `index` is below 64 here, so the mask of higher banks is empty after the last.
                    let higher = set.valid_banks & (!1_u64 << index);
                    self.next = higher.trailing_zeros();
                    bank
                }
            };

            // The last bank may exceed the last vCPU.
            let there = self.count - index * BANK_VPS;
            let existing = if there < BANK_VPS { (1 << there) - 1 } else { !0 };
            if claimed & existing != 0 {
                return Some((index, claimed & existing));
            }
        }
        None
    }
}

/// VP indices in ascending order. See [`Targets::indices`].
#[derive(Clone, Debug)]
pub struct Indices<'a> {
    banks: Banks<'a>,
    base: u32,
    /// The rest of the bank at `base`.
    bits: u64,
}

impl Iterator for Indices<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if self.bits == 0 {
            let (index, bits) = self.banks.next()?;
            self.base = index * BANK_VPS;
            self.bits = bits;
        }
        let bit = self.bits.trailing_zeros();
        self.bits &= self.bits - 1;
        Some(self.base + bit)
    }
}
