//! The race for a slot of the message page, in every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-synic --test loom --release`

#![cfg(loom)]

use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;
use synic::{Absent, Delivery, MESSAGE_BYTES, Message, MessagePage, deliver};

/// One slot: its type, its flag, and one word of its payload.
struct Page {
    kind: AtomicU32,
    pending: AtomicBool,
    word: AtomicU64,
    /// End-of-message writes of the guest that the hypervisor has not acted upon.
    eom: AtomicBool,
    type_first: bool,
}

impl Page {
    fn new(type_first: bool) -> Self {
        Self {
            kind: AtomicU32::new(0),
            pending: AtomicBool::new(false),
            word: AtomicU64::new(0),
            eom: AtomicBool::new(false),
            type_first,
        }
    }

    /// What Linux does: reads, frees, checks the flag, writes EOM. Returns the message, if there was one.
    fn guest_takes(&self) -> Option<(u32, u64)> {
        let kind = self.kind.load(Ordering::Acquire);
        if kind == 0 {
            return None;
        }
        let word = self.word.load(Ordering::Relaxed);
        self.kind.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.pending.load(Ordering::Relaxed) {
            self.eom.store(true, Ordering::SeqCst);
        }
        Some((kind, word))
    }
}

impl MessagePage for Page {
    fn kind(&self, _: usize) -> Result<u32, Absent> {
        // Loom knows the one order of all processors by fences only.
        fence(Ordering::SeqCst);
        Ok(self.kind.load(Ordering::Acquire))
    }

    fn set_pending(&self, _: usize) -> Result<(), Absent> {
        self.pending.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn write(&self, _: usize, kind: u32, body: &[u8; MESSAGE_BYTES]) -> Result<(), Absent> {
        if self.type_first {
            self.kind.store(kind, Ordering::Release);
        }
        self.pending.store(body[5] & 1 != 0, Ordering::Relaxed);
        self.word.store(body[16].into(), Ordering::Relaxed);
        self.kind.store(kind, Ordering::Release);
        Ok(())
    }
}

fn message(number: u8) -> Message {
    Message::new(number.into(), 0, &[number]).expect("a short message")
}

type Deliver = fn(&Page, usize, &Message, bool) -> Result<Delivery, Absent>;

/// The hypervisor has two messages for one slot. The guest takes one per interrupt, and one after each EOM.
fn two_messages_arrive(deliver: Deliver, type_first: bool) {
    loom::model(move || {
        let page = Arc::new(Page::new(type_first));
        assert_eq!(deliver(&page, 0, &message(1), false), Ok(Delivery::Done));

        let guest = {
            let page = page.clone();
            thread::spawn(move || (page.guest_takes(), page.guest_takes()))
        };
        let second = deliver(&page, 0, &message(2), false).expect("the page is there");
        let (first_taken, second_taken) = guest.join().expect("no panic");
        assert_eq!(first_taken, Some((1, 1)), "the first message, whole");

        match second {
            // The guest has read it, or finds it at the interrupt.
            Delivery::Done => assert_eq!(second_taken.or_else(|| page.guest_takes()), Some((2, 2)), "whole"),
            // The slot was still occupied: the guest has written EOM, and the hypervisor tries again.
            Delivery::Occupied => {
                assert!(page.eom.load(Ordering::SeqCst), "a message is stuck: the guest tells nobody");
                assert_eq!(deliver(&page, 0, &message(2), false), Ok(Delivery::Done));
                assert_eq!(page.guest_takes(), Some((2, 2)));
            }
        }
    });
}

#[test]
fn message_for_an_occupied_slot_is_never_stuck() {
    two_messages_arrive(|page, slot, message, more| deliver(page, slot, message, more), false);
}

#[test]
fn without_a_second_look_a_message_is_stuck() {
    let one_look: Deliver = |page, slot, message, more| {
        if page.kind(slot)? != 0 {
            page.set_pending(slot)?;
            return Ok(Delivery::Occupied);
        }
        deliver(page, slot, message, more)
    };
    assert!(catch_unwind(|| two_messages_arrive(one_look, false)).is_err(), "the mistake was not found");
}

#[test]
fn second_look_before_the_flag_leaves_a_message_stuck() {
    let flag_last: Deliver = |page, slot, message, more| {
        if page.kind(slot)? != 0 && page.kind(slot)? != 0 {
            page.set_pending(slot)?;
            return Ok(Delivery::Occupied);
        }
        page.write(slot, message.kind(), &message.encode(more))?;
        Ok(Delivery::Done)
    };
    assert!(catch_unwind(|| two_messages_arrive(flag_last, false)).is_err(), "the mistake was not found");
}

#[test]
fn type_written_before_the_body_shows_half_a_message() {
    let plain: Deliver = |page, slot, message, more| deliver(page, slot, message, more);
    assert!(catch_unwind(|| two_messages_arrive(plain, true)).is_err(), "the mistake was not found");
}
