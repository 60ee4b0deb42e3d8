//! The other host: two of this program talk over one connection, beside that of the two QEMUs.
//!
//! ```text
//!   source                                   target
//!     Hello ------------------------------->            its guest could go on: features, number of vCPUs
//!            <------------------------------- Ready     where its QEMU listens
//!     QEMU sends the memory; the guest stops
//!     State ------------------------------->
//!     QEMU sends the rest, and is done
//!            <------------------------------- Loaded    all is there, and nothing runs
//!     Pages, if asked for ----------------->            sums of the memory, page by page
//!            <------------------------------- Same
//!     Go ---------------------------------->            the source never runs the guest again
//!            <------------------------------- Running
//! ```
//!
//! Until `Go` the source may let the guest go on, and the target may not. From then on it is the other way round. So
//! the guest never runs on both sides, whatever is cut off or ends. A source that has said `Go` and hears nothing does
//! not know whether the target runs it. It leaves its guest stopped, and says so.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::state::State;

/// What the two say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// This program, of this version.
    Hello(u32),
    /// The port at which the target's QEMU listens.
    Ready(u16),
    /// What QEMU leaves out, as bytes of [`State::encode`].
    State(Vec<u8>),
    Loaded,
    /// A sum of each page of the guest's memory, of a source that is asked to compare.
    Pages(Vec<u32>),
    /// They are the same on the target.
    Same,
    Go,
    Running,
    /// The one that says this has given up, and why.
    Failed(String),
}

/// It changes with [`Word`].
pub(crate) const VERSION: u32 = 1;
/// Longest word: a state of 256 vCPUs has 300 kB, and the sums of 4 GiB 5 MB.
const LONGEST: usize = 8 << 20;
/// Until the other side counts as gone. QEMU may send memory meanwhile.
const PATIENCE: Duration = Duration::from_secs(600);

/// The connection.
#[derive(Debug)]
pub(crate) struct Peer<S>(S);

impl Peer<TcpStream> {
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }
}

impl<S: Read + Write> Peer<S> {
    pub(crate) fn say(&mut self, word: &Word) -> Result<()> {
        let bytes = postcard::to_allocvec(word)?;
        let length = u32::try_from(bytes.len())?.to_le_bytes();
        self.0.write_all(&[&length[..], &bytes].concat()).context("the other host is gone")
    }

    pub(crate) fn hear(&mut self) -> Result<Word> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).context("the other host is gone")?;
        let length = u32::from_le_bytes(length) as usize;
        ensure!(length <= LONGEST, "the other host speaks another language");
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).context("the other host is gone")?;
        match postcard::from_bytes(&bytes).context("the other host speaks another language")? {
            Word::Failed(why) => bail!("the other host has given up: {why}"),
            word => Ok(word),
        }
    }

    /// Waits for exactly this word.
    pub(crate) fn expect(&mut self, expected: &Word) -> Result<()> {
        let word = self.hear()?;
        ensure!(word == *expected, "the other host says {word:?} instead of {expected:?}");
        Ok(())
    }

    pub(crate) fn hear_ready(&mut self) -> Result<u16> {
        match self.hear()? {
            Word::Ready(port) => Ok(port),
            word => bail!("the other host says {word:?} instead of where its QEMU listens"),
        }
    }

    pub(crate) fn hear_state(&mut self) -> Result<State> {
        match self.hear()? {
            Word::State(bytes) => State::decode(&bytes),
            word => bail!("the other host says {word:?} instead of the vCPUs' state"),
        }
    }

    /// Says why nothing comes of it, if somebody still listens.
    pub(crate) fn give_up(&mut self, why: &anyhow::Error) {
        let _ = self.say(&Word::Failed(format!("{why:#}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Peer<UnixStream>, Peer<UnixStream>) {
        let (one, other) = UnixStream::pair().expect("two sockets");
        (Peer(one), Peer(other))
    }

    #[test]
    fn words_arrive_and_a_failure_ends_it() {
        let (mut one, mut other) = pair();
        one.say(&Word::Ready(4444)).expect("is heard");
        assert_eq!(other.hear_ready().expect("is said"), 4444);
        other.say(&Word::Go).expect("is heard");
        assert!(one.expect(&Word::Running).is_err(), "that is another word");
        one.give_up(&anyhow::anyhow!("no memory"));
        assert_eq!(other.hear().expect_err("is over").to_string(), "the other host has given up: no memory");
    }

    #[test]
    fn garbage_and_silence_are_errors() {
        let (one, mut other) = pair();
        (&one.0).write_all(&[0xff; 64]).expect("has room");
        assert!(other.hear().is_err());
        let (one, mut other) = pair();
        (&one.0).write_all(&[3, 0, 0, 0, 9, 9, 9]).expect("has room");
        assert!(other.hear().is_err());
        let (mut one, mut other) = pair();
        one.say(&Word::State(b"nonsense".to_vec())).expect("has room");
        assert!(other.hear_state().is_err());
        drop(one);
        assert_eq!(other.hear().expect_err("nobody is there").to_string(), "the other host is gone");
    }
}
