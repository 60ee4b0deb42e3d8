//! Flushes on a processor with Arm's TLB maintenance instructions (Arm ARM, D8.17).
//!
//! A TLBI by guest physical address removes stage-2 entries. Combined entries of both stages are tagged by virtual
//! address, which is unknown here. So each flush ends by removing all combined entries of the VM (I_CKZGP). The order
//! is:
//!
//! ```text
//!   DSB    the new entries are visible, or a walk could bring the old ones back
//!   TLBI   stage-2 entries
//!   DSB    they are gone, or the next step could be undone from them
//!   TLBI   combined entries
//!   DSB    they are gone, and accesses that used them are done
//!   ISB
//! ```
//!
//! The VM's VMID must be in VTTBR_EL2 meanwhile, because the instructions use it.

use crate::{Scope, Stale, What};
use addr::{Gpa, GpaRange, PAGE_BYTES};

/// The processor's instructions.
pub trait Maintenance {
    /// DSB.
    fn dsb(&self, barrier: Barrier);
    /// ISB.
    fn isb(&self);
    /// TLBI.
    fn tlbi(&self, operation: Tlbi);
}

/// Which DSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// `DSB NSHST`: stores, on this processor.
    LocalStores,
    /// `DSB ISHST`: stores, for all processors.
    Stores,
    /// `DSB NSH`: also local invalidations. A DSB for stores only does not wait for them (R_PSMWS).
    Local,
    /// `DSB ISH`: also broadcast invalidations.
    Full,
}

/// Which TLBI. `everywhere` selects the form that is broadcast to the inner shareable domain (IS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tlbi {
    /// `IPAS2E1`, or `IPAS2LE1` for `leaves` only.
    Ipa {
        /// Leaves only; pointers to tables stay.
        leaves: bool,
        /// All processors.
        everywhere: bool,
        /// An address of the page.
        ipa: Gpa,
        /// The level of the entry (0: pages) if it is certain, for processors with FEAT_TTL.
        level: Option<u32>,
    },
    /// `RIPAS2E1IS`, or `RIPAS2LE1IS` (FEAT_TLBIRANGE): `(num + 1) << (5 * scale + 1)` pages from `ipa` on.
    Range {
        /// Leaves only; pointers to tables stay.
        leaves: bool,
        /// First address.
        ipa: Gpa,
        /// 0 to 3.
        scale: u32,
        /// 0 to 31.
        num: u64,
    },
    /// `VMALLE1`: combined entries of both stages.
    Combined {
        /// All processors.
        everywhere: bool,
    },
    /// `VMALLS12E1`: everything of the VM.
    All {
        /// All processors.
        everywhere: bool,
    },
}

impl Tlbi {
    /// The instruction's register operand; zero if it has none.
    #[must_use]
    pub fn operand(self) -> u64 {
        match self {
            // TTL: granule and Arm's level, which counts the other way.
            Self::Ipa { ipa, level, .. } => {
                let ttl = level.map_or(0, |level| GRANULE << 2 | u64::from(3_u32.saturating_sub(level)));
                ttl << 44 | ipa.0 >> 12
            }
            Self::Range { ipa, scale, num, .. } => GRANULE << 46 | u64::from(scale) << 44 | num << 39 | ipa.0 >> 12,
            Self::Combined { .. } | Self::All { .. } => 0,
        }
    }

    /// Bytes in a range.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Range { scale, num, .. } => (num + 1) << (5 * scale + 1 + 12),
            Self::Ipa { .. } => PAGE_BYTES,
            Self::Combined { .. } | Self::All { .. } => 0,
        }
    }
}

/// 4 KiB, where an operand names the granule.
const GRANULE: u64 = 0b01;

/// Maximum number of pages that are flushed one by one without range instructions. Above it, the whole VM is flushed.
const ONE_BY_ONE: u64 = 16;

/// TLBI features that all processors of the VM have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TlbiFeatures {
    /// FEAT_TTL.
    pub ttl: bool,
    /// FEAT_TLBIRANGE.
    pub ranges: bool,
}

impl TlbiFeatures {
    /// Flushes `stale`. On return no processor in its scope uses the old translations.
    pub fn pay(&self, stale: Stale, cpu: &impl Maintenance) {
        let everywhere = stale.scope() == Scope::AllCpus;
        let (stores, done) =
            if everywhere { (Barrier::Stores, Barrier::Full) } else { (Barrier::LocalStores, Barrier::Local) };
        let leaves = !stale.tables();
        let level = stale.level().filter(|_| self.ttl);
        let page = |ipa| Tlbi::Ipa { leaves, everywhere, ipa, level };

        match stale.what() {
            What::Nothing => return,
            What::Pages(pages) => {
                cpu.dsb(stores);
                pages.as_slice().iter().for_each(|ipa| cpu.tlbi(page(*ipa)));
            }
            What::Range(range) if range.bytes() <= ONE_BY_ONE * PAGE_BYTES => {
                cpu.dsb(stores);
                (range.start.0..range.end().0).step_by(4096).for_each(|ipa| cpu.tlbi(page(Gpa(ipa))));
            }
            What::Range(range) if self.ranges && everywhere => {
                cpu.dsb(stores);
                pieces(range, leaves).for_each(|operation| cpu.tlbi(operation));
            }
            What::Range(_) | What::Whole => {
                cpu.dsb(stores);
                cpu.tlbi(Tlbi::All { everywhere });
                cpu.dsb(done);
                cpu.isb();
                return;
            }
        }
        cpu.dsb(done);
        cpu.tlbi(Tlbi::Combined { everywhere });
        cpu.dsb(done);
        cpu.isb();
    }
}

/// Resolves a TLB conflict abort (fault status 0b110000): the processor has found two entries for one address. With
/// FEAT_BBM this can happen until a split is flushed, and it goes to EL2 even if the guest caused it (R_FWRMB). All
/// entries of the VM are removed from this processor's TLB (I_JCCRT), and the guest retries.
pub fn resolve_conflict(cpu: &impl Maintenance) {
    cpu.dsb(Barrier::LocalStores);
    cpu.tlbi(Tlbi::All { everywhere: false });
    cpu.dsb(Barrier::Local);
    cpu.isb();
}

/// The instructions for a range: the largest first, and a single one for a last odd page.
fn pieces(range: GpaRange, leaves: bool) -> impl Iterator<Item = Tlbi> {
    let mut ipa = range.start;
    core::iter::from_fn(move || {
        let pages = (range.end().0 - ipa.0) / PAGE_BYTES;
        let operation = match pages {
            0 => return None,
            1 => Tlbi::Ipa { leaves, everywhere: true, ipa, level: None },
            _ => {
                let scale = (0..4).rev().find(|scale| pages >> (5 * scale + 1) != 0).unwrap_or(0);
                let num = (pages >> (5 * scale + 1)).min(32) - 1;
                Tlbi::Range { leaves, ipa, scale, num }
            }
        };
        ipa = Gpa(ipa.0 + operation.bytes());
        Some(operation)
    })
}
