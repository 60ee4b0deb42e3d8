//! Corner cases of registers, slots and timers, and random sequences of timers against a naive model.

extern crate std;

use core::cell::RefCell;
use std::vec::Vec;

use hyperv_defs::msr;
use proptest::prelude::*;

use crate::{
    Absent, Expiry, Interrupt, MESSAGE_BYTES, MessagePage, Outbox, Refused, SINTS, Sint, Synic, TIMERS, Timers,
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

    fn write(&self, slot: usize, kind: u32, body: &[u8; MESSAGE_BYTES]) -> Result<(), Absent> {
        self.there()?;
        self.slots.borrow_mut()[slot] = *body;
        self.slots.borrow_mut()[slot][..4].copy_from_slice(&kind.to_le_bytes());
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
    let interrupt = Some(Interrupt { vector: 0x40, auto_eoi: false });
    assert_eq!(synic.pump(3, &page, &mut timers), interrupt);
    assert_eq!(timers.expire(160), Some(Expiry::Message(3)));
    assert_eq!(synic.pump(3, &page, &mut timers), None, "the slot is occupied");

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
    assert!(synic.pump(3, &page, &mut timers).is_some());
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
    assert_eq!(synic.pump(4, &page, &mut timers), None);
    assert!(synic.pump(3, &page, &mut timers).is_some());
}

#[test]
fn message_outlives_a_page_that_is_not_there() {
    let (synic, mut page, mut timers) = (enabled_synic(3, 0x40), Page::new(), Timers::new());
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | to_sint(3), 0), Ok(()));
    assert_eq!(timers.expire(100), Some(Expiry::Message(3)));
    page.is_there = false;
    assert_eq!(synic.pump(3, &page, &mut timers), None);
    page.is_there = true;
    assert!(synic.pump(3, &page, &mut timers).is_some());
}

#[test]
fn masked_source_gets_its_message_and_raises_nothing() {
    let (synic, page, mut timers) = (enabled_synic(3, 1 << 16), Page::new(), Timers::new());
    assert_eq!(timers.write(COUNT, 100, 0), Ok(()));
    assert_eq!(timers.write(CONFIG, ENABLED | to_sint(3), 0), Ok(()));
    assert_eq!(timers.expire(100), Some(Expiry::Message(3)));
    assert_eq!(synic.pump(3, &page, &mut timers), None);
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
    assert!(timers.expire(u64::MAX).is_some());
    let _ = timers.deadline();
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
