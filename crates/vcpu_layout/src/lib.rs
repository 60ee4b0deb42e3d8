//! Lays out the state of a virtual CPU by writer.
//!
//! Two cores that write to the same cache line take it from each other again and again, even if they write different
//! words. So the important property of a field is its writer, not its purpose. The field's declaration names the
//! writer:
//!
//! | class | written by | access |
//! |---|---|---|
//! | `owner` | the pCPU that runs the vCPU | [`Owned`], through [`OwnerGuard`]; [`OwnerWord`] to read from anywhere |
//! | `mailbox` | any pCPU | atomics, locks |
//! | `frozen` | no pCPU after creation | a shared reference; [`Frozen`] if the type does not show it |
//! | `cold` | any pCPU, rarely | any |
//!
//! [`macro@lay_out`] groups the fields by class, begins each class on a line of its own, and rounds the struct's size
//! up to whole lines. The result is proven: constant assertions on the compiler's offsets check that no line holds two
//! classes, and that no line belongs to two structs of an array. A violation does not compile, and the message names
//! both fields.
//!
//! ```
//! use std::sync::atomic::AtomicU64;
//! use vcpu_layout::{LINE, Owned, OwnerWord, VcpuLayout, lay_out};
//!
//! #[lay_out]
//! struct Vcpu {
//!     /// Pending work.
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
//! `#[lay_out(pinned)]` keeps the order of the fields, for structs that hardware or assembly code knows; it only
//! proves. A field of class `nested` is a struct that is itself laid out. A field of class `pad`, in pinned structs, is
//! unused.
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

pub use access::{Frozen, MailboxField, Owned, OwnerField, OwnerGuard, OwnerWord, Proof};
pub use description::{Class, Content, Field, Layout, Row, VcpuLayout};
pub use stagger::{PAGE, pages, stagger};
/// Lays out a struct; see the crate's description.
///
/// It goes before all `#[derive]`s. For a struct `S` it also makes `SFields`, a struct of the same fields in any order,
/// and `S::lay_out`, which takes one; `S::OFFSET_A` for each field `a`; and [`VcpuLayout`] for `S`.
pub use vcpu_layout_derive::lay_out;

use crossbeam_utils::CachePadded;

/// Bytes within which two cores disturb each other: a cache line, or two lines that are fetched together.
pub const LINE: usize = align_of::<CachePadded<()>>();

/// An empty type at the start of a line. [`macro@lay_out`] adds it to structs.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LineStart(CachePadded<()>);

impl LineStart {
    /// The only value.
    pub const HERE: Self = Self(CachePadded::new(()));
}
