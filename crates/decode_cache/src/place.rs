//! Where an instruction is, and what decides what its bytes mean.

use addr::Gpa;

/// What decides what bytes mean, beside the bytes: the processor's mode, numbered by whoever decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mode(pub u8);

/// Where an instruction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Address of its first byte as the guest's page tables translate it: RIP, plus the base of the code segment where
    /// that counts.
    pub rip: u64,
    /// The address space: CR3. Where tables vouch for the walk ([`Vouching::Tables`](crate::Vouching::Tables)), whatever
    /// else the way of a walk depends on must be in it as well: whether there is paging at all, and how many levels.
    pub space: u64,
    /// What its bytes mean.
    pub mode: Mode,
    /// Where the live walk finds its first byte, if the caller has walked.
    pub gpa: Option<Gpa>,
}
