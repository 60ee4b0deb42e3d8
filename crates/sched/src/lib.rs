//! Schedules vCPUs on pCPUs, in independent parts.
//!
//! * [`Mailbox`]: one word per vCPU, through which all other CPUs reach it. It holds the vCPU's pending work and its
//!   state (blocked, queued, running on a pCPU) *in the same atomic word*. So "there is work" and "I block" cannot miss
//!   each other, and exactly one poster enqueues or kicks.
//! * [`Share`]: one per VM, with what its vCPUs have run together, divided by its weight; its cap, and its pCPUs.
//! * [`RunQueue`]: one per pCPU, or per core, with the vCPUs that wait there. The VM that has used the least for its
//!   weight is next, and of its vCPUs the one that has run the least. So no VM takes more by having more vCPUs, and no
//!   vCPU starves.
//! * [`IdleSet`]: the pCPUs that have nothing to run. A queued vCPU never waits while one of them is idle.
//! * [`Dormant`]: one word per VM, which tells when none of its vCPUs can ever run again.
//!
//! ```
//! use sched::{CpuId, Mailbox, Notify, Pending};
//!
//! let mailbox = Mailbox::blocked();
//! // An interrupt for a blocked vCPU: this poster, and no other, puts it into a run queue.
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Enqueue);
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Nothing);
//!
//! mailbox.run_on(CpuId(1));
//! assert_eq!(mailbox.take(), Pending::INTERRUPT);
//!
//! // While it runs, the first poster gets the pCPU to kick; the second one need not kick.
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Kick(CpuId(1)));
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Nothing);
//! assert!(!mailbox.block(), "work is waiting");
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod dormant;
mod idle_set;
mod mailbox;
mod run_queue;
mod runners;
mod share;
mod sync;

pub use dormant::Dormant;
pub use idle_set::IdleSet;
pub use mailbox::{CpuId, Mailbox, Notify, Pending};
pub use run_queue::{Claim, MAX_LAG, Member, RunQueue, Taker, Times, Turn, VirtualTime, VmKey, WAKE_CREDIT};
pub use runners::{Smt, mates, runners};
pub use share::{Cap, CpuSet, Share};

#[cfg(all(test, not(loom)))]
mod tests;
