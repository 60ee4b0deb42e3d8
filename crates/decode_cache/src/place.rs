//! The place of an instruction, and the mode that gives its bytes a meaning.

use addr::Gpa;

/// The processor's mode, numbered by the decoder: besides the bytes, the only input of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModeNumber(pub u8);

/// The place of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Address of its first byte, as the guest's page tables translate it: RIP, plus the code segment's base where it
    /// counts.
    pub rip: u64,
    /// The address space: CR3. If page tables are protected ([`Vouching::Tables`](crate::Vouching::Tables)), it must
    /// include all other inputs of a walk too: whether paging is on, and the number of levels.
    pub space: u64,
    /// The mode in which its bytes are decoded.
    pub mode: ModeNumber,
    /// Where a page walk finds its first byte now, if the caller has walked.
    pub gpa: Option<Gpa>,
}
