//! SPIs of the machine: against a model of its interrupt controller and of its devices, which are handled by the guest.

use std::collections::BTreeMap;
use std::vec::Vec;

use fastrand::Rng;

use super::machine::Machine;
use crate::device::gic::{Order, Width};

const LEVEL: u32 = 35;
const OTHER_LEVEL: u32 = 100;
const EDGE: u32 = 64;
const SPIS: [u32; 3] = [LEVEL, OTHER_LEVEL, EDGE];

/// An SPI of the machine: its device, and its state in the machine's controller (IHI 0069, 4.1).
#[derive(Default)]
struct Source {
    /// The device wants to be handled.
    line: bool,
    is_edge: bool,
    /// Of an edge: it came, and was not acknowledged.
    latch: bool,
    enabled: bool,
    active: bool,
    /// Acknowledged by the hypervisor, which does not know yet whose it is.
    in_flight: u32,
    raised: u32,
    handled: u32,
}

struct World {
    machine: Machine,
    sources: BTreeMap<u32, Source>,
    /// Where messages are to go.
    routes: Vec<(u32, Option<u32>)>,
}

impl World {
    /// A guest that has configured and enabled all.
    fn new(vcpus: u32, lists: usize) -> Self {
        let mut machine = Machine::new(vcpus, lists);
        SPIS.into_iter().for_each(|intid| machine.distributor.forward(intid));
        let sources = SPIS.map(|intid| (intid, Source::default())).into_iter().collect();
        let mut world = Self { machine, sources, routes: Vec::new() };
        world.machine.write_d(0, 0, 0x12);
        world.machine.write_d(0, 0xc00 + EDGE / 16 * 4, 2 << (EDGE % 16 * 2));
        for vcpu in 0..vcpus {
            world.machine.write_r(vcpu, 0x14, 0);
        }
        for intid in SPIS {
            world.machine.write_wide(0, 0x400 + intid, Width::Byte, 0xa0);
            world.set_enabled(0, intid, true);
        }
        world.settle();
        world
    }

    fn set_enabled(&mut self, vcpu: u32, intid: u32, enabled: bool) {
        let offset = if enabled { 0x100 } else { 0x180 };
        self.machine.write_d(vcpu, offset + intid / 32 * 4, 1 << (intid % 32));
        self.follow();
    }

    /// The machine does what it is told.
    fn follow(&mut self) {
        while let Some(order) = self.machine.distributor.next_order() {
            match order {
                Order::Configure { intid, enabled, edge, .. } => {
                    let source = self.sources.get_mut(&intid).expect("forwarded");
                    (source.enabled, source.is_edge) = (enabled, edge);
                }
                Order::Route { intid, vcpu } => self.routes.push((intid, vcpu)),
                Order::Deactivate { intid } => self.sources.get_mut(&intid).expect("forwarded").active = false,
            }
        }
        for cpu in &mut self.machine.cpus {
            for intid in cpu.ended_spis.drain(..) {
                self.sources.get_mut(&intid).expect("forwarded").active = false;
            }
        }
    }

    /// The device wants to be handled.
    fn raise(&mut self, intid: u32) {
        let source = self.sources.get_mut(&intid).expect("forwarded");
        source.latch |= source.is_edge && !source.line;
        source.raised += u32::from(!source.line);
        source.line = true;
    }

    /// The hypervisor acknowledges what comes.
    fn acknowledge(&mut self) {
        self.follow();
        for source in self.sources.values_mut() {
            let is_pending = if source.is_edge { source.latch } else { source.line };
            if is_pending && source.enabled && !source.active {
                (source.active, source.latch) = (true, false);
                source.in_flight += 1;
            }
        }
    }

    /// It hands on what it acknowledged.
    fn hand_on(&mut self) {
        for (&intid, source) in &mut self.sources {
            for _ in 0..core::mem::take(&mut source.in_flight) {
                assert!(self.machine.distributor.arrived(intid));
            }
        }
        self.machine.deliver_news();
        self.follow();
    }

    fn settle(&mut self) {
        for _ in 0..4 {
            self.acknowledge();
            self.hand_on();
            self.machine.settle_told();
            self.follow();
        }
    }

    /// The guest handles the interrupt that `vcpu` gets next, if there is one. Returns its number.
    fn handle(&mut self, vcpu: u32, silences: bool) -> Option<u32> {
        let intid = self.machine.cpu(vcpu).acknowledge()?;
        let source = self.sources.get_mut(&intid).expect("forwarded");
        source.handled += 1;
        // An edge that is not repeated comes once.
        if silences || source.is_edge {
            source.line = false;
        }
        Some(intid)
    }

    fn end(&mut self, vcpu: u32) {
        self.machine.cpu(vcpu).end();
        self.follow();
    }

    fn state(&self, intid: u32) -> (bool, u32) {
        let source = &self.sources[&intid];
        (source.active, source.handled)
    }
}

#[test]
fn guests_end_of_an_interrupt_is_the_machines() {
    let mut world = World::new(1, 4);
    world.raise(LEVEL);
    world.settle();
    let list = world.machine.cpus[0].lists.iter().find(|list| **list != 0).copied();
    assert_eq!(list, Some(0x70a0_0023_0000_0023), "pending, group 1, with the physical one of the same number");
    assert_eq!(world.handle(0, true), Some(LEVEL));
    assert_eq!(world.state(LEVEL), (true, 1), "not again before its end");
    let exits = world.machine.maintenance;
    world.end(0);
    assert_eq!((world.state(LEVEL), world.machine.maintenance), ((false, 1), exits));
    world.settle();
    assert_eq!(world.handle(0, true), None, "the device was handled");
}

#[test]
fn level_that_stays_comes_again_after_each_end_and_not_before() {
    let mut world = World::new(2, 4);
    world.raise(LEVEL);
    for round in 1..20 {
        world.settle();
        assert_eq!(world.handle(0, false), Some(LEVEL));
        world.settle();
        assert_eq!((world.handle(0, false), world.state(LEVEL)), (None, (true, round)));
        world.end(0);
    }
}

#[test]
fn disabled_level_waits_in_the_machine_and_comes_only_if_its_line_is_still_asserted() {
    for stays in [false, true] {
        let mut world = World::new(1, 4);
        world.raise(LEVEL);
        world.settle();
        world.set_enabled(0, LEVEL, false);
        world.settle();
        assert_eq!(world.state(LEVEL), (false, 0), "dropped, and ended in the machine");
        assert_eq!(world.handle(0, true), None);
        world.sources.get_mut(&LEVEL).expect("forwarded").line = stays;
        world.set_enabled(0, LEVEL, true);
        world.settle();
        assert_eq!(world.handle(0, true), stays.then_some(LEVEL));
    }
}

#[test]
fn edge_is_not_lost_while_it_is_disabled() {
    let mut world = World::new(1, 4);
    world.raise(EDGE);
    world.settle();
    world.set_enabled(0, EDGE, false);
    world.settle();
    assert_eq!(world.handle(0, true), None);
    world.set_enabled(0, EDGE, true);
    world.settle();
    assert_eq!(world.handle(0, true), Some(EDGE));
}

#[test]
fn interrupt_that_the_guest_clears_or_ends_by_a_register_ends_in_the_machine() {
    for (offset, is_active) in [(0x280, false), (0x380, true)] {
        let mut world = World::new(1, 4);
        world.raise(LEVEL);
        world.settle();
        if is_active {
            assert_eq!(world.handle(0, true), Some(LEVEL));
        }
        world.sources.get_mut(&LEVEL).expect("forwarded").line = false;
        world.machine.write_d(0, offset + LEVEL / 32 * 4, 1 << (LEVEL % 32));
        world.follow();
        world.settle();
        assert!(!world.state(LEVEL).0, "register {offset:#x}");
        world.machine.cpu(0).stack.clear();
        world.raise(LEVEL);
        world.settle();
        assert_eq!(world.handle(0, true), Some(LEVEL), "register {offset:#x}");
    }
}

#[test]
fn interrupts_of_others_are_not_taken_and_lines_do_not_move_what_is_forwarded() {
    let mut world = World::new(1, 4);
    for other in [0, 27, 33, 255, 256, 1019, u32::MAX] {
        assert!(!world.machine.distributor.arrived(other));
        world.machine.distributor.forward(31);
    }
    world.machine.set_line(LEVEL, true);
    world.machine.settle_all();
    assert_eq!(world.handle(0, true), None);
    assert!(!world.machine.distributor.arrived(31));
}

#[test]
fn message_is_an_interrupt_of_the_guest_alone() {
    const MESSAGE: u32 = 70;
    let mut world = World::new(2, 4);
    world.machine.distributor.expect_message(MESSAGE);
    world.machine.write_d(0, 0xc00 + MESSAGE / 16 * 4, 2 << (MESSAGE % 16 * 2));
    world.machine.write_wide(0, 0x400 + MESSAGE, Width::Byte, 0xa0);
    world.set_enabled(0, MESSAGE, true);
    for other in [LEVEL, EDGE, 0, 31, 256, u32::MAX] {
        world.machine.distributor.message(other);
    }
    world.settle();
    assert_eq!(world.handle(0, true), None, "forwarded, private, or none");
    assert!(world.routes.iter().all(|route| *route == (MESSAGE, Some(0))), "{:?}", world.routes);
    world.machine.write_wide(0, 0x6000 + MESSAGE * 8, Width::Double, 1);
    world.follow();
    assert_eq!(world.routes.pop(), Some((MESSAGE, Some(1))), "the machine has it come to the new target");
    // One comes while the first is active. It waits for the end of it, and neither concerns the machine.
    world.machine.distributor.message(MESSAGE);
    world.settle();
    assert_eq!(world.machine.cpu(1).acknowledge(), Some(MESSAGE));
    world.machine.distributor.message(MESSAGE);
    world.settle();
    assert_eq!(world.machine.cpu(1).acknowledge(), None);
    world.end(1);
    world.settle();
    assert_eq!(world.machine.cpu(1).acknowledge(), Some(MESSAGE));
    world.end(1);
    world.settle();
    assert_eq!(world.machine.cpu(1).acknowledge(), None);
}

#[test]
fn guests_configuration_reaches_the_machine() {
    let mut world = World::new(3, 4);
    assert!(world.sources[&EDGE].is_edge && !world.sources[&LEVEL].is_edge);
    world.machine.write_wide(0, 0x6000 + LEVEL * 8, Width::Double, 2);
    let orders: Vec<_> = core::iter::from_fn(|| world.machine.distributor.next_order()).collect();
    assert_eq!(orders, [Order::Configure { intid: LEVEL, enabled: true, edge: false, vcpu: Some(2) }]);
    world.machine.write_wide(0, 0x6000 + 41 * 8, Width::Double, 2);
    assert_eq!(world.machine.distributor.next_order(), None, "an emulated device's");
}

#[test]
fn whatever_guest_and_devices_do_nothing_is_lost_and_nothing_storms() {
    for seed in 0..400 {
        random_run(seed);
    }
}

fn random_run(seed: u64) {
    const VCPUS: u32 = 3;
    let mut random = Rng::with_seed(seed);
    let mut world = World::new(VCPUS, random.usize(2..5));
    for _ in 0..300 {
        let (vcpu, intid) = (random.u32(..VCPUS), SPIS[random.usize(..SPIS.len())]);
        let mask = 1 << (intid % 32);
        match random.u32(..14) {
            0..2 => world.raise(intid),
            2 => world.acknowledge(),
            3 => world.hand_on(),
            4..6 => {
                let _ = world.handle(vcpu, random.u32(..4) != 0);
            }
            6..8 => world.end(vcpu),
            8 => world.set_enabled(vcpu, intid, random.bool()),
            9 => world.machine.write_wide(vcpu, 0x6000 + intid * 8, Width::Double, random.u32(..VCPUS).into()),
            // An edge that the guest clears is lost, as it wants.
            10 if intid != EDGE => world.machine.write_d(vcpu, 0x280 + intid / 32 * 4, mask),
            11 => world.machine.write_d(vcpu, 0x200 + intid / 32 * 4, mask),
            12 => world.machine.settle(vcpu),
            _ => world.machine.settle_told(),
        }
        world.follow();
    }
    let made_pending = 100;
    SPIS.into_iter().for_each(|intid| world.set_enabled(0, intid, true));
    for _ in 0..50 {
        world.settle();
        for vcpu in 0..VCPUS {
            // What was begun ends first.
            while !world.machine.cpus[vcpu as usize].stack.is_empty() {
                world.end(vcpu);
                world.settle();
            }
            while world.handle(vcpu, true).is_some() {
                world.end(vcpu);
                world.settle();
            }
        }
    }
    for (intid, source) in &world.sources {
        assert!(!source.line && !source.latch, "seed {seed}: {intid} was never handled");
        assert!(!source.active, "seed {seed}: {intid} cannot come again");
        assert!(source.handled <= 4 * source.raised + made_pending, "seed {seed}: {intid} storms");
    }
}
