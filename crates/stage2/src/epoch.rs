//! Tells when a table that is cut off from its tree may be reused.
//!
//! The hardware's walkers have left it when the flush of its range is done. Other pCPUs may still read it, because they
//! walk without a lock. A pCPU that handles a vCPU's exit announces itself before it walks, and leaves before the vCPU
//! enters its guest again. So it holds no table from an earlier exit. A table that was cut off in one *epoch* is free
//! when all pCPUs that walked in that epoch have left.
//!
//! The same announcement makes [marks](crate::MarkWord::write_as_walker) cheap: a sender that takes marks also waits
//! for walkers.

use crate::Pages;
use crate::sync::{AtomicU64, Ordering, fence};
use addr::Hpa;

/// Knows which pCPUs walk.
pub trait Quiescence {
    /// Ends the current epoch and returns its number. A walker that starts in a later epoch does not find what the
    /// caller has cut off before.
    fn end_epoch(&self) -> u64;

    /// Whether all walkers that started in `epoch` or before have left.
    fn have_left(&self, epoch: u64) -> bool;

    /// Ends the current epoch and waits until all of its walkers have left. Their writes are visible then, and current
    /// walkers see the caller's earlier writes.
    ///
    /// A walker that waits would wait for itself. So the caller gives up its own announcement `me`, and with it each
    /// walk that borrows it. (A walker has one announcement at a time, see [`Epochs::enter`].)
    fn wait(&self, me: Walking<'_>, relax: impl Fn()) {
        drop(me);
        let epoch = self.end_epoch();
        while !self.have_left(epoch) {
            relax();
        }
    }
}

/// One walker's announcement, on a cache line that only it writes.
#[derive(Debug)]
#[repr(align(64))]
pub struct Walker {
    /// The epoch in which it started, or [`AWAY`].
    since: AtomicU64,
}

const AWAY: u64 = 0;

impl Walker {
    /// A walker that is away.
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

/// The walkers of a machine, for example one per pCPU, and the epoch.
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

    /// Announces the walker with this number. Until the returned guard is dropped, no table that it can find is freed.
    ///
    /// `None` if there is no such walker, or it walks already.
    pub fn enter(&self, walker: usize) -> Option<Walking<'_>> {
        let walker = self.walkers.as_ref().get(walker)?;
        if walker.since.load(Ordering::Relaxed) != AWAY {
            return None;
        }
        // A processor that sees this value, but missed the time away before it, must see all earlier writes.
        walker.since.store(self.current.load(Ordering::Relaxed), Ordering::Release);
        // Announce before the first read: a processor that frees either sees us, or has cut off before we look.
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

/// A guard: this walker walks. It is the proof that a [walk](crate::Tree::walk) of a tree needs.
#[derive(Debug)]
#[must_use = "the walker leaves when this is dropped"]
pub struct Walking<'a>(&'a Walker);

impl Drop for Walking<'_> {
    fn drop(&mut self) {
        // All reads are done before this store is visible.
        self.0.since.store(AWAY, Ordering::Release);
    }
}

/// Tables that are cut off and wait for walkers to leave.
#[derive(Debug)]
pub struct Limbo<const N: usize> {
    tables: [Option<(Hpa, u64)>; N],
}

impl<const N: usize> Limbo<N> {
    /// No tables wait.
    #[must_use]
    pub const fn new() -> Self {
        Self { tables: [None; N] }
    }

    /// Whether there is no room for another table.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.tables.iter().all(Option::is_some)
    }

    /// Number of waiting tables.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.tables.iter().flatten().count()
    }

    /// Adds a table that was cut off and whose range was flushed.
    pub(crate) fn retire(&mut self, table: Hpa, walkers: &impl Quiescence) {
        let place = self.tables.iter_mut().find(|place| place.is_none()).expect("the caller has looked for a place");
        *place = Some((table, walkers.end_epoch()));
    }

    /// Frees the tables that no walker can reach any more.
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
