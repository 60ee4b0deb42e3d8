//! The memory layout of the hypervisor's own state: the writers of a vCPU block's bytes, and the addresses of the
//! blocks.
//!
//! The data comes from the compiler and from the running host, so it is real, not planned.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// The fields of a struct. Sizes and offsets are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The struct's name.
    pub name: String,
    /// Size of the whole struct.
    pub bytes: u32,
    /// Alignment of the whole struct.
    pub align: u32,
    /// Bytes of a cache line, or of the lines that are fetched together.
    pub line: u32,
    /// Every byte is in one row, except those of nested structs, which also have rows of their own.
    pub rows: Vec<Row>,
}

/// A field, or bytes between fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Nesting depth of its struct.
    pub depth: u8,
    /// Offset from the start of the outermost struct.
    pub offset: u32,
    /// Its size.
    pub bytes: u32,
    /// Its writer.
    pub content: Content,
    /// The field's name; empty for bytes between fields.
    pub name: String,
    /// Its type, as in the source.
    pub kind: String,
}

/// Content of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// Written by the pCPU that runs the vCPU.
    Owner,
    /// Written by any pCPU.
    Mailbox,
    /// Not written after creation.
    Frozen,
    /// Written by any pCPU, rarely.
    Cold,
    /// A struct; its fields are the rows that follow.
    Nested,
    /// Unused.
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

    /// The writer, in words.
    #[must_use]
    pub const fn writer(self) -> &'static str {
        match self {
            Self::Owner => "its pCPU",
            Self::Mailbox => "any pCPU",
            Self::Frozen => "none",
            Self::Cold => "any pCPU, rarely",
            Self::Nested | Self::Gap => "",
        }
    }
}

/// A piece of the host's memory with an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The owner.
    pub whose: Whose,
    /// Its kind: the name of a [`Layout`], or of pages that only the owner writes.
    pub what: String,
    /// Its host virtual address.
    pub hva: u64,
    /// Its size in bytes.
    pub bytes: u32,
}

/// The owner of a [`Place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Whose {
    /// A physical CPU.
    Pcpu(u32),
    /// A VM, by its number.
    Vm(u32),
    /// A vCPU, by the numbers of its VM and of itself.
    Vcpu(u32, u32),
    /// Every pCPU has its own at this address: registers of a device that is part of the pCPU.
    EachPcpu,
}
