//! Remote TLB flush for guests that never waits for a vCPU that is not running.
//!
//! ```text
//!  sender                                            each target, before every entry
//!
//!  1 publish  request into the target's words,       1 presence.enter(cpu)      "in the guest from now on"
//!             FLUSH into its mailbox                   ---- full barrier ----
//!    ---- full barrier ----                          2 work in the mailbox?
//!  2 look     which targets are in their guests?         yes: presence.leave(), take the requests, flush, again
//!  3 kick     those, all with one command                no:  VMRUN
//!  4 flush    the sender's own entries meanwhile     3 presence.leave()          after the exit
//!  5 wait     until each of those has left
//! ```
//!
//! The two barriers guarantee: either the target sees the request before it enters, or the sender sees the target in
//! its guest. A target that is not in its guest (halted, preempted, handling an exit, moving between two pCPUs) costs
//! the sender one store and one read. The sender neither wakes it nor waits for it; the target finds the request before
//! its next entry.
//!
//! A kicked target is done as soon as it has left the guest, because it finds the request before it enters again. So
//! the sender waits for an exit, never for a flush, and never for anything that a guest or the scheduler does.
//!
//! # The target's half
//!
//! [`run`] is the sender's half. The target's half is the caller's loop. It must look like this, where `has_work` is a
//! bit in an atomic word that `publish` sets by a read-modify-write *after* [`Requests::ask`]:
//!
//! ```
//! # use shootdown::{Flush, Pages, Presence, Requests};
//! # use std::sync::atomic::{AtomicBool, Ordering};
//! # let (presence, requests, has_work, cpu) = (Presence::new(), Requests::new(), AtomicBool::new(true), 0);
//! # requests.ask(Flush::Pages(Pages::new(0x1000, 2)));
//! # let mut flushed = 0;
//! # let mut flush = |flush| if let Flush::Pages(pages) = flush { flushed += pages.count() };
//! loop {
//!     presence.enter(cpu);
//!     if !has_work.load(Ordering::Relaxed) {
//!         break; // into the guest; `presence.leave()` is the first thing after it
//!     }
//!     presence.leave();
//!     // The bit before the words: a request that comes between the two sets the bit again.
//!     has_work.swap(false, Ordering::AcqRel);
//!     let taken = requests.take();
//!     match taken.whole() {
//!         true => flush(Flush::Whole),
//!         false => taken.map(Flush::Pages).for_each(&mut flush),
//!     }
//! }
//! # assert_eq!(flushed, 2);
//! ```
//!
//! A kick between `enter` and the guest's first instruction must end that entry at once. So host interrupts are masked
//! from `enter` to the entry. A vCPU that moves to another pCPU must not use old entries in that pCPU's TLB: the target
//! does a flush only on the pCPU where it takes the request.
//!
//! While the hypervisor emulates an instruction, it walks the guest's tables and uses the result a little later.
//! [`Presence::emulate`] announces this, and the sender waits for it like for a guest. It is short, and a kick would
//! not end it sooner, so the sender sends none.
//!
//! # Why no wait is endless
//!
//! * A vCPU in the hypervisor counts as done. Senders are in the hypervisor, so no sender waits for another.
//! * A waiting sender holds no lock that a kicked pCPU could need on its way out of the guest.
//! * Between `emulate` and `leave` a pCPU waits only for short locks. A holder of such a lock waits for nothing: not
//!   for a sender, and not for anything that a sender has begun.
//! * Each entry has a number: the sender does not wait for a target that has left and entered again.
//!
//! # Cost
//!
//! Per target the sender needs two locked instructions (a word of the requests, the mailbox) and two loads. They touch
//! one cache line if mailbox word (8 bytes), [`Presence`] (8) and [`Requests`] (48) are adjacent. Per shootdown it
//! needs one fence, one multicast, and the exit of the slowest kicked target. `cargo bench -p dunlin-shootdown` shows
//! about 8 ns per target plus 13, compared with 12.5 per target with three lines and a fence for each. The target needs
//! one locked instruction and one load per entry, and one store per exit. All are on that line, which other pCPUs write
//! only for a request.

#![no_std]
#![forbid(unsafe_code)]

mod cpu_set;
mod plan;
mod presence;
mod requests;
mod sender;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;

pub use cpu_set::CpuSet;
pub use plan::{CutOff, Plan};
pub use presence::{Presence, Seen};
pub use requests::{Flush, Pages, Requests, Taken};
pub use sender::{Outcome, run};
