//! The mailbox: how other CPUs reach a vCPU.
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
//! All changes are read-modify-writes of one word, so all CPUs see them in one order. A poster adds its bits and reads
//! the vCPU's state in the same step. A vCPU that wants to block does so only if no bit is set, in the same step. There
//! is no window between the two, and no fence to get wrong.

use bitflags::bitflags;

use crate::sync::{AtomicU64, Ordering};

bitflags! {
    /// A vCPU's pending work, taken before its next entry.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Pending: u16 {
        /// Interrupt vectors were posted.
        const INTERRUPT = 1 << 0;
        /// An NMI was posted.
        const NMI = 1 << 1;
        /// x86: an INIT was posted: reset, then wait for a start-up IPI.
        const INIT = 1 << 2;
        /// A start was posted (x86: start-up IPI, Arm: PSCI CPU_ON).
        const STARTUP = 1 << 3;
        /// The vCPU's own timer has expired.
        const TIMER = 1 << 4;
        /// The VM ends: leave the guest for ever.
        const STOP = 1 << 5;
        /// Other vCPUs have requested TLB flushes. Quiet: it does not wake a blocked vCPU, which does the flush before
        /// its next entry.
        const FLUSH = 1 << 6;
        /// The VM is paused or resumed: check which.
        const PAUSE = 1 << 7;
        /// A parent's vCPU: its children have left messages or events for it.
        const MESSAGE = 1 << 8;
        /// The vCPU has to send to others: an interrupt of its own of which only some of many have heard, or one of a
        /// device.
        const SEND = 1 << 9;
        /// Besides [`PAUSE`](Self::PAUSE): all vCPUs are to check, and this one tells others.
        const TELL = 1 << 10;
    }
}

/// Number of a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u32);

impl CpuId {
    /// Index into arrays with one element per pCPU.
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

/// What a poster must do so that the vCPU notices its post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Notify {
    /// Nothing: the vCPU sees it before its next entry, or an earlier poster has notified it.
    Nothing,
    /// Make this pCPU leave the guest, if the vCPU is in it.
    Kick(CpuId),
    /// The vCPU was blocked and counts as queued now: put it into a run queue.
    Enqueue,
}

/// See the module's description.
#[derive(Debug)]
pub struct Mailbox {
    word: AtomicU64,
}

const PENDING: u64 = 0xffff;
/// Work that does not wake a blocked vCPU.
const QUIET: u64 = Pending::FLUSH.bits() as u64;
const STATE: u64 = 3 << 16;
const BLOCKED: u64 = 0 << 16;
const QUEUED: u64 = 1 << 16;
const RUNNING: u64 = 2 << 16;
const CPU_SHIFT: u32 = 32;

impl Mailbox {
    /// The mailbox of a vCPU that waits for its first post.
    #[must_use]
    pub fn blocked() -> Self {
        Self { word: AtomicU64::new(BLOCKED) }
    }

    /// Adds quiet work ([`Pending::FLUSH`]). The vCPU's state does not change, and a blocked vCPU stays blocked.
    /// Returns whether the vCPU had no work before. If it had, the poster of that work makes it leave its guest.
    ///
    /// As for [`Mailbox::post`], the caller's earlier writes are visible after the [`Mailbox::take`] that returns the
    /// work.
    pub fn leave(&self, work: Pending) -> bool {
        self.word.fetch_or(u64::from(work.bits()), Ordering::AcqRel) & PENDING == 0
    }

    /// Adds work and returns what the caller must do.
    ///
    /// The caller's earlier writes are visible to the vCPU after the [`Mailbox::take`] that returns the work.
    pub fn post(&self, work: Pending) -> Notify {
        let work = u64::from(work.bits());
        let mut old = self.word.load(Ordering::Relaxed);
        loop {
            let mut new = old | work;
            if old & STATE == BLOCKED {
                new = new & !STATE | QUEUED;
            }
            // The word is written even if it does not change: the release half publishes the caller's data to the vCPU
            // that takes bits which an earlier poster has set.
            match self.word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => old = now,
            }
        }

        match old & STATE {
            BLOCKED => Notify::Enqueue,
            // The first poster kicks. A later one finds work that was not taken yet. The vCPU takes all of it before it
            // enters again, and if it is in its guest now, the first poster has kicked it.
            RUNNING if old & PENDING == 0 => Notify::Kick(CpuId((old >> CPU_SHIFT) as u32)),
            _ => Notify::Nothing,
        }
    }

    /// Whether there is pending work. One load, which is the cost of each entry.
    #[must_use]
    #[inline]
    pub fn has_work(&self) -> bool {
        self.word.load(Ordering::Relaxed) & PENDING != 0
    }

    /// Whether all of `work` is pending.
    #[must_use]
    pub fn has(&self, work: Pending) -> bool {
        Pending::from_bits_truncate((self.word.load(Ordering::Relaxed) & PENDING) as u16).contains(work)
    }

    /// Takes all work. Only the pCPU that runs the vCPU calls this.
    #[inline]
    pub fn take(&self) -> Pending {
        let old = self.word.fetch_and(!PENDING, Ordering::AcqRel);
        Pending::from_bits_truncate((old & PENDING) as u16)
    }

    /// The queued vCPU runs on `cpu` from now on.
    pub fn run_on(&self, cpu: CpuId) {
        self.change_state(RUNNING, cpu);
    }

    /// The running vCPU is about to return to a run queue.
    pub fn requeue(&self) {
        self.change_state(QUEUED, CpuId(0));
    }

    /// The running vCPU blocks, unless it has pending work. Returns whether it blocked.
    #[must_use]
    pub fn block(&self) -> bool {
        let running = self.word.load(Ordering::Relaxed);
        running & PENDING == 0
            && self.word.compare_exchange(running, BLOCKED, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The pCPU that runs the vCPU now, if there is one.
    #[must_use]
    pub fn running_on(&self) -> Option<CpuId> {
        let word = self.word.load(Ordering::Relaxed);
        (word & STATE == RUNNING).then_some(CpuId((word >> CPU_SHIFT) as u32))
    }

    /// Whether the vCPU is blocked and has no work that would wake it.
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
