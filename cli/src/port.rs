//! The way to the hypervisor from inside of a parent VM: a port of a virtio console, which Linux shows as a file.
//!
//! The kernel lets one process at a time open it. So a tool that waits between two questions closes it meanwhile
//! ([`Port::rest`]), and one that finds it open waits for its turn.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::Failure;

/// The name that the hypervisor gives to its port.
const NAME: &str = "dunlin";
/// Where Linux lists such ports, each a folder with its name in a file.
const PORTS: &str = "/sys/class/virtio-ports";
/// How long to wait for another process to close the port, and how often to look.
const TURN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// The file of the port, if this machine is a parent of the hypervisor.
pub(crate) fn find() -> Option<PathBuf> {
    find_in(Path::new(PORTS)).map(|name| Path::new("/dev").join(name))
}

fn find_in(ports: &Path) -> Option<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(ports)
        .ok()?
        .flatten()
        .filter(|port| fs::read_to_string(port.path().join("name")).is_ok_and(|name| name.trim_end() == NAME))
        .map(|port| PathBuf::from(port.file_name()))
        .collect();
    found.sort();
    found.into_iter().next()
}

/// The port, open or closed.
#[derive(Debug)]
pub(crate) struct Port {
    path: PathBuf,
    file: Option<File>,
    read_timeout: Duration,
    write_timeout: Duration,
}

impl Port {
    /// The port at this path, closed. Reads and writes fail after a time.
    pub(crate) const fn at(path: PathBuf, timeout: Duration) -> Self {
        Self { path, file: None, read_timeout: timeout, write_timeout: timeout }
    }

    /// Opens the port if it is closed.
    pub(crate) fn wake(&mut self) -> Result<(), Failure> {
        if self.file.is_none() {
            let open = || OpenOptions::new().read(true).write(true).open(&self.path);
            self.file = Some(in_turn(open, TURN).map_err(|error| cannot_open(&self.path, &error))?);
        }
        Ok(())
    }

    /// Closes the port, for others.
    pub(crate) fn rest(&mut self) {
        self.file = None;
    }

    /// How long a read waits.
    pub(crate) const fn set_read_timeout(&mut self, timeout: Duration) {
        self.read_timeout = timeout;
    }

    /// The same open port.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let file = self.file.as_ref().map(File::try_clone).transpose()?;
        Ok(Self { path: self.path.clone(), file, ..*self })
    }

    /// The file, when it is ready. Fails after the time.
    fn ready(&mut self, wanted: PollFlags, timeout: Duration) -> io::Result<&mut File> {
        let file = self.file.as_mut().ok_or(ErrorKind::NotConnected)?;
        let limit = Timespec::try_from(timeout).map_err(|_| ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&*file, wanted)], Some(&limit))? {
            0 => Err(ErrorKind::TimedOut.into()),
            _ => Ok(file),
        }
    }
}

impl Read for Port {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.ready(PollFlags::IN, self.read_timeout)?.read(into)
    }
}

impl Write for Port {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.ready(PollFlags::OUT, self.write_timeout)?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens the port, when no other process has it open.
fn in_turn(mut open: impl FnMut() -> io::Result<File>, patience: Duration) -> io::Result<File> {
    let begin = Instant::now();
    loop {
        match open() {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && begin.elapsed() < patience => thread::sleep(PAUSE),
            opened => return opened,
        }
    }
}

fn cannot_open(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    match error.kind() {
        ErrorKind::ResourceBusy => Failure::failed(format!("{path}: another program speaks to the hypervisor"))
            .help("one program can at a time; wait until 'dunlin trace', 'dunlin create' or the like has ended"),
        ErrorKind::PermissionDenied => Failure::failed(format!("{path}: no right to speak to the hypervisor"))
            .help("whoever may read and write this file may: root, or others by its rights"),
        _ => Failure::failed(format!("{path}: cannot be opened: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn port_is_found_by_its_name() {
        let ports = tempfile::tempdir().expect("a directory");
        assert_eq!(find_in(ports.path()), None);
        for (port, name) in [("vport0p1", "org.qemu.guest_agent.0\n"), ("vport2p1", "dunlin\n"), ("vport1p1", "")] {
            fs::create_dir(ports.path().join(port)).expect("a directory");
            fs::write(ports.path().join(port).join("name"), name).expect("a file");
        }
        fs::create_dir(ports.path().join("vport3p1")).expect("a directory without a name");
        assert_eq!(find_in(ports.path()), Some(PathBuf::from("vport2p1")));
        assert_eq!(find_in(&ports.path().join("none")), None);
    }

    #[test]
    fn busy_port_is_waited_for_and_named_in_the_end() {
        let busy = || Err(io::Error::from(ErrorKind::ResourceBusy));
        let mut left = 3;
        let opened = in_turn(
            || {
                left -= 1;
                if left > 0 { busy() } else { File::open("/dev/null") }
            },
            TURN,
        );
        assert!(opened.is_ok() && left == 0);
        let error = in_turn(busy, Duration::from_millis(1)).expect_err("busy for ever");
        let text = cannot_open(Path::new("/dev/vport0p1"), &error).to_string();
        assert!(text.contains("/dev/vport0p1: another program speaks to the hypervisor"), "{text}");
        let error = in_turn(|| Err(ErrorKind::PermissionDenied.into()), TURN).expect_err("at once");
        assert!(cannot_open(Path::new("/dev/vport0p1"), &error).to_string().contains("no right"));
    }

    #[test]
    fn read_of_a_silent_port_ends_after_a_time() {
        let (here, there) = UnixStream::pair().expect("a pair");
        let mut port = Port::at(PathBuf::new(), Duration::from_millis(20));
        assert_eq!(port.read(&mut [0; 4]).expect_err("closed").kind(), ErrorKind::NotConnected);
        port.file = Some(File::from(OwnedFd::from(here)));
        assert_eq!(port.read(&mut [0; 4]).expect_err("silent").kind(), ErrorKind::TimedOut);
        (&there).write_all(b"abc").expect("written");
        let mut bytes = [0; 4];
        assert_eq!(port.read(&mut bytes).expect("there"), 3);
        port.write_all(b"de").expect("written");
        let mut bytes = [0; 2];
        (&there).read_exact(&mut bytes).expect("there");
        assert_eq!(&bytes, b"de");
    }
}
