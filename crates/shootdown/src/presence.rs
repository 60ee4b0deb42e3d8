//! Whether a vCPU is in its guest.

use crate::cpu_set::CpuSet;
use crate::sync::{AtomicU64, Ordering, store_then_look};

/// Where a vCPU is, in one word that the pCPU which runs it writes and anybody reads.
///
/// ```text
///  63                      16 15        2 1  0
/// +--------------------------+-----------+----+
/// | number of the stay       | pCPU      |mode|
/// +--------------------------+-----------+----+
/// ```
///
/// Each stay in the guest has a number of its own, so that whoever saw the vCPU in its guest can tell whether it has
/// been out since.
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
    /// A vCPU that is outside.
    #[must_use]
    pub fn new() -> Self {
        Self { word: AtomicU64::new(OUTSIDE) }
    }

    /// The vCPU is in its guest on `cpu` from now on. Whether work waits for it is to be tested after this, and is then
    /// seen if whoever left it has not seen the vCPU here.
    ///
    /// `cpu` is below [`CpuSet::CAPACITY`]: others could neither be kicked nor waited for.
    #[inline]
    pub fn enter(&self, cpu: u32) {
        self.begin(cpu, IN_GUEST);
    }

    /// The hypervisor on `cpu` uses the guest's translations from now on: it carries out one of the guest's
    /// instructions. It is waited for like the guest itself, but needs no kick. Until [`Presence::leave`] this pCPU
    /// waits for nobody who could wait for a shootdown: it would be waited for meanwhile.
    #[inline]
    pub fn emulate(&self, cpu: u32) {
        self.begin(cpu, EMULATING);
    }

    /// The vCPU uses no translation any more until it next enters.
    #[inline]
    pub fn leave(&self) {
        let stay = self.word.load(Ordering::Relaxed) & !(STAY - 1);
        self.word.store(stay | OUTSIDE, Ordering::Release);
    }

    /// Whether the vCPU is in its guest, where a kick ends its stay. For somebody who has left it work to find, and
    /// then a full barrier.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.look().0 & MODE == IN_GUEST
    }

    /// Where the vCPU is; after a full barrier, as above.
    #[must_use]
    pub fn look(&self) -> Seen {
        Seen(self.word.load(Ordering::Acquire))
    }

    #[inline]
    fn begin(&self, cpu: u32, mode: u64) {
        debug_assert!(cpu < CpuSet::CAPACITY, "cpu{cpu} is beyond what a shootdown reaches");
        // The lower bits are filled up, so that one more makes the next stay with the lower bits clear.
        let next_stay = (self.word.load(Ordering::Relaxed) | (STAY - 1)).wrapping_add(1);
        store_then_look(&self.word, next_stay + ((u64::from(cpu) & CPU) << CPU_SHIFT) + mode);
    }
}

impl Default for Presence {
    fn default() -> Self {
        Self::new()
    }
}

/// Where a vCPU was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(u64);

impl Seen {
    /// Whether it used its guest's translations.
    #[must_use]
    pub fn is_inside(self) -> bool {
        self.0 & MODE != OUTSIDE
    }

    /// Whether it needs a kick to stop doing so.
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
