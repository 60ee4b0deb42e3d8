//! A serial line of a running QEMU, with the test at its other end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::until;

/// How long something may take that is waited for: more than anything takes on a busy computer.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two polls.
const PAUSE: Duration = Duration::from_millis(20);

/// The other end. All that arrives is read at once.
pub struct SerialLine {
    stream: UnixStream,
    heard: Arc<Mutex<Vec<u8>>>,
    /// How much of it was waited for already.
    seen: usize,
}

impl SerialLine {
    /// Arguments for QEMU that make a character device of this name, for [`SerialLine::attach`].
    #[must_use]
    pub fn qemu_arguments(folder: &Path, name: &str) -> [String; 2] {
        let path = folder.join(name);
        ["-chardev".to_string(), format!("socket,id={name},server=on,wait=off,path={}", path.display())]
    }

    /// Connects to the QEMU with these arguments, once it has started.
    ///
    /// # Panics
    /// It does not start within 30 s.
    #[must_use]
    pub fn attach(folder: &Path, name: &str) -> Self {
        let path = folder.join(name);
        let stream = until("a serial line", || UnixStream::connect(&path).ok());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, into) = (stream.try_clone().expect("a socket has two ends"), heard.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                into.lock().expect("nobody panics with it").extend_from_slice(&bytes[..count]);
            }
        });
        Self { stream, heard, seen: 0 }
    }

    /// Types.
    ///
    /// # Panics
    /// When QEMU is gone.
    pub fn type_keys(&mut self, keys: &[u8]) {
        self.stream.write_all(keys).unwrap_or_else(|error| panic!("{error}; {}", self.heard()));
    }

    /// Waits for this text, after the last awaited text. Returns the output before it.
    ///
    /// # Panics
    /// It does not come within two minutes.
    pub fn wait_for(&mut self, text: &str) -> String {
        for _ in 0..PATIENCE.as_millis() / PAUSE.as_millis() {
            let all = self.heard.lock().expect("nobody panics with it")[self.seen..].to_vec();
            if let Some(at) = all.windows(text.len()).position(|window| window == text.as_bytes()) {
                self.seen += at + text.len();
                return String::from_utf8_lossy(&all[..at]).into_owned();
            }
            thread::sleep(PAUSE);
        }
        panic!("no '{text}' behind byte {} of {}", self.seen, self.heard())
    }

    /// All that has arrived.
    #[must_use]
    pub fn heard(&self) -> String {
        String::from_utf8_lossy(&self.heard.lock().expect("nobody panics with it")).into_owned()
    }
}
