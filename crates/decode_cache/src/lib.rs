//! Decoded instructions of a guest, remembered, so that an emulated access to a device need not decode again, nor, in one
//! of the designs, even fetch.
//!
//! What an instruction means is a function of its bytes and of the processor's [`Mode`]. What its bytes *are* depends on
//! memory, page tables and whoever writes to them. Two designs, each usable alone:
//!
//! * [`ByBytes`], one per vCPU: keyed by the bytes as fetched, and the mode. It can never be wrong and needs no coherence;
//!   the fetch still has to be paid.
//! * [`WriteProtect`], one per VM, the design that bhyve tried in 2015 (Carabas and Natu, AsiaBSDCon): keyed by where the
//!   instruction is. The pages that it depends on are read-only for the guest while it is remembered, and the fault of a
//!   write forgets it. With the page tables protected as well, the walk to the instruction is saved too.
//!
//! [`DecodeCache`] is both, or none, behind one interface: what a vCPU asks, whichever its VM is set to. Nothing here knows
//! an instruction set: what is remembered is whatever is [`Decoded`]. Hits and misses, insertions and evictions are
//! returned; the caller counts.
//!
//! ```
//! use decode_cache::{ByBytes, Bytes, Decoded, Mode, Outcome};
//!
//! /// All instructions of this machine are a byte that says how long they are.
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
//! assert_eq!(cache.find(Mode(0), &fetched), None);
//! assert_eq!(cache.insert(Mode(0), &fetched, Instruction(2)), Outcome::Stored);
//! assert_eq!(cache.find(Mode(0), &fetched), Some(&Instruction(2)));
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bytes;
mod either;
mod fetched;
mod place;
mod protect;
mod registry;
mod slot;
mod sync;
#[cfg(test)]
mod tests;
mod write_protect;

pub use bytes::ByBytes;
pub use either::{DecodeCache, Lookup, Needs};
pub use fetched::Bytes;
pub use place::{Mode, Place};
pub use protect::{Cause, Lost, Protect, Protection, Unprotection};
pub use registry::WALK_LIMIT;
pub use write_protect::{Insertion, MAX_TABLES, Size, Vouching, WriteProtect};

/// Most bytes that an instruction has.
pub const MAX_LENGTH: usize = 15;

/// A decoded instruction, as the caches keep it.
pub trait Decoded: Copy {
    /// In bytes, 1 to [`MAX_LENGTH`].
    fn length(&self) -> u8;

    /// As words, for memory that is shared a word at a time.
    fn pack(&self) -> [u64; 4];

    /// What [`pack`](Self::pack) made these words of; `None` for words that it never makes.
    fn unpack(words: [u64; 4]) -> Option<Self>;
}

/// What became of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is remembered.
    Stored,
    /// It is remembered, and another that was remembered no longer is.
    Replaced,
    /// It is not remembered.
    Refused(Refusal),
}

/// Why an instruction is not remembered. Each is harmless: it is decoded again the next time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is none to remember it in.
    Off,
    /// It reaches beyond the bytes that were given, or into the next page.
    Crosses,
    /// The place lacks the GPA, which the walk to it finds; or the GPA is none.
    Unplaced,
    /// Two of its pages have only one slot between them, or there are more of them than can be kept.
    Pages,
    /// A page cannot be made read-only.
    Unprotected,
    /// A page was evicted by walks too often.
    Walked,
    /// Its bytes, or the way to them, changed meanwhile; or a page was evicted.
    Changed,
    /// Another vCPU writes to the same slot now, or another processor changes stage 2 at one of the pages.
    Busy,
}
