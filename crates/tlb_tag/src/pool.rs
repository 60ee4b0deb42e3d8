//! A pool: the tags that VMs of one scheme share, on all pCPUs of a machine.

use alloc::boxed::Box;

use crate::cpu::CpuTags;
use crate::sync::{AtomicU64, Ordering};
use crate::tag::TagRange;
use crate::vcpu::VcpuTags;

/// How tags are assigned; see the crate's description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// One tag, a flush at each entry.
    FlushAlways,
    /// Round robin per pCPU, a flush of everything per generation.
    Generation,
    /// A home tag per vCPU, an epoch per VM.
    Epoch,
}

/// The tags of a pool, and which of them are home tags. All pCPUs share it. Creating and removing a vCPU accesses it;
/// an entry never does.
#[derive(Debug)]
pub struct Pool {
    scheme: Scheme,
    range: TagRange,
    can_flush_one_tag: bool,
    /// Bit n: tag n of the range is a home tag. Only for [`Scheme::Epoch`].
    homes: Box<[AtomicU64]>,
    /// Number of vCPUs made so far. Names are never reused, so a new vCPU is not confused with an old one.
    made: AtomicU64,
}

/// Maximum number of tags in an epoch pool: each pCPU keeps one word per tag.
const LARGEST_TABLE: u32 = 4096;

impl Pool {
    /// A pool of the tags in `range`. `can_flush_one_tag`: whether the machine can flush the entries of one tag (SVM's
    /// flush-by-ASID). Otherwise each flush drops everything on the pCPU.
    #[must_use]
    pub fn new(scheme: Scheme, range: TagRange, can_flush_one_tag: bool) -> Self {
        let range = match scheme {
            Scheme::Epoch => TagRange::new(range.first().get(), range.count().min(LARGEST_TABLE)),
            Scheme::FlushAlways | Scheme::Generation => range,
        };
        let words = if scheme == Scheme::Epoch { range.count().div_ceil(64) } else { 0 };
        Self {
            scheme,
            range,
            can_flush_one_tag,
            homes: (0..words).map(|_| AtomicU64::new(0)).collect(),
            made: AtomicU64::new(0),
        }
    }

    /// How tags are assigned.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The tags.
    #[must_use]
    pub fn range(&self) -> TagRange {
        self.range
    }

    /// The state of a pCPU that has assigned no tag yet.
    #[must_use]
    pub fn cpu(&self) -> CpuTags {
        CpuTags::new(self.scheme, self.range, self.can_flush_one_tag)
    }

    /// How many tags are some vCPU's home: none with a scheme that knows no homes.
    #[must_use]
    pub fn homes(&self) -> u32 {
        self.homes.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    }

    /// The state of a new vCPU, with a home tag if one is left.
    #[must_use]
    pub fn vcpu(&self) -> VcpuTags {
        let name = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        VcpuTags::new(self.scheme, name, self.claim_home(), self.range.first())
    }

    /// Frees the home tag of a removed vCPU. Its old entries are flushed before the next owner's first entry on each
    /// pCPU, as at any change of pCPU.
    pub fn release(&self, vcpu: VcpuTags) {
        if let Some(home) = vcpu.home() {
            self.homes[home as usize / 64].fetch_and(!(1 << (home % 64)), Ordering::AcqRel);
        }
    }

    /// Index in the range of the lowest tag that is no home tag.
    fn claim_home(&self) -> Option<u32> {
        for (index, word) in (0..).zip(&self.homes) {
            let valid = (self.range.count() - index * 64).min(64);
            loop {
                let free = word.load(Ordering::Relaxed).trailing_ones();
                if free >= valid {
                    break;
                }
                let bit = 1 << free;
                if word.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                    return Some(index * 64 + free);
                }
            }
        }
        None
    }
}
