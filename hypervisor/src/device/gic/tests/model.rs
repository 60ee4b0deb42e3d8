//! Random sequences: against the manual's interrupt state machine, without list registers, and with vCPUs that exit
//! late.

use std::collections::BTreeMap;
use std::vec::Vec;

use fuzz::Decisions;

use super::machine::{Machine, TIMER};
use crate::device::gic::Width;

const VCPUS: u32 = 3;
const PRIVATE: [u32; 7] = [0, 1, 2, 15, LEVEL_PPI, EDGE_PPI, TIMER];
const LEVEL_PPI: u32 = 20;
const EDGE_PPI: u32 = 21;
/// The first half of each is level-triggered.
const SPIS: [u32; 8] = [32, 33, 34, 63, 64, 65, 100, 255];

fn of<T: Copy>(random: &mut Decisions, choices: &[T]) -> T {
    choices[random.usize(..choices.len())]
}

/// Private interrupts have a vCPU, SPIs do not.
type Key = (Option<u32>, u32);

/// One interrupt, as in IHI 0069 4.1.
#[derive(Clone, Copy, Debug, Default)]
struct Interrupt {
    enabled: bool,
    edge: bool,
    latch: bool,
    line: bool,
    active: Option<u32>,
    priority: u8,
    target: u32,
}

impl Interrupt {
    fn is_pending(&self) -> bool {
        self.latch || self.line && !self.edge
    }
}

/// The expected state.
struct Model(BTreeMap<Key, Interrupt>);

impl Model {
    fn at(&mut self, key: Key) -> &mut Interrupt {
        self.0.get_mut(&key).expect("known")
    }

    fn set_line(&mut self, key: Key, asserted: bool) {
        let interrupt = self.at(key);
        interrupt.latch |= interrupt.edge && asserted && !interrupt.line;
        interrupt.line = asserted;
    }

    /// What `vcpu` may acknowledge next while `running` is its priority: all interrupts of the same highest priority.
    fn next(&self, vcpu: u32, running: u8) -> Vec<Key> {
        let mine = |(key, interrupt): &(&Key, &Interrupt)| match key.0 {
            Some(owner) => owner == vcpu,
            None => interrupt.target == vcpu,
        };
        let ready = |interrupt: &Interrupt| {
            interrupt.is_pending() && interrupt.enabled && interrupt.active.is_none() && interrupt.priority < running
        };
        let ready: Vec<_> = self.0.iter().filter(mine).filter(|(_, interrupt)| ready(interrupt)).collect();
        let best = ready.iter().map(|(_, interrupt)| interrupt.priority).min();
        ready.iter().filter(|(_, interrupt)| Some(interrupt.priority) == best).map(|(key, _)| **key).collect()
    }
}

fn key(vcpu: u32, intid: u32) -> Key {
    (if intid < 32 { Some(vcpu) } else { None }, intid)
}

struct World {
    random: Decisions,
    machine: Machine,
    model: Model,
    /// First half of the end done: to be deactivated, in any order.
    half_ended: Vec<(u32, u32)>,
    splits_end: bool,
    acknowledged: u32,
}

impl World {
    fn new(random: Decisions, lists: usize, splits_end: bool) -> Self {
        let mut world = Self {
            random,
            machine: Machine::running(VCPUS, lists),
            model: Model(BTreeMap::new()),
            half_ended: Vec::new(),
            splits_end,
            acknowledged: 0,
        };
        for vcpu in 0..VCPUS {
            world.machine.cpu(vcpu).splits_end = splits_end;
            world.machine.write_r(vcpu, 0x1_0c04, 2 << ((EDGE_PPI - 16) * 2));
            for intid in PRIVATE {
                let edge = intid < 16 || intid == EDGE_PPI;
                world.model.0.insert(key(vcpu, intid), Interrupt { enabled: true, edge, ..Interrupt::default() });
                world.set_priority(vcpu, intid);
            }
        }
        for (number, intid) in SPIS.into_iter().enumerate() {
            let edge = number % 2 == 1;
            let offset = 0xc00 + intid / 16 * 4;
            let mut value = world.machine.read_d(0, offset);
            value |= u32::from(edge) << (intid % 16 * 2 + 1);
            world.machine.write_d(0, offset, value);
            world.model.0.insert(key(0, intid), Interrupt { enabled: true, edge, ..Interrupt::default() });
            world.set_priority(0, intid);
        }
        world.machine.settle_all();
        world
    }

    /// Not while it is pending or active: which priority counts then is up to the implementation.
    fn set_priority(&mut self, vcpu: u32, intid: u32) {
        let priority = of(&mut self.random, &[0x20_u8, 0x40, 0x60, 0x80, 0xa0, 0xa0]);
        self.model.at(key(vcpu, intid)).priority = priority;
        if intid < 32 {
            self.machine.write_r_wide(vcpu, vcpu, 0x1_0400 + intid, Width::Byte, priority.into());
        } else {
            self.machine.write_wide(vcpu, 0x400 + intid, Width::Byte, priority.into());
        }
    }

    fn step(&mut self) {
        let vcpu = self.random.u32(..VCPUS);
        let spi = of(&mut self.random, &SPIS);
        match self.random.u32(..16) {
            0..2 => self.device(spi),
            2 => self.own_device(vcpu),
            3..5 => self.send(vcpu),
            5..8 => self.acknowledge(vcpu),
            8..12 => self.end(vcpu),
            12 => self.enable(vcpu),
            13 => self.route(vcpu, spi),
            14 => self.set_pending(vcpu),
            _ => {
                let intid = self.any(vcpu);
                let interrupt = self.model.at(key(vcpu, intid));
                if !interrupt.is_pending() && interrupt.active.is_none() {
                    self.set_priority(vcpu, intid);
                }
            }
        }
    }

    fn any(&mut self, _vcpu: u32) -> u32 {
        if self.random.bool() { of(&mut self.random, &PRIVATE) } else { of(&mut self.random, &SPIS) }
    }

    fn device(&mut self, spi: u32) {
        let asserted = self.random.bool();
        self.model.set_line(key(0, spi), asserted);
        self.machine.set_line(spi, asserted);
    }

    fn own_device(&mut self, vcpu: u32) {
        let asserted = self.random.bool();
        let intid = of(&mut self.random, &[LEVEL_PPI, EDGE_PPI, TIMER]);
        self.model.set_line(key(vcpu, intid), asserted);
        // The owner's devices speak while it is out of the guest.
        self.machine.exit(vcpu);
        if intid == TIMER {
            self.machine.cpu(vcpu).timer = asserted;
        } else {
            self.machine.cpu(vcpu).gic.set_line(intid, asserted);
        }
        self.machine.settle(vcpu);
    }

    fn send(&mut self, sender: u32) {
        let intid = of(&mut self.random, &[0, 1, 2, 15]);
        let list = self.random.u32(..8);
        let to_others = self.random.u32(..4) == 0;
        for target in 0..VCPUS {
            if if to_others { target != sender } else { list >> target & 1 != 0 } {
                self.model.at((Some(target), intid)).latch = true;
            }
        }
        self.machine.send(sender, u64::from(to_others) << 40 | u64::from(intid) << 24 | u64::from(list));
    }

    fn acknowledge(&mut self, vcpu: u32) {
        let running = self.machine.cpu(vcpu).stack.last().map_or(0xff, |&(priority, _)| priority);
        let expected = self.model.next(vcpu, running);
        let got = self.machine.cpu(vcpu).acknowledge();
        match got {
            None => assert_eq!(expected, [], "vCPU {vcpu} is not interrupted"),
            Some(intid) => {
                let key = key(vcpu, intid);
                assert!(expected.contains(&key), "vCPU {vcpu} acknowledges {intid}, expected {expected:?}");
                let interrupt = self.model.at(key);
                interrupt.latch = false;
                interrupt.active = Some(vcpu);
                self.acknowledged += 1;
            }
        }
    }

    fn end(&mut self, vcpu: u32) {
        if self.splits_end && !self.half_ended.is_empty() && self.random.bool() {
            let which = self.random.u32(..(u32::try_from(self.half_ended.len()).expect("few")));
            let (vcpu, intid) = self.half_ended.swap_remove(which as usize);
            self.machine.deactivate(vcpu, intid);
            self.model.at(key(vcpu, intid)).active = None;
            return;
        }
        let Some(intid) = self.machine.cpu(vcpu).end() else { return };
        if self.splits_end {
            self.half_ended.push((vcpu, intid));
        } else {
            self.model.at(key(vcpu, intid)).active = None;
        }
    }

    fn enable(&mut self, vcpu: u32) {
        let intid = self.any(vcpu);
        let enabled = self.random.u32(..3) != 0;
        self.model.at(key(vcpu, intid)).enabled = enabled;
        self.write_bit(vcpu, intid, if enabled { 0x100 } else { 0x180 });
    }

    fn set_pending(&mut self, vcpu: u32) {
        let intid = self.any(vcpu);
        let pending = self.random.bool();
        // The test decides the line of a linked interrupt then.
        if intid == TIMER {
            return;
        }
        self.model.at(key(vcpu, intid)).latch = pending;
        self.write_bit(vcpu, intid, if pending { 0x200 } else { 0x280 });
    }

    fn write_bit(&mut self, vcpu: u32, intid: u32, register: u32) {
        let bit = 1 << (intid % 32);
        if intid < 32 {
            self.machine.write_r(vcpu, 0x1_0000 + register, bit);
        } else {
            self.machine.write_d(vcpu, register + intid / 32 * 4, bit);
        }
    }

    fn route(&mut self, vcpu: u32, spi: u32) {
        let target = self.random.u32(..VCPUS);
        self.model.at(key(0, spi)).target = target;
        self.machine.write_wide(vcpu, 0x6000 + spi * 8, Width::Double, target.into());
    }

    /// The registers show the model's state.
    fn compare_registers(&mut self) {
        let vcpu = self.random.u32(..VCPUS);
        for intid in PRIVATE {
            let model = *self.model.at(key(vcpu, intid));
            let pending = self.machine.read_r(vcpu, 0x1_0200) >> intid & 1 != 0;
            let active = self.machine.read_r(vcpu, 0x1_0380) >> intid & 1 != 0;
            assert_eq!(active, model.active.is_some(), "vCPU {vcpu}, active {intid}");
            if intid != TIMER {
                assert_eq!(pending, model.is_pending(), "vCPU {vcpu}, pending {intid}");
            }
        }
        for intid in SPIS {
            let model = *self.model.at(key(0, intid));
            let pending = self.machine.read_d(vcpu, 0x280 + intid / 32 * 4) >> (intid % 32) & 1 != 0;
            let active = self.machine.read_d(vcpu, 0x300 + intid / 32 * 4) >> (intid % 32) & 1 != 0;
            assert_eq!((pending, active), (model.is_pending(), model.active.is_some()), "SPI {intid}");
        }
    }
}

#[test]
fn promptly_told_vcpus_see_what_the_manual_says() {
    let mut acknowledged = 0;
    for seed in 1..=24 {
        let lists = [2, 3, 4, 16][usize::try_from(seed % 4).expect("below four")];
        let mut world = World::new(Decisions::of_seed(seed), lists, seed % 3 == 0);
        for step in 0..10_000 {
            world.step();
            world.machine.settle_told();
            if step % 50 == 0 {
                world.compare_registers();
                world.machine.settle_told();
            }
        }
        acknowledged += world.acknowledged;
    }
    assert!(acknowledged > 20_000, "the test did something: {acknowledged}");
}

/// A VM that is saved and restored notices nothing, whatever its interrupts are doing, and whatever number of list
/// registers the other host has.
#[test]
fn vcpus_that_go_on_in_another_host_see_what_the_manual_says() {
    let mut acknowledged = 0;
    for seed in 1..=24 {
        let lists = [2, 3, 4, 16][usize::try_from(seed % 4).expect("below four")];
        let mut world = World::new(Decisions::of_seed(seed), lists, seed % 3 == 0);
        for step in 0..4_000 {
            world.step();
            // Also between an event and the exit by which a vCPU hears of it.
            if world.random.u32(..4) == 0 {
                // A level that is pending by its line and by its register loses the latter if it is in a list register.
                let is_twice = |spi: u32| {
                    let interrupt = world.model.0[&key(0, spi)];
                    !interrupt.edge && interrupt.latch && interrupt.line
                };
                let woken = if SPIS.into_iter().any(is_twice) { 0 } else { world.random.u32(..1 << VCPUS) };
                world.machine.save_and_restore([2, 3, 4, 16][world.random.usize(..4)], woken);
            }
            world.machine.settle_told();
            if step % 50 == 0 {
                world.compare_registers();
                world.machine.settle_told();
            }
        }
        acknowledged += world.acknowledged;
    }
    assert!(acknowledged > 8_000, "the test did something: {acknowledged}");
}

/// The fuzzer decides what happens next.
#[test]
fn whatever_happens_vcpus_see_what_the_manual_says() {
    fuzz::target("gic", |bytes| {
        let mut random = Decisions::of_bytes(bytes);
        let (lists, splits_end) = ([2, 3, 4, 16][random.usize(..4)], random.bool());
        let mut world = World::new(random, lists, splits_end);
        while !world.random.are_over() {
            world.step();
            world.machine.settle_told();
        }
        world.compare_registers();
    });
}

/// Edges of one interrupt.
#[derive(Default)]
struct Edges {
    /// That an acknowledgement may still be for.
    open: u32,
    /// The last one is not followed by an acknowledgement yet.
    unseen: bool,
}

impl Edges {
    fn come(&mut self) {
        self.open += 1;
        self.unseen = true;
    }

    fn are_seen(&mut self) {
        assert!(self.open > 0, "acknowledged without an edge");
        self.open -= 1;
        self.unseen = false;
    }
}

/// vCPUs exit late, so their news is old. Two edges around an acknowledgement may become one or two, but no edge is
/// lost, and none is invented.
#[test]
fn late_vcpus_lose_no_edge_and_make_up_none() {
    let mut delivered = 0;
    for seed in 1..=12 {
        let lists = 2 + usize::from(seed % 2 == 0) * 2;
        let mut world = World::new(Decisions::of_seed(seed), lists, false);
        let edge_spis: Vec<u32> = SPIS.into_iter().skip(1).step_by(2).collect();
        let mut edges: BTreeMap<Key, Edges> = BTreeMap::new();
        for _ in 0..10_000 {
            let vcpu = world.random.u32(..VCPUS);
            let spi = of(&mut world.random, &edge_spis);
            match world.random.u32(..8) {
                0..2 => {
                    world.machine.set_line(spi, true);
                    world.machine.set_line(spi, false);
                    edges.entry((None, spi)).or_default().come();
                }
                2 => {
                    let intid = of(&mut world.random, &[0, 1, 2, 15]);
                    let target = world.random.u32(..VCPUS);
                    world.machine.cpu(target).posted.raise(intid);
                    edges.entry((Some(target), intid)).or_default().come();
                }
                3..5 => {
                    if let Some(intid) = world.machine.cpu(vcpu).acknowledge() {
                        edges.entry(key(vcpu, intid)).or_default().are_seen();
                        delivered += 1;
                    }
                }
                5 => {
                    world.machine.cpu(vcpu).end();
                }
                6 => world.machine.settle(vcpu),
                _ => world.route(vcpu, spi),
            }
            if world.machine.cpu(vcpu).wants_exit() {
                world.machine.settle(vcpu);
            }
        }

        // All vCPUs exit and take what is left.
        for _ in 0..100 {
            world.machine.settle_all();
            for vcpu in 0..VCPUS {
                if world.machine.cpu(vcpu).end().is_none()
                    && let Some(intid) = world.machine.cpu(vcpu).acknowledge()
                {
                    edges.entry(key(vcpu, intid)).or_default().are_seen();
                }
            }
        }
        let lost: Vec<&Key> = edges.iter().filter(|(_, edges)| edges.unseen).map(|(key, _)| key).collect();
        assert!(lost.is_empty(), "seed {seed}: {lost:?}");
    }
    assert!(delivered > 5_000, "the test did something: {delivered}");
}
