//! The memory for instructions: data at fixed addresses, and code, which is written through another address.

use super::Unavailable;
use crate::machine::{AROUND, CODE, CODE_BYTES, READ_ONLY, RESERVED, WINDOW, WINDOW_BYTES, WINDOW_END, index};
use libc::c_void;

/// The mappings that exist while the processor is in use.
pub(super) struct Mapped {
    /// A writable mapping of the code.
    code: *mut u8,
}

impl Mapped {
    pub(super) fn new() -> Result<Self, Unavailable> {
        let bytes = index(RESERVED.end - RESERVED.start);
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let fixed = anonymous | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: nothing is replaced.
        let reserved = unsafe { libc::mmap(at(RESERVED.start), bytes, libc::PROT_NONE, fixed, -1, 0) };
        if reserved != at(RESERVED.start) {
            return Err(Unavailable::last("the addresses are taken"));
        }
        // From here on the reserved part is ours, and is given back even if the rest fails.
        let mut mapped = Self { code: std::ptr::null_mut() };

        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the window is in the reserved part.
        let done = unsafe { libc::mprotect(at(WINDOW), WINDOW_BYTES, rights) };
        if done != 0 {
            return Err(Unavailable::last("no memory for data"));
        }
        // Each page is written once, so that the kernel puts memory there.
        mapped.write(0, &[0; WINDOW_BYTES]);
        mapped.map_code()?;
        Ok(mapped)
    }

    /// The code's memory at two addresses: written at one, executed at the other.
    fn map_code(&mut self) -> Result<(), Unavailable> {
        // SAFETY: the name is a string that ends in zero.
        let file = unsafe { libc::memfd_create(c"dunlin-x86-oracle".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(Unavailable::last("no memory for code"));
        }
        // SAFETY: the file is ours.
        let sized = unsafe { libc::ftruncate(file, CODE_BYTES.cast_signed() as libc::off_t) } == 0;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let written = unsafe { libc::mmap(std::ptr::null_mut(), CODE_BYTES, rights, libc::MAP_SHARED, file, 0) };
        let (rights, kind) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: the replaced mapping is in the reserved range.
        let executed = unsafe { libc::mmap(at(CODE), CODE_BYTES, rights, kind, file, 0) };
        // SAFETY: no other code has the file; the mappings stay.
        unsafe { libc::close(file) };
        if written != libc::MAP_FAILED {
            self.code = written.cast();
        }
        if !sized || written == libc::MAP_FAILED || executed == libc::MAP_FAILED {
            return Err(Unavailable::last("no memory for code"));
        }
        self.clear_code(0, CODE_BYTES);
        Ok(())
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset <= WINDOW_BYTES && bytes.len() <= WINDOW_BYTES - offset, "beyond the window");
        let to = index(WINDOW) + offset;
        let is_read_only = to + bytes.len() > index(READ_ONLY);
        if is_read_only {
            protect_last(libc::PROT_READ | libc::PROT_WRITE);
        }
        // SAFETY: the window is mapped as long as `self` lives, no reference to it exists, and it can be written.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        if is_read_only {
            protect_last(libc::PROT_READ);
        }
    }

    pub(super) fn read(&self, into: &mut [u8]) {
        assert!(into.len() <= WINDOW_BYTES, "beyond the window");
        // SAFETY: the window is mapped and readable as long as `self` lives; no instruction runs now.
        unsafe { std::ptr::copy_nonoverlapping(WINDOW as *const u8, into.as_mut_ptr(), into.len()) };
    }

    pub(super) fn put_code(&mut self, place: usize, bytes: &[u8]) {
        assert!(place <= CODE_BYTES && bytes.len() <= CODE_BYTES - place, "beyond the code");
        // SAFETY: just asserted.
        let to = unsafe { self.code.add(place) };
        // SAFETY: the mapping is writable, and no reference to it exists. The path to the instruction includes the
        // kernel and an IRET, which serializes: the processor sees the written bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub(super) fn clear_code(&mut self, place: usize, length: usize) {
        assert!(place <= CODE_BYTES && length <= CODE_BYTES - place, "beyond the code");
        // SAFETY: just asserted.
        let to = unsafe { self.code.add(place) };
        // SAFETY: as in `put_code`.
        unsafe { std::ptr::write_bytes(to, AROUND, length) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.code.is_null() {
            // SAFETY: mapped by `map_code`, and only `self` uses it.
            unsafe { libc::munmap(self.code.cast(), CODE_BYTES) };
        }
        let bytes = index(RESERVED.end - RESERVED.start);
        // SAFETY: mapped by `new`; only `self` uses it, and instructions, of which none runs.
        unsafe { libc::munmap(at(RESERVED.start), bytes) };
    }
}

/// Changes the rights to the last page of the window.
fn protect_last(rights: i32) {
    // SAFETY: the page is in the reserved part, which is ours. No reference to it exists.
    let done = unsafe { libc::mprotect(at(READ_ONLY), index(WINDOW_END - READ_ONLY), rights) };
    assert_eq!(done, 0, "the rights to a page of ours can be changed");
}

fn at(address: u64) -> *mut c_void {
    index(address) as *mut c_void
}
