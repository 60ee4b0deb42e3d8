//! What happened on a pCPU, event by event, for `dunlin trace`.
//!
//! Events are short and speak of the pCPU that wrote them; which vCPU they are about is said by the last
//! [`What::Arrived`] before. Times are in TSC ticks of the host.

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

use crate::counters::ExitReason;

/// Something happened on a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in host ticks.
    pub at: u64,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A vCPU was given the pCPU.
    Arrived {
        /// Number of its VM.
        vm: u32,
        /// Its number within the VM.
        vcpu: u32,
    },
    /// It left the pCPU again.
    Left(Departure),
    /// It left its guest at this moment.
    Exit {
        /// Why.
        reason: ExitReason,
        /// How long the hypervisor needed for it, in ticks.
        ticks: u32,
    },
    /// This pCPU has kicked others out of their guests, or out of their sleep.
    Kicked {
        /// How many, this one perhaps among them.
        pcpus: u32,
        /// The first of them.
        first: u32,
    },
    /// The vCPU has flushed TLBs of vCPUs of its VM.
    Flushed {
        /// How many vCPUs this was for, itself not counted.
        targets: u32,
        /// How many of them were in their guests, and were kicked and waited for.
        kicked: u32,
        /// How long it took, in ticks.
        ticks: u32,
    },
}

/// How a vCPU leaves a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// It waits for an interrupt.
    Blocked,
    /// Its VM is paused.
    Paused,
    /// Others are due.
    Preempted,
    /// Its VM ends.
    Ended,
}

impl Departure {
    /// In a word.
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
    /// Events that were lost since the trace began, because nobody had read earlier ones.
    pub lost: u64,
    /// The oldest that were not read yet.
    pub events: Vec<Event>,
}
