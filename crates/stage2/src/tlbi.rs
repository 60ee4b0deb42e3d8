//! Pays debts on a processor with Arm's TLB maintenance instructions (Arm ARM, D8.17).
//!
//! What an instruction by guest physical address removes is what stage 2 alone says. What both stages say together is
//! kept by virtual address, which nobody knows here, so each payment ends by removing all of that for the VM (I_CKZGP). The
//! order is:
//!
//! ```text
//!   DSB    the new entries are visible, or a walk could bring the old ones back
//!   TLBI   what stage 2 says
//!   DSB    it is gone, or the next step could be undone from it
//!   TLBI   what both stages say
//!   DSB    it is gone, and accesses that used it are done
//!   ISB
//! ```
//!
//! The VM's VMID must be in VTTBR_EL2 meanwhile: instructions concern the VM that is named there.

use crate::{Reach, Stale, What};
use addr::{Gpa, GpaRange, PAGE_BYTES};

/// The instructions, as the processor has them.
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
    /// `DSB NSH`: also local invalidations. One for stores alone does not wait for them (R_PSMWS).
    Local,
    /// `DSB ISH`: also broadcast invalidations.
    Full,
}

/// Which TLBI. `everywhere` is the form that is broadcast to the inner shareable domain (IS).
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
    /// `VMALLE1`: what both stages say.
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
    /// What the instruction takes in its register; zero for those that take none.
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

    /// Bytes that a range has.
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

/// Pages of a range that are removed one by one where there are no instructions for ranges. Beyond that, all of the VM
/// goes at once.
const ONE_BY_ONE: u64 = 16;

/// What all processors have that run the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// FEAT_TTL.
    pub ttl: bool,
    /// FEAT_TLBIRANGE.
    pub ranges: bool,
}

impl Features {
    /// Pays a debt. On return no processor that it concerns uses what it names.
    pub fn pay(&self, stale: Stale, cpu: &impl Maintenance) {
        let everywhere = stale.reach() == Reach::Everybody;
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

/// This processor forgets that the page at `gpa` denies an access, in whatever size it is cached: what a fault owes that has
/// made the tables allow it.
#[inline]
pub fn forget(gpa: Gpa, cpu: &impl Maintenance) {
    cpu.dsb(Barrier::LocalStores);
    cpu.tlbi(Tlbi::Ipa { leaves: true, everywhere: false, ipa: gpa, level: None });
    cpu.dsb(Barrier::Local);
    cpu.tlbi(Tlbi::Combined { everywhere: false });
    cpu.dsb(Barrier::Local);
    cpu.isb();
}

/// The processor has found two entries for one address and says so by a TLB conflict abort (fault status 0b110000). With
/// FEAT_BBM that is possible until a split's debt is paid, and goes to EL2 even where the guest caused it (R_FWRMB). All of
/// the VM goes from this processor's TLB (I_JCCRT), and the guest tries again.
pub fn resolve_conflict(cpu: &impl Maintenance) {
    cpu.dsb(Barrier::LocalStores);
    cpu.tlbi(Tlbi::All { everywhere: false });
    cpu.dsb(Barrier::Local);
    cpu.isb();
}

/// The instructions for a range: the largest first, and a last odd page by itself.
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
