//! VMBus without a channel, for a parent: HvCallPostMessage, and the host's answers.
//!
//! Dunlin has no device of this kind. But where Linux has its driver of the bus as a module, the module for
//! `/dev/mshv` uses a function of it, and the driver of a bus that nobody answers on does not stay loaded.

use hyperv_defs::vmbus::{MESSAGE_TYPE, Posted, Reply};
use hyperv_defs::{PartitionId, Status};
use sched::Pending;
use synic::{Message, Outbox};

use super::Ended;
use super::parent::Caller;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// Answers under way, at most. A guest waits for each of them.
const ROOM: usize = 4;
const NOBODY: PartitionId = PartitionId(0);

/// The host's side of the bus.
pub(in crate::arch) struct VmBus {
    answers: Mutex<Answers>,
    /// There are some. It spares the vCPUs of the parent a lock for each message about a child.
    has_some: AtomicBool,
}

struct Answers {
    /// The first `count` of them, in order.
    queue: [Option<Reply>; ROOM],
    /// The vCPU that gets them.
    vcpu: u32,
}

impl VmBus {
    pub(super) fn new() -> Self {
        Self { answers: Mutex::new(Answers { queue: [None; ROOM], vcpu: 0 }), has_some: AtomicBool::new(false) }
    }

    /// Whether an answer waits.
    pub(in crate::arch) fn has_answers(&self) -> bool {
        self.has_some.load(Ordering::Relaxed)
    }

    /// The answers that wait for a vCPU, if it is the one that gets them.
    pub(in crate::arch) fn outbox(&self, vcpu: u32) -> Option<impl Outbox + '_> {
        let is_for = self.has_some.load(Ordering::Acquire) && self.answers.lock().vcpu == vcpu;
        is_for.then_some(Waiting(self))
    }

    /// Takes a message. Returns the vCPU that has an answer now.
    fn take(&self, posted: Posted, vcpus: u32) -> Result<Option<u32>, Status> {
        let mut answers = self.answers.lock();
        if let Posted::Contact { vcpu, .. } = posted {
            if vcpu >= vcpus {
                return Err(Status::InvalidVpIndex);
            }
            // A guest that begins anew does not hear of what was before.
            *answers = Answers { queue: [None; ROOM], vcpu };
        }
        let Some(reply) = Reply::to(posted) else { return Ok(None) };
        let free = answers.queue.iter_mut().find(|place| place.is_none()).ok_or(Status::InsufficientBuffers)?;
        *free = Some(reply);
        self.has_some.store(true, Ordering::Release);
        Ok(Some(answers.vcpu))
    }
}

/// What waits for the vCPU that gets the answers.
struct Waiting<'a>(&'a VmBus);

impl Outbox for Waiting<'_> {
    fn front(&self, _: usize) -> Option<(Message, bool)> {
        let answers = self.0.answers.lock();
        let [first, second, ..] = answers.queue;
        let message = Message::new(MESSAGE_TYPE, NOBODY.0, &first?.payload())?;
        Some((message, second.is_some()))
    }

    fn delivered(&mut self, _: usize) {
        let mut answers = self.0.answers.lock();
        answers.queue.rotate_left(1);
        answers.queue[ROOM - 1] = None;
        self.0.has_some.store(answers.queue[0].is_some(), Ordering::Release);
    }
}

/// HvCallPostMessage.
pub(super) fn post(caller: &Caller<'_>, posted: Posted) -> Result<Ended, Status> {
    if let Some(vcpu) = caller.children.bus.take(posted, caller.vm.config.vcpus)? {
        caller.vm.post(vcpu, Pending::MESSAGE);
    }
    caller.done()
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const CONTACT: Posted = Posted::Contact { version: 0x5_0003, vcpu: 1 };

    /// What a vCPU finds, until nothing is left.
    fn found(bus: &VmBus, vcpu: u32) -> Vec<(u8, bool)> {
        let mut found = Vec::new();
        while let Some(mut outbox) = bus.outbox(vcpu) {
            let (message, more) = outbox.front(2).expect("the outbox is not empty");
            found.push((message.payload()[0], more));
            outbox.delivered(2);
        }
        found
    }

    #[test]
    fn answers_come_in_order_to_the_vcpu_that_made_contact() {
        let bus = VmBus::new();
        assert_eq!(bus.take(CONTACT, 2), Ok(Some(1)));
        assert_eq!(bus.take(Posted::RequestOffers, 2), Ok(Some(1)));
        assert_eq!(bus.take(Posted::Other, 2), Ok(None));
        assert_eq!(found(&bus, 0), []);
        assert_eq!(found(&bus, 1), [(15, true), (4, false)]);
        assert_eq!(bus.take(Posted::Unload, 2), Ok(Some(1)));
        assert_eq!(found(&bus, 1), [(17, false)]);
    }

    #[test]
    fn guest_that_does_not_listen_fills_its_own_queue_only() {
        let bus = VmBus::new();
        assert_eq!(bus.take(Posted::Contact { version: 0x5_0003, vcpu: 2 }, 2), Err(Status::InvalidVpIndex));
        for _ in 0..ROOM {
            assert_eq!(bus.take(Posted::RequestOffers, 2), Ok(Some(0)));
        }
        assert_eq!(bus.take(Posted::RequestOffers, 2), Err(Status::InsufficientBuffers));
        assert_eq!(bus.take(CONTACT, 2), Ok(Some(1)), "a new kernel begins with an empty queue");
        assert_eq!(found(&bus, 1), [(15, false)]);
    }
}
