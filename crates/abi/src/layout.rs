//! How the hypervisor's own state lies in memory: which bytes of a vCPU's block are whose, and where the blocks are.
//!
//! What it tells comes from the compiler and from the running host, so it is what there is, not what was planned.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// The fields of a struct. Sizes and offsets are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The struct's name.
    pub name: String,
    /// Of the whole struct.
    pub bytes: u32,
    /// Of the whole struct.
    pub align: u32,
    /// Of a cache line, or of as many as are fetched together.
    pub line: u32,
    /// Every byte is in one row, but for those of structs within, which have rows of their own as well.
    pub rows: Vec<Row>,
}

/// A field, or bytes between fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// In how many structs its struct is nested.
    pub depth: u8,
    /// From the start of the outermost struct.
    pub offset: u32,
    /// Its size.
    pub bytes: u32,
    /// Who writes it.
    pub content: Content,
    /// The field's name; empty for bytes between fields.
    pub name: String,
    /// Its type, as it was written.
    pub kind: String,
}

/// What is in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// What the pCPU that runs the vCPU writes.
    Owner,
    /// What everybody writes.
    Mailbox,
    /// What nobody writes after creation.
    Frozen,
    /// What anybody writes, seldom.
    Cold,
    /// A struct; its fields are the rows that follow.
    Nested,
    /// Nothing.
    Gap,
}

impl Content {
    /// One word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Mailbox => "mailbox",
            Self::Frozen => "frozen",
            Self::Cold => "cold",
            Self::Nested => "nested",
            Self::Gap => "",
        }
    }

    /// Who writes it, in words.
    #[must_use]
    pub const fn writer(self) -> &'static str {
        match self {
            Self::Owner => "who runs it",
            Self::Mailbox => "everybody",
            Self::Frozen => "nobody",
            Self::Cold => "anybody, seldom",
            Self::Nested | Self::Gap => "",
        }
    }
}

/// A piece of the host's memory that belongs to something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// What it belongs to.
    pub whose: Whose,
    /// What it is: the name of a [`Layout`], or of pages that only the owner writes.
    pub what: String,
    /// Its host virtual address.
    pub hva: u64,
    /// Its size in bytes.
    pub bytes: u32,
}

/// What a [`Place`] belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Whose {
    /// A physical CPU.
    Pcpu(u32),
    /// A VM, by its number.
    Vm(u32),
    /// A vCPU, by the numbers of its VM and of itself.
    Vcpu(u32, u32),
    /// Every pCPU has one of its own, all at this address: registers of a device that is part of it.
    EachPcpu,
}
