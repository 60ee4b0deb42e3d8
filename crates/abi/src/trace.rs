//! Events of a pCPU, for `dunlin trace`.
//!
//! Events are short and name no vCPU: they belong to the vCPU of the last [`What::RunBegan`]. Times are in ticks of the
//! host's clock.

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

use crate::counters::ExitReason;

/// An event on a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in host ticks.
    pub at: u64,
    /// The event.
    pub what: What,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// The pCPU began to run a vCPU.
    RunBegan {
        /// Number of its VM.
        vm: u32,
        /// Its number within the VM.
        vcpu: u32,
    },
    /// The pCPU stopped running the vCPU.
    RunEnded(RunEnd),
    /// The vCPU exited at this time.
    Exit {
        /// The reason.
        reason: ExitReason,
        /// Ticks that the hypervisor needed for it.
        ticks: u32,
    },
    /// This pCPU has kicked others out of their guests, or woken them.
    Kicked {
        /// Number of kicked pCPUs, perhaps including this one.
        pcpus: u32,
        /// The first of them.
        first: u32,
    },
    /// The vCPU has flushed TLBs of vCPUs of its VM.
    Flushed {
        /// Number of targets, the vCPU itself not counted.
        targets: u32,
        /// Number of targets that were in their guests, so that they were kicked and waited for.
        kicked: u32,
        /// Duration, in ticks.
        ticks: u32,
    },
}

/// Why a pCPU stopped running a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunEnd {
    /// The vCPU waits for an interrupt or other work.
    Blocked,
    /// Its VM is paused: as if blocked, but no timer of its own wakes the vCPU.
    Paused,
    /// Other vCPUs are due; the vCPU goes back into a run queue.
    Preempted,
    /// Its VM ends; the vCPU never runs again.
    Ended,
}

impl RunEnd {
    /// The reason in one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Paused => "paused",
            Self::Preempted => "preempted",
            Self::Ended => "ended",
        }
    }
}

/// Some of a pCPU's events, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Events that were lost since the trace began, because the ring was full.
    pub lost: u64,
    /// The oldest unread events.
    pub events: Vec<Event>,
}
