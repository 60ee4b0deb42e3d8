//! QEMU's monitor: what a person would type there, such as an error of the hardware.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection to the monitor of a QEMU that runs.
pub struct Monitor(UnixStream);

impl Monitor {
    /// Arguments for QEMU by which [`Monitor::attach`] finds it.
    #[must_use]
    pub fn qemu_arguments(folder: &Path) -> [String; 2] {
        ["-monitor".to_string(), format!("unix:{},server=on,wait=off", folder.join("monitor").display())]
    }

    /// Connects to the QEMU that was given these arguments, once it is there.
    ///
    /// # Panics
    /// When it does not come within half a minute.
    #[must_use]
    pub fn attach(folder: &Path) -> Self {
        let path = folder.join("monitor");
        let monitor = super::until("QEMU's monitor", || UnixStream::connect(&path).ok());
        monitor.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket has a time limit");
        let mut monitor = Self(monitor);
        monitor.prompt();
        monitor
    }

    /// Types a command, and gives what is answered.
    ///
    /// # Panics
    /// When nobody answers.
    pub fn say(&mut self, command: &str) -> String {
        self.tell(command);
        self.prompt()
    }

    /// Types a command that may be QEMU's last.
    ///
    /// # Panics
    /// When nobody listens.
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
