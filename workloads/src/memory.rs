//! Maps, protects, discards and unmaps memory by hand. All unsafe code of the workloads is here.
//!
//! [`Region`] is private memory of one thread. [`Window`] is one page of address space that all threads read, while its
//! frame is replaced. Both return words, never references. The memory at an address changes without the compiler's
//! knowledge, and if a kernel or hypervisor misses a flush it changes against all rules. So every access is volatile,
//! and no code assumes anything about the result.

#![expect(unsafe_code, reason = "system calls on the address space, and access to what they left there")]

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Result;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

/// Bytes in a page.
const PAGE: usize = 4096;

/// Access rights of a page. It is always readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

/// Private memory of up to [`Region::MAX_PAGES`] pages, seen as one word per page.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u64>,
    pages: usize,
    /// A bit for each page that may be written.
    writable: u64,
}

impl Region {
    /// Maximum number of pages in a region.
    pub(crate) const MAX_PAGES: usize = 64;

    /// Maps `pages` pages, which read as zero and may be written.
    ///
    /// # Panics
    /// If `pages` is 0 or more than [`Self::MAX_PAGES`].
    pub(crate) fn map(pages: usize) -> Result<Self> {
        assert!((1..=Self::MAX_PAGES).contains(&pages), "a region has 1 to {} pages", Self::MAX_PAGES);
        let start = map_private(pages * PAGE)?;
        Ok(Self { start, pages, writable: u64::MAX })
    }

    /// The word of `page`.
    pub(crate) fn word(&self, page: usize) -> u64 {
        let word = self.address(page);
        // SAFETY: `address` gives a word of a page of ours, and pages of a region may always be read.
        unsafe { word.read_volatile() }
    }

    /// Writes the word of `page`.
    ///
    /// # Panics
    /// If the page may not be written.
    pub(crate) fn set_word(&mut self, page: usize, value: u64) {
        assert!(self.writable & (1 << page) != 0, "page {page} may only be read");
        let word = self.address(page);
        // SAFETY: `address` gives a word of a page of ours, which may be written; `&mut self` keeps others away.
        unsafe { word.write_volatile(value) }
    }

    /// Changes the access rights of `pages`.
    pub(crate) fn protect(&mut self, pages: Range<usize>, access: Access) -> Result<()> {
        let (start, bytes) = self.range(&pages);
        let flags = match access {
            Access::Read => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: the pages are ours, no reference into them exists, and `writable` records which ones reject writes.
        unsafe { mprotect(start, bytes, flags) }?;
        for page in pages {
            match access {
                Access::Read => self.writable &= !(1 << page),
                Access::ReadWrite => self.writable |= 1 << page,
            }
        }
        Ok(())
    }

    /// Gives the frames of `pages` back; they read as zero from now on.
    pub(crate) fn discard(&mut self, pages: Range<usize>) -> Result<()> {
        let (start, bytes) = self.range(&pages);
        // SAFETY: the pages are ours, and no reference into them exists.
        unsafe { madvise(start, bytes, Advice::LinuxDontNeed) }
    }

    fn address(&self, page: usize) -> NonNull<u64> {
        assert!(page < self.pages, "the region has {} pages, not {page}", self.pages);
        // SAFETY: `page` is below `pages`, so the address is inside the mapping.
        unsafe { self.start.byte_add(page * PAGE) }
    }

    fn range(&self, pages: &Range<usize>) -> (*mut c_void, usize) {
        assert!(pages.start < pages.end && pages.end <= self.pages, "{pages:?} are no pages of {}", self.pages);
        (self.address(pages.start).as_ptr().cast(), pages.len() * PAGE)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmap(self.start, self.pages * PAGE);
    }
}

/// One page of address space that all threads may read, with one of several frames of memory behind it.
#[derive(Debug)]
pub(crate) struct Window {
    /// The frames, as a file that exists in memory only.
    file: OwnedFd,
    /// All frames at addresses of their own, for writing.
    frames: NonNull<u64>,
    count: usize,
    /// The page for reading.
    page: NonNull<u64>,
}

// SAFETY: the addresses stay mapped until the window is dropped. They are only used for volatile access to aligned
// words and for system calls, which any thread may do at any time.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// A window with `count` frames of zeros, through which the first one is seen.
    pub(crate) fn new(count: usize) -> Result<Self> {
        let file = memfd_create("dunlin-window", MemfdFlags::CLOEXEC)?;
        let bytes = count * PAGE;
        ftruncate(&file, bytes as u64)?;
        let frames = map_file(bytes, &file)?;
        let page = map_file(PAGE, &file).inspect_err(|_| unmap(frames, bytes))?;
        Ok(Self { file, frames, count, page })
    }

    /// The word that is seen through the window.
    pub(crate) fn read(&self) -> u64 {
        // SAFETY: the page always has a frame: `show` replaces it in one step, and a thread that reads meanwhile waits
        // in the kernel.
        unsafe { self.page.read_volatile() }
    }

    /// Writes the word of `frame`, at the frame's own address.
    pub(crate) fn write(&self, frame: usize, value: u64) {
        assert!(frame < self.count, "there are {} frames, not {frame}", self.count);
        // SAFETY: `frame` is below `count`, so the address is inside the mapping.
        let word = unsafe { self.frames.byte_add(frame * PAGE) };
        // SAFETY: the word is mapped until the window is dropped.
        unsafe { word.write_volatile(value) }
    }

    /// Puts `frame` behind the page. From the return on, no CPU may see the frame that was there before.
    pub(crate) fn show(&self, frame: usize) -> Result<()> {
        assert!(frame < self.count, "there are {} frames, not {frame}", self.count);
        let page = self.page.as_ptr().cast();
        let (rights, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the page is ours, so the replaced mapping is ours too; no reference into it exists.
        unsafe { mmap(page, PAGE, rights, flags, &self.file, (frame * PAGE) as u64) }?;
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        unmap(self.page, PAGE);
        unmap(self.frames, self.count * PAGE);
    }
}

fn map_private(bytes: usize) -> Result<NonNull<u64>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE) }?;
    Ok(NonNull::new(start.cast()).expect("the kernel maps nothing at address zero unasked"))
}

fn map_file(bytes: usize, file: &OwnedFd) -> Result<NonNull<u64>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
    let start = unsafe { mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, file, 0) }?;
    Ok(NonNull::new(start.cast()).expect("the kernel maps nothing at address zero unasked"))
}

/// Unmaps address space from one of the two functions above that is not used any more.
fn unmap(start: NonNull<u64>, bytes: usize) {
    // SAFETY: only called by owners of a mapping, with all of it, when they are done with it.
    let result = unsafe { munmap(start.as_ptr().cast(), bytes) };
    result.expect("memory that was mapped in whole can be unmapped in whole");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_keeps_what_is_written_until_it_is_discarded() {
        let mut region = Region::map(3).expect("memory is there");
        (0..3).for_each(|page| region.set_word(page, 7));
        region.protect(0..2, Access::Read).expect("is ours");
        region.discard(1..2).expect("is ours");
        assert_eq!((0..3).map(|page| region.word(page)).collect::<Vec<_>>(), [7, 0, 7]);
        region.protect(0..2, Access::ReadWrite).expect("is ours");
        region.set_word(1, 8);
        assert_eq!(region.word(1), 8);
    }

    #[test]
    fn the_window_shows_the_frame_that_was_asked_for_last() {
        let window = Window::new(2).expect("memory is there");
        window.write(0, 10);
        window.write(1, 11);
        assert_eq!(window.read(), 10);
        window.show(1).expect("is ours");
        assert_eq!(window.read(), 11);
        window.write(1, 12);
        assert_eq!(window.read(), 12);
    }
}
