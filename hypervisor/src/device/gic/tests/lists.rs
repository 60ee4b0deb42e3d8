//! List registers: which interrupts get a place, and what happens if there are too few places.

use std::vec::Vec;

use super::machine::{Machine, TIMER};
use crate::device::gic::{Distributor, Posted, Read, Sgi, Width};

const UIE: u64 = 1 << 1;
const LRENPIE: u64 = 1 << 2;
const NPIE: u64 = 1 << 3;
const TDIR: u64 = 1 << 14;

fn in_use(machine: &Machine, vcpu: usize) -> Vec<u64> {
    machine.cpus[vcpu].lists.iter().copied().filter(|list| list >> 62 != 0).collect()
}

/// INTIDs in list registers, in order.
fn intids(machine: &Machine, vcpu: usize) -> Vec<u64> {
    let mut intids: Vec<u64> = in_use(machine, vcpu).iter().map(|list| list & 0xffff_ffff).collect();
    intids.sort_unstable();
    intids
}

fn set_priority(machine: &mut Machine, vcpu: u32, intid: u32, priority: u64) {
    if intid < 32 {
        machine.write_r_wide(vcpu, vcpu, 0x1_0400 + intid, Width::Byte, priority);
    } else {
        machine.write_wide(vcpu, 0x400 + intid, Width::Byte, priority);
    }
}

fn route(machine: &mut Machine, intid: u32, affinity: u64) {
    machine.write_wide(0, 0x6000 + intid * 8, Width::Double, affinity);
}

#[test]
fn list_register_has_the_fields_of_the_manual() {
    let mut machine = Machine::running(1, 4);
    set_priority(&mut machine, 0, 5, 0x48);
    machine.cpu(0).gic.raise(5);
    machine.settle(0);
    assert_eq!(in_use(&machine, 0), [0x5048_0000_0000_0005], "pending, group 1, silent");

    let mut machine = Machine::running(1, 4);
    machine.set_line(40, true);
    machine.settle(0);
    assert_eq!(in_use(&machine, 0), [0x50a0_0200_0000_0028], "a level: its end exits");

    let mut machine = Machine::running(1, 4);
    machine.cpu(0).timer = true;
    machine.settle(0);
    assert_eq!(in_use(&machine, 0), [0x70a0_001b_0000_001b], "linked with the physical one");
}

#[test]
fn sgi_does_not_touch_the_distributor_even_beside_an_spi() {
    let mut machine = Machine::running(2, 4);
    machine.set_line(40, true);
    machine.settle_all();
    let visits = machine.visits;
    for intid in 0..3 {
        machine.send(0, intid << 24 | 0b10);
        machine.send(0, intid << 24 | 0b01);
    }
    machine.settle_all();
    assert_eq!(machine.visits, visits);
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![0, 1, 2, 40], vec![0, 1, 2]));

    // Nor does its end.
    assert!(machine.cpu(1).acknowledge().is_some());
    machine.cpu(1).end();
    machine.settle_all();
    assert_eq!(machine.visits, visits);
}

#[test]
fn exit_that_changed_nothing_changes_nothing() {
    let mut machine = Machine::running(1, 4);
    assert!(machine.cpu(0).gic.is_idle());
    machine.cpu(0).gic.raise(1);
    machine.settle(0);
    assert!(!machine.cpu(0).gic.is_idle());
    let (lists, visits) = (machine.cpu(0).lists.clone(), machine.visits);
    machine.settle(0);
    assert_eq!((&machine.cpus[0].lists, machine.visits), (&lists, visits));
}

#[test]
fn most_urgent_get_the_places_and_the_rest_follows_in_order() {
    let mut machine = Machine::running(1, 2);
    for (intid, priority) in [(0, 0x90), (1, 0x30), (2, 0x70), (40, 0x10), (41, 0x50)] {
        set_priority(&mut machine, 0, intid, priority);
    }
    for intid in 0..3 {
        machine.cpu(0).gic.raise(intid);
    }
    machine.set_line(40, true);
    machine.set_line(41, true);
    machine.settle_all();
    assert_eq!(intids(&machine, 0), [1, 40]);
    assert_eq!(machine.cpu(0).control, 1 | NPIE);

    let mut order = Vec::new();
    while let Some(intid) = machine.cpu(0).acknowledge() {
        order.push(intid);
        if intid >= 32 {
            machine.set_line(intid, false);
        }
        machine.cpu(0).end();
        machine.settle_all();
    }
    assert_eq!(order, [40, 1, 41, 2, 0]);
    assert_eq!((machine.cpu(0).control, in_use(&machine, 0).len()), (1, 0));
}

#[test]
fn ends_of_what_is_in_no_list_register_are_counted_and_made_good() {
    let mut machine = Machine::running(1, 2);
    // Nested three deep with two list registers.
    for (intid, priority) in [(0, 0x60), (1, 0x40), (2, 0x20)] {
        set_priority(&mut machine, 0, intid, priority);
        machine.cpu(0).gic.raise(intid);
        machine.settle_all();
        assert_eq!(machine.cpu(0).acknowledge(), Some(intid));
        machine.settle_all();
    }
    assert_eq!(intids(&machine, 0), [1, 2], "what ends next");
    assert_eq!(machine.cpu(0).control, 1 | LRENPIE);
    assert_eq!(machine.read_r(0, 0x1_0300), 0b111);

    // Directly after each other, without an exit in between.
    for intid in [2, 1, 0] {
        assert_eq!(machine.cpu(0).end(), Some(intid));
    }
    assert!(machine.cpu(0).wants_exit());
    machine.settle_all();
    assert_eq!(machine.read_r(0, 0x1_0300), 0);
    assert_eq!(machine.cpu(0).control, 1);
}

#[test]
fn pending_that_is_left_behind_active_ones_comes_when_they_ended() {
    let mut machine = Machine::running(1, 2);
    for (intid, priority) in [(0, 0x60), (1, 0x40)] {
        set_priority(&mut machine, 0, intid, priority);
        machine.cpu(0).gic.raise(intid);
        machine.settle_all();
        assert_eq!(machine.cpu(0).acknowledge(), Some(intid));
    }
    machine.cpu(0).gic.raise(3);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), machine.cpu(0).control), (vec![0, 1], 1 | UIE));
    machine.cpu(0).end();
    assert!(machine.cpu(0).wants_exit());
    machine.settle_all();
    assert_eq!(intids(&machine, 0), [0, 3]);
}

#[test]
fn with_a_split_end_what_waits_for_its_second_half_keeps_nobody_out() {
    let mut machine = Machine::running(1, 2);
    machine.cpu(0).splits_end = true;
    for intid in 0..4 {
        machine.cpu(0).gic.raise(intid);
        machine.settle_all();
        assert_eq!(machine.cpu(0).acknowledge(), Some(intid), "four in the middle of their end, two places");
        machine.cpu(0).end();
        machine.settle_all();
    }
    assert_eq!(machine.cpu(0).control, 1 | LRENPIE | TDIR);
    let mut exits = 0;
    for intid in [3, 0, 2, 1] {
        exits += u32::from(machine.deactivate(0, intid));
        assert_eq!(machine.read_r(0, 0x1_0300) >> intid & 1, 0);
    }
    assert_eq!((machine.read_r(0, 0x1_0300), machine.read_r(0, 0x1_0200)), (0, 0));
    assert_eq!(exits, 2, "as long as they did not fit");
    for nonsense in [31, 255, 256, 1023, 8192, u32::MAX] {
        let Machine { cpus, distributor, .. } = &mut machine;
        cpus[0].gic.deactivate(nonsense, distributor);
    }
}

#[test]
fn timer_that_its_guest_makes_pending_holds_the_physical_one_until_the_end() {
    let mut machine = Machine::running(1, 4);
    machine.write_r(0, 0x1_0200, 1 << TIMER);
    assert!(machine.cpu(0).timer_active);
    assert_eq!(machine.cpu(0).acknowledge(), Some(TIMER));
    machine.cpu(0).end();
    assert!(!machine.cpu(0).timer_active, "the end of the one is the end of the other");
    machine.settle_all();
    machine.cpu(0).timer = true;
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), Some(TIMER), "and its timer still comes");

    machine.write_r(0, 0x1_0280, 1 << TIMER);
    machine.cpu(0).timer = false;
    machine.cpu(0).end();
    machine.write_r(0, 0x1_0200, 1 << TIMER);
    machine.write_r(0, 0x1_0280, 1 << TIMER);
    assert!(!machine.cpu(0).timer_active, "it has taken that back");
}

#[test]
fn edge_while_active_is_delivered_once_more_after_the_end() {
    let mut machine = Machine::running(1, 4);
    machine.cpu(0).gic.raise(7);
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), Some(7));
    machine.cpu(0).gic.raise(7);
    machine.cpu(0).gic.raise(7);
    machine.settle_all();
    assert_eq!(in_use(&machine, 0)[0] >> 62, 3, "active and pending");
    machine.cpu(0).end();
    assert_eq!(machine.cpu(0).acknowledge(), Some(7));
    machine.cpu(0).end();
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), None);
}

#[test]
fn level_is_looked_at_again_at_its_end() {
    let mut machine = Machine::running(1, 4);
    for stays in [true, false] {
        machine.set_line(50, true);
        machine.settle_all();
        assert_eq!(machine.cpu(0).acknowledge(), Some(50));
        machine.settle_all();
        assert_eq!(in_use(&machine, 0)[0] >> 62, 2, "not pending beside active");
        machine.set_line(50, stays);
        machine.cpu(0).end();
        assert!(machine.cpu(0).wants_exit());
        machine.settle_all();
        assert_eq!(in_use(&machine, 0).len(), usize::from(stays));
        if stays {
            machine.set_line(50, false);
            machine.settle_all();
            assert!(in_use(&machine, 0).is_empty(), "taken back before it was seen");
        }
    }
}

#[test]
fn timer_is_linked_from_its_coming_to_its_end() {
    let mut machine = Machine::running(1, 4);
    machine.cpu(0).timer = true;
    machine.settle_all();
    assert!(machine.cpu(0).timer_active && machine.cpu(0).gic.holds_linked(TIMER));
    assert_eq!(machine.cpu(0).acknowledge(), Some(TIMER));
    machine.settle_all();
    assert!(machine.cpu(0).gic.holds_linked(TIMER));
    // The guest sets the next deadline, and ends it: the processor ends the physical one.
    machine.cpu(0).timer = false;
    machine.settle_all();
    machine.cpu(0).end();
    machine.settle_all();
    assert!(!machine.cpu(0).timer_active && !machine.cpu(0).gic.holds_linked(TIMER));

    // The cause goes before the guest saw it.
    machine.cpu(0).timer = true;
    machine.settle_all();
    machine.cpu(0).timer = false;
    machine.settle_all();
    assert_eq!((machine.cpu(0).acknowledge(), machine.cpu(0).timer_active), (None, false));

    // The guest clears it: it comes again as long as its cause remains.
    machine.cpu(0).timer = true;
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), Some(TIMER));
    machine.write_r(0, 0x1_0380, 1 << TIMER);
    assert!(!machine.cpu(0).gic.holds_linked(TIMER));
    machine.settle_all();
    assert!(machine.cpu(0).gic.holds_linked(TIMER));
}

#[test]
fn end_by_the_guest_ends_the_link_at_once() {
    let mut machine = Machine::running(1, 4);
    let gic = &mut machine.cpu(0).gic;
    gic.set_line(TIMER, true);
    gic.prepare(None);
    let list = gic.lists().find(|list| *list != 0).expect("loaded");
    assert_eq!(gic.fold(|_| list & !(3 << 62), 1, false), 1, "it was acknowledged on the way");
    assert!(!gic.holds_linked(TIMER), "or it would be delivered again before it came again");
}

#[test]
fn with_a_split_end_the_count_of_ends_means_nothing() {
    let mut machine = Machine::running(1, 2);
    machine.write_r(0, 0x1_0300, 0b111);
    machine.cpu(0).splits_end = true;
    machine.settle_all();
    let lists = machine.cpu(0).lists.clone();
    assert_eq!(machine.cpu(0).gic.fold(|index| lists[index], 1 | 3 << 27, true), 0);
    machine.enter(0);
    assert_eq!(machine.read_r(0, 0x1_0300), 0b111);
}

#[test]
fn only_linked_ppis_are_linked() {
    let machine = Machine::running(1, 2);
    for intid in [0, 26, 28, 32, 59, u32::MAX] {
        assert!(!machine.cpus[0].gic.holds_linked(intid));
    }
}

#[test]
fn rerouted_spi_leaves_the_list_register_of_the_old_target() {
    let mut machine = Machine::running(2, 2);
    machine.set_line(33, true);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![33], vec![]));
    route(&mut machine, 33, 1);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![], vec![33]));
    route(&mut machine, 33, 2);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![], vec![]), "there is no such vCPU");
    route(&mut machine, 33, 0);
    machine.settle_all();
    assert_eq!(intids(&machine, 0), [33]);
}

#[test]
fn spi_active_at_the_old_target_is_delivered_at_the_new_one_after_its_end() {
    let mut machine = Machine::running(2, 2);
    machine.write_d(0, 0xc08, 0b1000);
    machine.settle_all();
    machine.set_line(33, true);
    machine.settle_all();
    assert_eq!(machine.cpu(0).acknowledge(), Some(33));
    machine.set_line(33, false);
    machine.set_line(33, true);
    route(&mut machine, 33, 1);
    machine.settle_all();
    assert_eq!(machine.cpu(1).acknowledge(), None);
    machine.cpu(0).end();
    machine.settle_told();
    assert_eq!((machine.cpu(0).acknowledge(), machine.cpu(1).acknowledge()), (None, Some(33)));
}

#[test]
fn vcpu_that_goes_off_takes_no_spi_with_it() {
    let mut machine = Machine::running(2, 2);
    machine.set_line(33, true);
    machine.settle_all();
    machine.exit(0);
    machine.cpus[0].gic.power_off(&mut machine.distributor);
    assert!(machine.cpus[0].gic.is_idle());
    machine.cpu(0).lists.fill(0);
    machine.write_wide(1, 0x6000 + 33 * 8, Width::Double, 1);
    machine.settle(1);
    assert_eq!(intids(&machine, 1), [33], "without help of the one that is off");
    machine.send(1, 0b1);
    machine.settle_all();
    assert_eq!(intids(&machine, 0), [0], "what was sent meanwhile waits until it is on");
}

#[test]
fn state_in_the_list_registers_of_others_is_asked_for() {
    let mut machine = Machine::running(2, 2);
    route(&mut machine, 33, 1);
    machine.set_line(33, true);
    machine.settle_all();
    assert_eq!(machine.cpu(1).acknowledge(), Some(33));

    assert_eq!(machine.try_read_d(0, 0x304), Read::Retry);
    assert_eq!(machine.try_read_d(0, 0x304), Read::Retry, "not answered yet");
    machine.settle(1);
    assert_eq!(machine.try_read_d(0, 0x304), Read::Value(2));

    machine.cpu(1).end();
    assert_eq!(machine.try_read_d(0, 0x304), Read::Retry, "an answer is good once");
    machine.set_line(33, false);
    machine.settle(1);
    assert_eq!(machine.read_d(0, 0x304), 0);
}

#[test]
fn disabling_what_another_vcpu_holds_shows_in_rwp_until_it_came_back() {
    let mut machine = Machine::running(2, 2);
    route(&mut machine, 33, 1);
    machine.set_line(33, true);
    machine.settle_all();
    machine.write_d(0, 0x184, 0b10);
    assert_eq!(machine.try_read_d(0, 0), Read::Value(0x8000_0052));
    machine.settle(1);
    assert_eq!(machine.try_read_d(0, 0), Read::Value(0x52));
    assert_eq!(machine.cpu(1).acknowledge(), None);
    assert_eq!(machine.read_d(0, 0x204), 0b10, "pending all the same");

    machine.write_d(0, 0x104, 0b10);
    machine.settle_all();
    assert_eq!(intids(&machine, 1), [33]);
    assert_eq!(machine.try_read_d(0, 0), Read::Value(0x52), "over and forgotten");
}

#[test]
fn state_of_what_another_vcpu_holds_can_be_written() {
    let mut machine = Machine::running(2, 2);
    machine.write_d(0, 0xc08, 0b1000);
    route(&mut machine, 33, 1);
    machine.set_line(33, true);
    machine.settle_all();
    let write = |machine: &mut Machine, offset: u32| {
        machine.write_d(0, offset + 4, 0b10);
        machine.settle_all();
        (machine.read_d(0, 0x204), machine.read_d(0, 0x304))
    };
    assert_eq!(write(&mut machine, 0x280), (0, 0), "no longer pending");
    assert_eq!(write(&mut machine, 0x200), (2, 0));
    assert_eq!(write(&mut machine, 0x300), (2, 2), "active as well");
    assert_eq!(write(&mut machine, 0x380), (2, 0));
    assert_eq!(machine.cpu(1).acknowledge(), Some(33));
    assert_eq!(write(&mut machine, 0x380), (0, 0), "ended for it");
}

#[test]
fn switching_the_group_off_takes_everything_back() {
    let mut machine = Machine::running(2, 4);
    machine.set_line(33, true);
    machine.send(0, 0b11);
    machine.settle_all();
    machine.write_d(0, 0, 0);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![], vec![]));
    machine.write_d(1, 0, 2);
    machine.settle_all();
    assert_eq!((intids(&machine, 0), intids(&machine, 1)), (vec![0, 33], vec![0]));
}

#[test]
fn sleeping_redistributor_delivers_nothing_and_loses_nothing() {
    let mut machine = Machine::running(1, 4);
    machine.write_r(0, 0x14, 2);
    machine.set_line(33, true);
    machine.cpu(0).gic.raise(4);
    machine.settle_all();
    assert_eq!(intids(&machine, 0), [] as [u64; 0]);
    machine.write_r(0, 0x14, 0);
    assert_eq!(intids(&machine, 0), [4, 33]);
}

#[test]
fn waiting_vcpu_is_woken_by_what_its_mask_lets_through() {
    let mut machine = Machine::running(1, 2);
    assert!(!machine.cpu(0).gic.interrupts(0xff));
    machine.cpu(0).gic.raise(3);
    machine.settle_all();
    for (mask, interrupts) in [(0xff, true), (0xa8, true), (0xa0, false), (0, false)] {
        assert_eq!(machine.cpu(0).gic.interrupts(mask), interrupts, "{mask:#x}");
    }
    assert_eq!(machine.cpu(0).acknowledge(), Some(3));
    machine.settle_all();
    assert!(!machine.cpu(0).gic.interrupts(0xff), "active is not waiting");
}

#[test]
fn posts_are_taken_once() {
    let posted = Posted::new();
    posted.raise(31);
    posted.raise(0);
    posted.raise(32);
    posted.raise(u32::MAX);
    posted.announce_spis();
    let taken = posted.take();
    assert_eq!((taken.raised(), taken.has_spis()), (0x8000_0001, true));
    assert_eq!(posted.take(), Posted::new().take());
}

#[test]
fn sgi_goes_to_the_members_of_a_cluster_or_to_all_but_the_sender() {
    let targets = |value, sender, vcpus| Sgi::decode(value).targets(sender, vcpus).collect::<Vec<u32>>();
    assert_eq!(Sgi::decode(0xb00_0000).intid, 11);
    assert_eq!(targets(0b1011, 1, 4), [0, 1, 3], "the sender too, if it names itself");
    assert_eq!(targets(0xffff, 0, 3), [0, 1, 2]);
    assert_eq!(targets(1 << 16 | 0x8001, 0, 64), [16, 31]);
    assert_eq!(targets(1 << 32 | 1, 0, 5000), [4096]);
    assert_eq!(targets(1 << 40 | 0xffff, 1, 4), [0, 2, 3]);
    assert_eq!(targets(1 << 40, 0, 1), [] as [u32; 0]);
    assert_eq!(targets(0xff << 16 | 0xffff, 0, 64), [] as [u32; 0], "no such cluster");
    assert_eq!(targets(1 << 48 | 1, 0, 64), [] as [u32; 0], "no fourth level");
    assert_eq!(targets(1 << 44 | 1, 0, 64), [0], "range selector");
}

#[test]
fn lines_of_interrupts_that_do_not_exist_are_ignored() {
    let mut distributor = Distributor::new(1);
    for intid in [0, 31, 256, 1020, u32::MAX] {
        distributor.set_line(intid, true);
    }
    assert_eq!(distributor.next_news(), None);
    let mut machine = Machine::running(1, 2);
    for intid in [0, 15, 32, u32::MAX] {
        machine.cpu(0).gic.set_line(intid, true);
    }
    machine.cpu(0).gic.raise(16);
    machine.settle_all();
    assert!(machine.cpu(0).gic.is_idle());
}

#[test]
fn vcpu_that_waits_hears_its_timer_and_devices_only_as_far_as_they_are_let_through() {
    const LOWEST: u8 = 0xf0;
    let timer = 1 << TIMER;
    let mut machine = Machine::running(2, 4);
    for word in 1..8 {
        machine.write_d(0, 0x180 + word * 4, 0xffff_ffff);
    }
    machine.settle_all();
    let hears = |machine: &mut Machine, mask, sources| machine.cpu(1).gic.hears(mask, sources);
    assert!(hears(&mut machine, LOWEST, timer));
    assert!(!hears(&mut machine, LOWEST, 0), "no timer, no device");
    assert!(!hears(&mut machine, 0xa0, timer), "it is at something as urgent");
    machine.write_r(1, 0x1_0180, timer);
    assert!(!hears(&mut machine, LOWEST, timer), "disabled");

    // Another vCPU enables a device's interrupt; this makes news, though no interrupt yet.
    machine.write_d(0, 0x104, 1 << 3);
    machine.settle_all();
    assert!(hears(&mut machine, LOWEST, 0));
    assert!(!hears(&mut machine, 0, 0), "nothing gets through this mask");
    machine.write_d(0, 0, 0);
    machine.settle_all();
    assert!(!hears(&mut machine, LOWEST, timer), "the distributor is off");
}
