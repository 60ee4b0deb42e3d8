//! What a hypervisor did to stage-2 tables and TLBs, as text, and the same once more on [`Walks`](crate::walks::Walks).
//!
//! A hypervisor that was built with debug assertions writes such lines to its log, at level `trace`:
//!
//! ```text
//! machine cpus=2 rules=arm bbm=2 hafdbs=1 levels=3
//! cpu=0 allocate table=0x7c000000 count=2            zeroed, side by side
//! cpu=0 store table=0x7c002000 index=3 bits=0x7c1    an entry of a table that nobody else knows
//! cpu=0 exchange table=0x7c000000 index=1 old=0x0 new=0x7c002003
//! cpu=1 load vmid=1 root=0x7c000000                  VTTBR_EL2
//! cpu=1 enter vmid=1 root=0x7c000000
//! cpu=1 leave
//! cpu=0 flush root=0x7c000000                        a payment begins
//! cpu=0 barrier ishst
//! cpu=0 tlbi ipas2le1is start=0x40200000 bytes=0x1000 level=1
//! cpu=0 flushed root=0x7c000000 start=0x40200000 end=0x40400000
//! cpu=0 free table=0x7c003000
//! cpu=1 entry-flushes tag                            by VMRUN's TLB_CONTROL; or all
//! full                                               what came later was not recorded
//! ```
//!
//! They stand in the order in which things happened, of all pCPUs: entries change, and are noted, in one step. An entry to
//! a guest is noted before it, an exit after it, a barrier when it is done and a TLBI before it begins, so a guest is taken
//! to run for no shorter than it did, and a barrier not to have acted before it had. In a log they
//! follow the word `stage2: `, and all other lines are skipped.
//!
//! [`Trace::replay`] tells the machine the same, and lets it walk between any two events, above all where the tables are
//! being changed. Beside what [`Walks`](crate::walks::Walks) finds wrong by itself, `flushed` is taken at its word: none
//! of the TLBs may allow more than those entries that the pCPU has changed before, in that range, and that are as it has left
//! them. One thing it takes for granted, since reads are not in the trace: who changes an entry has read the way to it from the
//! root. What guests read and
//! write is not in the trace, so a lost write shows only as the stale right by which it could be.
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

/// One thing that a pCPU does. Addresses of tables are of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An entry that said `old` says `new` now.
    Exchange {
        /// The table.
        table: u64,
        /// Which of its entries.
        index: usize,
        /// What it said.
        old: u64,
        /// What it says.
        new: u64,
    },
    /// An entry of a table that is in no tree is written.
    Store {
        /// The table.
        table: u64,
        /// Which of its entries.
        index: usize,
        /// What it says.
        bits: u64,
    },
    /// Tables side by side are taken, and zeroed.
    Allocate {
        /// The first.
        table: u64,
        /// How many.
        count: u64,
    },
    /// A table is given back.
    Free {
        /// Which.
        table: u64,
    },
    /// A DSB is done.
    Barrier(Barrier),
    /// A TLBI, of the VM that is loaded.
    Tlbi {
        /// What goes.
        invalidate: Invalidate,
        /// From all pCPUs.
        everywhere: bool,
    },
    /// The entry that comes next flushes.
    EntryFlushes {
        /// All tags, not just that of the entry.
        all: bool,
    },
    /// The pCPU turns to a VM.
    Load {
        /// Its number in TLBs.
        vmid: u32,
        /// Its root table.
        root: u64,
    },
    /// A guest is entered.
    Enter {
        /// Its number in TLBs.
        vmid: u32,
        /// Its root table.
        root: u64,
    },
    /// It was left.
    Leave,
    /// The pCPU begins to pay what is owed to a VM's TLBs.
    Flush {
        /// The VM's root table.
        root: u64,
    },
    /// It says that no TLB holds any more what was stale there.
    Flushed {
        /// The VM's root table.
        root: u64,
        /// First GPA.
        start: u64,
        /// First GPA behind.
        end: u64,
    },
}

impl Event {
    /// Whether it makes a TLB forget.
    #[must_use]
    pub fn invalidates(&self) -> bool {
        matches!(self, Self::Tlbi { .. } | Self::EntryFlushes { .. })
    }
}

/// An event, and who did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The line that it was read from.
    pub line: usize,
    /// The pCPU.
    pub cpu: usize,
    /// What it did.
    pub event: Event,
}

/// What was done, on which machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Number of pCPUs.
    pub cpus: usize,
    /// What their TLBs may do.
    pub rules: Rules,
    /// Levels of the tables, each of which has 512 entries.
    pub levels: u32,
    /// The events in their order.
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

/// What is wrong with a trace itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The line, from 1 on.
    pub line: usize,
    /// Why it is one.
    pub why: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

impl std::error::Error for Mistake {}
