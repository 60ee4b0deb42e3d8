//! A few vCPUs on model processors: their list registers deliver and end interrupts like the architecture's, and they
//! exit whenever the maintenance interrupt is raised. Written from the manual, not from the code under test.

use std::vec::Vec;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::device::gic::{Config, Distributor, DistributorState, Posted, Read, Sgi, VcpuGic, VcpuState, Width};

pub(super) const TIMER: u32 = 27;

const IDLE: u8 = 0xff;

/// The parts of a VM that matter for interrupts.
pub(super) struct Machine {
    pub(super) distributor: Distributor,
    pub(super) cpus: Vec<Cpu>,
    /// Visits to the distributor by `prepare`.
    pub(super) visits: u32,
    /// Exits that the processor asked for.
    pub(super) maintenance: u32,
}

/// A vCPU and the processor that runs it.
pub(super) struct Cpu {
    pub(super) gic: VcpuGic,
    pub(super) posted: Posted,
    pub(super) lists: Vec<u64>,
    pub(super) control: u64,
    ends: u32,
    /// Interrupts acknowledged since the last exit.
    acknowledged: u64,
    /// EOImode of the guest.
    pub(super) splits_end: bool,
    /// Acknowledged and not ended: priority and INTID, the last one on top.
    pub(super) stack: Vec<(u8, u32)>,
    /// The virtual timer's condition, and the state of its physical interrupt.
    pub(super) timer: bool,
    pub(super) timer_active: bool,
    /// SPIs that were ended with the guest's interrupt.
    pub(super) ended_spis: Vec<u32>,
}

fn priority(list: u64) -> u8 {
    list.to_be_bytes()[1]
}

fn intid(list: u64) -> u32 {
    u32::try_from(list & 0xffff_ffff).expect("masked")
}

const HW: u64 = 1 << 61;
const EOI: u64 = 1 << 41;

impl Cpu {
    /// The guest reads ICC_IAR1_EL1.
    pub(super) fn acknowledge(&mut self) -> Option<u32> {
        let running = self.stack.last().map_or(IDLE, |&(priority, _)| priority);
        let list = self.lists.iter_mut().filter(|list| **list >> 62 == 1).min_by_key(|list| priority(**list))?;
        if priority(*list) >= running {
            return None;
        }
        *list ^= 3 << 62;
        self.stack.push((priority(*list), intid(*list)));
        self.acknowledged += 1;
        Some(intid(*list))
    }

    /// The guest writes ICC_EOIR1_EL1 for the last interrupt that it acknowledged. With a split end this is the first
    /// half.
    pub(super) fn end(&mut self) -> Option<u32> {
        let (_, intid) = self.stack.pop()?;
        if !self.splits_end && !self.end_in_list(intid) {
            self.ends += 1;
        }
        Some(intid)
    }

    fn end_in_list(&mut self, ended: u32) -> bool {
        let Some(list) = self.lists.iter_mut().find(|list| **list >> 63 == 1 && intid(**list) == ended) else {
            return false;
        };
        *list &= !(1 << 63);
        if *list & HW != 0 {
            assert_eq!(*list >> 32 & 0x1fff, u64::from(ended), "the physical interrupt of the same number");
            if ended == TIMER {
                assert!(self.timer_active, "its physical interrupt is active as long as it is");
                self.timer_active = false;
            } else {
                self.ended_spis.push(ended);
            }
        }
        true
    }

    /// ICH_MISR_EL2.
    pub(super) fn wants_exit(&self) -> bool {
        let used = self.lists.iter().filter(|list| **list >> 62 != 0).count();
        let pending = self.lists.iter().any(|list| *list >> 62 == 1);
        let ended = self.lists.iter().any(|list| list >> 62 == 0 && list & HW == 0 && list & EOI != 0);
        let enabled = |bit: u32| self.control >> bit & 1 != 0;
        ended || enabled(1) && used <= 1 || enabled(2) && self.ends != 0 || enabled(3) && !pending
    }
}

pub(super) fn through_a_file<T: Serialize + DeserializeOwned>(state: &T) -> T {
    let bytes = postcard::to_allocvec(state).expect("it has a fixed form");
    postcard::from_bytes(&bytes).expect("it was written so")
}

impl Machine {
    pub(super) fn new(vcpus: u32, lists: usize) -> Self {
        let config = |number| Config { number, vcpus, lists, linked: 1 << TIMER };
        let cpu = |number| Cpu {
            gic: VcpuGic::new(config(number)),
            posted: Posted::new(),
            lists: vec![0; lists],
            control: 1,
            ends: 0,
            acknowledged: 0,
            splits_end: false,
            stack: Vec::new(),
            timer: false,
            timer_active: false,
            ended_spis: Vec::new(),
        };
        let cpus = (0..vcpus).map(cpu).collect();
        Self { distributor: Distributor::new(vcpus), cpus, visits: 0, maintenance: 0 }
    }

    /// As a kernel leaves it: everything on, with one priority.
    pub(super) fn running(vcpus: u32, lists: usize) -> Self {
        let mut machine = Self::new(vcpus, lists);
        machine.write_d(0, 0x0, 0x12);
        for intid in (32..256).step_by(4) {
            machine.write_d(0, 0x400 + intid, 0xa0a0_a0a0);
        }
        for word in 1..8 {
            machine.write_d(0, 0x100 + word * 4, 0xffff_ffff);
        }
        for vcpu in 0..vcpus {
            machine.write_r(vcpu, 0x14, 0);
            for intid in (0..32).step_by(4) {
                machine.write_r(vcpu, 0x1_0400 + intid, 0xa0a0_a0a0);
            }
            machine.write_r(vcpu, 0x1_0100, 0xffff_ffff);
        }
        machine.settle_all();
        machine
    }

    /// All vCPUs exit, what there is goes into a file, and they go on in another host, with this number of list
    /// registers. Of a vCPU the guest's own part remains: what it has acknowledged, and its timer. Of the vCPUs, those
    /// with a bit in `woken` fill their list registers again before the distributor's state is taken.
    pub(super) fn save_and_restore(&mut self, lists: usize, woken: u32) {
        for vcpu in 0..self.count() {
            self.exit(vcpu);
            let cpu = &mut self.cpus[vcpu as usize];
            cpu.gic.accept(cpu.posted.take());
            cpu.gic.empty_lists(&mut self.distributor);
            cpu.lists.fill(0);
        }
        (0..self.count()).filter(|vcpu| woken >> vcpu & 1 != 0).for_each(|vcpu| self.enter(vcpu));
        let shared = through_a_file(&self.distributor.state());
        let vcpus: Vec<_> = self.cpus.iter().map(|cpu| through_a_file(&cpu.gic.state())).collect();
        // Nothing of this is news to anybody, and a save that is given up leaves all as it was.
        self.deliver_news();

        self.take_over(&shared, &vcpus, lists).expect("the state of one");
        assert_eq!(self.distributor.state(), shared);
        assert!(self.cpus.iter().map(|cpu| cpu.gic.state()).eq(vcpus));
        for vcpu in 0..self.count() {
            self.enter(vcpu);
        }
    }

    /// All interrupt controllers go on from these states, with this number of list registers. `None` for states that
    /// none has.
    pub(super) fn take_over(&mut self, shared: &DistributorState, vcpus: &[VcpuState], lists: usize) -> Option<()> {
        self.distributor = Distributor::with_state(shared, self.count())?;
        let count = self.count();
        for (number, (cpu, state)) in (0..).zip(self.cpus.iter_mut().zip(vcpus)) {
            let config = Config { number, vcpus: count, lists, linked: 1 << TIMER };
            cpu.gic = VcpuGic::with_state(config, state, u32::MAX);
            cpu.posted = Posted::new();
            cpu.lists = vec![0; lists];
            cpu.control = 1;
            cpu.timer_active = cpu.gic.holds_linked(TIMER);
        }
        Some(())
    }

    /// One exit and the entry after it.
    pub(super) fn settle(&mut self, vcpu: u32) {
        self.exit(vcpu);
        self.enter(vcpu);
    }

    pub(super) fn exit(&mut self, vcpu: u32) {
        let cpu = &mut self.cpus[vcpu as usize];
        let lists = cpu.lists.clone();
        let control = cpu.control | u64::from(cpu.ends.min(31)) << 27;
        cpu.ends -= cpu.ends.min(31);
        let seen = cpu.gic.fold(|index| lists[index], control, cpu.splits_end);
        assert_eq!(seen, core::mem::take(&mut cpu.acknowledged), "what was acknowledged is counted once");
        // Physical interrupts come to a pCPU outside the guest, or make it exit.
        if cpu.timer && !cpu.timer_active {
            cpu.timer_active = true;
            cpu.gic.set_line(TIMER, true);
        }
        if !cpu.timer && cpu.gic.holds_linked(TIMER) {
            cpu.gic.set_line(TIMER, false);
        }
    }

    pub(super) fn enter(&mut self, vcpu: u32) {
        let cpu = &mut self.cpus[vcpu as usize];
        cpu.gic.accept(cpu.posted.take());
        if cpu.gic.needs_distributor() {
            self.visits += 1;
            cpu.gic.prepare(Some(&mut self.distributor));
        } else {
            cpu.gic.prepare(None);
        }
        assert!(!cpu.gic.needs_distributor(), "one visit is enough");
        cpu.lists = cpu.gic.lists().collect();
        cpu.control = cpu.gic.control();
        if cpu.timer_active && !cpu.gic.holds_linked(TIMER) {
            cpu.timer_active = false;
        }
        self.deliver_news();
        self.check();
    }

    pub(super) fn deliver_news(&mut self) {
        while let Some(vcpu) = self.distributor.next_news() {
            self.cpus[vcpu as usize].posted.announce_spis();
        }
    }

    /// Every vCPU exits, until there is no news left.
    pub(super) fn settle_all(&mut self) {
        for vcpu in 0..self.count() {
            self.settle(vcpu);
        }
        self.settle_told();
    }

    /// Those vCPUs exit that have a reason to, until none has.
    pub(super) fn settle_told(&mut self) {
        for _ in 0..50 {
            let waiting: Vec<u32> = (0..self.count()).filter(|&vcpu| self.wants_settling(vcpu)).collect();
            if waiting.is_empty() {
                return;
            }
            for vcpu in waiting {
                self.maintenance += u32::from(self.cpus[vcpu as usize].wants_exit());
                self.settle(vcpu);
            }
        }
        panic!("exits without end");
    }

    pub(super) fn wants_settling(&self, vcpu: u32) -> bool {
        let cpu = &self.cpus[vcpu as usize];
        let posted = cpu.posted.take();
        let has_posts = posted != Posted::new().take();
        for intid in (0..32).filter(|intid| posted.raised() >> intid & 1 != 0) {
            cpu.posted.raise(intid);
        }
        if posted.has_spis() {
            cpu.posted.announce_spis();
        }
        has_posts || cpu.wants_exit() || cpu.timer && !cpu.timer_active
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.cpus.len()).expect("few")
    }

    pub(super) fn cpu(&mut self, vcpu: u32) -> &mut Cpu {
        &mut self.cpus[vcpu as usize]
    }

    pub(super) fn set_line(&mut self, intid: u32, asserted: bool) {
        self.distributor.set_line(intid, asserted);
        self.deliver_news();
    }

    pub(super) fn send(&mut self, sender: u32, value: u64) {
        let sgi = Sgi::decode(value);
        self.exit(sender);
        for target in sgi.targets(sender, self.count()) {
            if target == sender {
                self.cpus[target as usize].gic.raise(sgi.intid);
            } else {
                self.cpus[target as usize].posted.raise(sgi.intid);
            }
        }
        self.enter(sender);
    }

    /// The guest writes ICC_DIR_EL1. Returns whether that was an exit.
    pub(super) fn deactivate(&mut self, vcpu: u32, intid: u32) -> bool {
        let cpu = self.cpu(vcpu);
        if cpu.control & 1 << 14 == 0 {
            assert!(cpu.end_in_list(intid), "with all active ones in list registers");
            return false;
        }
        self.exit(vcpu);
        self.cpus[vcpu as usize].gic.deactivate(intid, &mut self.distributor);
        self.enter(vcpu);
        true
    }

    /// A word written to the distributor: an exit.
    pub(super) fn write_d(&mut self, vcpu: u32, offset: u32, value: u32) {
        self.write_wide(vcpu, offset, Width::Word, value.into());
    }

    pub(super) fn write_wide(&mut self, vcpu: u32, offset: u32, width: Width, value: u64) {
        self.exit(vcpu);
        self.cpus[vcpu as usize].gic.write_distributor(&mut self.distributor, offset, width, value);
        self.enter(vcpu);
    }

    pub(super) fn try_read_d(&mut self, vcpu: u32, offset: u32) -> Read {
        self.read_wide(vcpu, offset, Width::Word)
    }

    pub(super) fn read_wide(&mut self, vcpu: u32, offset: u32, width: Width) -> Read {
        self.exit(vcpu);
        let read = self.cpus[vcpu as usize].gic.read_distributor(&mut self.distributor, offset, width);
        self.enter(vcpu);
        read
    }

    /// Reads a word from the distributor, and repeats while other vCPUs must answer.
    pub(super) fn read_d(&mut self, vcpu: u32, offset: u32) -> u32 {
        for _ in 0..5 {
            match self.try_read_d(vcpu, offset) {
                Read::Value(value) => return u32::try_from(value).expect("a word"),
                Read::Retry => self.settle_all(),
            }
        }
        panic!("no answer");
    }

    pub(super) fn write_r(&mut self, vcpu: u32, offset: u32, value: u32) {
        self.write_r_wide(vcpu, vcpu, offset, Width::Word, value.into());
    }

    pub(super) fn read_r(&mut self, vcpu: u32, offset: u32) -> u32 {
        u32::try_from(self.read_r_wide(vcpu, vcpu, offset, Width::Word)).expect("a word")
    }

    /// Writes to the redistributor of vCPU `whose`.
    pub(super) fn write_r_wide(&mut self, vcpu: u32, whose: u32, offset: u32, width: Width, value: u64) {
        self.exit(vcpu);
        let gic = &mut self.cpus[vcpu as usize].gic;
        gic.write_redistributor(&mut self.distributor, whose, offset, width, value);
        let cpu = &mut self.cpus[vcpu as usize];
        cpu.timer_active = cpu.gic.holds_linked(TIMER);
        self.enter(vcpu);
    }

    pub(super) fn read_r_wide(&mut self, vcpu: u32, whose: u32, offset: u32, width: Width) -> u64 {
        self.exit(vcpu);
        let value = self.cpus[vcpu as usize].gic.read_redistributor(&mut self.distributor, whose, offset, width);
        self.enter(vcpu);
        value
    }

    /// Invariants of list registers.
    fn check(&self) {
        let mut seen = Vec::new();
        for (vcpu, cpu) in self.cpus.iter().enumerate() {
            for &list in cpu.lists.iter().filter(|list| **list >> 62 != 0) {
                assert!(list & HW == 0 || list >> 62 != 3, "linked, and active and pending");
                let key = if intid(list) < 32 { (vcpu, intid(list)) } else { (usize::MAX, intid(list)) };
                assert!(!seen.contains(&key), "INTID {} is in two list registers", intid(list));
                seen.push(key);
            }
        }
    }
}
