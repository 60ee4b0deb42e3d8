//! Memory that a parent gives to a child and takes away again, while the child runs.
//!
//! The script makes the parent's calls. As soon as a page is taken away it writes a mark there, as Linux would use the
//! page for something else. A write of the child, or of the hypervisor for the child, that comes later destroys it.

mod calls;
mod taken;
pub(super) mod tracked;

use alloc::sync::Arc;
use interleave::STEPS;
use std::vec;
use std::vec::Vec;

use abi::payload::{Role, VmConfig};
use addr::{Gpa, GpaRange, PAGE_BYTES};
use hyperv_defs::partition::CreatePartitionInput;
use hyperv_defs::wire::{U32, U64};
use hyperv_defs::{Answer, Code, Control, PartitionId, Status};
use partition::Entry;
use sched::Pending;
use stage2::Access;

use super::{Scenario, config, create, explore, prepare};
use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::platform;
use crate::arch::fake::program::Op;
use crate::arch::{Arch, Machine};
use crate::frames::Frames;
use crate::mutants::{self, Mutant};
use crate::sync::{Ordering, relax};
use crate::vm::Vm;
use crate::vm::address_space::NoTlb;
use crate::vm::child::suspend;

/// Of the child: a page that stays, and one that comes and goes.
const FIXED: u64 = 0;
const LENT: u64 = 1;
/// Words on the page that stays: a vCPU has ended.
const DONE: u64 = 0x100;
/// Pages of the parent: outputs, those of the child, and deposits.
const OUTPUT: u64 = 1;
const OF_FIXED: u64 = 16;
const OF_LENT: u64 = 17;
const DEPOSITS: u64 = 64;
const DEPOSITED: u16 = 24;

/// Bytes of the parent's memory.
const MEMORY: u64 = 16 << 20;

const RIGHTS: u64 = 0x800f;
const READ_ONLY: u64 = 0x800d;
const NO_ACCESS: u64 = 0x1_0000;
const LARGE: u64 = 0x8000_0000;
/// As UNMAP has it.
const UNMAP_LARGE: u64 = 2;

/// A parent, and its only child.
struct Family<'a> {
    simulation: &'a Simulation,
    parent: Arc<Vm>,
    id: u64,
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

const fn all(reps: u16) -> Answer {
    Answer::new(Status::Success, reps)
}

impl<'a> Family<'a> {
    /// A child with deposits and without memory, whose vCPUs have these programs.
    fn new(simulation: &'a Simulation, programs: Vec<Vec<Op>>) -> Self {
        Self::of_parent(simulation, vec![vec![]], programs)
    }

    /// The same. The parent's vCPUs have programs too.
    fn of_parent(simulation: &'a Simulation, own: Vec<Vec<Op>>, programs: Vec<Vec<Op>>) -> Self {
        let config = VmConfig { role: Role::Parent, memory_bytes: MEMORY, ..config("parent", own.len()) };
        prepare(core::slice::from_ref(&config));
        let parent = create(simulation, 0, &config, own);
        let mut family = Self { simulation, parent, id: 0 };

        let create = CreatePartitionInput {
            compatibility_version: U32::new(0x609),
            flags: U64::new(0x48_2110),
            ..CreatePartitionInput::default()
        };
        assert_eq!(family.call(Code::CreatePartition, 0, create.bytes()), all(0));
        let mut id = [0; 8];
        assert!(family.parent.memory.read(Gpa(OUTPUT * PAGE_BYTES), &mut id));
        family.id = u64::from_le_bytes(id);
        assert_eq!(family.deposit(DEPOSITS, DEPOSITED), all(DEPOSITED));

        let vcpus = u64::try_from(programs.len()).expect("few");
        simulation.load(&format!("parent/{:x}", family.id), programs);
        assert_eq!(family.call(Code::InitializePartition, 0, &bytes(&[family.id])), all(0));
        for index in 0..vcpus {
            assert_eq!(family.call(Code::CreateVp, 0, &bytes(&[family.id, index, !0])), all(0));
        }
        family
    }

    fn call(&self, code: Code, reps: u16, input: &[u8]) -> Answer {
        let is_short = matches!(code, Code::InitializePartition | Code::FinalizePartition | Code::DeletePartition);
        let control = Control::new(code).with_rep_count(reps);
        let control = if is_short { control.with_fast() } else { control };
        let mut page = [0; 4096];
        page[..input.len()].copy_from_slice(input);
        platform::hypercall(&self.parent, control, &page, Gpa(OUTPUT * PAGE_BYTES))
    }

    fn deposit(&self, first: u64, count: u16) -> Answer {
        let pages = (first..first + u64::from(count)).collect::<Vec<_>>();
        self.call(Code::DepositMemory, count, &bytes(&[&[self.id], &pages[..]].concat()))
    }

    fn map(&self, first: u64, flags: u64, pages: &[u64]) -> Answer {
        let count = u16::try_from(pages.len()).expect("few");
        self.call(Code::MapGpaPages, count, &bytes(&[&[self.id, first, flags], pages].concat()))
    }

    fn unmap(&self, first: u64, flags: u64, count: u16) -> Answer {
        self.call(Code::UnmapGpaPages, count, &bytes(&[self.id, first, flags]))
    }

    fn described(&self, page: u64) -> Entry {
        platform::described(&self.parent, PartitionId(self.id), page).expect("it exists")
    }

    /// Whether stage 2 maps a page as it was described.
    fn is_mapped_as_described(&self, page: u64) -> bool {
        let memory = &self.child().memory;
        let shape = memory.shape();
        let found = memory.tree().walk(memory.tables(), &NoTlb, &*shape).lookup(Gpa(page * PAGE_BYTES));
        match (self.described(page), found) {
            (Entry::Absent | Entry::NoAccess, None) => true,
            (Entry::Page { source, access }, Some(leaf)) => {
                Some(leaf.translate(Gpa(page * PAGE_BYTES))) == self.parent.memory.backing.pages(source, 1)
                    && leaf.access == Access { read: true, write: access.write, execute: access.execute }
            }
            _ => false,
        }
    }

    fn child(&self) -> Arc<Vm> {
        platform::child_of(&self.parent, PartitionId(self.id)).expect("it is initialized")
    }

    /// Lets all vCPUs run.
    fn start(&self) {
        let child = self.child();
        for (index, vcpu) in (0..).zip(child.vcpus()) {
            vcpu.posted().start();
            child.post(index, Pending::STARTUP);
            child.vp(index).expect("it was created").resume(suspend::EXPLICIT, 0);
        }
    }

    /// Lets vCPUs try again that have found no memory.
    fn serve(&self) {
        let child = self.child();
        for (index, vcpu) in (0..).zip(child.vcpus()) {
            if vcpu.suspended().load(Ordering::SeqCst) & suspend::INTERCEPT != 0 {
                child.vp(index).expect("it was created").resume(suspend::INTERCEPT, 0);
            }
        }
    }

    fn word(&self, page: u64, offset: u64) -> u64 {
        let mut word = [0; 8];
        assert!(self.parent.memory.read(Gpa(page * PAGE_BYTES + offset), &mut word), "page {page:#x} is not there");
        u64::from_le_bytes(word)
    }

    fn write(&self, page: u64, offset: u64, value: u64) {
        let is_written = self.parent.memory.write(Gpa(page * PAGE_BYTES + offset), &value.to_le_bytes());
        assert!(is_written, "page {page:#x} is not there");
    }

    /// Ends the child. All of its deposits come back, and are clear.
    fn end(self) {
        assert_eq!(self.call(Code::FinalizePartition, 0, &bytes(&[self.id])), all(0));
        let half = DEPOSITED / 2;
        assert_eq!(self.call(Code::WithdrawMemory, half, &bytes(&[self.id, 0])), all(half));
        let mut back: Vec<u64> = (0..half.into()).map(|index| self.word(OUTPUT, index * 8)).collect();
        let rest = self.call(Code::WithdrawMemory, 512, &bytes(&[self.id, 0]));
        assert_eq!(rest, Answer::new(Status::NoResources, DEPOSITED - half));
        back.extend((0..(DEPOSITED - half).into()).map(|index| self.word(OUTPUT, index * 8)));
        back.sort_unstable();
        assert!(back.iter().copied().eq(DEPOSITS..DEPOSITS + u64::from(DEPOSITED)), "{back:x?}");
        for &page in &back {
            let mut content = [0xff; 4096];
            assert!(self.parent.memory.read(Gpa(page * PAGE_BYTES), &mut content), "page {page:#x} is not there");
            assert_eq!(content, [0; 4096], "page {page:#x} is not clear");
        }
        assert_eq!(self.call(Code::DeletePartition, 0, &bytes(&[self.id])), all(0));
        self.turn_off();
    }

    fn turn_off(self) {
        let Self { simulation, parent, .. } = self;
        parent.stop(abi::control::StopReason::Commanded, format_args!("by the script"));
        super::until_gone(simulation, parent);
    }
}

/// How often the page is taken away.
const ROUNDS: u64 = 6;

/// Takes the lent page away and gives it back, while vCPUs run.
fn take_and_give(simulation: &Simulation, programs: Vec<Vec<Op>>) {
    let vcpus = u64::try_from(programs.len()).expect("few");
    let family = Family::new(simulation, programs);
    assert_eq!(family.map(FIXED, RIGHTS, &[OF_FIXED, OF_LENT]), all(2));
    family.start();
    let is_done = |number| family.word(OF_FIXED, DONE + 8 * number) != 0;
    for round in 1..=ROUNDS {
        let what = if round % 2 == 0 { Code::UnmapGpaPages } else { Code::MapGpaPages };
        let flags = if what == Code::MapGpaPages { NO_ACCESS } else { 0 };
        // One after the other: what is taken away twice is no error.
        assert_eq!(family.call(what, 1, &bytes(&[family.id, LENT, flags, 0])), all(1));
        let mark = !round;
        for offset in 0..4 {
            family.write(OF_LENT, 8 * offset, mark);
        }
        for offset in [0, 1, 2, 3, 0, 1, 2, 3] {
            assert_eq!(family.word(OF_LENT, 8 * offset), mark, "the page was written to after it was taken away");
            // Time for those that have it still in a TLB.
            relax();
        }
        assert_eq!(family.map(LENT, RIGHTS, &[OF_LENT]), all(1));
        // The page is back before those that wait for it hear of that.
        let turns = if mutants::is(Mutant::WaitNotSeen) { 200 } else { 8 };
        (0..turns).for_each(|_| relax());
        family.serve();
        (0..8).for_each(|_| relax());
    }
    simulation.wait_until("both vCPUs have ended", || {
        family.serve();
        (0..vcpus).all(is_done)
    });
    family.end();
}

/// Writes to the lent page again and again.
fn writer(number: u64) -> Vec<Op> {
    let at = LENT * PAGE_BYTES + 8 * number;
    let round = |value| [Op::Write(at, value), Op::Write(at, value + 1), Op::Yield, Op::Write(at, value + 2)];
    (1..=4).flat_map(round).chain([Op::Write(DONE + 8 * number, 1), Op::Stop]).collect()
}

/// Has the hypervisor write to it.
fn written_for(number: u64) -> Vec<Op> {
    let at = LENT * PAGE_BYTES + 16 * number;
    let round = |value| [Op::WriteByHost(at, value), Op::WriteByHost(at, value + 1), Op::Yield];
    (1..=3).flat_map(round).chain([Op::Write(DONE + 8 * number, 1), Op::Stop]).collect()
}

/// Has the hypervisor write to it before the next instruction, which reads that. The script leaves these words alone.
fn owed(number: u64) -> Vec<Op> {
    let at = LENT * PAGE_BYTES + 0x100 + 8 * number;
    let round = |value| [Op::Owe(at, value), Op::Expect(at, value), Op::Owe(at, value + 1), Op::Expect(at, value + 1)];
    (1..=4)
        .flat_map(|round_number| round(2 * round_number))
        .chain([Op::Write(DONE + 8 * number, 1), Op::Stop])
        .collect()
}

/// A page that two vCPUs write to is taken away.
pub(super) const TAKEN_FROM_CHILD: Scenario = Scenario {
    name: "a page is taken away from a child that writes to it",
    cpus: 2,
    count: 2_000,
    steps: STEPS,
    script: |simulation| take_and_give(simulation, vec![writer(0), writer(1)]),
};

/// A page that the hypervisor writes to is taken away.
pub(super) const VISITED: Scenario = Scenario {
    name: "a page is taken away from a child while the hypervisor writes to it",
    cpus: 2,
    count: 2_000,
    steps: STEPS,
    script: |simulation| take_and_give(simulation, vec![written_for(0), written_for(1)]),
};

/// A page is taken away that the hypervisor has to write to before the guest goes on.
pub(super) const OWED: Scenario = Scenario {
    name: "a page is taken away from a child that the hypervisor owes something there",
    cpus: 2,
    count: 2_000,
    steps: STEPS,
    script: |simulation| take_and_give(simulation, vec![owed(0), owed(1)]),
};

/// The parent deposits a page that its other vCPUs write to: the hypervisor's list of pages is in it.
pub(super) const DEPOSITED_IN_USE: Scenario = Scenario {
    name: "a parent deposits a page that it writes to",
    cpus: 2,
    count: 2_000,
    steps: STEPS,
    script: |simulation| {
        const PAGE: u64 = 200;
        let at = PAGE * PAGE_BYTES;
        let writer = |number: u64| [&[Op::Write(at, !number), Op::Yield].repeat(10)[..], &[Op::Stop]].concat();
        let first = vec![Op::Start(1), Op::Start(2), Op::Stop];
        let family = Family::of_parent(simulation, vec![first, writer(1), writer(2)], vec![]);
        family.parent.start();
        simulation.wait_until("the parent uses it", || family.word(PAGE, 0) != 0);
        assert_eq!(family.deposit(PAGE, 1), all(1));
        (0..16).for_each(|_| relax());
        assert_eq!(family.call(Code::WithdrawMemory, 1, &bytes(&[family.id, 0])), all(1));
        assert_eq!(family.word(OUTPUT, 0), PAGE);
        family.end();
    },
};

/// A parent that owns the machine's devices has a device's registers at their own address. It names them where the
/// interface wants memory.
pub(super) const DEVICE_AS_MEMORY: Scenario = Scenario {
    name: "a parent names the registers of a device as memory",
    cpus: 1,
    count: 20,
    steps: STEPS,
    script: |simulation| {
        let family = Family::new(simulation, vec![]);
        let registers = Frames::allocate(PAGE_BYTES, PAGE_BYTES).expect("there is memory");
        registers.zero();
        let page = GpaRange::new(Gpa(registers.hpa().0), PAGE_BYTES).expect("a page");
        let memory = &family.parent.memory;
        assert!(!memory.has(page.start), "it is not the parent's memory");
        memory.map_at_its_address(page).expect("there are tables");

        let mut content = [0xff; 8];
        assert!(!memory.read(page.start, &mut content), "registers were read");
        assert!(!memory.write(page.start, &[1; 8]), "registers were written to");
        assert!(memory.find_word(page.start).is_none(), "a word of registers was found");
        assert!(memory.with_page(page.start, |_| ()).is_none(), "registers are no page of memory");
        assert!(registers.read(0, &mut content) && content == [0; 8], "registers have changed");
        family.end();
        drop(registers);
    },
};

/// The parent suspends a child whose timer runs, and stops its time. The timer has as long to go afterwards.
pub(super) const FROZEN: Scenario = Scenario {
    name: "a parent stops the time of a child whose timer runs",
    cpus: 2,
    count: 200,
    steps: 4 * STEPS,
    script: |simulation| {
        const FREEZE: u64 = 0x3_0003;
        const EXPLICIT_SUSPEND: u64 = 0;
        const LENGTH: u64 = 10_000;
        const PAGE: u64 = 200;
        let program = vec![Op::Write(0, 1), Op::Timer(LENGTH), Op::Halt, Op::Write(8, 1), Op::Stop];
        let family = Family::new(simulation, vec![program]);
        assert_eq!(family.map(FIXED, RIGHTS, &[OF_FIXED]), all(1));
        let freeze = |is_frozen| {
            assert_eq!(family.call(Code::SetPartitionProperty, 0, &bytes(&[family.id, FREEZE, is_frozen])), all(0));
        };
        let is_interrupted = || {
            let mut input = [0; 4096];
            let get = bytes(&[family.id, 0, 0x8000_0000, 0, 7, PAGE]);
            input[..get.len()].copy_from_slice(&get);
            let control = Control::new(Code::GetVpState).with_variable_words(1);
            assert_eq!(platform::hypercall(&family.parent, control, &input, Gpa(OUTPUT * PAGE_BYTES)), all(0));
            family.word(PAGE, 128) != 0
        };
        // A look at the clock takes a tick.
        let pass = |ticks: u64| {
            let end = Machine::now() + ticks;
            while Machine::now() < end {}
        };

        family.start();
        let began = Machine::now();
        simulation.wait_until("it runs", || family.word(OF_FIXED, 0) != 0);
        let suspend = bytes(&[family.id, 0, EXPLICIT_SUSPEND, 0, 1, 0]);
        assert_eq!(family.call(Code::SetVpRegisters, 1, &suspend), all(1));
        freeze(1);
        // The vCPU may have been slow, and the timer short.
        let had_expired = is_interrupted() || family.word(OF_FIXED, 8) != 0;
        let ran = Machine::now() - began;
        pass(2 * LENGTH);
        let child = family.child();
        child.post(0, Pending::TIMER);
        (0..64).for_each(|_| relax());
        assert_eq!(is_interrupted() || family.word(OF_FIXED, 8) != 0, had_expired, "time stood still");
        freeze(0);
        let thawed = Machine::now();
        child.vp(0).expect("it was created").resume(suspend::EXPLICIT, 0);
        simulation.wait_until("its timer expires", || family.word(OF_FIXED, 8) != 0);
        let passed = ran + (Machine::now() - thawed);
        assert!(had_expired || passed >= LENGTH, "it came after {passed} ticks");
        drop(child);
        family.end();
    },
};

#[test]
fn timer_of_a_frozen_child_has_as_long_to_go_afterwards() {
    explore(FROZEN);
}

/// The parent interrupts a vCPU that is suspended, and reads its state at once.
pub(super) const SAVED: Scenario = Scenario {
    name: "a parent saves a vCPU that it has interrupted",
    cpus: 2,
    count: 200,
    steps: STEPS,
    script: |simulation| {
        const PAGE: u64 = 200;
        const INTERRUPTED: u64 = 128;
        let family = Family::new(simulation, vec![vec![], vec![]]);
        for vp in [0, 1, 0] {
            assert_eq!(family.call(Code::AssertVirtualInterrupt, 0, &bytes(&[family.id, 0, vp, 0x41])), all(0));
            let mut input = [0; 4096];
            let get = bytes(&[family.id, vp, 0x8000_0000, 0, 7, PAGE]);
            input[..get.len()].copy_from_slice(&get);
            let control = Control::new(Code::GetVpState).with_variable_words(1);
            assert_eq!(platform::hypercall(&family.parent, control, &input, Gpa(OUTPUT * PAGE_BYTES)), all(0));
            assert_eq!(family.word(PAGE, INTERRUPTED), 1, "the interrupt of vCPU {vp} is not in its state");
        }
        family.end();
    },
};

#[test]
fn state_of_a_vcpu_has_the_interrupts_that_it_has_not_taken() {
    explore(SAVED);
}

/// Two vCPUs of the parent create the same vCPU of its child. One of them is told so, and then changes its registers.
pub(super) const CREATED_TWICE: Scenario = Scenario {
    name: "two vCPUs of a parent create one vCPU of its child",
    cpus: 2,
    count: 2_000,
    steps: STEPS,
    script: |simulation| {
        const ANSWERS: u64 = 200 * PAGE_BYTES;
        const RAX: u64 = 0x2_0000;
        let first = vec![Op::Start(1), Op::CreateVp(ANSWERS), Op::Stop];
        let second = vec![Op::CreateVp(ANSWERS + 8), Op::Stop];
        let family = Family::of_parent(simulation, vec![first, second], vec![vec![]]);
        assert_eq!(family.call(Code::DeleteVp, 0, &bytes(&[family.id, 0])), all(0));
        family.parent.start();
        let answers = || [0, 8].map(|offset| family.word(200, offset));
        simulation.wait_until("one has created it", || answers().contains(&1));
        assert_eq!(family.call(Code::SetVpRegisters, 1, &bytes(&[family.id, 0, RAX, 0, 77, 0])), all(1));
        simulation.wait_until("both calls have ended", || !answers().contains(&0));
        assert!(answers().contains(&(1 + Status::InvalidVpIndex as u64)), "{:x?}: it exists already", answers());
        assert_eq!(family.call(Code::GetVpRegisters, 1, &bytes(&[family.id, 0, RAX])), all(1));
        assert_eq!(family.word(OUTPUT, 0), 77, "it was reset by the other call");
        family.end();
    },
};

#[test]
fn vcpu_of_a_child_begins_once() {
    explore(CREATED_TWICE);
}

#[test]
fn page_that_was_deposited_is_not_written_to_by_the_parent() {
    explore(DEPOSITED_IN_USE);
}

#[test]
fn registers_of_a_device_are_never_taken_for_memory() {
    explore(DEVICE_AS_MEMORY);
}

#[test]
fn page_that_was_taken_away_from_a_child_is_not_written_to() {
    explore(TAKEN_FROM_CHILD);
}

#[test]
fn page_that_was_taken_away_from_a_child_is_not_written_to_by_the_hypervisor() {
    explore(VISITED);
}

#[test]
fn guest_finds_what_was_written_for_it_on_a_page_that_comes_and_goes() {
    explore(OWED);
}

/// A family whose child never runs.
fn with_family(script: fn(&Family<'_>)) {
    let _no_mistakes = super::beside_others();
    run(1, move |simulation: &Simulation| {
        let family = Family::new(simulation, vec![vec![]]);
        script(&family);
        assert_eq!(family.call(Code::FinalizePartition, 0, &bytes(&[family.id])), all(0));
        assert_eq!(family.call(Code::DeletePartition, 0, &bytes(&[family.id])), all(0));
        // All of the parent's pages are its own again.
        for page in 0..MEMORY / PAGE_BYTES {
            let _there = family.word(page, 0);
        }
        family.turn_off();
    });
}

#[test]
fn parent_that_creates_its_last_vp_first_has_those_that_it_has_created() {
    with_family(|family| {
        let create = |index| family.call(Code::CreateVp, 0, &bytes(&[family.id, index, !0]));
        let exist = || [0, 1, 2, 3].map(|index| family.child().vp(index).is_some());
        let refused = Answer::new(Status::InvalidVpIndex, 0);
        assert_eq!(create(4), refused, "a child has at most four here");
        assert_eq!(family.child().vcpus().len(), 1, "which is known before any is made");
        assert_eq!(create(3), all(0));
        assert_eq!(exist(), [true, false, false, true]);
        assert_eq!((create(3), create(1)), (refused, all(0)));
        assert_eq!(exist(), [true, true, false, true]);
    });
}

#[test]
fn deposited_page_is_out_of_the_parents_reach_until_it_is_back() {
    with_family(|family| {
        let mut word = [0; 8];
        assert!(!family.parent.memory.read(Gpa(DEPOSITS * PAGE_BYTES), &mut word));
        assert!(!family.parent.memory.write(Gpa(DEPOSITS * PAGE_BYTES), &word));
        let again = family.deposit(DEPOSITS - 2, 4);
        assert_eq!(again, Answer::new(Status::InvalidParameter, 2), "the third was deposited before");
        let beyond = family.deposit(MEMORY / PAGE_BYTES - 1, 2);
        assert_eq!(beyond, Answer::new(Status::InvalidParameter, 1));
        let lent = family.map(0, RIGHTS, &[OF_FIXED, DEPOSITS]);
        assert_eq!(lent, Answer::new(Status::InvalidParameter, 1), "a table must not be in a child");
        assert_eq!(family.deposit(OF_FIXED, 1), Answer::new(Status::InvalidParameter, 0), "it is the child's");
    });
}

#[test]
fn parent_that_reads_what_it_has_deposited_finds_ones_and_goes_on() {
    let _no_mistakes = super::beside_others();
    run(1, |simulation: &Simulation| {
        const FLAG: u64 = 200 * PAGE_BYTES;
        let reader = vec![Op::Expect(DEPOSITS * PAGE_BYTES, !0), Op::Write(FLAG, 1), Op::Stop];
        let family = Family::of_parent(simulation, vec![reader], vec![]);
        family.parent.start();
        simulation.wait_until("the parent goes on", || family.word(FLAG / PAGE_BYTES, 0) == 1);
        family.end();
    });
}

#[test]
fn parent_that_writes_to_what_it_has_deposited_ends() {
    let _no_mistakes = super::beside_others();
    run(1, |simulation: &Simulation| {
        let writer = vec![Op::Write(DEPOSITS * PAGE_BYTES, 1), Op::Stop];
        let family = Family::of_parent(simulation, vec![writer], vec![]);
        family.parent.start();
        simulation.wait_until("the parent has ended", || family.parent.is_over());
        family.end();
    });
}

#[test]
fn child_has_the_rights_that_its_parent_gives() {
    with_family(|family| {
        let child = family.child();
        let mut word = [0; 8];
        assert!(!child.memory.read(Gpa(0), &mut word));
        family.write(OF_FIXED, 0, 77);
        assert_eq!(family.map(0, READ_ONLY, &[OF_FIXED]), all(1));
        assert!(child.memory.read(Gpa(0), &mut word));
        assert_eq!(u64::from_le_bytes(word), 77);
        assert!(!child.memory.write(Gpa(0), &word), "it is read-only");
        let found = child.memory.find_word(Gpa(0)).expect("it is there");
        assert!(!child.memory.compare_exchange(found, 77, 78));
        assert_eq!(child.memory.load(found, 0), 77);

        assert_eq!(family.map(0, RIGHTS, &[OF_FIXED]), all(1));
        assert!(!child.memory.compare_exchange(found, 77, 78), "the word was found before");
        let found = child.memory.find_word(Gpa(0)).expect("it is there");
        assert!(child.memory.compare_exchange(found, 77, 78));
        assert_eq!(family.word(OF_FIXED, 0), 78);
        assert_eq!(family.map(0, NO_ACCESS, &[0]), all(1));
        assert!(child.memory.find_word(Gpa(0)).is_none() && !child.memory.read(Gpa(0), &mut word));
        assert_eq!(child.memory.load(found, 0), 0, "a word that went away is not read");
    });
}

#[test]
fn time_of_a_child_stands_still_while_it_is_frozen() {
    const FREEZE: u64 = 0x3_0003;
    const REFERENCE_TIME: u64 = 0x3_0005;
    const RBX: u64 = 0x2_0003;
    const TSC: u64 = 0x8_0000;
    with_family(|family| {
        let set = |property, value| {
            assert_eq!(family.call(Code::SetPartitionProperty, 0, &bytes(&[family.id, property, value])), all(0));
        };
        let time = || {
            assert_eq!(family.call(Code::GetPartitionProperty, 0, &bytes(&[family.id, REFERENCE_TIME])), all(0));
            family.word(OUTPUT, 0)
        };
        // The fake machine shows the offset of a vCPU's counter there.
        let offset = || {
            assert_eq!(family.call(Code::GetVpRegisters, 1, &bytes(&[family.id, 0, RBX])), all(1));
            family.word(OUTPUT, 0)
        };
        // A look at the clock takes a tick.
        let pass = || (0..10_000).fold(0, |_, _| Machine::now());

        let running = time();
        let _later = pass();
        assert!(time() > running);
        set(FREEZE, 1);
        let frozen = time();
        let _later = pass();
        assert_eq!((time(), offset()), (frozen, 0));
        set(REFERENCE_TIME, 5_000_000_000);
        let tsc = bytes(&[family.id, 0, TSC, 0, 1 << 50, 0]);
        assert_eq!(family.call(Code::SetVpRegisters, 1, &tsc), all(1));
        let written = offset();
        let _later = pass();
        assert_eq!((time(), offset()), (5_000_000_000, written));
        set(FREEZE, 0);
        assert!((5_000_000_000..5_001_000_000).contains(&time()));
        assert!(offset() < written, "the counter stood still");
        set(FREEZE, 0);
        let again = offset();
        let _later = pass();
        assert_eq!(offset(), again);
    });
}

#[test]
fn part_of_a_large_page_can_be_taken_away() {
    with_family(|family| {
        let level = |page: u64| {
            let memory = &family.child().memory;
            let shape = memory.shape();
            memory.tree().walk(memory.tables(), &NoTlb, &*shape).lookup(Gpa(page * PAGE_BYTES)).map(|leaf| leaf.level)
        };
        assert_eq!(family.map(0x400, RIGHTS | LARGE, &[0x200, 0x600]), all(2));
        assert_eq!([level(0x400), level(0x7ff)], [Some(1); 2]);
        assert_eq!(family.map(0x405, NO_ACCESS, &[0, 0]), all(2));
        assert_eq!([0x404, 0x405, 0x406, 0x407, 0x600].map(level), [Some(0), None, None, Some(0), Some(1)]);
        assert!((0x400..0x800).all(|page| family.is_mapped_as_described(page)));
        assert_eq!(family.map(0x600, NO_ACCESS | LARGE, &[0]), all(1));
        assert_eq!(level(0x600), None);
        assert_eq!(family.unmap(0x400, UNMAP_LARGE, 2), all(2));
        assert_eq!((family.described(0x405), level(0x404)), (Entry::Absent, None));
    });
}

#[test]
fn call_that_lacks_tables_asks_for_deposits_and_goes_on() {
    with_family(|family| {
        let (mut at, mut asked) = (0, 0);
        while asked < 3 {
            let answer = family.map(at, RIGHTS, &[OF_FIXED]);
            if answer == all(1) {
                at += 1 << 18;
                continue;
            }
            assert_eq!(answer, Answer::new(Status::InsufficientMemory, 0));
            assert_eq!(family.deposit(256 + asked * 8, 8), all(8));
            asked += 1;
        }
        assert!((0..at).step_by(1 << 18).all(|page| family.is_mapped_as_described(page)));
    });
}

#[test]
fn stage_2_follows_the_description() {
    with_family(|family| {
        let mut random = fastrand::Rng::with_seed(0x5eed_0003);
        assert_eq!(family.deposit(128, 64), all(64));
        for _ in 0..3_000 {
            let is_large = random.u8(..4) == 0;
            let step = if is_large { 512 } else { 1 };
            let count = random.u16(1..=4);
            let first = if is_large { 512 * random.u64(..4) } else { random.u64(..2_040) };
            let large = if is_large { LARGE } else { 0 };
            let answer = match random.u8(..4) {
                0 => family.unmap(first, if is_large { UNMAP_LARGE } else { 0 }, count),
                1 => family.map(first, NO_ACCESS | large, &vec![0; count.into()]),
                _ => {
                    let rights = if random.bool() { RIGHTS } else { READ_ONLY };
                    let source = |random: &mut fastrand::Rng| {
                        if is_large { 512 * random.u64(1..8) } else { random.u64(512..4_096) }
                    };
                    let pages: Vec<u64> = (0..count).map(|_| source(&mut random)).collect();
                    family.map(first, rights | large, &pages)
                }
            };
            assert_eq!(answer, all(count), "there are deposits enough");
            for page in first..first + u64::from(count) * step {
                assert!(family.is_mapped_as_described(page), "page {page:#x}: {:?}", family.described(page));
            }
        }
        assert!((0..4_096).all(|page| family.is_mapped_as_described(page)));
    });
}
