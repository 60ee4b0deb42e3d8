//! The races for a slot of the message page, for the set of senders and for an event ring, in every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dunlin-synic --test loom --release`

#![cfg(loom)]

use std::num::NonZeroU32;
use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;
use synic::{Absent, Delivery, Message, MessagePage, Posted, RingPage, Rings, Rung, deliver};

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

    fn write(&self, _: usize, head: u64, tail: &[u8]) -> Result<(), Absent> {
        let [a, b, c, d, _, flags, ..] = head.to_le_bytes();
        let kind = u32::from_le_bytes([a, b, c, d]);
        if self.type_first {
            self.kind.store(kind, Ordering::Release);
        }
        self.pending.store(flags & 1 != 0, Ordering::Relaxed);
        self.word.store(tail[8].into(), Ordering::Relaxed);
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
        page.write(slot, message.head(more), message.tail())?;
        Ok(Delivery::Done)
    };
    assert!(catch_unwind(|| two_messages_arrive(flag_last, false)).is_err(), "the mistake was not found");
}

#[test]
fn type_written_before_the_body_shows_half_a_message() {
    let plain: Deliver = |page, slot, message, more| deliver(page, slot, message, more);
    assert!(catch_unwind(|| two_messages_arrive(plain, true)).is_err(), "the mistake was not found");
}

/// A set of senders: [`Posted`], or one with a mistake.
trait Set: Send + Sync + 'static {
    fn post(&self, sender: usize);
    fn take(&self) -> Option<usize>;
}

impl Set for Posted<1> {
    fn post(&self, sender: usize) {
        Posted::post(self, sender);
    }

    fn take(&self) -> Option<usize> {
        Posted::take(self)
    }
}

/// One word and its summary, whose owner clears the summary without a second look at the word.
struct ClearsLast {
    summary: AtomicU64,
    word: AtomicU64,
}

impl Set for ClearsLast {
    fn post(&self, sender: usize) {
        self.word.fetch_or(1 << sender, Ordering::Release);
        self.summary.fetch_or(1, Ordering::Release);
    }

    fn take(&self) -> Option<usize> {
        if self.summary.load(Ordering::Acquire) == 0 {
            return None;
        }
        let sender = self.word.load(Ordering::Acquire).trailing_zeros();
        if self.word.fetch_and(!1_u64.wrapping_shl(sender), Ordering::Acquire) & !1_u64.wrapping_shl(sender) == 0 {
            self.summary.store(0, Ordering::Release);
        }
        (sender < u64::BITS).then_some(sender as usize)
    }
}

/// Two senders post and then notify; the owner takes while they do, and once more when it was notified.
fn every_sender_is_taken<S: Set>(new: fn() -> S) {
    loom::model(move || {
        let set = Arc::new(new());
        let senders = [0, 1].map(|sender| {
            let set = set.clone();
            thread::spawn(move || set.post(sender))
        });
        let mut taken: Vec<_> = (0..2).filter_map(|_| set.take()).collect();
        for sender in senders {
            sender.join().expect("no panic");
        }
        taken.extend(std::iter::from_fn(|| set.take()).take(3));
        taken.sort_unstable();
        assert_eq!(taken, [0, 1]);
    });
}

#[test]
fn sender_that_posts_while_the_owner_takes_is_not_lost() {
    every_sender_is_taken(Posted::<1>::new);
}

#[test]
fn summary_cleared_without_a_second_look_loses_a_sender() {
    let new = || ClearsLast { summary: AtomicU64::new(0), word: AtomicU64::new(0) };
    assert!(catch_unwind(|| every_sender_is_taken(new)).is_err(), "the mistake was not found");
}

/// A child's vCPU sends a message. The parent takes it and resumes the child, which sends another at once.
fn child_that_is_resumed_can_send_again(takes_first: bool) {
    loom::model(move || {
        let (page, set) = (Arc::new(Page::new(false)), Arc::new(Posted::<1>::new()));
        set.post(0);
        let parent = {
            let (page, set) = (page.clone(), set.clone());
            thread::spawn(move || {
                let taken = page.guest_takes();
                if taken.is_some() {
                    set.post(0);
                }
                taken.is_some()
            })
        };
        if takes_first {
            assert_eq!(set.take(), Some(0));
        }
        assert_eq!(deliver(&*page, 0, &message(1), false), Ok(Delivery::Done));
        if !takes_first {
            set.take();
        }
        let was_resumed = parent.join().expect("no panic");
        assert_eq!(set.take().is_some(), was_resumed, "the second message");
    });
}

#[test]
fn message_sent_as_soon_as_the_first_was_read_is_not_lost() {
    child_that_is_resumed_can_send_again(true);
}

#[test]
fn sender_taken_after_its_message_was_written_is_lost() {
    let mistaken = || child_that_is_resumed_can_send_again(false);
    assert!(catch_unwind(mistaken).is_err(), "the mistake was not found");
}

/// An event ring with one place.
struct Ring {
    port: AtomicU32,
    full: AtomicBool,
    masked: AtomicBool,
    /// Calls of the parent that say that a full ring is empty.
    told: AtomicBool,
}

impl Ring {
    fn new() -> Self {
        Self {
            port: AtomicU32::new(0),
            full: AtomicBool::new(false),
            masked: AtomicBool::new(false),
            told: AtomicBool::new(false),
        }
    }

    /// What Linux does for one event (`synic_event_ring_get_queued_port`).
    fn parent_takes(&self) -> Option<u32> {
        let look = || {
            fence(Ordering::SeqCst);
            Some(self.port.load(Ordering::Relaxed)).filter(|&port| port != 0)
        };
        let mut port = look();
        if port.is_none() {
            if self.full.load(Ordering::Relaxed) {
                self.full.store(false, Ordering::Relaxed);
                self.told.store(true, Ordering::SeqCst);
                port = look();
            }
            if port.is_none() {
                self.masked.store(false, Ordering::Relaxed);
                port = look();
            }
            port?;
            self.masked.store(true, Ordering::Relaxed);
        }
        self.port.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        port
    }
}

impl RingPage for Ring {
    fn port(&self, _: usize, _: usize) -> Result<u32, Absent> {
        fence(Ordering::SeqCst);
        Ok(self.port.load(Ordering::Acquire))
    }

    fn set_port(&self, _: usize, _: usize, port: u32) -> Result<(), Absent> {
        self.port.store(port, Ordering::Release);
        Ok(())
    }

    fn set_full(&self, _: usize) -> Result<(), Absent> {
        self.full.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn is_masked(&self, _: usize) -> Result<bool, Absent> {
        fence(Ordering::SeqCst);
        Ok(self.masked.load(Ordering::Relaxed))
    }
}

type RingFn = fn(&Ring, &mut Rings<1>, NonZeroU32) -> Result<Rung, Absent>;

/// The ring has an event, the parent empties it, and another event comes.
fn second_event_is_seen(ring: RingFn, parent_was_masked: bool) {
    loom::model(move || {
        let (page, mut rings) = (Arc::new(Ring::new()), Rings::new());
        let port = |number| NonZeroU32::new(number).expect("not zero");
        assert_eq!(ring(&page, &mut rings, port(1)), Ok(Rung::Signal));
        page.masked.store(parent_was_masked, Ordering::Relaxed);
        let parent = {
            let page = page.clone();
            thread::spawn(move || [(); 3].map(|()| page.parent_takes()))
        };
        let rung = ring(&page, &mut rings, port(2)).expect("the page is there");
        let mut seen: Vec<_> = parent.join().expect("no panic").into_iter().flatten().collect();
        match rung {
            // The signal comes after the event.
            Rung::Signal => seen.extend(page.parent_takes()),
            Rung::Masked => {}
            Rung::Full => {
                assert!(page.told.load(Ordering::SeqCst), "an event is stuck: the parent tells nobody");
                assert_eq!(ring(&page, &mut rings, port(2)), Ok(Rung::Signal));
                seen.extend(page.parent_takes());
            }
        }
        assert_eq!(seen, [1, 2], "an event was not seen");
    });
}

#[test]
fn event_that_meets_a_parent_emptying_its_ring_is_seen() {
    for was_masked in [false, true] {
        second_event_is_seen(|page, rings, port| rings.ring(page, 5, port), was_masked);
    }
}

#[test]
fn without_a_second_look_at_a_full_ring_an_event_is_stuck() {
    let one_look: RingFn = |page, rings, port| {
        if page.port(5, 0)? != 0 {
            page.set_full(5)?;
            return Ok(Rung::Full);
        }
        rings.ring(page, 5, port)
    };
    assert!(catch_unwind(|| second_event_is_seen(one_look, false)).is_err(), "the mistake was not found");
}

#[test]
fn mask_read_before_the_event_is_written_leaves_it_unseen() {
    let mask_first: RingFn = |page, rings, port| {
        let is_masked = page.is_masked(5)?;
        let rung = rings.ring(page, 5, port)?;
        Ok(if rung == Rung::Full {
            rung
        } else if is_masked {
            Rung::Masked
        } else {
            Rung::Signal
        })
    };
    assert!(catch_unwind(|| second_event_is_seen(mask_first, true)).is_err(), "the mistake was not found");
}
