//! When a table that is cut off from its tree may be used for something else.
//!
//! The hardware's walkers have left it when the flush of its range is done. Other processors of ours may still be in
//! it, since they walk without a lock. A processor that handles an exit of a vCPU announces itself before it walks and
//! leaves before the vCPU goes back to its guest; at every exit, then, it holds nothing from before. A table that was cut
//! off in one *epoch* is free when everybody who was walking in that epoch has left.
//!
//! The same announcement makes [marks](crate::MarkWord::write_as_walker) cheap: who takes marks waits for walkers, too.

use crate::Pages;
use crate::sync::{AtomicU64, Ordering, fence};
use addr::Hpa;

/// Knows who walks.
pub trait Quiescence {
    /// Ends the current epoch, and says which one it was. What the caller has cut off before is not found by anybody who
    /// starts in a later one.
    fn end_epoch(&self) -> u64;

    /// Whether everybody who was walking in `epoch`, or before, has left.
    fn have_left(&self, epoch: u64) -> bool;

    /// Ends the current epoch and waits until all have left who walk in it: what they did is visible then, and who walks
    /// now sees what the caller has done before. For nobody who walks, since that would be to wait for oneself.
    fn wait(&self, relax: impl Fn()) {
        let epoch = self.end_epoch();
        while !self.have_left(epoch) {
            relax();
        }
    }
}

/// One walker's announcement, on a cache line of its own: only it writes there.
#[derive(Debug)]
#[repr(align(64))]
pub struct Walker {
    /// The epoch in which it started, or [`AWAY`].
    since: AtomicU64,
}

const AWAY: u64 = 0;

impl Walker {
    /// One that is away.
    #[must_use]
    pub fn new() -> Self {
        Self { since: AtomicU64::new(AWAY) }
    }
}

impl Default for Walker {
    fn default() -> Self {
        Self::new()
    }
}

/// The walkers of a machine, such as one per pCPU, and the epoch.
#[derive(Debug)]
pub struct Epochs<W> {
    current: AtomicU64,
    walkers: W,
}

impl<W: AsRef<[Walker]>> Epochs<W> {
    /// The first epoch.
    pub fn new(walkers: W) -> Self {
        Self { current: AtomicU64::new(AWAY + 1), walkers }
    }

    /// The walker with this number announces itself. Until it drops what is returned, no table that it can find is freed.
    ///
    /// `None` when there is no such walker, or when it is walking already.
    pub fn enter(&self, walker: usize) -> Option<Walking<'_>> {
        let walker = self.walkers.as_ref().get(walker)?;
        if walker.since.load(Ordering::Relaxed) != AWAY {
            return None;
        }
        // Who sees this, and not that we were away in between, must have seen all that we did before.
        walker.since.store(self.current.load(Ordering::Relaxed), Ordering::Release);
        // Announced before anything is read: who frees either sees us, or has cut off before we look.
        fence(Ordering::SeqCst);
        Some(Walking(walker))
    }
}

impl<W: AsRef<[Walker]>> Quiescence for Epochs<W> {
    fn end_epoch(&self) -> u64 {
        self.current.fetch_add(1, Ordering::SeqCst)
    }

    fn have_left(&self, epoch: u64) -> bool {
        // Pairs with the fence of `enter`.
        fence(Ordering::SeqCst);
        self.walkers.as_ref().iter().all(|walker| {
            let since = walker.since.load(Ordering::Acquire);
            since == AWAY || since > epoch
        })
    }
}

/// A walker is at work.
#[derive(Debug)]
#[must_use = "the walker leaves when this is dropped"]
pub struct Walking<'a>(&'a Walker);

impl Drop for Walking<'_> {
    fn drop(&mut self) {
        // What was read is read before this is seen.
        self.0.since.store(AWAY, Ordering::Release);
    }
}

/// Tables that are in no tree any more, and wait for walkers to leave.
#[derive(Debug)]
pub struct Limbo<const N: usize> {
    tables: [Option<(Hpa, u64)>; N],
}

impl<const N: usize> Limbo<N> {
    /// Nothing waits.
    #[must_use]
    pub const fn new() -> Self {
        Self { tables: [None; N] }
    }

    /// Whether no further table can wait.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.tables.iter().all(Option::is_some)
    }

    /// How many tables wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.tables.iter().flatten().count()
    }

    /// A table that was cut off, and whose range was flushed, waits from now on.
    pub(crate) fn retire(&mut self, table: Hpa, walkers: &impl Quiescence) {
        let place = self.tables.iter_mut().find(|place| place.is_none()).expect("the caller has looked for a place");
        *place = Some((table, walkers.end_epoch()));
    }

    /// Gives back the tables that nobody walks any more.
    pub fn reclaim(&mut self, pages: &impl Pages, walkers: &impl Quiescence) {
        for place in &mut self.tables {
            if let Some((table, _)) = place.take_if(|(_, epoch)| walkers.have_left(*epoch)) {
                pages.free(table);
            }
        }
    }
}

impl<const N: usize> Default for Limbo<N> {
    fn default() -> Self {
        Self::new()
    }
}
