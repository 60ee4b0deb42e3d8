//! How many vCPUs of a VM are dormant: halted or off, so that only another vCPU of the VM can make one run again. If
//! all are, the VM has ended.
//!
//! ```text
//!  a vCPU that halts for good              a vCPU that a message wakes
//!
//!  1 add                                   1 remove
//!  2 block (Mailbox)                       2 take the message, run, post messages to others
//!    ---- full barrier ----
//!  3 are_all: the word is full,
//!    all are blocked,
//!    the word is still the same
//! ```
//!
//! Between 1 and the next removal a vCPU posts nothing. So once the word is full, a vCPU that is seen blocked stays so,
//! unless another one was removed meanwhile. Such a one may have woken the first after it was looked at, and may be
//! blocked itself when its turn comes. That shows in the word, which counts removals, too.

use crate::sync::{AtomicU64, Ordering, fence};

/// The dormant vCPUs in the word. The rest are removals.
const DORMANT: u64 = (1 << 32) - 1;
/// One removal, and one dormant vCPU less.
const REMOVAL: u64 = (1 << 32) - 1;

/// The word: dormant vCPUs in the low half, removals in the high half.
#[derive(Debug)]
pub struct Dormant {
    word: AtomicU64,
}

impl Dormant {
    /// Of a VM whose vCPUs are all dormant.
    #[must_use]
    pub fn all(vcpus: u32) -> Self {
        Self { word: AtomicU64::new(vcpus.into()) }
    }

    /// A vCPU is about to block, and only another vCPU can make it run again.
    pub fn add(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
    }

    /// A vCPU that was added does not block, or runs again. It has not looked for messages since.
    pub fn remove(&self) {
        self.word.fetch_add(REMOVAL, Ordering::SeqCst);
    }

    /// Whether all `vcpus` are dormant, and will be for ever. Each vCPU that was added asks after it has blocked, so
    /// the last one gets a true answer. `are_blocked` looks at all mailboxes ([`Mailbox::is_blocked`]).
    ///
    /// [`Mailbox::is_blocked`]: crate::Mailbox::is_blocked
    #[must_use]
    pub fn are_all(&self, vcpus: u32, are_blocked: impl FnOnce() -> bool) -> bool {
        fence(Ordering::SeqCst);
        let before = self.word.load(Ordering::SeqCst);
        before & DORMANT == u64::from(vcpus) && are_blocked() && self.word.load(Ordering::SeqCst) == before
    }
}
