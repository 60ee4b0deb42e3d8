//! What the write-protecting design asks of whoever owns the guest's memory, and what it says about a write.

use addr::Gpa;

/// What is done to a VM's memory so that remembered instructions stay true.
///
/// `protect` and `unprotect` are called with a small lock held: they must not come back to the cache, should be as
/// short as a change of one stage-2 leaf, and **wait for nobody**. A processor that replaces the leaf may itself wait for a
/// flush; the flush waits for a vCPU whose instruction is being carried out; and that vCPU may need the lock. So they answer
/// `Busy` instead. `flush` and `read` are called without any lock.
pub trait Protect {
    /// Makes the page read-only for the guest in stage 2.
    fn protect(&self, page: Gpa) -> Protection;

    /// Returns when no vCPU of the VM runs its guest with rights from before.
    fn flush(&self);

    /// Undoes `protect`: gives back the right to write, unless there is another reason to withhold it. Rights grow, so
    /// nothing needs to be flushed; whoever still uses the lack of it faults once more.
    fn unprotect(&self, page: Gpa) -> Unprotection;

    /// Reads bytes of one page. False if there is no memory.
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool;
}

/// What became of a page that was to be read-only.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// It is, but vCPUs may still write with rights that they had: a [`flush`](Protect::flush) is owed.
    Owed,
    /// It was so before, and no vCPU has any right left: whoever made it so has flushed.
    Already,
    /// It cannot be.
    Refused,
    /// Another processor changes stage 2 there. The page has its rights as before.
    Busy,
}

/// What became of a page that was to be writable again.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unprotection {
    /// It is.
    Done,
    /// Another processor changes stage 2 there. The page is read-only as before.
    Busy,
}

/// Why remembered instructions are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The guest writes to a page.
    Write,
    /// A processor walks a page table of the guest, which SVM takes for a write (APM vol. 2, 15.25.5).
    Walk,
    /// The hypervisor writes to a page, or takes it from the guest.
    Host,
}

/// How many remembered instructions were forgotten because of one page.
///
/// One that depends on several pages and is void already because of another one counts once more, unless its slot has been
/// used again since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Those whose code is in the page.
    pub code: u32,
    /// Those on the way to whose code it is a page table.
    pub tables: u32,
}

impl Lost {
    /// All of them.
    #[must_use]
    pub const fn entries(self) -> u32 {
        self.code.saturating_add(self.tables)
    }
}
