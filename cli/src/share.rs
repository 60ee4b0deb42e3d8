//! Access to a running host: `dunlin stats` in one terminal finds the host of `dunlin run` in another.
//!
//! Each `dunlin run` listens on `<pid>.sock` in a directory that only its user may enter, and speaks the protocol of
//! the control port there. It passes requests on to the hypervisor under its own ids, and sends each reply back to the
//! process that asked.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread;

use abi::control::{FrameError, Request};
use rustix::process::{Pid, getuid, test_kill_process};

use crate::control::{self, Client};
use crate::failure::Failure;
use crate::port;

/// The directory of sockets.
pub(crate) fn directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory).join("dunlin"),
        _ => std::env::temp_dir().join(format!("dunlin-{}", getuid().as_raw())),
    }
}

/// A socket on which other tools reach our host; gone when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    path: PathBuf,
}

/// A request from another tool.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The request, with its own id.
    pub(crate) request: Request,
    /// Where the reply goes.
    pub(crate) asker: UnixStream,
}

impl Share {
    /// Listens, and delivers requests to `events`.
    pub(crate) fn open<E: Send + 'static>(
        events: &Sender<E>,
        wrap: impl Fn(Asked) -> E + Copy + Send + 'static,
    ) -> io::Result<Self> {
        let directory = directory();
        make_private(&directory)?;
        clean(&directory);
        let path = directory.join(format!("{}.sock", std::process::id()));
        // A socket with our own process id can only be left from an earlier process that had it.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;

        let events = events.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let events = events.clone();
                thread::spawn(move || serve(stream, &events, wrap));
            }
        });
        Ok(Self { path })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn serve<E>(mut stream: UnixStream, events: &Sender<E>, wrap: impl Fn(Asked) -> E) {
    let Ok(answers) = stream.try_clone() else { return };
    if control::limit_patience(&answers).is_err() {
        return;
    }
    // An error here is the asker's: it hung up.
    let _ = control::receive(&mut stream, |request: Result<Request, FrameError>| match request {
        Ok(request) => match answers.try_clone() {
            Ok(asker) => events.send(wrap(Asked { request, asker })).is_ok(),
            Err(_) => false,
        },
        Err(error) => match answers.try_clone() {
            Ok(mut asker) => control::send(&mut asker, &abi::control::Message::Refused(error)).is_ok(),
            Err(_) => false,
        },
    });
}

/// Creates the directory. Rejects one that belongs to another user, who could read our messages.
fn make_private(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() || found.uid() != getuid().as_raw() {
        return Err(io::Error::other(format!("{} belongs to another user", directory.display())));
    }
    Ok(())
}

/// Process ids of the hosts that have a socket, in order.
fn hosts(directory: &Path) -> Vec<(i32, PathBuf)> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut hosts: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            let pid = path.file_name()?.to_str()?.strip_suffix(".sock")?.parse().ok()?;
            Some((pid, path))
        })
        .collect();
    hosts.sort();
    hosts
}

/// Removes sockets whose process no longer exists (it was killed, or the computer crashed).
fn clean(directory: &Path) {
    for (pid, path) in hosts(directory) {
        let alive = Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH));
        if !alive {
            let _ = fs::remove_file(path);
        }
    }
}

/// Connects to the host of that process, or to the one there is: of this user, or the one below this machine.
pub(crate) fn attach(wanted: Option<u32>) -> Result<Client, Failure> {
    let directory = directory();
    clean(&directory);
    let hosts = hosts(&directory);
    let pids = || hosts.iter().map(|(pid, _)| pid.to_string()).collect::<Vec<_>>().join(", ");

    let path = match (wanted, hosts.as_slice()) {
        (None, []) => {
            if let Some(path) = port::find() {
                return Client::on_port(path);
            }
            return Err(Failure::failed("no host is running").help("start one in another terminal: 'dunlin run'"));
        }
        (None, [(_, path)]) => path,
        (None, _) => {
            let what = format!("{} hosts are running: {}", hosts.len(), pids());
            return Err(Failure::bad_input(what).help("choose one with --host PID"));
        }
        (Some(wanted), _) => match hosts.iter().find(|(pid, _)| u32::try_from(*pid) == Ok(wanted)) {
            Some((_, path)) => path,
            None => {
                let running = if hosts.is_empty() { "none".to_string() } else { pids() };
                return Err(Failure::bad_input(format!("option '--host': no host of process {wanted}"))
                    .help(format!("running: {running}")));
            }
        },
    };
    UnixStream::connect(path)
        .and_then(Client::new)
        .map_err(|error| Failure::failed(format!("{}: no connection: {error}", path.display())))
}
