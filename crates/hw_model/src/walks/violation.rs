//! Violations.

use std::fmt;

/// A rule that the code under test has broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two cached translations of an address point to different memory, or differ in size where that is not allowed.
    MultiHit(u64),
    /// A guest used a translation, or wrote through it, after it was declared gone.
    StaleUse(u64),
    /// Hardware or software read a table after it was freed.
    FreedWalk(u64),
    /// A table was freed while a TLB still points to it.
    FreedEarly(u64),
    /// The TLB of one pCPU holds translations from two roots under one VMID.
    TwoVms(u32),
    /// A thread began an invalidation and did not complete it before it entered its guest.
    NotCompleted,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MultiHit(gpa) => write!(f, "two translations that must not be cached together for {gpa:#x}"),
            Self::StaleUse(gpa) => write!(f, "an old translation of {gpa:#x} was used"),
            Self::FreedWalk(table) => write!(f, "table {table:#x} was read after it was freed"),
            Self::FreedEarly(table) => write!(f, "table {table:#x} was freed while a TLB leads to it"),
            Self::TwoVms(vmid) => write!(f, "translations of two VMs are cached under VMID {vmid}"),
            Self::NotCompleted => write!(f, "a guest was entered before an invalidation was complete"),
        }
    }
}
