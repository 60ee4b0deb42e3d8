//! System calls: a copy of another process' descriptor, and calls of the device. All unsafe code of this program is
//! here.

#![expect(unsafe_code, reason = "descriptors of another process, calls of a device")]

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Bytes in a page.
pub(crate) const PAGE: usize = 4096;

/// A page that a call reads or writes, where pages begin.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(crate) struct Page([u8; PAGE]);

impl Page {
    /// A page that begins with these bytes, of which there is no more than a page, and is zero behind them.
    pub(crate) fn new(bytes: &[u8]) -> Box<Self> {
        let mut page = Box::new(Self([0; PAGE]));
        page.0[..bytes.len()].copy_from_slice(bytes);
        page
    }

    /// What it has.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Calls a device. `make` makes the argument: it is told the addresses of the pages that the call may read and write.
/// The argument names no other memory.
pub(crate) fn call<const WORDS: usize, const PAGES: usize>(
    device: BorrowedFd<'_>,
    request: u32,
    pages: [&mut Page; PAGES],
    make: impl FnOnce([u64; PAGES]) -> [u64; WORDS],
) -> Result<()> {
    let mut argument = make(pages.map(|page| std::ptr::from_mut(page).expose_provenance() as u64));
    // SAFETY: the kernel accesses the argument, and the pages that it names, which are borrowed until the call returns.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request as _, argument.as_mut_ptr()) };
    if result < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// Another process.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    /// The process with this number.
    pub(crate) fn open(pid: u32) -> Result<Self> {
        // SAFETY: the call takes two numbers.
        own(unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) }).map(Self)
    }

    /// A copy of the descriptor that has this number there. It needs the right to trace the process.
    pub(crate) fn descriptor(&self, number: i32) -> Result<OwnedFd> {
        let process = libc::c_long::from(self.0.as_raw_fd());
        // SAFETY: the call takes three numbers.
        own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, libc::c_long::from(number), 0) })
    }

    /// Whether it has ended, or ends in this time. A process that nobody has waited for yet has ended, too.
    pub(crate) fn ends_within(&self, time: Duration) -> Result<bool> {
        let mut wanted = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = i32::try_from(time.as_millis()).map_err(Error::other)?;
        // SAFETY: the call reads and writes one structure, which is borrowed until it returns.
        match unsafe { libc::poll(&raw mut wanted, 1, milliseconds) } {
            count if count >= 0 => Ok(count > 0),
            _ => match Error::last_os_error() {
                error if error.kind() == ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
        }
    }
}

/// Sends a thread of a process the signal by which QEMU gets its vCPUs' threads out of a call of the device. Without a
/// request for the thread it does nothing.
pub(crate) fn kick(process: u32, thread: u32) {
    let [process, thread] = [process, thread].map(libc::c_long::from);
    // SAFETY: the call takes three numbers. A thread that is gone gets no signal.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
}

/// The descriptor that a call has returned.
fn own(result: libc::c_long) -> Result<OwnedFd> {
    if result < 0 {
        return Err(Error::last_os_error());
    }
    let descriptor = i32::try_from(result).map_err(Error::other)?;
    // SAFETY: the kernel has just made it for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;

    #[test]
    fn copy_of_a_descriptor_is_the_same_file() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let this = Process::open(std::process::id()).expect("this process is there");
        let copy = this.descriptor(writer.as_raw_fd()).expect("is ours");
        std::fs::File::from(copy).write_all(b"hello").expect("the pipe has room");
        drop(writer);
        let mut said = String::new();
        assert_eq!(reader.read_to_string(&mut said).expect("is text"), 5);
        assert_eq!(said, "hello");
        assert!(this.descriptor(99_999).is_err());
    }

    #[test]
    fn process_has_ended_before_its_parent_has_waited_for_it() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let process = Process::open(child.id()).expect("it is there");
        assert!(!process.ends_within(Duration::from_millis(1)).expect("can be asked"));
        drop(child.stdin.take());
        assert!(process.ends_within(Duration::from_secs(60)).expect("can be asked"));
        child.wait().expect("is ours");
    }

    #[test]
    fn device_without_this_call_says_so() {
        let file = std::fs::File::open("/dev/null").expect("is there");
        let mut page = Page::new(&[1, 2]);
        assert_eq!(page.bytes()[..3], [1, 2, 0]);
        let error = call(file.as_fd(), 0xc020_b807, [&mut page], |[at]| [at, 0]).expect_err("is no such device");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
