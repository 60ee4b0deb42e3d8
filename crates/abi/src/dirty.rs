//! What is told about dirty logs: which pages of a VM were written since somebody last looked.

use serde::{Deserialize, Serialize};

use crate::payload::DirtyLogging;

/// A harvest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Its number since the log started, from 1 on.
    pub number: u64,
    /// When it began, in nanoseconds of the host since it came up.
    pub at_ns: u64,
    /// Pages of 4 KiB that were dirty.
    pub pages: u64,
    /// Nanoseconds from its begin to its end, all else that the CPU did meanwhile included.
    pub nanos: u64,
    /// Of these, nanoseconds of looking, clearing and flushing.
    pub harvest_nanos: u64,
    /// Flushes that concerned all vCPUs.
    pub flushes: u64,
}

/// How a VM's log stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyInfo {
    /// When this was so, in nanoseconds of the host since it came up.
    pub at_ns: u64,
    /// How the log that runs was started.
    pub running: Option<DirtyLogging>,
    /// Whether it has a mirror.
    pub mirror: bool,
    /// Whether the VM is paused.
    pub paused: bool,
    /// Harvests since it started.
    pub rounds: u64,
    /// Pages that they found dirty, altogether.
    pub pages: u64,
    /// Large pages that the host's own CPU has split ahead of the guest, since it started.
    pub splits_ahead: u64,
    /// Whether some are still to be split.
    pub is_splitting: bool,
    /// Flushes that concerned all vCPUs, since the VM was created.
    pub flushes: u64,
    /// Large pages that came back, since the VM was created.
    pub collapses: u64,
    /// Whether some are still to come back.
    pub is_collapsing: bool,
    /// Bytes of host memory that are in the VM's stage-2 tables.
    pub table_bytes: u64,
}

/// A VM's memory beside its mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Pages of 4 KiB that were compared.
    pub pages: u64,
    /// Those that differ.
    pub different: u64,
    /// GPA of the first that does.
    pub first: Option<u64>,
}
