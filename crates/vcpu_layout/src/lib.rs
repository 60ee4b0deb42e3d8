//! State of a virtual CPU, laid out by who writes it.
//!
//! Two cores that write to the same cache line take it from each other, again and again, even if they write different
//! words of it. So what matters about a field is not what it is for but who writes it, and that is said where the field
//! is declared:
//!
//! | class | is written by | how it is reached |
//! |---|---|---|
//! | `owner` | the pCPU that runs the vCPU | [`Owned`], through [`Running`]; [`OwnerWord`] to read from anywhere |
//! | `mailbox` | everybody | atomics, locks |
//! | `frozen` | nobody after creation | a shared reference; [`Frozen`] where the type does not show it |
//! | `cold` | anybody, seldom | any |
//!
//! [`macro@lay_out`] then puts the fields of a class together, begins each class on a line of its own, and makes the
//! struct as long as its lines are. It does not ask to be believed: from the offsets that the compiler has chosen follow
//! constant assertions that no line holds two classes, and none belongs to two structs of an array. What breaks one of
//! them does not compile, and the message names both fields.
//!
//! ```
//! use std::sync::atomic::AtomicU64;
//! use vcpu_layout::{LINE, Owned, OwnerWord, VcpuLayout, lay_out};
//!
//! #[lay_out]
//! struct Vcpu {
//!     /// Work that waits.
//!     #[layout(mailbox)]
//!     pending: AtomicU64,
//!     #[layout(owner)]
//!     registers: Owned<[u64; 16]>,
//!     #[layout(frozen)]
//!     id: u32,
//!     #[layout(owner)]
//!     exits: OwnerWord,
//! }
//!
//! let vcpu = Vcpu::lay_out(VcpuFields {
//!     pending: AtomicU64::new(0),
//!     registers: Owned::new([0; 16]),
//!     id: 3,
//!     exits: OwnerWord::new(0),
//! });
//! let mut running = vcpu.registers.run();
//! let (registers, proof) = running.split();
//! registers[0] = 7;
//! vcpu.exits.add(proof, 1);
//! assert_eq!(vcpu.exits.get(), 1);
//!
//! // Classes are in the order of their first fields.
//! assert_eq!(Vcpu::OFFSET_PENDING, 0);
//! assert_eq!(Vcpu::OFFSET_REGISTERS, LINE);
//! assert_eq!(Vcpu::LAYOUT.size % LINE, 0);
//! ```
//!
//! `#[lay_out(pinned)]` leaves the order of the fields alone, for structs that hardware or assembly code knows; it only
//! proves. A field of class `nested` is a struct that is laid out itself; `pad`, in pinned structs, is nobody's.
//!
//! ```compile_fail
//! use std::sync::atomic::AtomicU64;
//! use vcpu_layout::{OwnerWord, lay_out};
//!
//! #[lay_out(pinned)] // error: `pending` (mailbox) and `exits` (owner) of `Vcpu` share a cache line
//! struct Vcpu {
//!     #[layout(mailbox)]
//!     pending: AtomicU64,
//!     #[layout(owner)]
//!     exits: OwnerWord,
//! }
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate self as vcpu_layout;

mod access;
mod description;
#[doc(hidden)]
pub mod proof;
mod stagger;
#[cfg(test)]
mod tests;

pub use access::{Frozen, MailboxField, Owned, OwnerField, OwnerWord, Proof, Running};
pub use description::{Class, Content, Field, Layout, Row, VcpuLayout};
pub use stagger::{PAGE, pages, stagger};
/// Lays out the struct that it stands before; the crate's description tells how.
///
/// It goes before all `#[derive]`s. Beside the struct `S` it makes `SFields`, a struct of the same fields in no
/// particular order, and `S::lay_out`, which takes one; `S::OFFSET_A` for each field `a`; and [`VcpuLayout`] for `S`.
pub use vcpu_layout_derive::lay_out;

use crossbeam_utils::CachePadded;

/// Bytes that two cores may be in each other's way within: a cache line, or the two that are fetched together.
pub const LINE: usize = align_of::<CachePadded<()>>();

/// Nothing, at the start of a line. Put into structs by [`macro@lay_out`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LineStart(CachePadded<()>);

impl LineStart {
    /// The only value.
    pub const HERE: Self = Self(CachePadded::new(()));
}
