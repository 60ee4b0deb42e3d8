//! The mailbox: how everybody else reaches a vCPU.
//!
//! ```text
//!  63            32 31    18 17 16 15                0
//! +----------------+--------+-----+-------------------+
//! | pCPU           |   0    |state| pending           |
//! +----------------+--------+-----+-------------------+
//!
//!            post + Enqueue            run_on
//!  Blocked ------------------> Queued --------> Running(pCPU)
//!     ^                          ^                 |   |
//!     |                          '----- requeue ---'   |
//!     '------------- block (only if nothing pending) --'
//! ```
//!
//! All changes are read-modify-writes of one word, so they have one order that everybody agrees on. A poster adds its
//! bits and learns in the same step where the vCPU was; a vCPU that wants to block does so only if no bit is set, in the
//! same step. There is no window between the two, and no fence to get wrong.

use bitflags::bitflags;

use crate::sync::{AtomicU64, Ordering};

bitflags! {
    /// Work that waits for a vCPU, settled before its next entry.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Pending: u16 {
        /// Interrupt vectors were posted.
        const INTERRUPT = 1 << 0;
        /// An NMI was posted.
        const NMI = 1 << 1;
        /// An INIT was posted: reset, then wait for a start-up message.
        const INIT = 1 << 2;
        /// A start-up message was posted.
        const STARTUP = 1 << 3;
        /// The vCPU's own timer is due.
        const TIMER = 1 << 4;
        /// The VM ends: leave the guest for good.
        const STOP = 1 << 5;
        /// Others have asked for TLB entries to be flushed. Quiet: it does not wake a vCPU that is blocked, which meets
        /// it before its next entry, whenever that is.
        const FLUSH = 1 << 6;
        /// The VM is paused, or no longer: look.
        const PAUSE = 1 << 7;
    }
}

/// Number of a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u32);

impl CpuId {
    /// Position in arrays that have one element per pCPU.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl core::fmt::Display for CpuId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "cpu{}", self.0)
    }
}

/// What a poster has to do for its post to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Notify {
    /// Nothing: it will be seen before the next entry, or somebody else was told already.
    Nothing,
    /// Make this pCPU leave the guest, if the vCPU is in it.
    Kick(CpuId),
    /// The vCPU was blocked and is now queued in name: put it into a run queue.
    Enqueue,
}

/// See the module's description.
#[derive(Debug)]
pub struct Mailbox {
    word: AtomicU64,
}

const PENDING: u64 = 0xffff;
/// Work that a blocked vCPU sleeps through.
const QUIET: u64 = Pending::FLUSH.bits() as u64;
const STATE: u64 = 3 << 16;
const BLOCKED: u64 = 0 << 16;
const QUEUED: u64 = 1 << 16;
const RUNNING: u64 = 2 << 16;
const CPU_SHIFT: u32 = 32;

impl Mailbox {
    /// The mailbox of a vCPU that waits for a first post.
    #[must_use]
    pub fn blocked() -> Self {
        Self { word: AtomicU64::new(BLOCKED) }
    }

    /// Adds quiet work ([`Pending::FLUSH`]): where the vCPU is does not change, and a blocked one stays blocked. Says whether
    /// the vCPU had no work before; if it had, whoever gave it that sees to it that the vCPU leaves its guest.
    ///
    /// As for [`Mailbox::post`], what the caller wrote before is seen after the [`Mailbox::take`] that returns the work.
    pub fn leave(&self, work: Pending) -> bool {
        self.word.fetch_or(u64::from(work.bits()), Ordering::AcqRel) & PENDING == 0
    }

    /// Adds work and says whom the caller has to tell.
    ///
    /// Whatever the caller wrote before this call is seen by the vCPU after the [`Mailbox::take`] that returns the work.
    pub fn post(&self, work: Pending) -> Notify {
        let work = u64::from(work.bits());
        let mut old = self.word.load(Ordering::Relaxed);
        loop {
            let mut new = old | work;
            if old & STATE == BLOCKED {
                new = new & !STATE | QUEUED;
            }
            // Even when nothing changes the word is written: the release half is what publishes the caller's data to
            // the vCPU that will take the bits which an earlier poster set.
            match self.word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => old = now,
            }
        }

        match old & STATE {
            BLOCKED => Notify::Enqueue,
            // The first poster kicks. A later one finds work that was not taken yet: the vCPU takes all of it before it
            // enters again, and if it is in its guest now, the first poster has met it there.
            RUNNING if old & PENDING == 0 => Notify::Kick(CpuId((old >> CPU_SHIFT) as u32)),
            _ => Notify::Nothing,
        }
    }

    /// Whether any work waits. One load; this is what each entry pays.
    #[must_use]
    #[inline]
    pub fn has_work(&self) -> bool {
        self.word.load(Ordering::Relaxed) & PENDING != 0
    }

    /// Takes all work. Called by the pCPU that runs the vCPU.
    #[inline]
    pub fn take(&self) -> Pending {
        let old = self.word.fetch_and(!PENDING, Ordering::AcqRel);
        Pending::from_bits_truncate((old & PENDING) as u16)
    }

    /// The vCPU, which was queued, runs on `cpu` from now on.
    pub fn run_on(&self, cpu: CpuId) {
        self.change_state(RUNNING, cpu);
    }

    /// The vCPU, which ran, is about to be put back into a run queue.
    pub fn requeue(&self) {
        self.change_state(QUEUED, CpuId(0));
    }

    /// The vCPU, which ran, blocks, unless work waits. Says whether it blocked.
    #[must_use]
    pub fn block(&self) -> bool {
        let running = self.word.load(Ordering::Relaxed);
        running & PENDING == 0
            && self.word.compare_exchange(running, BLOCKED, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The pCPU that runs the vCPU right now, if any does.
    #[must_use]
    pub fn running_on(&self) -> Option<CpuId> {
        let word = self.word.load(Ordering::Relaxed);
        (word & STATE == RUNNING).then_some(CpuId((word >> CPU_SHIFT) as u32))
    }

    /// Whether the vCPU waits for a post and nothing is posted that would wake it.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.word.load(Ordering::SeqCst) & (STATE | PENDING & !QUIET) == BLOCKED
    }

    fn change_state(&self, state: u64, cpu: CpuId) {
        let mut old = self.word.load(Ordering::Relaxed);
        loop {
            let new = old & PENDING | state | u64::from(cpu.0) << CPU_SHIFT;
            match self.word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }
}
