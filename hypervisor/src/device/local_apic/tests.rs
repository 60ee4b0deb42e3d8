use std::collections::BTreeSet;
use std::vec::Vec;

use fastrand::Rng;

use super::{Config, Effect, GeneralProtection, LocalApic, Mode, Pinned, TSC_TICKS_PER_TIMER_TICK};
use crate::device::interrupt::{Kind, LogicalId, Message, Pin, Target, cluster_members};

const ID: u32 = 0x23;
const SHORTEST_PERIOD: u64 = 50_000;

const BASE: u32 = 0x800;
const TPR: u32 = 0x08;
const PPR: u32 = 0x0a;
const EOI: u32 = 0x0b;
const LDR: u32 = 0x0d;
const DFR: u32 = 0x0e;
const SVR: u32 = 0x0f;
const ISR: u32 = 0x10;
const TMR: u32 = 0x18;
const IRR: u32 = 0x20;
const ESR: u32 = 0x28;
const ICR: u32 = 0x30;
const ICR_HIGH: u32 = 0x31;
const LVT_TIMER: u32 = 0x32;
const LVT_LINT0: u32 = 0x35;
const LVT_LINT1: u32 = 0x36;
const LVT_ERROR: u32 = 0x37;
const INITIAL_COUNT: u32 = 0x38;
const CURRENT_COUNT: u32 = 0x39;
const DIVIDE: u32 = 0x3e;
const SELF_IPI: u32 = 0x3f;

const MASKED: u64 = 1 << 16;
const PERIODIC: u64 = 1 << 17;
const DEADLINE: u64 = 2 << 17;
const DIVIDE_BY_1: u64 = 0b1011;

const DISABLED_BASE: u64 = 0xfee0_0000;
const XAPIC_BASE: u64 = 0xfee0_0800;
const X2APIC_BASE: u64 = 0xfee0_0c00;

fn config() -> Config {
    Config { id: ID, x2apic_offered: true, bootstrap: false, shortest_period: SHORTEST_PERIOD }
}

/// An APIC as a kernel leaves it in xAPIC mode: switched on.
fn xapic() -> LocalApic {
    let mut apic = LocalApic::new(config());
    assert_eq!(apic.write_mmio(0xf0, 0x1ff, 0), Effect::None);
    apic
}

fn x2apic() -> LocalApic {
    let mut apic = xapic();
    assert_eq!(apic.set_base_msr(X2APIC_BASE), Ok(Effect::ModeChanged));
    apic
}

fn write(apic: &mut LocalApic, register: u32, value: u64) -> Effect {
    write_at(apic, register, value, 0)
}

fn write_at(apic: &mut LocalApic, register: u32, value: u64, now: u64) -> Effect {
    apic.write_msr(BASE + register, value, now).expect("a legal write")
}

/// A write whose effect is not tested.
fn set(apic: &mut LocalApic, register: u32, value: u64) {
    set_at(apic, register, value, 0);
}

fn set_at(apic: &mut LocalApic, register: u32, value: u64, now: u64) {
    let _effect = write_at(apic, register, value, now);
}

fn read(apic: &mut LocalApic, register: u32) -> u64 {
    read_at(apic, register, 0)
}

fn read_at(apic: &mut LocalApic, register: u32, now: u64) -> u64 {
    apic.read_msr(BASE + register, || now).expect("a legal read")
}

fn mmio(register: u32) -> u16 {
    u16::try_from(register * 16).expect("inside the page")
}

fn deliver_next(apic: &mut LocalApic) -> Option<u8> {
    let vector = apic.pending()?;
    apic.deliver(vector);
    Some(vector)
}

// --- Priority, nesting, EOI ---

#[test]
fn highest_requested_vector_comes_first() {
    let mut apic = x2apic();
    for vector in [0x31, 0xef, 0x30, 0x80] {
        apic.accept(vector, false);
    }
    assert_eq!(apic.pending(), Some(0xef));
}

#[test]
fn vector_of_the_class_in_service_waits_for_the_eoi() {
    let mut apic = x2apic();
    apic.accept(0x40, false);
    assert_eq!(deliver_next(&mut apic), Some(0x40));
    apic.accept(0x4f, false);
    assert_eq!(apic.pending(), None);
    assert!(apic.has_any_request());

    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    assert_eq!(deliver_next(&mut apic), Some(0x4f));
}

#[test]
fn nested_interrupts_end_in_reverse_order() {
    let mut apic = x2apic();
    for vector in [0x35, 0x52, 0xe1] {
        apic.accept(vector, false);
        assert_eq!(deliver_next(&mut apic), Some(vector));
    }
    for (ended, priority) in [(0xe1, 0xe0), (0x52, 0x50), (0x35, 0x30)] {
        assert_eq!(read(&mut apic, PPR), priority);
        let word = ISR + ended / 32;
        assert_ne!(read(&mut apic, word) & 1 << (ended % 32), 0);
        assert_eq!(write(&mut apic, EOI, 0), Effect::None);
        assert_eq!(read(&mut apic, word) & 1 << (ended % 32), 0);
    }
    assert_eq!(read(&mut apic, PPR), 0);
}

#[test]
fn same_vector_can_be_requested_while_it_is_in_service() {
    let mut apic = x2apic();
    apic.accept(0x40, false);
    assert_eq!(deliver_next(&mut apic), Some(0x40));
    apic.accept(0x40, false);
    apic.accept(0x40, false);
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    assert_eq!(deliver_next(&mut apic), Some(0x40));
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    assert_eq!(apic.pending(), None);
}

#[test]
fn vector_with_auto_eoi_ends_as_it_is_delivered() {
    let mut apic = x2apic();
    apic.set_auto_eoi([0x41, 0xf3].into_iter());
    apic.accept(0xf3, false);
    assert_eq!(deliver_next(&mut apic), Some(0xf3));
    assert_eq!(read(&mut apic, PPR), 0);
    for vector in [0x40, 0x41] {
        apic.accept(vector, false);
    }
    assert_eq!(deliver_next(&mut apic), Some(0x41));
    assert_eq!(deliver_next(&mut apic), Some(0x40), "the neighbour in its class waits for nobody");
    assert_eq!(read(&mut apic, PPR), 0x40, "and has to be ended as ever");

    apic.set_auto_eoi(core::iter::empty());
    apic.accept(0xf3, false);
    assert_eq!(deliver_next(&mut apic), Some(0xf3));
    assert_eq!(read(&mut apic, PPR), 0xf0);
}

#[test]
fn vector_with_auto_eoi_that_did_not_arrive_is_requested_again() {
    let mut apic = x2apic();
    apic.set_auto_eoi([0xf3].into_iter());
    apic.accept(0xf3, false);
    assert_eq!(deliver_next(&mut apic), Some(0xf3));
    apic.retract(0xf3);
    assert_eq!(deliver_next(&mut apic), Some(0xf3));
    assert_eq!(apic.pending(), None);
}

#[test]
fn eoi_without_an_interrupt_in_service_does_nothing() {
    let mut apic = x2apic();
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    apic.accept(0x40, false);
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    assert_eq!(apic.pending(), Some(0x40));
}

#[test]
fn task_priority_holds_back_its_own_class_and_those_below() {
    let mut apic = x2apic();
    apic.accept(0x4f, false);
    set(&mut apic, TPR, 0x40);
    assert_eq!(apic.pending(), None);
    assert!(apic.is_held_by_task_priority());
    set(&mut apic, TPR, 0x3f);
    assert_eq!(apic.pending(), Some(0x4f));
    assert!(!apic.is_held_by_task_priority());
}

#[test]
fn what_an_interrupt_in_service_holds_back_is_not_held_by_the_task_priority() {
    let mut apic = x2apic();
    apic.accept(0x80, false);
    assert_eq!(deliver_next(&mut apic), Some(0x80));
    set(&mut apic, TPR, 0x50);
    apic.accept(0x55, false);
    assert!(!apic.is_held_by_task_priority());
    set(&mut apic, EOI, 0);
    assert!(apic.is_held_by_task_priority());
}

#[test]
fn processor_priority_is_the_higher_of_task_and_service() {
    let mut apic = x2apic();
    apic.accept(0x5a, false);
    assert_eq!(deliver_next(&mut apic), Some(0x5a));
    for (task, processor) in [(0, 0x50), (0x4f, 0x50), (0x53, 0x53), (0x61, 0x61)] {
        set(&mut apic, TPR, task);
        assert_eq!(read(&mut apic, PPR), processor);
    }
}

#[test]
fn cr8_shows_the_class_and_keeps_the_rest_of_the_task_priority() {
    let mut apic = x2apic();
    set(&mut apic, TPR, 0x57);
    assert_eq!(apic.cr8(), 5);
    apic.set_cr8(5);
    assert_eq!(read(&mut apic, TPR), 0x57);
    apic.set_cr8(0xff);
    assert_eq!(read(&mut apic, TPR), 0xf0);
}

#[test]
fn interrupt_that_did_not_reach_the_guest_is_requested_again() {
    let mut apic = x2apic();
    apic.accept(0x41, false);
    apic.accept(0x93, true);
    for vector in [0x93, 0x93, 0x93] {
        assert_eq!(deliver_next(&mut apic), Some(vector));
        apic.retract(vector);
    }
    // Not in service: nothing happens.
    apic.retract(0x41);
    assert_eq!(deliver_next(&mut apic), Some(0x93));
    assert_eq!(apic.pending(), None, "the lower one waits");
    assert_eq!(apic.end_of_interrupt(), Effect::EndOfInterrupt { vector: 0x93 });
    assert_eq!(deliver_next(&mut apic), Some(0x41));
}

#[test]
fn deliver_leaves_alone_what_may_not_be_delivered() {
    let mut apic = x2apic();
    apic.deliver(0x40);
    apic.deliver(0);
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);

    apic.accept(0x40, false);
    set(&mut apic, TPR, 0x40);
    apic.deliver(0x40);
    set(&mut apic, TPR, 0);
    assert_eq!(apic.pending(), Some(0x40));
}

#[test]
fn only_the_end_of_a_level_interrupt_is_told() {
    let mut apic = x2apic();
    apic.accept(0x41, false);
    apic.accept(0x52, true);
    assert_eq!(read(&mut apic, TMR + 2), 1 << 18);
    assert_eq!(deliver_next(&mut apic), Some(0x52));
    assert_eq!(write(&mut apic, EOI, 0), Effect::EndOfInterrupt { vector: 0x52 });
    assert_eq!(deliver_next(&mut apic), Some(0x41));
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);

    // Another vector of a class that has seen a level.
    apic.accept(0x53, false);
    assert_eq!(deliver_next(&mut apic), Some(0x53));
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);

    // The same vector as an edge, one by one and in words.
    apic.accept(0x52, false);
    assert_eq!(deliver_next(&mut apic), Some(0x52));
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    apic.accept(0x52, true);
    apic.accept_words(&[0, 1 << 18, 0, 0]);
    assert_eq!(deliver_next(&mut apic), Some(0x52));
    assert_eq!(write(&mut apic, EOI, 0), Effect::None);
    assert_eq!(read(&mut apic, TMR + 2), 0);
}

#[test]
fn end_of_an_edge_is_nobodys_business_if_nothing_else_waits_or_is_in_service() {
    let mut apic = x2apic();
    assert!(!apic.has_only_an_edge(), "nothing is requested");
    apic.accept(0x51, false);
    assert!(apic.has_only_an_edge());
    for (vector, level) in [(0x52, false), (0x41, false), (0x61, true)] {
        let mut with_another = x2apic();
        with_another.accept(0x51, false);
        with_another.accept(vector, level);
        assert!(!with_another.has_only_an_edge(), "{vector:#x} waits, too");
    }
    set(&mut apic, TPR, 0x60);
    assert!(!apic.has_only_an_edge(), "it may not be delivered now");
    set(&mut apic, TPR, 0);
    apic.deliver(0x51);
    assert!(!apic.has_only_an_edge(), "it is not requested any more");
    apic.accept(0x61, false);
    assert!(!apic.has_only_an_edge(), "another one is in service");

    let mut level = x2apic();
    level.accept(0x51, true);
    assert!(!level.has_only_an_edge(), "an I/O APIC waits for its end");
    let mut ends_itself = x2apic();
    ends_itself.set_auto_eoi([0x51].into_iter());
    ends_itself.accept(0x51, false);
    assert!(!ends_itself.has_only_an_edge(), "nobody ends it");
}

#[test]
fn posted_words_request_each_of_their_vectors() {
    let mut apic = x2apic();
    apic.accept_words(&[1 << 16 | 1 << 63, 1, 1 << 15 | 1 << 16, 1 << 63]);
    let mut delivered = Vec::new();
    while let Some(vector) = deliver_next(&mut apic) {
        delivered.push(vector);
        set(&mut apic, EOI, 0);
    }
    assert_eq!(delivered, [0xff, 0x90, 0x8f, 0x40, 0x3f, 0x10]);
}

#[test]
fn apic_that_is_switched_off_accepts_nothing_and_holds_what_it_had() {
    let mut apic = x2apic();
    apic.accept(0x40, false);
    set(&mut apic, SVR, 0xff);
    assert!(!apic.is_enabled());
    assert_eq!(apic.pending(), None);
    apic.accept(0x50, false);
    apic.accept_words(&[0, 0, 1, 0]);
    set(&mut apic, SVR, 0x1ff);
    assert_eq!(deliver_next(&mut apic), Some(0x40));
    set(&mut apic, EOI, 0);
    assert!(!apic.has_any_request());
}

#[test]
fn switching_off_masks_all_local_interrupts_for_good() {
    let mut apic = x2apic();
    set(&mut apic, LVT_TIMER, 0x40);
    set(&mut apic, INITIAL_COUNT, 1000);
    assert_eq!(write(&mut apic, SVR, 0xff), Effect::TimerChanged);
    assert_eq!(apic.deadline(), None);
    set(&mut apic, LVT_TIMER, 0x40);
    assert_eq!(read(&mut apic, LVT_TIMER), 0x40 | MASKED);
    set(&mut apic, SVR, 0x1ff);
    assert_eq!(read(&mut apic, LVT_TIMER), 0x40 | MASKED);
}

#[derive(Default)]
struct Model {
    irr: BTreeSet<u8>,
    isr: BTreeSet<u8>,
    level: BTreeSet<u8>,
    tpr: u8,
    on: bool,
}

impl Model {
    fn class_in_service(&self) -> u8 {
        self.isr.last().map_or(0, |vector| vector >> 4)
    }

    fn pending(&self) -> Option<u8> {
        let floor = self.class_in_service().max(self.tpr >> 4);
        self.irr.last().copied().filter(|vector| self.on && vector >> 4 > floor)
    }

    fn accept(&mut self, vector: u8, level: bool) {
        if self.on && vector >= 16 {
            self.irr.insert(vector);
            if level {
                self.level.insert(vector)
            } else {
                self.level.remove(&vector)
            };
        }
    }

    fn words(set: &BTreeSet<u8>) -> [u64; 8] {
        let mut words = [0; 8];
        for vector in set {
            words[usize::from(vector / 32)] |= 1 << (vector % 32);
        }
        words
    }
}

#[test]
fn random_histories_agree_with_sets_of_vectors() {
    for seed in 1..=40 {
        let mut random = Rng::with_seed(seed);
        let mut apic = x2apic();
        let mut model = Model { on: true, ..Model::default() };
        // Few vectors make collisions common.
        let vectors: Vec<u8> = (0..1 + random.u64(..12)).map(|_| random.u8(..)).collect();

        for _ in 0..4_000 {
            let any = vectors[random.usize(..vectors.len())];
            match random.u64(..16) {
                0..=3 => {
                    let level = random.u64(..4) == 0;
                    apic.accept(any, level);
                    model.accept(any, level);
                }
                4 => {
                    let mut words = [0; 4];
                    for vector in vectors.iter().filter(|&vector| vector & 3 != any & 3) {
                        words[usize::from(vector / 64)] |= 1 << (vector % 64);
                        model.accept(*vector, false);
                    }
                    apic.accept_words(&words);
                }
                5..=9 => {
                    let vector = model.pending();
                    assert_eq!(deliver_next(&mut apic), vector);
                    if let Some(vector) = vector {
                        model.irr.remove(&vector);
                        model.isr.insert(vector);
                    }
                }
                10..=13 => {
                    let expected = match model.isr.pop_last() {
                        Some(vector) if model.level.contains(&vector) => Effect::EndOfInterrupt { vector },
                        _ => Effect::None,
                    };
                    assert_eq!(write(&mut apic, EOI, 0), expected);
                }
                14 => {
                    model.tpr = if random.u64(..2) == 0 { 0 } else { random.u8(..) };
                    set(&mut apic, TPR, model.tpr.into());
                }
                _ => {
                    model.on = random.u64(..4) != 0;
                    set(&mut apic, SVR, if model.on { 0x1ff } else { 0xff });
                }
            }

            assert_eq!(apic.pending(), model.pending());
            assert_eq!(apic.has_any_request(), !model.irr.is_empty());
            let service_priority = model.class_in_service() << 4;
            assert_eq!(
                read(&mut apic, PPR),
                if model.tpr >> 4 >= service_priority >> 4 { model.tpr } else { service_priority }.into()
            );
            for (first, set) in [(IRR, &model.irr), (ISR, &model.isr), (TMR, &model.level)] {
                for (word, expected) in (0..).zip(Model::words(set)) {
                    assert_eq!(read(&mut apic, first + word), expected);
                }
            }
        }
    }
}

#[test]
fn every_accepted_request_is_delivered_exactly_once() {
    let mut random = Rng::with_seed(77);
    let mut apic = x2apic();
    let mut owed = BTreeSet::new();
    for _ in 0..50_000 {
        let vector = random.u8(..).max(16);
        match random.u64(..4) {
            0 => {
                apic.accept(vector, random.u64(..2) == 0);
                owed.insert(vector);
            }
            1 => {
                if let Some(vector) = deliver_next(&mut apic) {
                    assert!(owed.remove(&vector), "delivered twice or never requested");
                }
            }
            2 => {
                let _effect = apic.end_of_interrupt();
            }
            _ => apic.set_cr8(random.u8(..) & 7),
        }
    }
    apic.set_cr8(0);
    for _ in 0..16 {
        let _effect = apic.end_of_interrupt();
    }
    while let Some(vector) = deliver_next(&mut apic) {
        assert!(owed.remove(&vector));
        let _effect = apic.end_of_interrupt();
    }
    assert!(owed.is_empty(), "lost: {owed:x?}");
}

// --- Modes ---

#[test]
fn modes_change_as_the_manual_allows() {
    let invalid = DISABLED_BASE | 1 << 10;
    let table = [
        (DISABLED_BASE, DISABLED_BASE, true),
        (DISABLED_BASE, XAPIC_BASE, true),
        (DISABLED_BASE, X2APIC_BASE, false),
        (XAPIC_BASE, DISABLED_BASE, true),
        (XAPIC_BASE, XAPIC_BASE, true),
        (XAPIC_BASE, X2APIC_BASE, true),
        (X2APIC_BASE, DISABLED_BASE, true),
        (X2APIC_BASE, XAPIC_BASE, false),
        (X2APIC_BASE, X2APIC_BASE, true),
        (DISABLED_BASE, invalid, false),
        (XAPIC_BASE, invalid, false),
        (X2APIC_BASE, invalid, false),
    ];
    for (from, to, is_legal) in table {
        let mut apic = LocalApic::new(config());
        if from != XAPIC_BASE {
            assert_eq!(apic.set_base_msr(from), Ok(Effect::ModeChanged));
        }
        let expected = match (is_legal, from == to) {
            (false, _) => Err(GeneralProtection),
            (true, true) => Ok(Effect::None),
            (true, false) => Ok(Effect::ModeChanged),
        };
        assert_eq!(apic.set_base_msr(to), expected, "{from:#x} to {to:#x}");
        assert_eq!(apic.base_msr(), if is_legal { to } else { from });
    }
}

#[test]
fn base_register_refuses_reserved_bits() {
    let mut apic = LocalApic::new(Config { bootstrap: true, ..config() });
    assert_eq!(apic.base_msr(), XAPIC_BASE | 1 << 8);
    for bit in [0, 1, 2, 3, 4, 5, 6, 7, 9] {
        assert_eq!(apic.set_base_msr(XAPIC_BASE | 1 << bit), Err(GeneralProtection));
    }
    assert_eq!(apic.set_base_msr(u64::MAX), Err(GeneralProtection));
    assert_eq!(apic.base_msr(), XAPIC_BASE | 1 << 8);
    assert_eq!(apic.set_base_msr(XAPIC_BASE), Ok(Effect::None));
    assert_eq!(apic.base_msr(), XAPIC_BASE | 1 << 8, "the boot processor stays what it is");
}

#[test]
fn registers_move_in_any_mode_and_stay_there_through_resets() {
    let mut apic = xapic();
    let _effect = apic.write_mmio(mmio(TPR), 0x20, 0);
    assert_eq!(apic.set_base_msr(0xfed4_0800), Ok(Effect::None));
    assert_eq!((apic.mmio_base(), apic.base_msr()), (0xfed4_0000, 0xfed4_0800));
    assert_eq!(apic.read_mmio(mmio(TPR), || 0), 0x20, "nothing but the address has changed");

    assert_eq!(apic.set_base_msr(0xfed4_0c00), Ok(Effect::ModeChanged));
    assert_eq!(apic.base_msr(), 0xfed4_0c00);
    apic.init();
    assert_eq!(apic.base_msr(), 0xfed4_0c00, "INIT leaves the MSR as it is");
    assert_eq!(apic.set_base_msr(0xfed5_0000), Ok(Effect::ModeChanged));
    assert_eq!(apic.base_msr(), 0xfed5_0000);
    assert_eq!(apic.set_base_msr(XAPIC_BASE), Ok(Effect::ModeChanged));
    assert_eq!((apic.mmio_base(), apic.base_msr()), (0xfee0_0000, XAPIC_BASE));
}

#[test]
fn refused_write_of_the_base_register_moves_nothing() {
    let mut apic = x2apic();
    assert_eq!(apic.set_base_msr(0xfed4_0800), Err(GeneralProtection), "from x2APIC to xAPIC");
    assert_eq!((apic.mmio_base(), apic.base_msr()), (0xfee0_0000, X2APIC_BASE));
}

#[test]
fn x2apic_that_is_not_offered_is_refused() {
    let mut apic = LocalApic::new(Config { x2apic_offered: false, ..config() });
    assert_eq!(apic.set_base_msr(X2APIC_BASE), Err(GeneralProtection));
    assert_eq!(apic.mode(), Mode::XApic);
}

#[test]
fn requests_survive_the_change_to_x2apic() {
    let mut apic = xapic();
    apic.accept(0x44, false);
    let _effect = apic.write_mmio(mmio(TPR), 0x20, 0);
    let _effect = apic.write_mmio(mmio(ICR_HIGH), 0x0700_0000, 0);
    assert_eq!(apic.set_base_msr(X2APIC_BASE), Ok(Effect::ModeChanged));
    assert_eq!(apic.pending(), Some(0x44));
    assert_eq!(read(&mut apic, TPR), 0x20);
    assert_eq!(read(&mut apic, ICR), 0, "the destination was written in the other format");
}

#[test]
fn apic_comes_back_from_disabled_as_after_reset() {
    let mut apic = x2apic();
    apic.accept(0x44, false);
    assert_eq!(apic.set_base_msr(DISABLED_BASE), Ok(Effect::ModeChanged));
    apic.accept(0x55, false);
    assert_eq!((apic.is_enabled(), apic.pending(), apic.has_any_request()), (false, None, false));
    assert_eq!(apic.read_mmio(mmio(SVR), || 0), u32::MAX);
    assert_eq!(apic.read_msr(BASE + SVR, || 0), Err(GeneralProtection));

    assert_eq!(apic.set_base_msr(XAPIC_BASE), Ok(Effect::ModeChanged));
    assert_eq!(apic.read_mmio(mmio(SVR), || 0), 0xff);
    assert!(!apic.has_any_request());
}

#[test]
fn init_resets_all_but_id_and_mode() {
    let mut apic = x2apic();
    apic.accept(0x44, false);
    set(&mut apic, LVT_TIMER, 0x50);
    set(&mut apic, INITIAL_COUNT, 500);
    apic.init();
    assert_eq!(apic.mode(), Mode::X2Apic);
    assert_eq!(read(&mut apic, 0x02), ID.into());
    assert_eq!(read(&mut apic, SVR), 0xff);
    assert_eq!(read(&mut apic, LVT_TIMER), MASKED);
    assert_eq!((apic.deadline(), apic.has_any_request(), apic.is_enabled()), (None, false, false));
}

#[test]
fn each_mode_has_its_own_door() {
    let mut apic = xapic();
    assert_eq!(apic.read_msr(BASE + SVR, || 0), Err(GeneralProtection));
    assert_eq!(apic.write_msr(BASE + EOI, 0, 0), Err(GeneralProtection));
    assert_eq!(apic.read_mmio(0x20, || 0), ID << 24);

    let mut apic = x2apic();
    assert_eq!(apic.read_mmio(0x20, || 0), u32::MAX);
    assert_eq!(apic.write_mmio(mmio(TPR), 0x30, 0), Effect::None);
    assert_eq!(read(&mut apic, TPR), 0);
}

// --- Registers ---

#[test]
fn x2apic_refuses_registers_that_do_not_exist_or_go_the_other_way() {
    let mut apic = x2apic();
    let read_only = [0x02, 0x03, PPR, LDR, ISR, 0x17, TMR, 0x1f, IRR, 0x27, CURRENT_COUNT];
    let write_only = [EOI, SELF_IPI];
    let both = [TPR, SVR, ESR, ICR, LVT_TIMER, 0x33, 0x34, LVT_LINT0, LVT_LINT1, LVT_ERROR, INITIAL_COUNT, DIVIDE];
    for register in 0..=0xff {
        let is_readable = read_only.contains(&register) || both.contains(&register) || (ISR..ESR).contains(&register);
        let is_writable = write_only.contains(&register) || both.contains(&register);
        assert_eq!(apic.read_msr(BASE + register, || 0).is_ok(), is_readable, "read of {register:#x}");
        assert_eq!(apic.write_msr(BASE + register, 0, 0).is_ok(), is_writable, "write of {register:#x}");
    }
    for msr in [0, 0x7ff, 0x900, u32::MAX] {
        assert_eq!(apic.read_msr(msr, || 0), Err(GeneralProtection));
        assert_eq!(apic.write_msr(msr, 0, 0), Err(GeneralProtection));
    }
}

#[test]
fn x2apic_refuses_reserved_bits() {
    let mut apic = x2apic();
    let reserved = [
        (EOI, 1),
        (ESR, 1),
        (TPR, 0x100),
        (SVR, 1 << 12),
        (ICR, 1 << 13),
        (ICR, 1 << 16),
        (ICR, 1 << 20),
        (LVT_TIMER, 1 << 8),
        (LVT_TIMER, 1 << 19),
        (LVT_ERROR, 1 << 13),
        (LVT_LINT0, 1 << 17),
        (INITIAL_COUNT, 1 << 32),
        (DIVIDE, 4),
        (SELF_IPI, 0x100),
    ];
    for (register, value) in reserved {
        assert_eq!(apic.write_msr(BASE + register, value, 0), Err(GeneralProtection), "{register:#x} {value:#x}");
    }
}

#[test]
fn version_tells_six_local_vectors() {
    assert_eq!(read(&mut x2apic(), 0x03), 0x0005_0014);
}

#[test]
fn local_vectors_keep_what_is_writable() {
    let mut apic = xapic();
    for (register, fields) in [(LVT_TIMER, 0x0007_00ff), (LVT_LINT0, 0x0001_a7ff), (LVT_ERROR, 0x0001_07ff)] {
        assert_eq!(apic.read_mmio(mmio(register), || 0), 0x0001_0000);
        let _effect = apic.write_mmio(mmio(register), u32::MAX, 0);
        assert_eq!(apic.read_mmio(mmio(register), || 0), fields);
    }
}

#[test]
fn reserved_register_of_an_xapic_reads_zero_and_is_noted() {
    for offset in [0x00, 0x40, 0x24, 0x2f0, 0x3a0, 0x3f0, 0x400, 0xff0, 0xffff] {
        let mut apic = xapic();
        assert_eq!(apic.read_mmio(offset, || 0), 0);
        let _effect = apic.write_mmio(mmio(ESR), 0, 0);
        assert_eq!(apic.read_mmio(mmio(ESR), || 0), 0x80, "read of {offset:#x}");

        let _effect = apic.write_mmio(mmio(ESR), 0, 0);
        assert_eq!(apic.write_mmio(offset, 1, 0), Effect::None);
        let _effect = apic.write_mmio(mmio(ESR), 0, 0);
        assert_eq!(apic.read_mmio(mmio(ESR), || 0), 0x80, "write of {offset:#x}");
    }
}

#[test]
fn writing_a_read_only_register_of_an_xapic_is_no_error() {
    let mut apic = xapic();
    for register in [0x02, 0x03, PPR, ISR, TMR, IRR, 0x27, CURRENT_COUNT] {
        let before = apic.read_mmio(mmio(register), || 0);
        assert_eq!(apic.write_mmio(mmio(register), u32::MAX, 0), Effect::None);
        assert_eq!(apic.read_mmio(mmio(register), || 0), before);
    }
    let _effect = apic.write_mmio(mmio(ESR), 0, 0);
    assert_eq!(apic.read_mmio(mmio(ESR), || 0), 0);
}

#[test]
fn errors_show_after_the_next_write_of_the_error_register() {
    let mut apic = x2apic();
    apic.accept(0x0f, false);
    assert_eq!(read(&mut apic, ESR), 0);
    set(&mut apic, ESR, 0);
    assert_eq!(read(&mut apic, ESR), 0x40);
    assert_eq!(read(&mut apic, ESR), 0x40);
    set(&mut apic, ESR, 0);
    assert_eq!(read(&mut apic, ESR), 0);
}

#[test]
fn error_interrupts_once_until_the_error_register_is_written() {
    let mut apic = x2apic();
    set(&mut apic, LVT_ERROR, 0xfe);
    apic.accept_words(&[1 << 3, 0, 0, 0]);
    assert_eq!(deliver_next(&mut apic), Some(0xfe));
    set(&mut apic, EOI, 0);
    apic.accept(3, false);
    assert_eq!(apic.pending(), None);
    set(&mut apic, ESR, 0);
    apic.accept(3, false);
    assert_eq!(apic.pending(), Some(0xfe));
}

#[test]
fn error_interrupt_with_an_illegal_vector_is_one_more_error() {
    let mut apic = x2apic();
    set(&mut apic, LVT_ERROR, 0x05);
    set(&mut apic, SELF_IPI, 0x07);
    set(&mut apic, ESR, 0);
    assert_eq!(read(&mut apic, ESR), 0x60);
    assert!(!apic.has_any_request());
}

// --- Sending ---

fn ipi(vector: u8, kind: Kind, target: Target) -> Effect {
    Effect::Send(Message { vector, kind, target, level: false })
}

#[test]
fn x2apic_command_names_kind_and_target() {
    let mut apic = x2apic();
    let table = [
        (0x7_0000_00fb, ipi(0xfb, Kind::Fixed, Target::Physical(7))),
        (0x1234_5678_0000_01fb, ipi(0xfb, Kind::LowestPriority, Target::Physical(0x1234_5678))),
        (0xff_0000_00fb, ipi(0xfb, Kind::Fixed, Target::Physical(0xff))),
        (0xffff_ffff_0000_00fb, ipi(0xfb, Kind::Fixed, Target::AllIncludingSelf)),
        (0xffff_ffff_0000_08fb, ipi(0xfb, Kind::Fixed, Target::AllIncludingSelf)),
        (0x2_8001_0000_08fb, ipi(0xfb, Kind::Fixed, Target::Cluster { cluster: 2, members: 0x8001 })),
        (0x7_0000_0400, ipi(0, Kind::Nmi, Target::Physical(7))),
        (0x7_0000_c500, ipi(0, Kind::Init, Target::Physical(7))),
        (0x7_0000_4500, ipi(0, Kind::Init, Target::Physical(7))),
        (0x7_0000_0500, ipi(0, Kind::Init, Target::Physical(7))),
        (0x7_0000_0699, ipi(0x99, Kind::Startup, Target::Physical(7))),
        (0x0000_0000_000c_4608, ipi(8, Kind::Startup, Target::AllButSelf)),
        (0x0000_0000_0008_00fb, ipi(0xfb, Kind::Fixed, Target::AllIncludingSelf)),
        (0x0000_0000_0004_0400, ipi(0, Kind::Nmi, Target::SelfOnly)),
        // INIT level de-assert, SMI, reserved and external: nothing.
        (0x7_0000_8500, Effect::None),
        (0x7_0000_4200, Effect::None),
        (0x7_0000_4300, Effect::None),
        (0x7_0000_4700, Effect::None),
        // Restarting oneself by shorthand is not allowed.
        (0x0000_0000_0004_4500, Effect::None),
        (0x0000_0000_0008_4608, Effect::None),
    ];
    for (command, effect) in table {
        assert_eq!(write(&mut apic, ICR, command), effect, "{command:#x}");
        assert_eq!(read(&mut apic, ICR), command);
    }
    assert!(!apic.has_any_request());
}

#[test]
fn xapic_sends_on_the_write_of_the_lower_half() {
    let mut apic = xapic();
    let table = [
        (0x0700_0000, 0x40fb, ipi(0xfb, Kind::Fixed, Target::Physical(7))),
        (0xff00_0000, 0x40fb, ipi(0xfb, Kind::Fixed, Target::AllIncludingSelf)),
        (0xff00_0000, 0x48fb, ipi(0xfb, Kind::Fixed, Target::AllIncludingSelf)),
        (0x0c00_0000, 0x48fb, ipi(0xfb, Kind::Fixed, Target::Logical(0x0c))),
        (0x0700_0000, 0x000c_4500, ipi(0, Kind::Init, Target::AllButSelf)),
        (0x07ff_ffff, 0x4699, ipi(0x99, Kind::Startup, Target::Physical(7))),
    ];
    for (high, low, effect) in table {
        assert_eq!(apic.write_mmio(mmio(ICR_HIGH), high, 0), Effect::None);
        assert_eq!(apic.write_mmio(mmio(ICR), low, 0), effect);
        assert_eq!(apic.read_mmio(mmio(ICR_HIGH), || 0), high & 0xff00_0000);
    }
    // Delivery status always reads idle.
    let _effect = apic.write_mmio(mmio(ICR), 0x50fb, 0);
    assert_eq!(apic.read_mmio(mmio(ICR), || 0), 0x40fb);
}

#[test]
fn hyper_vs_command_has_the_xapics_format_in_both_modes() {
    for mut apic in [xapic(), x2apic()] {
        let sent = apic.set_xapic_command(0x21 << 56 | 0x4051);
        assert_eq!(sent, Ok(ipi(0x51, Kind::Fixed, Target::Physical(0x21))));
        assert_eq!(apic.xapic_command(), Ok(0x21 << 56 | 0x4051));
        let everybody = apic.set_xapic_command(0xff << 56 | 0x4051);
        assert_eq!(everybody, Ok(ipi(0x51, Kind::Fixed, Target::AllIncludingSelf)));
    }
    let mut x2apic = x2apic();
    set(&mut x2apic, ICR, 0x21 << 32 | 0x4051);
    assert_eq!(x2apic.xapic_command(), Ok(0x21 << 56 | 0x4051));

    let mut off = xapic();
    assert_eq!(off.set_base_msr(DISABLED_BASE), Ok(Effect::ModeChanged));
    assert_eq!(off.set_xapic_command(0x4051), Err(GeneralProtection));
    assert_eq!(off.xapic_command(), Err(GeneralProtection));
    assert_eq!(off.write_task_priority(0x20), Err(GeneralProtection));
}

#[test]
fn hyper_vs_task_priority_is_the_apics_and_refuses_reserved_bits() {
    let mut apic = x2apic();
    assert_eq!(apic.write_task_priority(0x57), Ok(Effect::None));
    assert_eq!((apic.task_priority(), apic.cr8(), read(&mut apic, TPR)), (Ok(0x57), 5, 0x57));
    assert_eq!(apic.write_task_priority(0x100), Err(GeneralProtection));
}

#[test]
fn ipi_to_oneself_does_not_leave() {
    let mut apic = x2apic();
    for (register, value) in [(SELF_IPI, 0x51), (ICR, 0x0004_0051), (ICR, u64::from(ID) << 32 | 0x51)] {
        assert_eq!(write(&mut apic, register, value), Effect::None);
        assert_eq!(deliver_next(&mut apic), Some(0x51));
        assert_eq!(write(&mut apic, EOI, 0), Effect::None);
        assert!(!apic.has_any_request());
    }
}

#[test]
fn illegal_vectors_are_not_sent() {
    let mut apic = x2apic();
    for (register, value) in [(SELF_IPI, 0x0f), (ICR, 0x7_0000_000f), (ICR, 0x000c_0100)] {
        assert_eq!(write(&mut apic, register, value), Effect::None);
        set(&mut apic, ESR, 0);
        assert_eq!(read(&mut apic, ESR), 0x20);
    }
}

#[test]
fn x2apic_logical_id_follows_from_the_id() {
    for (id, logical) in [(0, 1), (7, 0x80), (0x23, 0x2_0008), (0x12_345f, 0x2345_8000)] {
        let mut apic = LocalApic::new(Config { id, ..config() });
        assert_eq!(apic.set_base_msr(X2APIC_BASE), Ok(Effect::ModeChanged));
        assert_eq!(read(&mut apic, LDR), logical);
        if id < 1 << 20 {
            let [members, cluster] = [logical & 0xffff, logical >> 16].map(|half| u16::try_from(half).expect("half"));
            assert_eq!(cluster_members(cluster, members).collect::<Vec<_>>(), [id]);
        }
    }
    assert_eq!(cluster_members(3, 0x8005).collect::<Vec<_>>(), [0x30, 0x32, 0x3f]);
}

#[test]
fn xapic_logical_id_is_read_flat_or_by_cluster() {
    let mut apic = xapic();
    let mut matches = |format: u32, id: u32, destination: u8| {
        assert_eq!(apic.write_mmio(mmio(DFR), format, 0), Effect::LogicalIdChanged);
        assert_eq!(apic.write_mmio(mmio(LDR), id << 24 | 0x12_3456, 0), Effect::LogicalIdChanged);
        assert_eq!(apic.read_mmio(mmio(LDR), || 0), id << 24);
        assert_eq!(apic.read_mmio(mmio(DFR), || 0), format | 0x0fff_ffff);
        let logical = apic.logical_id();
        assert_eq!(LogicalId::from_bits(logical.to_bits()), logical);
        logical.matches(destination)
    };
    assert!(matches(0xf000_0000, 0x04, 0x06));
    assert!(!matches(0xf000_0000, 0x04, 0xfb));
    assert!(matches(0, 0x24, 0x26));
    assert!(!matches(0, 0x24, 0x36));
    assert!(!matches(0, 0x24, 0x2b));
    assert!(matches(0, 0x24, 0xf4));
    assert!(!matches(0x5000_0000, 0xff, 0xff));
}

#[test]
fn x2apic_hears_eight_bit_destinations_as_cluster_zero() {
    for (id, answers) in [(3, true), (8, false), (0x13, false)] {
        let mut apic = LocalApic::new(Config { id, ..config() });
        assert_eq!(apic.set_base_msr(X2APIC_BASE), Ok(Effect::ModeChanged));
        assert_eq!(apic.logical_id().matches(0x08), answers);
        assert_eq!(apic.set_base_msr(DISABLED_BASE), Ok(Effect::ModeChanged));
        assert!(!apic.logical_id().matches(0xff));
    }
}

// --- Timer ---

const TICK: u64 = TSC_TICKS_PER_TIMER_TICK;

fn with_timer(entry: u64) -> LocalApic {
    let mut apic = x2apic();
    assert_eq!(write(&mut apic, DIVIDE, DIVIDE_BY_1), Effect::TimerChanged);
    assert_eq!(write(&mut apic, LVT_TIMER, entry), Effect::TimerChanged);
    apic
}

fn take(apic: &mut LocalApic, vector: u8) {
    assert_eq!(deliver_next(apic), Some(vector));
    assert_eq!(apic.end_of_interrupt(), Effect::None);
    assert!(!apic.has_any_request());
}

#[test]
fn one_shot_fires_once_when_the_count_reaches_zero() {
    let mut apic = with_timer(0x40);
    assert_eq!(apic.deadline(), None);
    set_at(&mut apic, INITIAL_COUNT, 1000, 100);
    assert_eq!(apic.deadline(), Some(100 + 1000 * TICK));
    assert!(!apic.expire(99 + 1000 * TICK));
    assert!(apic.expire(100 + 1000 * TICK));
    take(&mut apic, 0x40);
    assert_eq!(apic.deadline(), None);
    assert!(!apic.expire(u64::MAX));
    assert_eq!(read(&mut apic, INITIAL_COUNT), 1000);
    assert_eq!(read(&mut apic, CURRENT_COUNT), 0);
}

#[test]
fn current_count_steps_down_at_the_divided_rate() {
    let table =
        [(0b0000, 2), (0b0001, 4), (0b0010, 8), (0b0011, 16), (0b1000, 32), (0b1001, 64), (0b1010, 128), (0b1011, 1)];
    for (setting, divisor) in table {
        let mut apic = with_timer(0x40);
        set(&mut apic, DIVIDE, setting);
        set_at(&mut apic, INITIAL_COUNT, 10, 7);
        let step = TICK * divisor;
        for (elapsed, count) in
            [(0, 10), (1, 10), (step, 9), (step * 9, 1), (step * 10 - 1, 1), (step * 10, 0), (step * 99, 0)]
        {
            assert_eq!(read_at(&mut apic, CURRENT_COUNT, 7 + elapsed), count, "divided by {divisor} after {elapsed}");
        }
        assert_eq!(apic.deadline(), Some(7 + step * 10));
    }
}

#[test]
fn change_of_divider_goes_on_from_the_count() {
    let mut apic = with_timer(0x40);
    set_at(&mut apic, INITIAL_COUNT, 100, 0);
    set_at(&mut apic, DIVIDE, 0, 40 * TICK);
    assert_eq!(read_at(&mut apic, CURRENT_COUNT, 40 * TICK), 60);
    assert_eq!(apic.deadline(), Some(40 * TICK + 60 * 2 * TICK));
}

#[test]
fn initial_count_of_zero_stops_the_timer() {
    for mode in [0, PERIODIC] {
        let mut apic = with_timer(0x40 | mode);
        set(&mut apic, INITIAL_COUNT, 1_000_000);
        set(&mut apic, INITIAL_COUNT, 0);
        assert_eq!(apic.deadline(), None);
        assert!(!apic.expire(u64::MAX));
    }
}

#[test]
fn periodic_timer_does_not_drift_however_late_it_is_seen() {
    let mut apic = with_timer(0x40 | PERIODIC);
    let period = 20_000 * TICK;
    set_at(&mut apic, INITIAL_COUNT, 20_000, 5);
    for n in 1..=10 {
        assert_eq!(apic.deadline(), Some(5 + n * period));
        assert!(apic.expire(5 + n * period + n * 1000));
        take(&mut apic, 0x40);
    }
}

#[test]
fn long_pause_of_a_periodic_timer_is_one_interrupt() {
    let mut apic = with_timer(0x40 | PERIODIC);
    let period = 20_000 * TICK;
    set_at(&mut apic, INITIAL_COUNT, 20_000, 0);
    let late = 1_000_000_007 * period + 3;
    assert!(apic.expire(late));
    assert!(!apic.expire(late));
    take(&mut apic, 0x40);
    assert_eq!(apic.deadline(), Some(1_000_000_008 * period));
}

#[test]
fn tiny_period_is_stretched() {
    let mut apic = with_timer(0x40 | PERIODIC);
    set_at(&mut apic, INITIAL_COUNT, 1, 0);
    assert_eq!(apic.deadline(), Some(SHORTEST_PERIOD));
    assert_eq!(read_at(&mut apic, CURRENT_COUNT, 10), 1);
    assert!(apic.expire(SHORTEST_PERIOD));
    assert_eq!(apic.deadline(), Some(2 * SHORTEST_PERIOD));
}

#[test]
fn masked_timer_counts_but_needs_nobody() {
    let mut apic = with_timer(0x40 | PERIODIC | MASKED);
    let period = 20_000 * TICK;
    set_at(&mut apic, INITIAL_COUNT, 20_000, 0);
    assert_eq!(apic.deadline(), None);
    assert_eq!(read_at(&mut apic, CURRENT_COUNT, 5 * TICK), 19_995);
    assert_eq!(read_at(&mut apic, CURRENT_COUNT, 77 * period + 5 * TICK), 19_995);

    // Expiries while it was masked do not interrupt later.
    set_at(&mut apic, LVT_TIMER, 0x40 | PERIODIC, 100 * period + 1);
    assert!(!apic.has_any_request());
    assert_eq!(apic.deadline(), Some(101 * period));
}

#[test]
fn one_shot_that_ended_while_masked_stays_silent() {
    let mut apic = with_timer(0x40 | MASKED);
    set_at(&mut apic, INITIAL_COUNT, 10, 0);
    assert_eq!(read_at(&mut apic, CURRENT_COUNT, 10_000), 0);
    set_at(&mut apic, LVT_TIMER, 0x40, 10_000);
    assert_eq!((apic.has_any_request(), apic.deadline()), (false, None));
}

#[test]
fn expiry_that_nobody_looked_at_comes_before_a_change() {
    for change in [(LVT_TIMER, 0x41 | MASKED), (INITIAL_COUNT, 7), (DIVIDE, 0), (SVR, 0x1ff)] {
        let mut apic = with_timer(0x40);
        set_at(&mut apic, INITIAL_COUNT, 10, 0);
        set_at(&mut apic, change.0, change.1, 10 * TICK);
        assert_eq!(apic.pending(), Some(0x40), "{change:x?}");
    }
}

#[test]
fn deadline_fires_when_it_has_come_and_then_reads_zero() {
    let mut apic = with_timer(0x40 | DEADLINE);
    assert_eq!(apic.set_tsc_deadline(5000, 1000), Effect::TimerChanged);
    assert_eq!((apic.deadline(), apic.tsc_deadline(1000)), (Some(5000), 5000));
    assert!(!apic.expire(4999));
    assert_eq!(apic.tsc_deadline(5000), 0);
    assert!(apic.expire(5000));
    take(&mut apic, 0x40);
    assert_eq!((apic.deadline(), apic.tsc_deadline(5000)), (None, 0));
}

#[test]
fn deadline_in_the_past_fires_at_once_and_zero_disarms() {
    let mut apic = with_timer(0x40 | DEADLINE);
    let _effect = apic.set_tsc_deadline(1, 1000);
    take(&mut apic, 0x40);
    assert_eq!(apic.deadline(), None);
    let _effect = apic.set_tsc_deadline(2000, 1000);
    let _effect = apic.set_tsc_deadline(0, 1000);
    assert_eq!(apic.deadline(), None);
    assert!(!apic.expire(u64::MAX));
}

#[test]
fn late_deadline_is_not_lost_when_the_guest_sets_the_next() {
    let mut apic = with_timer(0x40 | DEADLINE);
    let _effect = apic.set_tsc_deadline(2000, 1000);
    let _effect = apic.set_tsc_deadline(9000, 2500);
    take(&mut apic, 0x40);
    assert_eq!(apic.deadline(), Some(9000));
}

#[test]
fn masked_deadline_passes_silently() {
    let mut apic = with_timer(0x40 | DEADLINE | MASKED);
    let _effect = apic.set_tsc_deadline(2000, 1000);
    assert_eq!((apic.deadline(), apic.tsc_deadline(1000)), (None, 2000));
    set_at(&mut apic, LVT_TIMER, 0x40 | DEADLINE, 3000);
    assert_eq!((apic.has_any_request(), apic.deadline()), (false, None));

    set_at(&mut apic, LVT_TIMER, 0x40 | DEADLINE | MASKED, 3000);
    let _effect = apic.set_tsc_deadline(5000, 3000);
    set_at(&mut apic, LVT_TIMER, 0x40 | DEADLINE, 4000);
    assert_eq!(apic.deadline(), Some(5000));
}

#[test]
fn counter_and_deadline_exclude_each_other() {
    let mut apic = with_timer(0x40);
    let _effect = apic.set_tsc_deadline(5000, 0);
    assert_eq!((apic.deadline(), apic.tsc_deadline(0)), (None, 0));

    set(&mut apic, INITIAL_COUNT, 1000);
    set(&mut apic, LVT_TIMER, 0x40 | DEADLINE);
    assert_eq!((apic.deadline(), read(&mut apic, CURRENT_COUNT)), (None, 0));
    assert_eq!(read(&mut apic, INITIAL_COUNT), 0);
    set(&mut apic, INITIAL_COUNT, 1000);
    assert_eq!(apic.deadline(), None);

    let _effect = apic.set_tsc_deadline(5000, 0);
    set(&mut apic, LVT_TIMER, 0x40);
    assert_eq!((apic.deadline(), apic.tsc_deadline(0)), (None, 0));
}

#[test]
fn one_shot_and_periodic_change_while_the_counter_runs() {
    let mut apic = with_timer(0x40);
    set(&mut apic, INITIAL_COUNT, 20_000);
    set_at(&mut apic, LVT_TIMER, 0x40 | PERIODIC, 100);
    assert!(apic.expire(20_000 * TICK));
    assert_eq!(apic.deadline(), Some(40_000 * TICK));
}

#[test]
fn reserved_timer_mode_never_runs() {
    let mut apic = with_timer(0x40);
    set(&mut apic, INITIAL_COUNT, 20);
    set(&mut apic, LVT_TIMER, 0x40 | 3 << 17);
    set(&mut apic, INITIAL_COUNT, 20);
    let _effect = apic.set_tsc_deadline(20, 0);
    assert_eq!(apic.deadline(), None);
    assert!(!apic.expire(u64::MAX));
}

#[test]
fn timer_vector_below_sixteen_is_an_error() {
    let mut apic = with_timer(0x08);
    set(&mut apic, INITIAL_COUNT, 1);
    apic.expire(100);
    set(&mut apic, ESR, 0);
    assert_eq!(read(&mut apic, ESR), 0x40);
    assert!(!apic.has_any_request());
}

// --- Hostile input ---

#[test]
fn nothing_that_a_guest_does_panics() {
    for seed in 1..=20 {
        let mut random = Rng::with_seed(seed);
        let mut apic = if seed % 2 == 0 { x2apic() } else { xapic() };
        let mut now = 0_u64;
        for _ in 0..20_000 {
            now = match random.u64(..64) {
                0 => random.u64(..),
                1 => u64::MAX,
                2 => 0,
                _ => now.saturating_add(random.u64(..1 << 20)),
            };
            let value = random.u64(..) >> random.u64(..64);
            let [low, high] = super::registers::halves(value);
            let msr = BASE + random.u32(..0x100);
            let offset = if random.u64(..2) == 0 { mmio(msr - BASE) } else { u16::from_le_bytes([random.u8(..), 0]) };
            match random.u64(..16) {
                0..=3 => {
                    let _result = apic.write_msr(msr, value, now);
                }
                4..=5 => {
                    let _result = apic.read_msr(msr, || now);
                }
                6..=9 => {
                    let _effect = apic.write_mmio(offset, low ^ high, now);
                }
                10 => {
                    apic.read_mmio(offset, || now);
                }
                11 => {
                    let _effect = apic.set_tsc_deadline(value, now);
                    assert!(apic.tsc_deadline(now) == 0 || apic.tsc_deadline(now) > now);
                }
                12 => {
                    apic.expire(now);
                    apic.expire(now);
                }
                13 => {
                    apic.accept(random.u8(..), value & 1 != 0);
                    apic.accept_words(&[value, random.u64(..) & random.u64(..), 0, 1 << random.u64(..64)]);
                }
                14 => {
                    deliver_next(&mut apic);
                    apic.deliver(random.u8(..));
                    apic.set_cr8(random.u8(..));
                }
                _ if random.u64(..32) == 0 => apic.init(),
                _ => {
                    let base = [DISABLED_BASE, XAPIC_BASE, X2APIC_BASE, value];
                    let index = random.usize(..64);
                    let _result = base.get(index).map(|&base| apic.set_base_msr(base));
                }
            }
            // After any operation, the caches agree with the registers.
            if let Some(vector) = apic.pending() {
                assert!(apic.is_enabled() && vector >= 16);
                assert!(vector >> 4 > apic.processor_priority() >> 4);
            }
            assert!(apic.deadline().is_none() || apic.is_enabled());
        }
    }
}

/// A parent saves the state and restores it: the list of registers as it is, on an APIC in the same mode.
fn restored(apic: &mut LocalApic, saved_at: u64, restored_at: u64) -> LocalApic {
    let state = apic.state(saved_at);
    let mut other = LocalApic::new(config());
    other.place_base_msr(apic.base_msr()).expect("a mode that it has");
    other.set_cr8(apic.cr8());
    other.set_state(&state, restored_at);
    assert_eq!(other.state(restored_at), state, "the state comes back as it was");
    other
}

#[test]
fn restored_apic_goes_on_with_the_same_interrupts() {
    for make in [xapic as fn() -> LocalApic, x2apic] {
        let mut random = Rng::with_seed(0x57a7e);
        for _ in 0..200 {
            let mut apic = make();
            for _ in 0..random.usize(..40) {
                match random.u8(..4) {
                    0 | 1 => apic.accept(random.u8(16..), random.bool()),
                    2 => {
                        if let Some(vector) = apic.pending() {
                            apic.deliver(vector);
                        }
                    }
                    _ => apic.set_cr8(random.u8(..16)),
                }
            }
            let mut other = restored(&mut apic, 0, 0);
            assert_eq!(other.logical_id(), apic.logical_id());
            // The upper four bits of the task priority are in CR8, and the lower are not saved.
            for step in 0..100 {
                assert_eq!(other.pending(), apic.pending(), "step {step}");
                match apic.pending() {
                    Some(vector) => {
                        apic.deliver(vector);
                        other.deliver(vector);
                    }
                    None => {
                        assert_eq!(other.end_of_interrupt(), apic.end_of_interrupt());
                        apic.set_cr8(0);
                        other.set_cr8(0);
                    }
                }
            }
        }
    }
}

#[test]
fn restored_timer_has_as_long_to_go() {
    const LATER: u64 = 1_000_000_000;
    for entry in [0x40, 0x40 | PERIODIC, 0x40 | MASKED, 0x40 | PERIODIC | MASKED] {
        let mut apic = x2apic();
        set(&mut apic, DIVIDE, DIVIDE_BY_1);
        set(&mut apic, LVT_TIMER, entry);
        set(&mut apic, INITIAL_COUNT, 100_000);
        let half = 50_000 * TSC_TICKS_PER_TIMER_TICK;
        let mut other = restored(&mut apic, half, LATER);
        assert_eq!(read_at(&mut other, CURRENT_COUNT, LATER), 50_000, "{entry:#x}");
        assert_eq!(read_at(&mut other, INITIAL_COUNT, LATER), 100_000);
        let is_masked = entry & MASKED != 0;
        assert_eq!(other.deadline(), (!is_masked).then_some(LATER + half), "{entry:#x}");
        assert_eq!(other.expire(LATER + half), !is_masked, "{entry:#x}");
        let again = (entry & (PERIODIC | MASKED) == PERIODIC).then_some(LATER + 3 * half);
        assert_eq!(other.deadline(), again, "{entry:#x}");
    }
}

#[test]
fn counting_timer_has_as_long_to_go_after_time_stood_still() {
    const STOOD: u64 = 7_000_000_000;
    let half = 50_000 * TSC_TICKS_PER_TIMER_TICK;
    for (entry, by) in [(0x40, STOOD), (0x40 | PERIODIC, STOOD), (0x40 | DEADLINE, 0)] {
        let mut apic = x2apic();
        set(&mut apic, DIVIDE, DIVIDE_BY_1);
        set(&mut apic, LVT_TIMER, entry);
        set(&mut apic, INITIAL_COUNT, 100_000);
        apic.place_tsc_deadline(2 * half, half);
        apic.move_count(STOOD);
        assert_eq!(apic.deadline(), Some(2 * half + by), "{entry:#x}");
        assert!(!apic.expire(2 * half + by - 1) && apic.expire(2 * half + by), "{entry:#x}");
    }
    let mut stopped = x2apic();
    stopped.move_count(STOOD);
    assert_eq!(stopped.deadline(), None);
}

#[test]
fn timer_that_is_due_has_expired_before_it_is_saved() {
    let mut apic = x2apic();
    set(&mut apic, DIVIDE, DIVIDE_BY_1);
    set(&mut apic, LVT_TIMER, 0x40);
    set(&mut apic, INITIAL_COUNT, 1000);
    let other = restored(&mut apic, 1_000_000, 5);
    assert_eq!((other.pending(), other.deadline()), (Some(0x40), None));
}

#[test]
fn deadline_comes_before_or_after_the_state() {
    let mut apic = x2apic();
    set(&mut apic, LVT_TIMER, 0x40 | DEADLINE);
    let state = apic.state(0);
    for deadline_is_first in [true, false] {
        let mut other = LocalApic::new(config());
        other.place_base_msr(X2APIC_BASE).expect("it is offered");
        if deadline_is_first {
            other.place_tsc_deadline(700, 1);
        }
        other.set_state(&state, 1);
        if !deadline_is_first {
            other.place_tsc_deadline(700, 1);
        }
        assert_eq!((other.tsc_deadline(1), other.deadline()), (700, Some(700)), "{deadline_is_first}");
        other.set_state(&state, 1);
        assert_eq!(other.deadline(), Some(700), "a state says nothing of the deadline");
        other.place_tsc_deadline(0, 1);
        assert_eq!(other.deadline(), None);
        other.place_tsc_deadline(3, 5);
        assert_eq!(other.pending(), Some(0x40), "a tick that has passed interrupts at once");
    }
}

#[test]
fn ids_have_the_form_of_the_mode() {
    let (mut old, mut new) = (xapic(), x2apic());
    assert_eq!(old.state(0).id.get(), ID << 24);
    let state = new.state(0);
    assert_eq!((state.id.get(), state.logical_destination.get()), (ID, 2 << 16 | 1 << 3));
    // An id that is written means nothing.
    old.set_state(&state, 0);
    assert_eq!((old.id(), old.state(0).id.get()), (ID, ID << 24));
}

#[test]
fn state_from_outside_may_be_anything() {
    let mut random = Rng::with_seed(0xbad);
    for round in 0..2000 {
        let mut bytes = [0; 176];
        bytes.iter_mut().for_each(|byte| *byte = if round % 2 == 0 { random.u8(..) } else { 0xff });
        let state = hyperv_defs::page::LocalApicState::from_bytes(&bytes).expect("it is long enough");
        let mut apic = if random.bool() { xapic() } else { x2apic() };
        apic.set_state(&state, random.u64(..));
        let shown = apic.state(u64::MAX);
        assert!(shown.irr[0].get().trailing_zeros() >= 16 && shown.isr[0].get().trailing_zeros() >= 16);
        for _ in 0..600 {
            match apic.pending() {
                Some(vector) => {
                    assert!(vector >= 16);
                    apic.deliver(vector);
                    assert_ne!(apic.pending(), Some(vector));
                }
                None => {
                    let _effect = apic.end_of_interrupt();
                }
            }
        }
        apic.set_cr8(0);
        let is_on = state.spurious.get() >> 8 & 1 != 0;
        assert_eq!((apic.is_enabled(), apic.pending()), (is_on, None), "all is delivered and ended");
        assert_eq!(apic.has_any_request(), !is_on && state.irr.iter().any(|word| word.get() != 0));
    }
}

#[test]
fn mode_from_outside_keeps_the_registers() {
    let mut apic = xapic();
    apic.accept(0x55, false);
    assert_eq!(apic.place_base_msr(X2APIC_BASE), Ok(()));
    assert_eq!((apic.mode(), apic.pending()), (Mode::X2Apic, Some(0x55)));
    assert_eq!(apic.place_base_msr(XAPIC_BASE), Ok(()));
    assert_eq!((apic.mode(), apic.pending()), (Mode::XApic, Some(0x55)));
    assert_eq!(apic.place_base_msr(DISABLED_BASE), Ok(()));
    assert_eq!((apic.is_enabled(), apic.pending()), (false, None));
    assert_eq!(apic.place_base_msr(XAPIC_BASE | 1), Err(GeneralProtection));
    assert_eq!(apic.place_base_msr(DISABLED_BASE | 0x400), Err(GeneralProtection));
}

#[test]
fn deadline_moves_with_the_counter_and_a_count_does_not() {
    let mut apic = x2apic();
    set(&mut apic, LVT_TIMER, 0x40 | DEADLINE);
    assert_eq!(apic.set_tsc_deadline(1000, 0), Effect::TimerChanged);
    apic.move_deadline(-300);
    assert_eq!(apic.deadline(), Some(700));
    set(&mut apic, LVT_TIMER, 0x40);
    set(&mut apic, DIVIDE, DIVIDE_BY_1);
    set(&mut apic, INITIAL_COUNT, 100);
    let deadline = apic.deadline();
    apic.move_deadline(300);
    assert_eq!(apic.deadline(), deadline);
    apic.place_tsc_deadline(5000, 0);
    apic.move_deadline(11);
    set(&mut apic, LVT_TIMER, 0x40 | DEADLINE);
    let state = apic.state(0);
    apic.set_state(&state, 0);
    assert_eq!(apic.deadline(), Some(5011), "one that has come early, too");
}

#[test]
fn pin_does_what_its_entry_says() {
    let lint = |entry: u64| {
        let mut apic = x2apic();
        set(&mut apic, LVT_LINT1, entry);
        (apic.assert_pin(Pin::Lint1), apic.pending())
    };
    assert_eq!(lint(0x41), (Pinned::Done, Some(0x41)));
    assert_eq!(lint(0x41 | MASKED), (Pinned::Done, None));
    assert_eq!(lint(0x400), (Pinned::Nmi, None));
    assert_eq!(lint(0x700), (Pinned::External, None));
    assert_eq!(lint(0x200), (Pinned::Done, None), "SMI");
    let mut apic = x2apic();
    assert_eq!(apic.assert_pin(Pin::Lint0), Pinned::Done, "masked after power-on");
    assert_eq!(apic.set_base_msr(DISABLED_BASE), Ok(Effect::ModeChanged));
    assert_eq!([Pin::Lint0, Pin::Lint1].map(|pin| apic.assert_pin(pin)), [Pinned::External, Pinned::Nmi]);
}

/// Any accesses, by the guest and from outside: what is pending is what the registers say.
fn any_accesses(bytes: &[u8]) {
    let mut input = fuzz::Input::new(bytes);
    let mut apic = if input.byte() & 1 == 0 { xapic() } else { x2apic() };
    let mut now = 0_u64;
    while !input.is_empty() {
        let operation = input.byte() % 20;
        let byte = input.byte();
        match operation {
            0..2 => _ = apic.read_msr(BASE + u32::from(byte), || now),
            2..5 => _ = apic.write_msr(BASE + u32::from(byte), input.u32().into(), now),
            5 => _ = apic.write_msr(BASE + u32::from(byte), input.u64(), now),
            6 => _ = apic.read_mmio(u16::from(byte) << 4 | u16::from(input.byte() & 15), || now),
            7..9 => _ = apic.write_mmio(u16::from(byte) << 4, input.u32(), now),
            9 => apic.accept(byte, input.byte() & 1 != 0),
            10 => apic.accept_words(&[input.u64(), input.u64(), u64::from(byte), input.u64()]),
            11..14 => {
                if let Some(vector) = apic.pending() {
                    apic.deliver(vector);
                    if byte == 0xff {
                        apic.retract(vector);
                    }
                }
            }
            14 => _ = apic.end_of_interrupt(),
            15 => apic.set_cr8(byte & 15),
            16 => {
                now += u64::from(input.u32()) >> (byte & 31);
                let _ = apic.expire(now);
            }
            17 => {
                let base = [DISABLED_BASE, XAPIC_BASE, X2APIC_BASE, input.u64()][usize::from(byte & 3)];
                let _ = apic.set_base_msr(base);
            }
            18 => match byte & 3 {
                0 => _ = apic.set_tsc_deadline(input.u64(), now),
                1 => apic.init(),
                2 => _ = apic.assert_pin(if byte & 4 == 0 { Pin::Lint0 } else { Pin::Lint1 }),
                _ => apic.set_auto_eoi([byte | 16, byte ^ 0x80 | 16].into_iter()),
            },
            _ => {
                let state = hyperv_defs::page::LocalApicState::from_bytes(&input.array::<176>());
                apic.set_state(&state.expect("it is long enough"), now);
            }
        }
        is_as_it_shows(&mut apic, now);
    }
}

/// The sets that the APIC keeps for speed agree with its registers.
fn is_as_it_shows(apic: &mut LocalApic, now: u64) {
    let state = apic.state(now);
    let highest = |set: &[hyperv_defs::wire::U32; 8]| {
        (0..=255_u8).rev().find(|vector| set[usize::from(vector / 32)].get() >> (vector % 32) & 1 != 0)
    };
    let is_on = apic.mode() != Mode::Disabled && state.spurious.get() >> 8 & 1 != 0;
    assert_eq!(apic.is_enabled(), is_on);
    let requested = highest(&state.irr);
    assert_eq!(apic.has_any_request(), requested.is_some());
    let floor = highest(&state.isr).map_or(0, |vector| vector >> 4).max(apic.cr8());
    assert_eq!(apic.pending(), requested.filter(|vector| is_on && vector >> 4 > floor), "{state:?}");
    assert!(requested.is_none_or(|vector| vector >= 16) && highest(&state.isr).is_none_or(|vector| vector >= 16));
    let _ = apic.expire(now);
    assert!(apic.deadline().is_none_or(|deadline| deadline > now), "a timer that is due has expired");
}

#[test]
fn after_any_accesses_pending_is_what_the_registers_say() {
    fuzz::target("local_apic", any_accesses);
}
