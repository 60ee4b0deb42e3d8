//! Commands in a guest: how they are delivered, and how their output and status return.
//!
//! A command is the file `/dunlin/exec` in an archive after our initrd; Linux unpacks the archives in order. The agent
//! line (COM2) carries
//!
//! ```text
//! hello kernel=6.1.0-56-cloud-amd64 cpus=4 uptime=0.81 \n     user space is reached
//! ... the raw output of the command ...
//! \0 exit=0 \n                                                the very last bytes
//! ```
//!
//! Output may contain zero bytes, so a zero byte alone ends nothing. [`Agent`] keeps back bytes that may be the start
//! of the last line, and passes them on if they are not.

use std::io;

use cpio::newc;

/// The path where the agent finds the command.
const SCRIPT_PATH: &str = "dunlin/exec";
/// Maximum length of the greeting; a longer line is no greeting.
const HELLO_LIMIT: usize = 512;

/// The default command of a guest: facts for the summary, and a little work for every CPU.
pub(crate) const FIXED_SCRIPT: &str = r#"
uname -a
echo "CPUs online: $(nproc)"
echo "Interrupts so far:"
grep -E 'CPU|LOC:|RES:|CAL:' /proc/interrupts
echo "Errors in the kernel's log:"
dmesg -r 2>/dev/null | grep '^<[0-3]>' | tail -n 5
cpus=$(nproc)
worker=0
while [ $worker -lt $cpus ]; do
    (n=0; while [ $n -lt 2000 ]; do n=$((n + 1)); done; echo done >/tmp/.dunlin-worker-$worker) &
    worker=$((worker + 1))
done
wait
finished=$(ls /tmp/.dunlin-worker-* 2>/dev/null | wc -l)
echo "Parallel job: $finished of $cpus workers finished"
[ "$finished" -eq "$cpus" ]
"#;

/// Appends an archive (compressed or not) to an initrd.
pub(crate) fn append(initrd: &mut Vec<u8>, archive: &[u8]) {
    // Linux looks for the next archive at multiples of four bytes, after any zeros.
    initrd.resize(initrd.len().next_multiple_of(4), 0);
    initrd.extend_from_slice(archive);
}

/// Appends an archive that holds `command` as a shell script to an initrd (compressed or not).
pub(crate) fn add_script(initrd: &mut Vec<u8>, command: &str) -> io::Result<()> {
    const DIRECTORY: u32 = 0o040_755;
    const PROGRAM: u32 = 0o100_755;

    append(initrd, &[]);
    let script = format!("#!/bin/sh\n{command}\n");
    let bytes = u32::try_from(script.len()).map_err(|_| io::Error::other("the command is too long"))?;

    newc::Builder::new("dunlin").mode(DIRECTORY).nlink(2).ino(1).write(&mut *initrd, 0).finish()?;
    let mut file = newc::Builder::new(SCRIPT_PATH).mode(PROGRAM).nlink(1).ino(2).write(&mut *initrd, bytes);
    io::Write::write_all(&mut file, script.as_bytes())?;
    file.finish()?;
    newc::trailer(&mut *initrd)?;
    Ok(())
}

/// The guest's greeting when it reaches user space.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hello {
    /// Release of its kernel.
    pub(crate) kernel: String,
    /// CPUs online.
    pub(crate) cpus: u32,
    /// Its own idea of the time since its start, in seconds.
    pub(crate) uptime: f64,
}

impl Hello {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("hello ")?.split_ascii_whitespace();
        let mut word = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let kernel: String = word("kernel")?.chars().filter(|c| !c.is_control()).collect();
        Some(Self { kernel, cpus: word("cpus")?.parse().ok()?, uptime: word("uptime")?.parse().ok()? })
    }
}

/// The reader of an agent line.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    hello: Option<Hello>,
    greeted: bool,
    /// The greeting so far, or a possible last line: a zero byte and the bytes after it.
    held: Vec<u8>,
}

impl Agent {
    /// Takes bytes as they arrive and returns those that are surely output of the command.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut output = Vec::new();
        for &byte in bytes {
            self.held.push(byte);
            if !self.greeted {
                self.greet(byte);
                if !self.greeted {
                    continue;
                }
                if self.hello.is_some() {
                    self.held.clear();
                }
            }
            // Only a zero byte begins a last line, so a new one makes all before it output.
            let keep = match self.held.iter().rposition(|&byte| byte == 0) {
                Some(at) if begins_last_line(&self.held[at..]) => at,
                _ => self.held.len(),
            };
            output.extend(self.held.drain(..keep));
        }
        output
    }

    fn greet(&mut self, byte: u8) {
        if byte == b'\n' {
            self.hello = std::str::from_utf8(&self.held).ok().and_then(|line| Hello::parse(line.trim_end()));
        }
        self.greeted = byte == b'\n' || self.held.len() >= HELLO_LIMIT;
    }

    /// The greeting, once it was heard.
    pub(crate) fn hello(&self) -> Option<&Hello> {
        self.hello.as_ref()
    }

    /// The command's status, if the last line has arrived.
    pub(crate) fn status(&self) -> Option<u8> {
        let digits = self.held.strip_prefix(b"\0exit=")?.strip_suffix(b"\n")?;
        std::str::from_utf8(digits).ok()?.parse().ok()
    }

    /// The bytes kept back, if the connection ends without a last line.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        if self.status().is_some() { Vec::new() } else { std::mem::take(&mut self.held) }
    }
}

/// Whether `tail`, which starts with a zero byte, is a last line or the beginning of one.
fn begins_last_line(tail: &[u8]) -> bool {
    const START: &[u8] = b"\0exit=";
    let known = tail.len().min(START.len());
    if tail[..known] != START[..known] {
        return false;
    }
    let number = &tail[known..];
    let digits = number.strip_suffix(b"\n").unwrap_or(number);
    digits.len() <= 3 && digits.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};

    use super::*;

    const HELLO: &[u8] = b"hello kernel=6.1.0-1 cpus=4 uptime=1.25\n";

    fn all(agent: &mut Agent, bytes: &[u8]) -> Vec<u8> {
        bytes.iter().flat_map(|&byte| agent.push(&[byte])).collect()
    }

    #[test]
    fn script_follows_the_initrd_at_a_multiple_of_four() {
        let mut initrd = vec![7; 5];
        add_script(&mut initrd, "echo hi").expect("is short");
        assert_eq!(&initrd[5..8], &[0; 3]);

        let reader = newc::Reader::new(&initrd[8..]).expect("is an archive");
        assert_eq!((reader.entry().name(), reader.entry().mode()), ("dunlin", 0o040_755));
        let reader = newc::Reader::new(reader.finish().expect("goes on")).expect("has a file");
        assert_eq!((reader.entry().name(), reader.entry().mode()), ("dunlin/exec", 0o100_755));
        let mut script = Vec::new();
        let rest = reader.to_writer(&mut script).expect("is whole");
        assert_eq!(script, b"#!/bin/sh\necho hi\n");
        assert!(newc::Reader::new(rest).expect("has a trailer").entry().is_trailer());
    }

    #[test]
    fn archives_start_at_multiples_of_four() {
        let mut initrd = Vec::new();
        for archive in [&b"abcde"[..], b"", b"fghi", b"j"] {
            append(&mut initrd, archive);
        }
        assert_eq!(initrd, b"abcde\0\0\0fghij");
    }

    #[test]
    fn greeting_output_and_status_are_told_apart() {
        let mut agent = Agent::default();
        let mut line = HELLO.to_vec();
        line.extend(b"one\0two\n\0exit=3\n");
        assert_eq!(all(&mut agent, &line), b"one\0two\n");
        let hello = agent.hello().expect("was heard");
        assert_eq!((hello.kernel.as_str(), hello.cpus, hello.uptime), ("6.1.0-1", 4, 1.25));
        assert_eq!(agent.status(), Some(3));
        assert!(agent.finish().is_empty());
    }

    #[test]
    fn output_that_looks_like_a_last_line_is_output_when_more_follows() {
        let mut agent = Agent::default();
        all(&mut agent, HELLO);
        assert_eq!(all(&mut agent, b"\0exit=0\n"), b"");
        assert_eq!(agent.status(), Some(0));
        assert_eq!(all(&mut agent, b"more"), b"\0exit=0\nmore");
        assert_eq!(agent.status(), None);
        assert_eq!(all(&mut agent, b"\0\0exit=1\n"), b"\0");
        assert_eq!(agent.status(), Some(1));
    }

    #[test]
    fn line_that_ends_early_has_no_status_and_loses_nothing() {
        let mut agent = Agent::default();
        all(&mut agent, HELLO);
        assert_eq!(all(&mut agent, b"abc\0exit="), b"abc");
        assert_eq!(agent.status(), None);
        assert_eq!(agent.finish(), b"\0exit=");
    }

    #[test]
    fn line_without_a_greeting_is_output() {
        let mut agent = Agent::default();
        assert_eq!(all(&mut agent, b"who are you?\nme"), b"who are you?\nme");
        assert!(agent.hello().is_none());
        assert_eq!(all(&mut Agent::default(), &[b'x'; 2000]).len(), 2000);
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter_and_nothing_is_lost(
            bytes in prop::collection::vec(prop::sample::select(b"\0exit=01\nh".to_vec()), 0..60),
            cut in any::<prop::sample::Index>(),
        ) {
            let line = [HELLO, &bytes].concat();
            let cut = cut.index(line.len());
            let mut pieces = Agent::default();
            let mut output = pieces.push(&line[..cut]);
            output.extend(pieces.push(&line[cut..]));
            let mut single = Agent::default();
            assert_eq!(output, all(&mut single, &line));
            assert_eq!(pieces.status(), single.status());
            match pieces.status() {
                Some(status) => output.extend(format!("\0exit={status}\n").bytes()),
                None => output.extend(pieces.finish()),
            }
            // Leading zeros of a status are the only thing that is not given back as it came.
            if !bytes.windows(7).any(|w| w.starts_with(b"\0exit=0")) {
                assert_eq!(output, bytes);
            }
        }
    }
}
