//! The guest's console on a terminal. The terminal is a pseudo terminal, which other tests use as well.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use abi::control::{Answer, Command, Line, Message, StopReason};
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{InputModes, LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::rig::{Rig, wait_for};

/// A pseudo terminal, and all that was shown on it.
pub(crate) struct Terminal {
    ours: File,
    theirs: File,
    output: Receiver<String>,
    screen: String,
}

impl Terminal {
    pub(crate) fn open() -> Self {
        let (ours, theirs) = ends();
        let (sender, output) = channel();
        let mut reader = ours.try_clone().expect("is open");
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = reader.read(&mut bytes) {
                if sender.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { ours, theirs, output, screen: String::new() }
    }

    /// The side that a program gets.
    pub(crate) fn stdio(&self) -> Stdio {
        Stdio::from(self.theirs.try_clone().expect("is open"))
    }

    pub(crate) fn key(&mut self, keys: &[u8]) {
        self.ours.write_all(keys).expect("is open");
    }

    /// Waits until this was shown.
    pub(crate) fn until(&mut self, text: &str) {
        let seen = wait_for(|| {
            self.screen.extend(self.output.try_iter());
            self.screen.contains(text).then_some(())
        });
        assert!(seen.is_some(), "{text:?} did not come: {}", self.screen);
    }

    /// What raw mode changes.
    pub(crate) fn modes(&self) -> (InputModes, LocalModes) {
        let modes = tcgetattr(&self.theirs).expect("is a terminal");
        (modes.input_modes, modes.local_modes)
    }
}

fn ends() -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("there are some");
    grantpt(&ours).expect("is ours");
    unlockpt(&ours).expect("is ours");
    let name = ptsname(&ours, Vec::new()).expect("has a name");
    let theirs = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, rustix::fs::Mode::empty());
    let size = Winsize { ws_row: 30, ws_col: 110, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&ours, size).expect("is a terminal");
    (File::from(ours), File::from(theirs.expect("can be opened")))
}

#[test]
fn keys_reach_the_guest_its_console_is_shown_and_ctrl_bracket_leaves() {
    let rig = Rig::new();
    let host = rig.play(|host| {
        host.up();
        host.start(0);
        host.line(0, Line::Console, b"login: ");
        // Takes one key at a time, and none at first.
        let mut typed: Vec<u8> = Vec::new();
        let mut refused = false;
        while typed != b"ls\x03\r" {
            let request = host.next().expect("keys come");
            let Command::Input { vm: 0, line: Line::Console, bytes } = request.command else { panic!("{request:?}") };
            let count = u32::from(std::mem::replace(&mut refused, true));
            typed.extend(&bytes[..count as usize]);
            host.say(&Message::Reply { id: request.id, result: Ok(Answer::Accepted(count)) });
        }
        host.line(0, Line::Console, b"typed all");
        let asked = host.next().expect("leaves");
        assert_eq!(asked.command, Command::Stats { vm: 0, first: 0 });
        host.answer(asked);
        let asked = host.next().expect("leaves");
        assert_eq!(asked.command, Command::PowerOff);
        host.stop(0, StopReason::Commanded, "");
        host.say(&Message::Bye);
        host.end(abi::exit_code::qemu_status(abi::exit_code::CLEAN));
    });

    let mut terminal = Terminal::open();
    let before = terminal.modes();
    let [stdin, stdout, stderr] = [(); 3].map(|()| terminal.stdio());
    let mut tool = rig.run(&[]).stdin(stdin).stdout(stdout).stderr(stderr).spawn().expect("runs");

    terminal.until("login: ");
    assert_ne!(terminal.modes(), before);
    terminal.key(b"ls\x03\r");
    terminal.until("typed all");
    terminal.key(b"\x1d");
    terminal.until("exits  4,000");
    assert_eq!(tool.wait().expect("is ours").code(), Some(0));
    host.join().expect("was not upset");
    assert_eq!(terminal.modes(), before);
}
