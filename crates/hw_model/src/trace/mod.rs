//! A trace of a hypervisor's actions on stage-2 tables and TLBs, as text, and its replay on
//! [`Walks`](crate::walks::Walks).
//!
//! A hypervisor with debug assertions writes such lines to its log, at level `trace`:
//!
//! ```text
//! machine cpus=2 rules=arm bbm=2 hafdbs=1 levels=3
//! cpu=0 allocate table=0x7c000000 count=2            zeroed, adjacent
//! cpu=0 store table=0x7c002000 index=3 bits=0x7c1    an entry of a table that no other pCPU knows
//! cpu=0 exchange table=0x7c000000 index=1 old=0x0 new=0x7c002003
//! cpu=1 load vmid=1 root=0x7c000000                  VTTBR_EL2
//! cpu=1 enter vmid=1 root=0x7c000000
//! cpu=1 leave
//! cpu=0 flush root=0x7c000000                        a flush begins
//! cpu=0 barrier ishst
//! cpu=0 tlbi ipas2le1is start=0x40200000 bytes=0x1000 level=1
//! cpu=0 flushed root=0x7c000000 start=0x40200000 end=0x40400000
//! cpu=0 free table=0x7c003000
//! cpu=1 entry-flushes tag                            by VMRUN's TLB_CONTROL; or all
//! full                                               later events were not recorded
//! ```
//!
//! The lines are in the order of the events, of all pCPUs: a pCPU changes and records an entry in one step. It records
//! an entry to a guest before it, an exit after it, a barrier after it, and a TLBI before it. So in the trace a guest
//! never runs shorter than it did, and a barrier never acts earlier than it did. In a log these lines follow the word
//! `stage2: `; all other lines are skipped.
//!
//! [`Trace::replay`] repeats the events on the machine, and lets it walk between any two of them, mainly where the
//! tables are changing. Besides what [`Walks`](crate::walks::Walks) checks by itself, the replay checks each `flushed`.
//! The pCPU has changed entries in that range before. No TLB may allow more than the current values of those that are
//! still as the pCPU has left them.
//!
//! Reads are not in the trace, so the replay assumes one thing: a pCPU that changes an entry has read the path to it
//! from the root. Guests' accesses are not in the trace either, so a lost write shows only as the stale right that
//! allows it.
//!
//! ```
//! use hw_model::trace::Trace;
//!
//! let trace: Trace = "machine cpus=1 rules=nested levels=4\ncpu=0 allocate table=0x1000 count=1".parse()?;
//! assert!(trace.replay(1)?.violations.is_empty());
//! # Ok::<(), hw_model::trace::Mistake>(())
//! ```

mod replay;
#[cfg(test)]
mod tests;
mod text;

use std::fmt;

use crate::walks::{Barrier, Invalidate, Rules};
pub use replay::Outcome;

/// One event of a pCPU. Tables have host addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An entry changed from `old` to `new`.
    Exchange {
        /// The table.
        table: u64,
        /// Index of the entry.
        index: usize,
        /// Its old value.
        old: u64,
        /// Its new value.
        new: u64,
    },
    /// A write to an entry of a table that is in no tree.
    Store {
        /// The table.
        table: u64,
        /// Index of the entry.
        index: usize,
        /// Its new value.
        bits: u64,
    },
    /// Adjacent zeroed tables were allocated.
    Allocate {
        /// The first table.
        table: u64,
        /// Number of tables.
        count: u64,
    },
    /// A table was freed.
    Free {
        /// The table.
        table: u64,
    },
    /// A DSB is done.
    Barrier(Barrier),
    /// A TLBI, for the loaded VM.
    Tlbi {
        /// What it removes.
        invalidate: Invalidate,
        /// On all pCPUs.
        everywhere: bool,
    },
    /// The next entry flushes.
    EntryFlushes {
        /// All tags, not only that of the entry.
        all: bool,
    },
    /// The pCPU loads a VM.
    Load {
        /// Its VMID.
        vmid: u32,
        /// Its root table.
        root: u64,
    },
    /// The pCPU enters a guest.
    Enter {
        /// Its VMID.
        vmid: u32,
        /// Its root table.
        root: u64,
    },
    /// The pCPU has left the guest.
    Leave,
    /// The pCPU begins a flush for a VM.
    Flush {
        /// The VM's root table.
        root: u64,
    },
    /// The pCPU claims that no TLB holds stale entries of this range any more.
    Flushed {
        /// The VM's root table.
        root: u64,
        /// First GPA.
        start: u64,
        /// First GPA after the range.
        end: u64,
    },
}

impl Event {
    /// Whether it removes TLB entries.
    #[must_use]
    pub fn invalidates(&self) -> bool {
        matches!(self, Self::Tlbi { .. } | Self::EntryFlushes { .. })
    }
}

/// An event, and its pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its line number.
    pub line: usize,
    /// The pCPU.
    pub cpu: usize,
    /// The event.
    pub event: Event,
}

/// The events of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Number of pCPUs.
    pub cpus: usize,
    /// The rules of their TLBs.
    pub rules: Rules,
    /// Levels of the tables; each table has 512 entries.
    pub levels: u32,
    /// The events in order.
    pub steps: Vec<Step>,
}

impl Trace {
    /// The same trace without some events.
    #[must_use]
    pub fn without(&self, mut is_left_out: impl FnMut(&Event) -> bool) -> Self {
        let steps = self.steps.iter().filter(|step| !is_left_out(&step.event)).copied().collect();
        Self { steps, ..self.clone() }
    }
}

/// An error in the trace itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The line, from 1 on.
    pub line: usize,
    /// The reason.
    pub why: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

impl std::error::Error for Mistake {}
