//! Tells whether a vCPU is in its guest.

use crate::cpu_set::CpuSet;
use crate::sync::{AtomicU64, Ordering, store_then_look};

/// A vCPU's state in one word. The pCPU that runs the vCPU writes it, any pCPU reads it.
///
/// ```text
///  63                      16 15        2 1  0
/// +--------------------------+-----------+----+
/// | number of the entry      | pCPU      |mode|
/// +--------------------------+-----------+----+
/// ```
///
/// Each entry has a number of its own. So a sender that saw the vCPU in its guest can tell whether it has left since.
#[derive(Debug)]
pub struct Presence {
    word: AtomicU64,
}

const OUTSIDE: u64 = 0;
const IN_GUEST: u64 = 1;
const EMULATING: u64 = 2;
const MODE: u64 = 3;
const CPU_SHIFT: u32 = 2;
const CPU: u64 = 0x3fff;
const STAY: u64 = 1 << 16;

impl Presence {
    /// A vCPU outside its guest.
    #[must_use]
    pub fn new() -> Self {
        Self { word: AtomicU64::new(OUTSIDE) }
    }

    /// The vCPU is in its guest on `cpu` from now on. The caller tests for pending work after this call. It sees the
    /// work of every sender that has not seen the vCPU here.
    ///
    /// `cpu` is below [`CpuSet::CAPACITY`]: a sender could neither kick others nor wait for them.
    #[inline]
    pub fn enter(&self, cpu: u32) {
        self.begin(cpu, IN_GUEST);
    }

    /// The hypervisor on `cpu` uses the guest's translations from now on, because it emulates an instruction. A sender
    /// waits for it like for the guest, but does not kick. Until [`Presence::leave`] this pCPU must not wait for a pCPU
    /// that may wait for a shootdown: the two would wait for each other.
    #[inline]
    pub fn emulate(&self, cpu: u32) {
        self.begin(cpu, EMULATING);
    }

    /// The vCPU uses no translation until its next entry.
    #[inline]
    pub fn leave(&self) {
        let stay = self.word.load(Ordering::Relaxed) & !(STAY - 1);
        self.word.store(stay | OUTSIDE, Ordering::Release);
    }

    /// Whether the vCPU is in its guest, so that a kick makes it exit. The caller must have posted work, and then done
    /// a full barrier.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.look().0 & MODE == IN_GUEST
    }

    /// The vCPU's state; only after a full barrier, as above.
    #[must_use]
    pub fn look(&self) -> Seen {
        Seen(self.word.load(Ordering::Acquire))
    }

    #[inline]
    fn begin(&self, cpu: u32, mode: u64) {
        debug_assert!(cpu < CpuSet::CAPACITY, "cpu{cpu} is beyond what a shootdown reaches");
        // Set all lower bits, so that adding one gives the next entry's number with the lower bits clear.
        let next_stay = (self.word.load(Ordering::Relaxed) | (STAY - 1)).wrapping_add(1);
        store_then_look(&self.word, next_stay + ((u64::from(cpu) & CPU) << CPU_SHIFT) + mode);
    }
}

impl Default for Presence {
    fn default() -> Self {
        Self::new()
    }
}

/// A vCPU's state, as a sender saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(u64);

impl Seen {
    /// Whether it used its guest's translations.
    #[must_use]
    pub fn is_inside(self) -> bool {
        self.0 & MODE != OUTSIDE
    }

    /// Whether it needs a kick to stop this.
    #[must_use]
    pub fn needs_kick(self) -> bool {
        self.0 & MODE == IN_GUEST
    }

    /// The pCPU on which it did.
    #[must_use]
    pub fn cpu(self) -> u32 {
        u32::try_from(self.0 >> CPU_SHIFT & CPU).unwrap_or(0)
    }
}
