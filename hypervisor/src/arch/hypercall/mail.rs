//! What waits for the vCPUs of a parent: messages about its children.
//!
//! Any pCPU posts a message, by the number of its sender ([`Mail::post`]). The pCPU that runs the parent's vCPU
//! delivers it before the next entry. No message is stored: a sender's number says what its message is
//! ([`Mail::message_of`]). A vCPU of a child has at most one message under way, because it is suspended until the
//! parent resumes it.

use alloc::vec::Vec;

use hyperv_defs::PartitionId;
use hyperv_defs::vp::Vp;
use sched::Pending;
use synic::{Message, SINTS, Senders};

use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::vm::Vm;

/// The mail of one parent.
pub(in crate::arch) struct Mail {
    /// One for each of its vCPUs.
    inboxes: Vec<Inbox>,
    /// By number: a [`sender`], or zero for a number that nobody has.
    senders: Vec<AtomicU64>,
    /// Where the search for a free number begins: a number is not used again soon after its end.
    next: AtomicU32,
}

/// What waits for one vCPU.
#[repr(align(64))]
pub(in crate::arch) struct Inbox {
    /// Those that have a message for it.
    pub(in crate::arch) senders: Senders,
}

/// Numbers below are of the vCPU's own SINTs: their event rings have new entries. They have a word of [`Senders`] of
/// their own, and words take turns, so no child can keep the messages of others back by its doorbells.
const FIRST_VP: usize = 64;
const _: () = assert!(SINTS <= FIRST_VP);

const VP_BITS: u32 = 16;

/// A vCPU of a child, in a word. No partition has the id 0.
fn word_of(vp: Vp) -> u64 {
    vp.partition.0 << VP_BITS | u64::from(vp.index)
}

fn partition_of(word: u64) -> PartitionId {
    PartitionId(word >> VP_BITS)
}

impl Mail {
    /// None yet. `None` without memory.
    pub(super) fn new(vcpus: u32) -> Option<Self> {
        let (mut inboxes, mut senders) = (Vec::new(), Vec::new());
        inboxes.try_reserve_exact(vcpus as usize).ok()?;
        inboxes.extend((0..vcpus).map(|_| Inbox { senders: Senders::new() }));
        senders.try_reserve_exact(Senders::LIMIT).ok()?;
        senders.extend((0..Senders::LIMIT).map(|_| AtomicU64::new(0)));
        Some(Self { inboxes, senders, next: AtomicU32::new(0) })
    }

    /// What waits for a vCPU.
    pub(in crate::arch) fn inbox(&self, vcpu: u32) -> Option<&Inbox> {
        self.inboxes.get(vcpu as usize)
    }

    /// Gives a child's vCPU a number. `None`: all are used.
    pub(super) fn add_sender(&self, vp: Vp) -> Option<u32> {
        let all = Senders::LIMIT - FIRST_VP;
        let first = self.next.load(Ordering::Relaxed) as usize;
        let mut free = (0..all).map(|ahead| (first + ahead) % all);
        let found = free.find(|at| {
            let place = &self.senders[FIRST_VP + at];
            place.compare_exchange(0, word_of(vp), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        self.next.store(u32::try_from(found + 1).ok()?, Ordering::Relaxed);
        u32::try_from(FIRST_VP + found).ok()
    }

    /// A number is free again, and its messages are lost. Its vCPU posts no more.
    pub(super) fn remove_sender(&self, number: u32) {
        for inbox in &self.inboxes {
            inbox.senders.withdraw(number as usize);
        }
        if let Some(place) = self.senders.get(number as usize) {
            place.store(0, Ordering::Release);
        }
    }

    /// All numbers of a child's vCPUs are free again.
    pub(super) fn remove_senders_of(&self, id: PartitionId) {
        for (number, place) in (0..).zip(&self.senders) {
            let word = place.load(Ordering::Relaxed);
            if word != 0 && partition_of(word) == id {
                self.remove_sender(number);
            }
        }
    }

    /// The message of a sender. `None`: it has ended.
    pub(in crate::arch) fn message_of(&self, sender: usize) -> Option<Message> {
        if sender < SINTS {
            return Some(Message::sint_intercept(u32::try_from(sender).ok()?));
        }
        match self.senders.get(sender)?.load(Ordering::Acquire) {
            0 => None,
            word => {
                let [low, high, ..] = word.to_le_bytes();
                Some(Message::opaque_intercept(partition_of(word), u16::from_le_bytes([low, high]).into()))
            }
        }
    }

    /// Leaves the message of a sender with the parent's vCPU `vcpu`, which delivers it as soon as it can.
    pub(in crate::arch) fn post(&self, parent: &Vm, vcpu: u32, sender: u32) {
        // A parent that has fewer vCPUs than it says: the first one hears.
        let vcpu = if self.inbox(vcpu).is_some() { vcpu } else { 0 };
        if let Some(inbox) = self.inbox(vcpu) {
            inbox.senders.post(sender as usize);
            parent.post(vcpu, Pending::MESSAGE);
        }
    }
}
