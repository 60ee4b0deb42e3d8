//! Remote TLB flush for guests that never waits for a vCPU that is not running.
//!
//! ```text
//!  the one that flushes                              each target, before every entry
//!
//!  1 publish  request into the target's words,       1 presence.enter(cpu)      "in the guest from now on"
//!             FLUSH into its mailbox                   ---- full barrier ----
//!    ---- full barrier ----                          2 work in the mailbox?
//!  2 look     which targets are in their guests?         yes: presence.leave(), take the requests, flush, again
//!  3 kick     those, all with one command                no:  VMRUN
//!  4 flush    one's own entries meanwhile            3 presence.leave()          after the exit
//!  5 wait     until each of those has left
//! ```
//!
//! Either the target sees the request before it enters, or the sender sees the target in its guest: that is what the
//! two barriers are for. A target that is not in its guest (halted, preempted, handling an exit, on its way between
//! two pCPUs) costs the sender a store and a look. It is not woken and not waited for; it meets the request when it
//! next enters.
//!
//! A target that was kicked counts as done as soon as it has left the guest: whatever it does then, it meets the
//! request before it enters again. So the sender waits for an exit, never for a flush, and never for anything that a
//! guest or the scheduler does.
//!
//! # The target's half
//!
//! [`run`] is the sender's half. The target's is the caller's loop, and it has to look like this, with `has_work` a
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
//! A kick that arrives between `enter` and the guest's first instruction must end that entry at once, so host
//! interrupts are held off from the one to the other. A vCPU that comes to a pCPU where it was not last must not find
//! what that pCPU's TLB had of it before: requests are carried out only where the vCPU is when it takes them.
//!
//! While the hypervisor carries out an instruction for the guest, it walks the guest's tables and uses what it finds
//! a while later. [`Presence::emulate`] makes that a stay like one in the guest: the sender waits for it. It is
//! short, and no kick would end it sooner, so none is sent.
//!
//! # Why nobody waits for ever
//!
//! * A vCPU in the hypervisor counts as done. Senders are in the hypervisor, so no sender waits for another.
//! * A sender waits with no lock held that a kicked pCPU could need on its way out of the guest.
//! * Between `emulate` and `leave` nobody waits for anything but short locks, and whoever holds one of these waits for nobody:
//!   not for a sender, nor for what a sender is in the middle of.
//! * Each stay has a number: a target that has left and entered again since it was seen is not waited for.
//!
//! # What it costs
//!
//! The sender: per target two locked instructions (a word of the requests, the mailbox) and two loads, on one cache
//! line if mailbox word (8 bytes), [`Presence`] (8) and [`Requests`] (48) are put together; one fence, one multicast,
//! and the exit of the slowest that is kicked. `cargo bench -p dunlin-shootdown` shows about 8 ns per target and 13
//! besides, against 12.5 per target with three lines and a fence for each. The target: per entry one locked
//! instruction and one load, per exit one store, all on that line, which nobody else writes unless there is a
//! request.

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
