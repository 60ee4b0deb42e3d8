//! QEMU's monitor: sends commands, for example to inject a hardware error.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection to the monitor of a QEMU that runs.
pub struct Monitor(UnixStream);

impl Monitor {
    /// Arguments for QEMU so that [`Monitor::attach`] finds it.
    #[must_use]
    pub fn qemu_arguments(folder: &Path) -> [String; 2] {
        ["-monitor".to_string(), format!("unix:{},server=on,wait=off", folder.join("monitor").display())]
    }

    /// Connects to the QEMU with these arguments, once it has started.
    ///
    /// # Panics
    /// It does not start within 30 s.
    #[must_use]
    pub fn attach(folder: &Path) -> Self {
        let path = folder.join("monitor");
        let monitor = super::until("QEMU's monitor", || UnixStream::connect(&path).ok());
        monitor.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket has a time limit");
        let mut monitor = Self(monitor);
        monitor.prompt();
        monitor
    }

    /// Sends a command, and returns the answer.
    ///
    /// # Panics
    /// There is no answer.
    pub fn say(&mut self, command: &str) -> String {
        self.tell(command);
        self.prompt()
    }

    /// Sends a command that may be QEMU's last.
    ///
    /// # Panics
    /// The connection is closed.
    pub fn tell(&mut self, command: &str) {
        self.0.write_all(format!("{command}\n").as_bytes()).expect("the monitor listens");
    }

    /// Types a command to a QEMU that may have ended.
    pub fn offer(&mut self, command: &str) {
        let _ = self.0.write_all(format!("{command}\n").as_bytes());
    }

    /// Ends QEMU.
    pub fn quit(mut self) {
        let _ = self.0.write_all(b"quit\n");
        let _ = self.0.read_to_end(&mut Vec::new());
    }

    fn prompt(&mut self) -> String {
        let (mut heard, mut byte) = (Vec::new(), [0]);
        while !heard.ends_with(b"(qemu) ") {
            assert!(matches!(self.0.read(&mut byte), Ok(1)), "{}", String::from_utf8_lossy(&heard));
            heard.push(byte[0]);
        }
        String::from_utf8_lossy(&heard).into_owned()
    }
}
