//! The guest's memory, as a device accesses it.

use addr::Gpa;

/// The guest has no memory there, or not now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent;

/// The memory of a guest that runs meanwhile.
///
/// An access to 2 aligned bytes is not torn. The order of accesses is that of the calls, except where the processor
/// needs a fence; this crate has these fences.
pub trait GuestMemory {
    /// Copies from `gpa` on.
    ///
    /// # Errors
    /// A part of it is not there; then `into` must not be used.
    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Absent>;

    /// Copies to `gpa`.
    ///
    /// # Errors
    /// A part of it is not there; what is before that part was written.
    fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Absent>;
}
