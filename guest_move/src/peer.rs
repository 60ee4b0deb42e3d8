//! The other host: two of this program talk over one connection, which also has what the two QEMUs say.
//!
//! ```text
//!   source                                   target
//!     Hello, Needs ------------------------>            its guest could go on: features, number of vCPUs
//!            <------------------------------- Ready     its QEMU listens
//!     Data --------------------------------> ...        what QEMU sends: memory, while the guest runs
//!     State ------------------------------->            the guest has stopped
//!     Data --------------------------------> ...        the rest of the memory, and devices
//!     End --------------------------------->
//!            <------------------------------- Loaded    all is there, and nothing runs
//!     Pages, if asked for ----------------->            sums of the memory, page by page
//!            <------------------------------- Same
//!     Go ---------------------------------->            the source never runs the guest again
//!            <------------------------------- Running
//!         or <------------------------------- Back      its QEMU has ended, and the guest has not run there
//! ```
//!
//! Until `Go` the source may let the guest go on, and the target may not. From then on it is the other way round, until
//! `Back`. So the guest never runs on both sides, whatever is cut off or ends. A source that has said `Go` and hears
//! nothing does not know whether the target runs it. It leaves its guest stopped, and says so.
//!
//! Each word, and each piece of data, has its length and a sum. QEMU's own stream has no sum: a bit of a page that
//! changes on its way would be loaded. Data are neither copied nor given memory of their own here: memory that comes
//! and goes cost more than all the rest.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use twox_hash::XxHash3_64;

use crate::state::Needs;

/// What the two say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// This program, of this version.
    Hello(u32),
    /// What the guest needs of the target. A target that lacks something says so before anything is copied.
    Needs(Needs),
    /// The target's QEMU listens.
    Ready,
    /// What QEMU leaves out, as bytes of [`State::encode`](crate::state::State::encode).
    State(ByteBuf),
    /// The source's QEMU has sent all.
    End,
    Loaded,
    /// A sum of each page of the guest's memory, of a source that is asked to compare.
    Pages(Vec<u64>),
    /// They are the same on the target.
    Same,
    /// The source never runs the guest again. Whether it ran there, or was paused by somebody.
    Go {
        runs: bool,
    },
    Running,
    /// Why the target has not run the guest. It never will, so the guest is the source's again.
    Back(String),
    /// The one that says this has given up, and why.
    Failed(String),
}

/// It changes with [`Word`], and with the form of a word.
pub(crate) const VERSION: u32 = 8;
/// Longest word: the sums of 4 GiB have 10 MB.
const LONGEST: usize = 16 << 20;
/// Until the other side counts as gone, if it says nothing, or takes nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a wait looks whether the move is cancelled.
const PERIOD: Duration = Duration::from_millis(100);
/// Length and sum.
pub(crate) const HEADER: usize = 4 + 8;
/// In the length: data follow, which are no word.
const IS_DATA: u32 = 1 << 31;

/// The connection: what the other host says, and the other direction.
pub(crate) fn over(stream: TcpStream) -> Result<(Listener<TcpStream>, Speaker<TcpStream>)> {
    stream.set_read_timeout(Some(PERIOD))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let speaker = Speaker::new(stream.try_clone()?);
    Ok((Listener::new(stream), speaker))
}

/// Says words. Threads share it.
#[derive(Debug)]
pub(crate) struct Speaker<S>(Arc<Mutex<Said<S>>>);

#[derive(Debug)]
struct Said<S> {
    stream: S,
    /// Number of words.
    count: u64,
}

impl<S> Clone for Speaker<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Write> Speaker<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self(Arc::new(Mutex::new(Said { stream, count: 0 })))
    }

    /// Passes on what is kept back, if the stream keeps something.
    pub(crate) fn flush(&self) -> Result<()> {
        Ok(self.said().stream.flush()?)
    }

    fn said(&self) -> MutexGuard<'_, Said<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn say(&self, word: &Word) -> Result<()> {
        let mut bytes = postcard::to_extend(word, vec![0; HEADER])?;
        self.send(&mut bytes, 0)
    }

    /// Passes on what the source's QEMU sends: `bytes` from [`HEADER`] on.
    pub(crate) fn pass_on(&self, bytes: &mut [u8]) -> Result<()> {
        self.send(bytes, IS_DATA)
    }

    fn send(&self, bytes: &mut [u8], kind: u32) -> Result<()> {
        let length = u32::try_from(bytes.len() - HEADER)? | kind;
        let mut said = self.said();
        let sum = sum(said.count, length, &bytes[HEADER..]);
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..HEADER].copy_from_slice(&sum.to_le_bytes());
        said.count += 1;
        said.stream.write_all(bytes).context("it takes no more data")
    }

    /// Says why nothing comes of it, if somebody still listens.
    pub(crate) fn give_up(&self, why: &anyhow::Error) {
        let _ = self.say(&Word::Failed(format!("{why:#}")));
    }
}

/// Of what was said at this place in the order.
fn sum(number: u64, length: u32, bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(number << 32 | u64::from(length), bytes)
}

/// Hears words.
#[derive(Debug)]
pub(crate) struct Listener<S> {
    stream: S,
    /// Number of words.
    heard: u64,
    /// Begins with what was heard last, of `count` bytes. It never becomes shorter: to clear it again for each word
    /// would cost as much as to copy it.
    bytes: Vec<u8>,
    count: usize,
    patience: Duration,
}

impl<S: Read> Listener<S> {
    /// Of the words of a stream from its beginning on.
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, heard: 0, bytes: Vec::new(), count: 0, patience: PATIENCE }
    }

    /// Waits for that long at most from now on.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The next word.
    pub(crate) fn hear(&mut self) -> Result<Word> {
        self.hear_unless(&AtomicBool::new(false))
    }

    /// The next word, unless somebody sets `cancelled` meanwhile.
    pub(crate) fn hear_unless(&mut self, cancelled: &AtomicBool) -> Result<Word> {
        self.hear_word_or_data(cancelled)?.context("the other host sends data instead of a word")
    }

    /// The next word, or `None` if data come, which are [`Self::data`].
    pub(crate) fn hear_word_or_data(&mut self, cancelled: &AtomicBool) -> Result<Option<Word>> {
        self.fill(HEADER, cancelled)?;
        let (length, rest) = self.data().split_first_chunk().context("a short header")?;
        let (length, expected) = (u32::from_le_bytes(*length), u64::from_le_bytes(rest.try_into()?));
        let count = (length & !IS_DATA) as usize;
        ensure!(count <= LONGEST, "the other host speaks another language");
        self.fill(count, cancelled)?;
        let is_whole = sum(self.heard, length, self.data()) == expected;
        ensure!(is_whole, "what the other host has sent has changed on its way");
        self.heard += 1;
        if length & IS_DATA != 0 {
            return Ok(None);
        }
        match postcard::from_bytes(self.data()).context("the other host speaks another language")? {
            Word::Failed(why) => bail!("the other host has given up: {why}"),
            word => Ok(Some(word)),
        }
    }

    /// The data that were heard last.
    pub(crate) fn data(&self) -> &[u8] {
        &self.bytes[..self.count]
    }

    /// Hears so many bytes, which are the first of `bytes` then.
    fn fill(&mut self, count: usize, cancelled: &AtomicBool) -> Result<()> {
        let (mut last, mut filled) = (Instant::now(), 0);
        if self.bytes.len() < count {
            self.bytes.resize(count, 0);
        }
        self.count = count;
        while filled < count {
            ensure!(!cancelled.load(Ordering::Relaxed), CANCELLED);
            match self.stream.read(&mut self.bytes[filled..count]) {
                Ok(0) => bail!("the other host is gone"),
                Ok(more) => {
                    filled += more;
                    last = Instant::now();
                }
                Err(error) if is_for_later(error.kind()) => {
                    ensure!(last.elapsed() < self.patience, "the other host says nothing");
                }
                Err(error) => return Err(error).context("the other host is gone"),
            }
        }
        Ok(())
    }

    /// Waits for exactly this word, unless somebody sets `cancelled` meanwhile.
    pub(crate) fn expect_unless(&mut self, expected: &Word, cancelled: &AtomicBool) -> Result<()> {
        let word = self.hear_unless(cancelled)?;
        ensure!(word == *expected, "the other host says {word:?} instead of {expected:?}");
        Ok(())
    }
}

/// Why a wait has ended.
pub(crate) const CANCELLED: &str = "cancelled";

fn is_for_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Speaker<UnixStream>, Listener<UnixStream>) {
        let (one, other) = UnixStream::pair().expect("two sockets");
        other.set_read_timeout(Some(PERIOD)).expect("is longer than zero");
        let mut listener = Listener::new(other);
        listener.set_patience(PERIOD);
        (Speaker::new(one), listener)
    }

    /// What can be heard.
    #[derive(Debug, PartialEq, Eq)]
    enum Heard {
        Word(Word),
        Data(Vec<u8>),
    }

    /// The bytes of it.
    fn bytes_of(all: &[Heard]) -> Vec<u8> {
        let speaker = Speaker::new(Vec::new());
        for one in all {
            let said = match one {
                Heard::Word(word) => speaker.say(word),
                Heard::Data(data) => speaker.pass_on(&mut [&[0; HEADER], &data[..]].concat()),
            };
            said.expect("has room");
        }
        speaker.said().stream.clone()
    }

    fn all_of(bytes: &[u8]) -> Vec<Heard> {
        let mut listener = Listener::new(bytes);
        let next = || match listener.hear_word_or_data(&AtomicBool::new(false)).ok()? {
            Some(word) => Some(Heard::Word(word)),
            None => Some(Heard::Data(listener.data().to_vec())),
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn words_arrive_and_a_failure_ends_it() {
        let (one, mut other) = pair();
        one.say(&Word::Loaded).expect("is heard");
        let wanted = Word::Go { runs: true };
        assert!(other.expect_unless(&wanted, &AtomicBool::new(false)).is_err(), "that is another word");
        one.pass_on(&mut [7; 70_000]).expect("is heard");
        assert!(other.hear_word_or_data(&AtomicBool::new(false)).expect("is said").is_none());
        assert_eq!(other.data(), [7; 70_000 - HEADER]);
        one.pass_on(&mut [7; 20]).expect("is heard");
        assert!(other.hear().is_err(), "that is no word");
        one.give_up(&anyhow::anyhow!("no memory"));
        assert_eq!(other.hear().expect_err("is over").to_string(), "the other host has given up: no memory");
    }

    #[test]
    fn silence_and_a_cancelled_move_end_a_wait() {
        let (one, mut other) = pair();
        assert_eq!(other.hear().expect_err("nobody speaks").to_string(), "the other host says nothing");
        assert_eq!(other.hear_unless(&AtomicBool::new(true)).expect_err("is cancelled").to_string(), CANCELLED);
        drop(one);
        assert_eq!(other.hear().expect_err("nobody is there").to_string(), "the other host is gone");
    }

    #[test]
    fn nothing_that_is_cut_off_changed_repeated_or_out_of_turn_is_heard() {
        let all = || [Heard::Data(b"page".to_vec()), Heard::Word(Word::End), Heard::Word(Word::Go { runs: true })];
        let bytes = bytes_of(&all());
        assert_eq!(all_of(&bytes), all());
        for length in 0..bytes.len() {
            assert!(all_of(&bytes[..length]).len() < 3, "the first {length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let heard = all_of(&other);
            assert!(heard.len() < 3 && all().starts_with(&heard), "bit {bit}: {heard:?}");
        }
        let first = bytes_of(&all()[..1]);
        assert_eq!(all_of(&[&first[..], &first].concat()), all()[..1]);
        assert_eq!(all_of(&bytes[first.len()..]), []);
    }
}
