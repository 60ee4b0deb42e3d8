//! The design that [`ByBytes`](crate::ByBytes) is compared with, kept so that anyone can measure both again.
//!
//! [`WriteProtect`] is the cache that bhyve tried in 2015. [`Protect`] connects it to stage 2. Nothing outside this
//! folder uses its parts.

mod protect;
mod registry;
mod slot;
mod sync;
pub(crate) mod write_protect;

pub use protect::{DropCause, Lost, Protect, Protection, Unprotection};
pub use registry::WALK_LIMIT;
pub use write_protect::{Insertion, MAX_TABLES, Size, Vouching, WriteProtect};
