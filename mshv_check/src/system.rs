//! System calls: device calls, memory, signals. All unsafe code of this program is here.
//!
//! The memory of a [`Mapping`] is a guest's too, or the kernel's. It changes without the compiler's knowledge, so every
//! access is volatile, and none gives out a reference.

#![expect(unsafe_code, reason = "device calls, mappings shared with a guest, signals to a thread")]

use std::ffi::CString;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes in a page.
pub(crate) const PAGE: usize = 4096;

/// Something that a device call reads and writes: plain numbers, without padding.
///
/// # Safety
/// Every pattern of bits is a value.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: a number has no bad patterns.
unsafe impl Plain for u32 {}
// SAFETY: nor have numbers one behind the other.
unsafe impl<const COUNT: usize> Plain for [u8; COUNT] {}
// SAFETY: as above.
unsafe impl<const COUNT: usize> Plain for [u64; COUNT] {}

/// Calls a device. The request must access only `argument` and the [`Mapping`] that it points to. Any other pointer in
/// it must be an invalid address.
pub(crate) fn call<T: Plain>(device: BorrowedFd<'_>, request: u32, argument: &mut T) -> Result<i32> {
    call_at(device, request, std::ptr::from_mut(argument) as usize)
}

/// Calls a device with an argument that is no pointer, or a wrong one: the kernel checks it.
pub(crate) fn call_at(device: BorrowedFd<'_>, request: u32, argument: usize) -> Result<i32> {
    // SAFETY: the kernel writes only to what the argument says: a value of the caller's, or a place that it finds to be
    // wrong. Addresses inside of the argument are those of mappings, to which all access is volatile.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request as _, argument) };
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

/// A descriptor that a call has returned.
pub(crate) fn own(descriptor: i32) -> OwnedFd {
    // SAFETY: the kernel has just made it for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// An event, to be rung by a device.
pub(crate) fn event() -> Result<OwnedFd> {
    // SAFETY: it takes numbers only.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if descriptor < 0 { Err(Error::last_os_error()) } else { Ok(own(descriptor)) }
}

/// Memory of our own, page by page.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the address stays ours until the mapping is dropped; access is volatile and by aligned words only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// What the kernel is told about pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Equal pages may be merged.
    Mergeable,
    /// Huge pages are welcome.
    Huge,
    /// Make huge pages now.
    Collapse,
    /// Swap them out now.
    PageOut,
}

/// Not in every C library's list; from Linux' `asm-generic/mman-common.h`.
const MADV_COLLAPSE: i32 = 25;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

impl Mapping {
    /// Anonymous memory of zeros.
    pub(crate) fn anonymous(pages: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::map(std::ptr::null_mut(), pages * PAGE, READ_WRITE, flags, -1, 0)
    }

    /// One page of a device.
    pub(crate) fn of_device(device: BorrowedFd<'_>, page: usize) -> Result<Self> {
        Self::map(std::ptr::null_mut(), PAGE, READ_WRITE, libc::MAP_SHARED, device.as_raw_fd(), page * PAGE)
    }

    fn map(at: *mut u8, bytes: usize, rights: i32, flags: i32, file: i32, offset: usize) -> Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(Error::other)?;
        // SAFETY: with no address the kernel chooses a free one; with one, it is a mapping's own.
        let start = unsafe { libc::mmap(at.cast(), bytes, rights, flags, file, offset) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| Error::other("mapped at zero"))?;
        Ok(Self { start, bytes })
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The word at this offset, which must be aligned.
    pub(crate) fn word(&self, offset: usize) -> u32 {
        // SAFETY: `place` checks that the word is inside, and mapped memory can be read.
        unsafe { self.place(offset).read_volatile() }
    }

    pub(crate) fn set_word(&self, offset: usize, value: u32) {
        // SAFETY: `place` checks that the word is inside; the callers write to no page that they have protected.
        unsafe { self.place(offset).write_volatile(value) }
    }

    /// Copies bytes; the offset must be a multiple of four.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, chunk) in bytes.chunks(4).enumerate() {
            let mut word = self.word(offset + at * 4).to_le_bytes();
            word[..chunk.len()].copy_from_slice(chunk);
            self.set_word(offset + at * 4, u32::from_le_bytes(word));
        }
    }

    /// Gives the frames of these pages back. They read as zero.
    pub(crate) fn discard(&self, page: usize, pages: usize) -> Result<()> {
        let start = self.page(page, pages);
        // SAFETY: the pages are ours, and nobody has a reference to them.
        done(unsafe { libc::madvise(start.cast(), pages * PAGE, libc::MADV_DONTNEED) })
    }

    pub(crate) fn pages(&self) -> usize {
        self.bytes / PAGE
    }

    /// Tells the kernel something about these pages. Their content stays.
    pub(crate) fn advise(&self, page: usize, pages: usize, advice: Advice) -> Result<()> {
        let advice = match advice {
            Advice::Mergeable => libc::MADV_MERGEABLE,
            Advice::Huge => libc::MADV_HUGEPAGE,
            Advice::Collapse => MADV_COLLAPSE,
            Advice::PageOut => libc::MADV_PAGEOUT,
        };
        let start = self.page(page, pages);
        // SAFETY: the pages are ours, and keep their content.
        done(unsafe { libc::madvise(start.cast(), pages * PAGE, advice) })
    }

    /// Forbids writes to these pages, or permits them again.
    pub(crate) fn protect(&self, page: usize, pages: usize, writable: bool) -> Result<()> {
        let rights = if writable { READ_WRITE } else { libc::PROT_READ };
        let start = self.page(page, pages);
        // SAFETY: the pages are ours; who forbids writes writes nothing meanwhile.
        done(unsafe { libc::mprotect(start.cast(), pages * PAGE, rights) })
    }

    /// Unmaps these pages, calls `meanwhile`, and maps other ones there, of zeros.
    pub(crate) fn replace(&self, page: usize, pages: usize, meanwhile: impl FnOnce()) -> Result<()> {
        let start = self.page(page, pages);
        // SAFETY: the pages are ours, and nobody has a reference to them.
        done(unsafe { libc::munmap(start.cast(), pages * PAGE) })?;
        meanwhile();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // They belong to this mapping: its end unmaps them.
        Self::map(start, pages * PAGE, READ_WRITE, flags, -1, 0).map(std::mem::forget)
    }

    fn place(&self, offset: usize) -> *mut u32 {
        assert!(offset.is_multiple_of(4) && offset < self.bytes, "no word at {offset:#x}");
        // SAFETY: the offset is inside of the mapping.
        unsafe { self.start.byte_add(offset) }.as_ptr().cast()
    }

    fn page(&self, page: usize, pages: usize) -> *mut u8 {
        assert!(pages > 0 && (page + pages) * PAGE <= self.bytes, "no pages {page}+{pages}");
        // SAFETY: the pages are inside of the mapping.
        unsafe { self.start.byte_add(page * PAGE) }.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner has no use for it any more.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(result, 0);
    }
}

/// A disk that the kernel swaps to, until this is dropped.
#[derive(Debug)]
pub(crate) struct Swap(CString);

impl Swap {
    pub(crate) fn on(disk: &str) -> Result<Self> {
        let disk = CString::new(disk)?;
        // SAFETY: the path ends with zero.
        done(unsafe { libc::swapon(disk.as_ptr(), 0) })?;
        Ok(Self(disk))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: the path ends with zero.
        let result = unsafe { libc::swapoff(self.0.as_ptr()) };
        debug_assert_eq!(result, 0);
    }
}

fn done(result: i32) -> Result<()> {
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// A thread that can be interrupted in a device call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Thread {
    process: i32,
    thread: libc::c_long,
}

/// What interrupts: it does nothing else.
const SIGNAL: i32 = libc::SIGUSR1;

impl Thread {
    /// The one that calls this.
    pub(crate) fn current() -> Self {
        // SAFETY: it returns a number.
        let process = unsafe { libc::getpid() };
        // SAFETY: it returns a number.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        Self { process, thread }
    }

    /// Ends its device call, if it is in one.
    pub(crate) fn interrupt(self) {
        // SAFETY: a signal with a handler that does nothing. A thread that is gone gets none.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::c_long::from(self.process), self.thread, SIGNAL) };
    }
}

/// Prepares for [`Thread::interrupt`]. Device calls are not restarted after it.
pub(crate) fn allow_interrupts() -> Result<()> {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: all of it zero is a valid value: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32) = nothing;
    action.sa_sigaction = handler as usize;
    // SAFETY: the handler does nothing, so it may come at any time.
    done(unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_what_is_written_until_it_is_discarded_or_replaced() {
        let mapping = Mapping::anonymous(3).expect("memory is there");
        mapping.write(PAGE, b"hello");
        mapping.set_word(2 * PAGE, 7);
        assert_eq!(mapping.word(PAGE).to_le_bytes(), *b"hell");
        mapping.protect(1, 1, false).expect("is ours");
        mapping.protect(1, 1, true).expect("is ours");
        assert_eq!(mapping.word(PAGE + 4), u32::from(b'o'));
        mapping.discard(1, 1).expect("is ours");
        assert_eq!((mapping.word(PAGE), mapping.word(2 * PAGE)), (0, 7));
        let mut called = false;
        mapping.replace(2, 1, || called = true).expect("is ours");
        assert_eq!((called, mapping.word(2 * PAGE)), (true, 0));
    }

    #[test]
    fn call_of_a_descriptor_that_knows_no_such_call_is_an_error() {
        let file = std::fs::File::open("/dev/null").expect("is there");
        let mut argument = [0u64; 2];
        let error = call(std::os::fd::AsFd::as_fd(&file), 0x4010_b800, &mut argument).expect_err("is no such device");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
