//! Scheduling vCPUs on pCPUs, in three parts that do not know each other.
//!
//! * [`Mailbox`]: one word per vCPU through which everybody else reaches it. It holds the work that waits for the vCPU
//!   and where the vCPU is (blocked, queued, running on a pCPU), *in the same atomic word*, so that "there is work" and
//!   "I go to sleep" can never miss each other, and so that exactly one poster is told to enqueue or to kick.
//! * [`RunQueue`]: one per pCPU: the vCPUs that wait there, ordered by how much they have already had. The least served
//!   runs next, so nobody starves, whatever the others do.
//! * [`IdleSet`]: the pCPUs that have nothing to run. A vCPU that is pushed into a queue never waits beside one of them.
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
//! // While it runs, a poster is told whom to kick; the second one need not.
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Kick(CpuId(1)));
//! assert_eq!(mailbox.post(Pending::INTERRUPT), Notify::Nothing);
//! assert!(!mailbox.block(), "work is waiting");
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod idle_set;
mod mailbox;
mod run_queue;
mod sync;

pub use idle_set::IdleSet;
pub use mailbox::{CpuId, Mailbox, Notify, Pending};
pub use run_queue::{RunQueue, VirtualTime, WAKE_CREDIT};

#[cfg(all(test, not(loom)))]
mod tests;
