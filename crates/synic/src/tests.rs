//! Corner cases of registers, slots and timers, and random sequences of timers against a naive model.

extern crate std;

use core::cell::{Cell, RefCell};
use core::num::NonZeroU32;
use std::vec::Vec;

use hyperv_defs::msr;
use proptest::prelude::*;

use crate::{
    Absent, Expiry, Interrupt, MESSAGE_BYTES, Message, MessagePage, Notice, Outbox, Posted, Pumped, Refused, RingPage,
    Rings, Rung, SINTS, Sint, Synic, TIMERS, Timers,
};

/// A message page that is there, or not.
struct Page {
    slots: RefCell<Vec<[u8; MESSAGE_BYTES]>>,
    is_there: bool,
}

impl Page {
    fn new() -> Self {
        Self { slots: RefCell::new(std::vec![[0; MESSAGE_BYTES]; SINTS]), is_there: true }
    }

    fn there(&self) -> Result<(), Absent> {
        self.is_there.then_some(()).ok_or(Absent)
    }

    /// The guest reads and frees a slot. Returns its message, and whether the guest must write EOM.
    fn take(&self, slot: usize) -> ([u8; MESSAGE_BYTES], bool) {
        let message = self.slots.borrow()[slot];
        self.slots.borrow_mut()[slot][..4].fill(0);
        (message, message[5] & 1 != 0)
    }
}

impl MessagePage for Page {
    fn kind(&self, slot: usize) -> Result<u32, Absent> {
        self.there()?;
        Ok(u32::from_le_bytes(self.slots.borrow()[slot][..4].try_into().expect("four bytes")))
    }

    fn set_pending(&self, slot: usize) -> Result<(), Absent> {
        self.there()?;
        self.slots.borrow_mut()[slot][5] |= 1;
        Ok(())
    }

    fn write(&self, slot: usize, head: u64, tail: &[u8]) -> Result<(), Absent> {
        self.there()?;
        let slot = &mut self.slots.borrow_mut()[slot];
        slot[8..][..tail.len()].copy_from_slice(tail);
        slot[..8].copy_from_slice(&head.to_le_bytes());
        Ok(())
    }
}

const CONFIG: u32 = msr::STIMER0_CONFIG;
const COUNT: u32 = msr::STIMER0_CONFIG + 1;
const ENABLED: u64 = 1;
const PERIODIC: u64 = 2;
const AUTO_ENABLE: u64 = 8;
const DIRECT: u64 = 1 << 12;

fn to_sint(sint: u64) -> u64 {
    sint << 16
}

fn vector(vector: u64) -> u64 {
    vector << 4
}

fn enabled_synic(sint: u32, value: u64) -> Synic {
    let mut synic = Synic::new();
    for (number, value) in [(msr::SCONTROL, 1), (msr::SIMP, 0x5001), (msr::SINT0 + sint, value)] {
        synic.write(number, value).expect("a register of the SynIC");
    }
    synic
}

#[test]
fn sources_are_masked_after_a_reset() {
    let synic = Synic::new();
    for sint in 0..SINTS {
        assert_eq!(synic.sint(sint).and_then(Sint::interrupt), None);
    }
    assert_eq!(synic.read(msr::SINT15), Ok(1 << 16));
    assert_eq!(synic.read(msr::SVERSION), Ok(1));
}

#[test]
fn source_with_a_vector_of_exceptions_is_refused_unless_it_is_masked() {
    let mut synic = Synic::new();
    assert_eq!(synic.write(msr::SINT0 + 2, 15), Err(Refused));
    assert_eq!(synic.write(msr::SINT0 + 2, 15 | 1 << 16), Ok(()));
    assert_eq!(synic.write(msr::SINT0 + 2, 16), Ok(()));
    assert_eq!(synic.sint(2).and_then(Sint::interrupt), Some(Interrupt { vector: 16, auto_eoi: false }));
}

#[test]
fn version_and_foreign_registers_cannot_be_written() {
    let mut synic = Synic::new();
    assert_eq!(synic.write(msr::SVERSION, 1), Err(Refused));
    assert_eq!(synic.write(msr::VP_INDEX, 0), Err(Refused));
    assert_eq!(synic.read(msr::STIMER0_CONFIG), Err(Refused));
}

#[test]
fn pages_count_only_while_the_controller_is_on() {
    let mut synic = enabled_synic(1, 0x30);
    assert_eq!((synic.message_page(), synic.flags_page(), synic.ring_page()), (Some(0x5000), None, None));
    assert_eq!(synic.write(msr::SCONTROL, 0), Ok(()));
    assert_eq!(synic.message_page(), None);
}

#[test]
fn message_that_finds_its_slot_occupied_waits_until_it_is_free() {
    let (synic, page, mut timers) = (enabled_synic(3, 0x40), Page::new(), Timers::new());
    for timer in [0, 2] {
        assert_eq!(timers.write(COUNT + timer, 100, 0), Ok(()));
        assert_eq!(timers.write(CONFIG + timer, ENABLED | to_sint(3), 0), Ok(()));
    }
    assert_eq!(timers.expire(150), Some(Expiry::Message(3)));
    let interrupt = Ok(Pumped::Message(Some(Interrupt { vector: 0x40, auto_eoi: false })));
    assert_eq!(synic.pump(3, &page, &mut timers), interrupt);
    assert_eq!(timers.expire(160), Some(Expiry::Message(3)));
    assert_eq!(synic.pump(3, &page, &mut timers), Ok(Pumped::Nothing), "the slot is occupied");

    let (first, must_tell) = page.take(3);
    assert_eq!(first[..6], [0x10, 0, 0, 0x80, 24, 1]);
    assert_eq!((first[16], first[24], first[32]), (0, 100, 150), "timer, expiration, delivery");
    assert!(must_tell, "another message waits");
    assert_eq!(synic.pump(3, &page, &mut timers), interrupt);
    let (second, must_tell) = page.take(3);
    assert_eq!((second[16], second[24], second[32]), (1, 100, 160));
    assert!(!must_tell);
}

#[test]
fn message_is_told_of_the_one_behind_it() {
    let (synic, page, mut timers) = (enabled_synic(3, 0x40), Page::new(), Timers::new());
    for timer in [0, 2] {
        assert_eq!(timers.write(COUNT + timer, 100, 0), Ok(()));
        assert_eq!(timers.write(CONFIG + timer, ENABLED | to_sint(3), 0), Ok(()));
        assert_eq!(timers.expire(150), Some(Expiry::Message(3)));
    }
    assert!(synic.pump(3, &page, &mut timers).is_ok_and(|pumped| pumped != Pumped::Nothing));
    assert!(page.take(3).1, "the guest has to tell when the slot is free");
}

#[test]
fn occupied_slot_holds_up_no_other_source() {
    let (synic, page) = (enabled_synic(3, 0x40), Page::new());
    let mut timers = Timers::new();
    page.slots.borrow_mut()[4][0] = 1;
    for (timer, sint) in [(0, 4), (2, 3)] {
        assert_eq!(timers.write(COUNT + timer, 100, 0), Ok(()));
        assert_eq!(timers.write(CONFIG + timer, ENABLED | to_sint(sint), 0), Ok(()));
        assert_eq!(timers.expire(100), Some(Expiry::Message(usize::try_from(sint).expect("small"))));
    }
    assert_eq!(synic.pump(4, &page, &mut timers), Ok(Pumped::Nothing));
    assert!(synic.pump(3, &page, &mut timers).is_ok_and(|pumped| pumped != Pumped::Nothing));
}

#[test]
fn message_outlives_a_page_that_is_not_there() {
    let (synic, mut page, mut timers) = (enabled_synic(3, 0x40), Page::new(), Timers::new());
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | to_sint(3), 0), Ok(()));
    assert_eq!(timers.expire(100), Some(Expiry::Message(3)));
    page.is_there = false;
    assert_eq!(synic.pump(3, &page, &mut timers), Err(Absent));
    page.is_there = true;
    assert!(synic.pump(3, &page, &mut timers).is_ok_and(|pumped| pumped != Pumped::Nothing));
}

#[test]
fn masked_source_gets_its_message_and_raises_nothing() {
    let (synic, page, mut timers) = (enabled_synic(3, 1 << 16), Page::new(), Timers::new());
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | to_sint(3), 0), Ok(()));
    assert_eq!(timers.expire(100), Some(Expiry::Message(3)));
    assert_eq!(synic.pump(3, &page, &mut timers), Ok(Pumped::Message(None)));
    assert_ne!(page.kind(3), Ok(0));
}

#[test]
fn timer_in_direct_mode_raises_its_vector_once_and_is_off() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(CONFIG, DIRECT | AUTO_ENABLE | vector(0xed), 0), Ok(()));
    assert_eq!(timers.deadline(), None);
    assert_eq!(timers.write(COUNT, 1000, 5), Ok(()));
    assert_eq!((timers.deadline(), timers.expire(999)), (Some(1000), None));
    assert_eq!(timers.expire(1000), Some(Expiry::Direct(Interrupt { vector: 0xed, auto_eoi: false })));
    assert_eq!((timers.deadline(), timers.expire(5000)), (None, None));
    assert_eq!(timers.read(CONFIG), Ok(DIRECT | AUTO_ENABLE | vector(0xed)), "not enabled any more");
}

#[test]
fn moment_that_has_passed_expires_at_once() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(CONFIG, DIRECT | AUTO_ENABLE | vector(0xed), 0), Ok(()));
    assert_eq!(timers.write(COUNT, 7, 1000), Ok(()));
    assert!(timers.expire(1000).is_some());
}

#[test]
fn periodic_timer_keeps_its_rhythm_and_skips_what_nobody_saw() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, 1000, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | PERIODIC | DIRECT | vector(0x80), 300), Ok(()));
    assert_eq!(timers.deadline(), Some(1300));
    assert!(timers.expire(1310).is_some());
    assert_eq!(timers.deadline(), Some(2300));
    assert!(timers.expire(5950).is_some());
    assert_eq!((timers.deadline(), timers.expire(5950)), (Some(6300), None));
}

#[test]
fn period_of_one_unit_is_no_storm() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, 1, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | PERIODIC | DIRECT | vector(0x80), 0), Ok(()));
    assert!(timers.deadline().is_some_and(|at| at >= 500));
    assert_eq!(timers.read(COUNT), Ok(1), "the guest reads what it wrote");
}

#[test]
fn timer_that_sends_to_source_zero_stays_off() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED, 0), Ok(()));
    assert_eq!((timers.read(CONFIG), timers.deadline()), (Ok(0), None));
    assert_eq!(timers.write(CONFIG, AUTO_ENABLE, 0), Ok(()));
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!((timers.read(CONFIG), timers.deadline()), (Ok(AUTO_ENABLE), None));
}

#[test]
fn reserved_bits_and_vectors_of_exceptions_are_refused_and_change_nothing() {
    let mut timers = Timers::new();
    for config in [1 << 13, 1 << 20, 1 << 63, DIRECT | vector(15)] {
        assert_eq!(timers.write(CONFIG, config, 0), Err(Refused));
    }
    assert_eq!(timers.read(CONFIG), Ok(0));
    assert_eq!(timers.write(msr::SINT0, 0, 0), Err(Refused));
}

#[test]
fn count_of_zero_stops_a_timer() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(CONFIG, DIRECT | AUTO_ENABLE | vector(0xed), 0), Ok(()));
    assert_eq!(timers.write(COUNT, 1000, 0), Ok(()));
    assert_eq!(timers.write(COUNT, 0, 0), Ok(()));
    assert_eq!((timers.deadline(), timers.read(CONFIG)), (None, Ok(DIRECT | AUTO_ENABLE | vector(0xed))));
}

#[test]
fn periods_and_moments_at_the_end_of_time_do_not_overflow() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, u64::MAX, u64::MAX), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | PERIODIC | DIRECT | vector(0x80), u64::MAX), Ok(()));
    assert_eq!((timers.deadline(), timers.expire(u64::MAX)), (None, None));
}

/// A parent sets the time of a child, and may stop it there.
#[test]
fn periodic_timer_expires_once_at_the_end_of_time() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, 1000, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | PERIODIC | DIRECT | vector(0x80), 0), Ok(()));
    assert!(timers.expire(u64::MAX).is_some());
    assert_eq!((timers.deadline(), timers.expire(u64::MAX)), (None, None));
}

#[test]
fn timer_of_a_long_period_is_restored_where_a_whole_one_no_longer_fits() {
    let mut timers = Timers::new();
    assert_eq!(timers.write(COUNT, u64::MAX - 10, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | PERIODIC | DIRECT | vector(0x80), 0), Ok(()));
    let mut restored = Timers::new();
    assert_eq!(restored.set_state(&timers.state(), 1_000), Ok(()));
    assert_eq!((timers.deadline(), restored.deadline()), (Some(u64::MAX - 10), Some(u64::MAX - 10)));
}

#[test]
fn parent_finds_the_addresses_of_its_pages_and_enables_them() {
    let mut synic = Synic::with_pages(0xd_0000, 0xd_1000);
    assert_eq!((synic.read(msr::SIMP), synic.read(msr::SIEFP)), (Ok(0xd_0000), Ok(0xd_1000)));
    assert_eq!(synic.read(msr::SIRBP), Ok(0), "that page is the parent's own");
    for (number, value) in [(msr::SIMP, 0xd_0001), (msr::SIEFP, 0xd_1001), (msr::SIRBP, 0x7001), (msr::SCONTROL, 1)] {
        assert_eq!(synic.write(number, value), Ok(()));
    }
    let pages = (synic.message_page(), synic.flags_page(), synic.ring_page());
    assert_eq!(pages, (Some(0xd_0000), Some(0xd_1000), Some(0x7000)));
}

#[test]
fn ring_of_a_source_that_is_an_intercept_tells_by_a_message() {
    let mut synic = enabled_synic(5, 0x8_00f3);
    assert_eq!(synic.notice(5), Some(Notice::Message));
    assert_eq!(synic.notice(4), None, "it is masked");
    synic.write(msr::SINT0 + 4, 0x2_0040).expect("a source");
    assert_eq!(synic.notice(4), Some(Notice::Interrupt(Interrupt { vector: 0x40, auto_eoi: true })));
    assert_eq!(synic.notice(SINTS), None);
}

#[test]
fn messages_about_children_have_the_layout_that_parents_expect() {
    let opaque = Message::opaque_intercept(hyperv_defs::PartitionId(0x100), 7);
    assert_eq!(opaque.tail(), [0, 1, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!((opaque.head(false), opaque.head(true)), (0x4_8000_003f, 0x104_8000_003f));
    let sint = Message::sint_intercept(5);
    assert_eq!((sint.kind(), sint.payload()), (0x8000_0061, &[5, 0, 0, 0][..]));
}

/// A parent's set of senders; a message carries its sender's number.
fn message_of(sender: usize) -> Option<Message> {
    Some(Message::opaque_intercept(hyperv_defs::PartitionId(1), u32::try_from(sender).ok()?))
}

#[test]
fn senders_wait_for_an_occupied_slot_and_each_is_told_of_once() {
    let (synic, page, senders) = (enabled_synic(0, 0xf3), Page::new(), Posted::<2>::new());
    for sender in [3, 70, 127, 3] {
        senders.post(sender);
    }
    let mut seen = Vec::new();
    while synic.pump_posted(0, &page, &senders, message_of).is_some() {
        assert_eq!(synic.pump_posted(0, &page, &senders, message_of), None, "the slot is occupied");
        let waits = senders.has_some();
        let (message, must_tell) = page.take(0);
        assert_eq!(must_tell, waits, "EOM is for a parent for whom more waits");
        seen.push(message[16]);
    }
    seen.sort_unstable();
    assert_eq!(seen, [3, 70, 127]);
}

#[test]
fn senders_of_an_absent_page_wait_and_those_that_are_gone_do_not() {
    let (synic, mut page, senders) = (enabled_synic(0, 0xf3), Page::new(), Posted::<1>::new());
    page.is_there = false;
    senders.post(9);
    assert_eq!(synic.pump_posted(0, &page, &senders, message_of), None);
    page.is_there = true;
    senders.post(1);
    let only_nine = |sender| message_of(sender).filter(|_| sender == 9);
    assert!(synic.pump_posted(0, &page, &senders, only_nine).is_some());
    assert_eq!(page.take(0).0[16], 9);
    senders.post(2);
    senders.withdraw(2);
    assert_eq!(synic.pump_posted(0, &page, &senders, message_of), None);
    senders.post(Posted::<1>::LIMIT);
    assert!(!senders.has_some(), "there is no such sender");
}

#[test]
fn sender_that_posts_all_the_time_does_not_hold_up_another() {
    let senders = Posted::<3>::new();
    senders.post(0);
    senders.post(130);
    let mut taken = Vec::new();
    for _ in 0..4 {
        taken.extend(senders.take());
        senders.post(0);
    }
    assert!(taken.contains(&130), "{taken:?}");
}

/// A page of event rings with two places each.
struct RingOfTwo {
    places: [Cell<u32>; 2],
    full: Cell<bool>,
    masked: Cell<bool>,
    is_there: Cell<bool>,
}

impl RingOfTwo {
    fn new() -> Self {
        Self {
            places: [Cell::new(0), Cell::new(0)],
            full: Cell::new(false),
            masked: Cell::new(false),
            is_there: Cell::new(true),
        }
    }

    fn there<T>(&self, value: T) -> Result<T, Absent> {
        self.is_there.get().then_some(value).ok_or(Absent)
    }
}

impl RingPage for RingOfTwo {
    fn port(&self, _: usize, place: usize) -> Result<u32, Absent> {
        self.there(self.places[place].get())
    }

    fn set_port(&self, _: usize, place: usize, port: u32) -> Result<(), Absent> {
        self.there(())?;
        self.places[place].set(port);
        Ok(())
    }

    fn set_full(&self, _: usize) -> Result<(), Absent> {
        self.there(())?;
        self.full.set(true);
        Ok(())
    }

    fn is_masked(&self, _: usize) -> Result<bool, Absent> {
        self.there(self.masked.get())
    }
}

fn port(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("not zero")
}

#[test]
fn events_go_round_the_ring_and_a_full_one_says_so() {
    let (page, mut rings) = (RingOfTwo::new(), Rings::<2>::new());
    assert_eq!(rings.ring(&page, 5, port(10)), Ok(Rung::Signal));
    page.masked.set(true);
    assert_eq!(rings.ring(&page, 5, port(11)), Ok(Rung::Masked));
    assert!(!page.full.get());
    assert_eq!((rings.ring(&page, 5, port(12)), page.full.get()), (Ok(Rung::Full), true));
    assert_eq!(page.places[0].replace(0), 10);
    assert_eq!(rings.ring(&page, 5, port(12)), Ok(Rung::Masked));
    assert_eq!((page.places[0].get(), page.places[1].get()), (12, 11));
}

#[test]
fn event_for_an_absent_page_or_source_changes_nothing() {
    let (page, mut rings) = (RingOfTwo::new(), Rings::<2>::new());
    page.is_there.set(false);
    assert_eq!(rings.ring(&page, 5, port(10)), Err(Absent));
    page.is_there.set(true);
    assert_eq!(rings.ring(&page, SINTS, port(10)), Err(Absent));
    assert_eq!(rings.ring(&page, 5, port(11)), Ok(Rung::Signal));
    assert_eq!(page.places[0].get(), 11, "the first place");
}

#[derive(Clone, Debug)]
enum Step {
    Config(u32, u64),
    Count(u32, u64),
    Pass(u64),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let timer = 0..u32::try_from(TIMERS).expect("few");
    let config = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), 1..4_u64).prop_map(
        |(enabled, periodic, auto, direct, sint)| {
            let flags = u64::from(enabled) | u64::from(periodic) << 1 | u64::from(auto) << 3 | u64::from(direct) << 12;
            flags | vector(0x50) | to_sint(sint)
        },
    );
    let step = prop_oneof![
        2 => (timer.clone(), config).prop_map(|(timer, config)| Step::Config(timer, config)),
        2 => (timer, 0..5000_u64).prop_map(|(timer, count)| Step::Count(timer, count)),
        4 => (0..3000_u64).prop_map(Step::Pass),
        3 => (1..4_usize).prop_map(Step::Free),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// A guest that frees slots and writes EOM when the flag says so gets each expiry of a one-shot timer, and none
    /// early.
    #[test]
    fn each_expiry_arrives_once_and_not_early(steps in steps()) {
        let mut synic = enabled_synic(1, 0x41);
        for sint in 2..4 {
            synic.write(msr::SINT0 + sint, u64::from(0x40 + sint)).expect("a source");
        }
        let (page, mut timers, mut now) = (Page::new(), Timers::new(), 0);
        for step in steps {
            match step {
                Step::Config(timer, value) => timers.write(CONFIG + 2 * timer, value, now).expect("a configuration"),
                Step::Count(timer, value) => {
                    let value = if value == 0 { 0 } else { now + value };
                    timers.write(COUNT + 2 * timer, value, now).expect("a count");
                }
                Step::Pass(time) => {
                    now += time;
                    let mut expirations = 0;
                    while let Some(expiry) = timers.expire(now) {
                        expirations += 1;
                        prop_assert!(expirations <= TIMERS, "each timer expires once at a time");
                        if let Expiry::Message(sint) = expiry {
                            let _ = synic.pump(sint, &page, &mut timers);
                        }
                    }
                }
                Step::Free(sint) => {
                    let (message, must_tell) = page.take(sint);
                    if message[0] != 0 {
                        let word = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().expect("eight bytes"));
                        prop_assert!(word(24) <= word(32) && word(32) <= now, "expired, then sent, then read");
                    }
                    let waits = timers.front(sint).is_some();
                    prop_assert!(!waits || must_tell || message[0] == 0, "a message waits and nobody is told");
                    if must_tell {
                        let _ = synic.pump(sint, &page, &mut timers);
                        prop_assert!(!waits || timers.front(sint).is_none() || page.kind(sint) != Ok(0));
                    }
                }
            }
            prop_assert!(timers.deadline().is_none_or(|at| at > now || !matches!(step, Step::Pass(_))));
        }
    }
}

#[test]
fn timers_go_on_elsewhere_where_they_were() {
    let mut timers = Timers::new();
    // One-shot in direct mode, periodic with messages, one-shot with an undelivered message, off.
    assert_eq!(timers.write(COUNT, 5000, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | DIRECT | vector(0xed), 0), Ok(()));
    assert_eq!(timers.write(COUNT + 2, 1000, 0), Ok(()));
    assert_eq!(timers.write(CONFIG + 2, ENABLED | PERIODIC | to_sint(3), 0), Ok(()));
    assert_eq!(timers.write(COUNT + 4, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG + 4, ENABLED | to_sint(4), 0), Ok(()));
    assert_eq!(timers.expire(150), Some(Expiry::Message(4)));

    let state = timers.state();
    let mut other = Timers::new();
    assert_eq!(other.set_state(&state, 700), Ok(()));
    assert_eq!(other.state(), state);
    assert_eq!(other.front(4).map(|(_, more)| more), Some(false), "its message still waits");
    other.delivered(4);
    assert_eq!(other.deadline(), Some(1000), "the period keeps its phase");
    assert_eq!(other.expire(1000), Some(Expiry::Message(3)));
    other.delivered(3);
    assert_eq!(other.deadline(), Some(2000));
    assert_eq!(other.read(CONFIG + 4), Ok(to_sint(4)), "it is off once its message is delivered");
}

#[test]
fn timers_that_no_guest_can_have_are_refused_as_a_whole() {
    let mut state = Timers::new().state();
    state.timers[0].count = 77.into();
    state.timers[3].config = (1 << 40).into();
    let mut timers = Timers::new();
    assert_eq!(timers.set_state(&state, 0), Err(Refused));
    assert_eq!(timers.state(), Timers::new().state());
}
