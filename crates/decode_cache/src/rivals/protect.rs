//! The interface between the write-protecting design and the owner of the guest's memory.

use addr::Gpa;

/// Changes a VM's memory so that cached instructions stay correct.
///
/// The cache calls `protect` and `unprotect` with a small lock held. They must not call the cache, should be as short
/// as a change of one stage-2 leaf, and **must not wait**. A processor that replaces the leaf may itself wait for a
/// flush. The flush waits for a vCPU whose instruction is being emulated, and that vCPU may need the lock. So they
/// return `Busy` instead. The cache calls `flush` and `read` without any lock.
pub trait Protect {
    /// Makes the page read-only for the guest in stage 2.
    fn protect(&self, page: Gpa) -> Protection;

    /// Returns when no vCPU of the VM is in its guest with old rights.
    fn flush(&self);

    /// Reverses `protect`: makes the page writable again, unless there is another reason against it. Rights grow, so no
    /// flush is needed; a vCPU with an old entry faults once more.
    fn unprotect(&self, page: Gpa) -> Unprotection;

    /// Reads bytes of one page. False if there is no memory.
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool;
}

/// Result of `protect`.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// The page is read-only, but vCPUs may still have the right to write: a [`flush`](Protect::flush) is needed.
    Owed,
    /// The page was read-only before, and no vCPU has a right left: the earlier caller has flushed.
    Already,
    /// The page cannot be read-only.
    Refused,
    /// Another processor changes stage 2 there. The page has its old rights.
    Busy,
}

/// Result of `unprotect`.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unprotection {
    /// The page is writable.
    Done,
    /// Another processor changes stage 2 there. The page is still read-only.
    Busy,
}

/// Why cached instructions are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// The guest writes to a page.
    Write,
    /// A processor walks a page table of the guest, which SVM treats as a write (APM vol. 2, 15.25.5).
    Walk,
    /// The hypervisor writes to a page, or takes it from the guest.
    Host,
}

/// Number of cached instructions that were dropped because of one page.
///
/// An entry that depends on several pages, and is already void because of another one, counts again, unless its slot
/// was reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Entries whose code is in the page.
    pub code: u32,
    /// Entries for which the page is a page table on the walk to their code.
    pub tables: u32,
}

impl Lost {
    /// All of them.
    #[must_use]
    pub const fn entries(self) -> u32 {
        self.code.saturating_add(self.tables)
    }
}
