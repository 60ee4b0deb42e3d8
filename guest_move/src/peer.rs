//! The other host: two of this program talk over one connection, which also has what the two QEMUs say.
//!
//! ```text
//!   source                                   target
//!     Hello ------------------------------->            its guest could go on: features, number of vCPUs
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
//! ```
//!
//! Until `Go` the source may let the guest go on, and the target may not. From then on it is the other way round. So
//! the guest never runs on both sides, whatever is cut off or ends. A source that has said `Go` and hears nothing does
//! not know whether the target runs it. It leaves its guest stopped, and says so.
//!
//! Each word has its length and a sum. QEMU's own stream has no sum: a bit of a page that changes on its way would be
//! loaded.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use twox_hash::XxHash64;

/// What the two say.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// This program, of this version.
    Hello(u32),
    /// The target's QEMU listens.
    Ready,
    /// A part of what the source's QEMU sends.
    Data(ByteBuf),
    /// What QEMU leaves out, as bytes of [`State::encode`](crate::state::State::encode).
    State(ByteBuf),
    /// The source's QEMU has sent all.
    End,
    Loaded,
    /// A sum of each page of the guest's memory, of a source that is asked to compare.
    Pages(Vec<u64>),
    /// They are the same on the target.
    Same,
    Go,
    Running,
    /// The one that says this has given up, and why.
    Failed(String),
}

/// It changes with [`Word`], and with the form of a word.
pub(crate) const VERSION: u32 = 2;
/// Longest word: the sums of 4 GiB have 10 MB.
const LONGEST: usize = 16 << 20;
/// Until the other side counts as gone, if it says nothing, or takes nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a wait looks whether the move is cancelled.
const PERIOD: Duration = Duration::from_millis(100);
/// Length and sum.
const HEADER: usize = 4 + 8;

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
        let length = u32::try_from(bytes.len() - HEADER)?;
        let mut said = self.said();
        let sum = XxHash64::oneshot(said.count, &bytes[HEADER..]);
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..HEADER].copy_from_slice(&sum.to_le_bytes());
        said.count += 1;
        said.stream.write_all(&bytes).context("it takes no more data")
    }

    /// Says why nothing comes of it, if somebody still listens.
    pub(crate) fn give_up(&self, why: &anyhow::Error) {
        let _ = self.say(&Word::Failed(format!("{why:#}")));
    }
}

/// Hears words.
#[derive(Debug)]
pub(crate) struct Listener<S> {
    stream: S,
    /// Number of words.
    heard: u64,
    patience: Duration,
}

impl<S: Read> Listener<S> {
    /// Of the words of a stream from its beginning on.
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, heard: 0, patience: PATIENCE }
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
        let mut header = [0; HEADER];
        self.fill(&mut header, cancelled)?;
        let (length, sum) = header.split_at(4);
        let length = u32::from_le_bytes(length.try_into()?) as usize;
        ensure!(length <= LONGEST, "the other host speaks another language");
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, cancelled)?;
        let is_whole = XxHash64::oneshot(self.heard, &bytes) == u64::from_le_bytes(sum.try_into()?);
        ensure!(is_whole, "what the other host has sent has changed on its way");
        self.heard += 1;
        match postcard::from_bytes(&bytes).context("the other host speaks another language")? {
            Word::Failed(why) => bail!("the other host has given up: {why}"),
            word => Ok(word),
        }
    }

    fn fill(&mut self, mut bytes: &mut [u8], cancelled: &AtomicBool) -> Result<()> {
        let mut last = Instant::now();
        while !bytes.is_empty() {
            ensure!(!cancelled.load(Ordering::Relaxed), CANCELLED);
            match self.stream.read(bytes) {
                Ok(0) => bail!("the other host is gone"),
                Ok(count) => {
                    bytes = bytes.split_at_mut(count).1;
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

    /// Waits for exactly this word.
    pub(crate) fn expect(&mut self, expected: &Word) -> Result<()> {
        self.expect_unless(expected, &AtomicBool::new(false))
    }

    /// The same, unless somebody sets `cancelled` meanwhile.
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
        (Speaker::new(one), Listener { stream: other, heard: 0, patience: PERIOD })
    }

    /// The bytes of some words.
    fn bytes_of(words: &[Word]) -> Vec<u8> {
        let speaker = Speaker::new(Vec::new());
        words.iter().for_each(|word| speaker.say(word).expect("has room"));
        speaker.said().stream.clone()
    }

    fn all_of(bytes: &[u8]) -> Vec<Word> {
        let mut listener = Listener::new(bytes);
        std::iter::from_fn(|| listener.hear().ok()).collect()
    }

    #[test]
    fn words_arrive_and_a_failure_ends_it() {
        let (one, mut other) = pair();
        one.say(&Word::Data(ByteBuf::from([7; 70_000]))).expect("is heard");
        assert_eq!(other.hear().expect("is said"), Word::Data(ByteBuf::from([7; 70_000])));
        one.say(&Word::Loaded).expect("is heard");
        assert!(other.expect(&Word::Go).is_err(), "that is another word");
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
    fn no_word_that_is_cut_off_changed_repeated_or_out_of_turn_is_heard() {
        let words = || [Word::Data(ByteBuf::from(*b"page")), Word::End, Word::Go];
        let bytes = bytes_of(&words());
        assert_eq!(all_of(&bytes), words());
        for length in 0..bytes.len() {
            assert!(all_of(&bytes[..length]).len() < 3, "the first {length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let heard = all_of(&other);
            assert!(heard.len() < 3 && words().starts_with(&heard), "bit {bit}: {heard:?}");
        }
        let first = bytes_of(&words()[..1]);
        assert_eq!(all_of(&[&first[..], &first].concat()), words()[..1]);
        assert_eq!(all_of(&bytes[first.len()..]), []);
    }
}
