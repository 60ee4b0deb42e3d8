//! Reports about dirty logs: which pages of a VM were written since the last round.

use serde::{Deserialize, Serialize};

use crate::payload::DirtyLogging;

/// Result of one harvest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Its number since the log started, from 1 on.
    pub number: u64,
    /// When it began, in nanoseconds since the host's start.
    pub at_ns: u64,
    /// Pages of 4 KiB that were dirty.
    pub pages: u64,
    /// Nanoseconds from its beginning to its end, including other work of the CPU.
    pub nanos: u64,
    /// Of these, nanoseconds of looking, clearing and flushing.
    pub harvest_nanos: u64,
    /// Flushes for all vCPUs.
    pub flushes: u64,
}

/// State of a VM's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyInfo {
    /// When, in nanoseconds since the host's start.
    pub at_ns: u64,
    /// Settings of the active log.
    pub running: Option<DirtyLogging>,
    /// Whether it has a mirror.
    pub mirror: bool,
    /// Whether the VM is paused.
    pub paused: bool,
    /// Harvests since it started.
    pub rounds: u64,
    /// Pages that they found dirty, in total.
    pub pages: u64,
    /// Large pages that the host's own CPU has split ahead of the guest, since the log's start.
    pub splits_ahead: u64,
    /// Whether some large pages are still to be split.
    pub is_splitting: bool,
    /// Flushes for all vCPUs, since the VM was created.
    pub flushes: u64,
    /// Large pages that came back, since the VM was created.
    pub collapses: u64,
    /// Whether some large pages are still to come back.
    pub is_collapsing: bool,
    /// Bytes of host memory in the VM's stage-2 tables.
    pub table_bytes: u64,
}

/// Comparison of a VM's memory with its mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Pages of 4 KiB that were compared.
    pub pages: u64,
    /// Pages that differ.
    pub different: u64,
    /// GPA of the first different page.
    pub first: Option<u64>,
}
