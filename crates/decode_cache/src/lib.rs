//! Caches a guest's decoded instructions, so that an emulated access to a device need not decode again. One of the
//! designs also saves the fetch.
//!
//! An instruction's meaning is a function of its bytes and of the processor's [`ModeNumber`]. The bytes depend on
//! memory, on page tables, and on writes to them. There are two designs, each usable alone:
//!
//! * [`ByBytes`], one per vCPU: the key is the fetched bytes and the mode. It is always correct and needs no coherence,
//!   but the fetch remains.
//! * [`WriteProtect`], one per VM, the design that bhyve tried in 2015 (Carabas and Natu, AsiaBSDCon): the key is the
//!   instruction's address. The pages that it depends on are read-only for the guest while it is cached. A write
//!   faults, and the fault drops the entry. If the page tables are protected too, a hit also saves the walk.
//!
//! The first is the better one (`docs/decisions/0009-decode-cache.md`); the second is in `rivals`, to be measured
//! beside it. This crate knows no instruction set: it caches any type that is [`Decoded`]. It returns hits, misses,
//! insertions and evictions; the caller counts them.
//!
//! ```
//! use decode_cache::{ByBytes, Bytes, Decoded, InsertOutcome, ModeNumber};
//!
//! /// All instructions of this machine are one byte that gives their length.
//! #[derive(Clone, Copy, Debug, PartialEq)]
//! struct Instruction(u8);
//!
//! impl Decoded for Instruction {
//!     fn length(&self) -> u8 {
//!         self.0
//!     }
//!     fn pack(&self) -> [u64; 4] {
//!         [u64::from(self.0), 0, 0, 0]
//!     }
//!     fn unpack([length, ..]: [u64; 4]) -> Option<Self> {
//!         u8::try_from(length).ok().map(Self)
//!     }
//! }
//!
//! let mut cache = ByBytes::<Instruction>::new();
//! let fetched = Bytes::new(&[2, 0, 7, 7]);
//! assert_eq!(cache.find(ModeNumber(0), &fetched), None);
//! assert_eq!(cache.insert(ModeNumber(0), &fetched, Instruction(2)), InsertOutcome::Stored);
//! assert_eq!(cache.find(ModeNumber(0), &fetched), Some(&Instruction(2)));
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bytes;
mod fetched;
mod place;
mod rivals;
#[cfg(test)]
mod tests;

pub use bytes::ByBytes;
pub use fetched::Bytes;
pub use place::{ModeNumber, Place};
pub use rivals::{
    DropCause, Insertion, Lost, MAX_TABLES, Protect, Protection, Size, Unprotection, Vouching, WALK_LIMIT, WriteProtect,
};

/// Maximum number of bytes of an instruction.
pub const MAX_LENGTH: usize = 15;

/// A decoded instruction, in the form that the caches store.
pub trait Decoded: Copy {
    /// Length in bytes, 1 to [`MAX_LENGTH`].
    fn length(&self) -> u8;

    /// The instruction as words, for shared memory that is accessed a word at a time.
    fn pack(&self) -> [u64; 4];

    /// Reverses [`pack`](Self::pack); `None` for words that it never makes.
    fn unpack(words: [u64; 4]) -> Option<Self>;
}

/// Result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertOutcome {
    /// It is cached.
    Stored,
    /// It is cached, and has replaced another one.
    Replaced,
    /// It is not cached.
    Refused(Refusal),
}

/// Why an instruction is not cached. Each is harmless: it is decoded again the next time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It ends after the given bytes, or in the next page.
    Crosses,
    /// The place has no GPA, which the page walk finds; or the GPA is invalid.
    Unplaced,
    /// Two of its pages share one slot, or it has more pages than an entry can hold.
    Pages,
    /// A page cannot be made read-only.
    Unprotected,
    /// Walks have evicted a page too often.
    Walked,
    /// Its bytes, or the walk to them, have changed meanwhile; or a page was evicted.
    Changed,
    /// Another vCPU writes to the same slot, or another processor changes stage 2 at one of the pages.
    Busy,
}
