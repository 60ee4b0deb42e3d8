//! Random lives of VMs whose vCPUs share a tag, on a machine whose TLBs never drop an entry by themselves
//! ([`hw_model`]). Planted mistakes check that such a life finds them.
//!
//! A guest has three pages. Each of its CPUs maps the first in its own way, and flushes it on that CPU only. The second
//! is mapped for all CPUs, and one instruction flushes it everywhere. The third stands for entries of stage 2 alone.

use hw_model::Machine;
use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};
use tlb_tag::by_vm::{CpuTags, Flush, Pool, VcpuTags, VmTags};
use tlb_tag::{Scheme, TagRange};

/// The translation of a page, and its age: enough to tell whether it may still be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Translation {
    /// Unique, also among VMs that are gone.
    vm: u64,
    /// The owner of the tables: a vCPU's number, or [`ALL`].
    vcpu: usize,
    version: u64,
    /// Version of the VM's stage 2.
    stage2: u64,
}

const ALL: usize = usize::MAX;
const PRIVATE: u64 = 1;
const COMMON: u64 = 2;
const STAGE2: u64 = 3;

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// An entry that was refused counts as one that has flushed.
    DebtLostOnAbortedEntry,
    /// It is not noticed that another vCPU of the VM ran here.
    SiblingNotNoticed,
    /// It is not noticed that the vCPU was on another pCPU. (Right only if the guest's own flushes reach all pCPUs, as
    /// with KVM.)
    JourneyNotNoticed,
    /// In a new generation only the tag of the entry is flushed.
    RecycledTagsNotFlushed,
    /// A rollover does not know which tags run, and gives one to another VM.
    RunningTagGivenAway,
    /// After another VM only the guest's own translations are flushed.
    Stage2OfOthersKept,
    /// The guest's request to flush everything is lost.
    VoidIsForgotten,
    /// A change of stage 2 is not announced.
    EpochIsForgotten,
    NeverFlushes,
}

const MUTANTS: [Mutant; 9] = [
    Mutant::DebtLostOnAbortedEntry,
    Mutant::SiblingNotNoticed,
    Mutant::JourneyNotNoticed,
    Mutant::RecycledTagsNotFlushed,
    Mutant::RunningTagGivenAway,
    Mutant::Stage2OfOthersKept,
    Mutant::VoidIsForgotten,
    Mutant::EpochIsForgotten,
    Mutant::NeverFlushes,
];

struct Vm {
    name: u64,
    tags: VmTags,
    epoch: u64,
    /// Version of stage 2, and of the page that all vCPUs map in the same way.
    stage2: u64,
    common: u64,
    vcpus: Vec<Vcpu>,
}

struct Vcpu {
    tags: VcpuTags,
    ran_on: Option<usize>,
    runs: bool,
    /// Version of the page that it maps in its own way.
    private: u64,
}

struct Host {
    machine: Machine<Translation>,
    pool: Pool,
    cpus: Vec<CpuTags>,
    /// Which vCPU runs on each pCPU.
    running: [Option<(usize, usize)>; CPUS],
    vms: Vec<Vm>,
    names: u64,
    mutant: Mutant,
    /// A use of a stale entry, if there was one.
    stale: Option<String>,
}

#[derive(Clone, Debug)]
enum Step {
    /// The vCPU on a pCPU departs, and a vCPU that runs nowhere arrives.
    Switch { cpu: usize, vm: usize, vcpu: usize },
    /// The vCPU there enters, or its entry is refused.
    Enter { cpu: usize, refused: bool },
    /// The guest changes the page of this CPU, and flushes it here.
    FlushHere { cpu: usize },
    /// The guest changes the page of all CPUs, and flushes it everywhere.
    FlushEverywhere { cpu: usize },
    /// A vCPU requests a flush of everything.
    Void { cpu: usize },
    /// The hypervisor takes something from the VM: by a new epoch, which the next entries see, or by an instruction
    /// that flushes the VM's tag everywhere.
    Remap { vm: usize, everywhere: bool },
    /// A VM without a running vCPU ends, and another begins.
    Replace { vm: usize, vcpus: u8 },
}

const CPUS: usize = 3;

impl Host {
    fn new(scheme: Scheme, tags: u32, mutant: Mutant) -> Self {
        let pool = Pool::new(scheme, TagRange::new(5, tags), CPUS);
        let mut host = Self {
            machine: Machine::new(CPUS),
            cpus: (0..CPUS).map(|cpu| pool.cpu(cpu)).collect(),
            pool,
            running: [None; CPUS],
            vms: Vec::new(),
            names: 0,
            mutant,
            stale: None,
        };
        // A few more VMs than tags: rollovers happen, and not all the time.
        for vcpus in [3, 2, 3, 1, 3, 2].into_iter().take(tags as usize + 1) {
            let vm = host.new_vm(vcpus);
            host.vms.push(vm);
        }
        host
    }

    fn new_vm(&mut self, vcpus: u8) -> Vm {
        self.names += 1;
        let tags = self.pool.vm();
        let vcpus = (0..vcpus).map(|_| Vcpu { tags: tags.vcpu(), ran_on: None, runs: false, private: 0 });
        Vm { name: self.names, epoch: 0, stage2: 0, common: 0, vcpus: vcpus.collect(), tags }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Switch { cpu, vm, vcpu } => {
                let vm = vm % self.vms.len();
                let vcpu = vcpu % self.vms[vm].vcpus.len();
                self.switch(cpu % CPUS, vm, vcpu);
            }
            Step::Enter { cpu, refused } => self.enter(cpu % CPUS, refused),
            Step::FlushHere { cpu } => {
                let cpu = cpu % CPUS;
                self.in_guest(cpu, |machine, vm, vcpu, tag| {
                    vm.vcpus[vcpu].private += 1;
                    machine.flush_page(cpu, tag, PRIVATE);
                });
            }
            Step::FlushEverywhere { cpu } => self.in_guest(cpu % CPUS, |machine, vm, _, tag| {
                vm.common += 1;
                machine.flush_page_everywhere(tag, COMMON);
            }),
            Step::Void { cpu } => {
                let Some((vm, vcpu)) = self.running[cpu % CPUS] else { return };
                let vcpu = &mut self.vms[vm].vcpus[vcpu];
                vcpu.private += 1;
                if self.mutant != Mutant::VoidIsForgotten {
                    vcpu.tags.void();
                }
            }
            Step::Remap { vm, everywhere } => self.remap(vm % self.vms.len(), everywhere),
            Step::Replace { vm, vcpus } => {
                let at = vm % self.vms.len();
                if self.vms[at].vcpus.iter().all(|vcpu| !vcpu.runs) {
                    self.vms[at] = self.new_vm(vcpus % 3 + 1);
                }
            }
        }
    }

    fn remap(&mut self, at: usize, everywhere: bool) {
        let vm = &mut self.vms[at];
        vm.stage2 += 1;
        match vm.tags.tag() {
            Some(tag) if everywhere => self.machine.flush_tag_everywhere(hw_model::Tag(tag.get())),
            _ if self.mutant == Mutant::EpochIsForgotten => {}
            _ => vm.epoch += 1,
        }
    }

    fn switch(&mut self, cpu: usize, vm: usize, vcpu: usize) {
        if self.vms[vm].vcpus[vcpu].runs {
            return;
        }
        let tags = &mut self.cpus[cpu];
        if let Some((vm, vcpu)) = self.running[cpu].take() {
            let vcpu = &mut self.vms[vm].vcpus[vcpu];
            vcpu.tags.depart(tags);
            vcpu.runs = false;
        }
        let arriving = &mut self.vms[vm].vcpus[vcpu];
        let came_back = arriving.ran_on == Some(cpu);
        let was_anywhere = arriving.ran_on.replace(cpu).is_some();
        arriving.tags.arrive(tags, came_back || was_anywhere && self.mutant == Mutant::JourneyNotNoticed);
        arriving.runs = true;
        if self.mutant == Mutant::RunningTagGivenAway {
            arriving.tags.depart(tags);
        }
        self.running[cpu] = Some((vm, vcpu));
    }

    fn enter(&mut self, cpu: usize, refused: bool) {
        let Some((vm, vcpu)) = self.running[cpu] else { return };
        let vm = &mut self.vms[vm];
        let entry = vm.vcpus[vcpu].tags.enter(&mut self.cpus[cpu], vm.epoch);
        let (tag, flush) = (hw_model::Tag(entry.tag().get()), entry.flush());
        if refused {
            if self.mutant == Mutant::DebtLostOnAbortedEntry {
                entry.completed();
            }
            return;
        }
        entry.completed();

        let machine = &mut self.machine;
        let mut own_tables = || [PRIVATE, COMMON].iter().for_each(|&page| machine.flush_page(cpu, tag, page));
        match flush {
            _ if self.mutant == Mutant::NeverFlushes => {}
            Flush::Nothing => {}
            Flush::OwnTables if self.mutant == Mutant::SiblingNotNoticed => {}
            Flush::OwnTables => own_tables(),
            Flush::Tag if self.mutant == Mutant::Stage2OfOthersKept => own_tables(),
            Flush::Everything if self.mutant == Mutant::RecycledTagsNotFlushed => machine.flush_tag(cpu, tag),
            Flush::Tag => machine.flush_tag(cpu, tag),
            Flush::Everything => machine.flush_everything(cpu),
        }
        self.look(cpu);
    }

    /// The TLB's answer must be the VM's own and not older than the last flush.
    fn look(&mut self, cpu: usize) {
        let Some((vm, number)) = self.running[cpu] else { return };
        let vm = &self.vms[vm];
        let vcpu = &vm.vcpus[number];
        let tag = hw_model::Tag(vcpu.tags.tag().get());
        let own = Translation { vm: vm.name, vcpu: number, version: vcpu.private, stage2: vm.stage2 };
        let common = Translation { vcpu: ALL, version: vm.common, ..own };
        let stage2 = Translation { version: 0, ..common };
        for (page, now) in [(PRIVATE, own), (COMMON, common), (STAGE2, stage2)] {
            for seen in self.machine.answers(cpu, tag, page) {
                if seen != now {
                    self.stale.get_or_insert(format!("pCPU {cpu}, {tag:?}: {seen:?} where {now:?} is right"));
                }
            }
            self.machine.walk(cpu, tag, page, now);
        }
    }

    /// The guest does something there, if one runs without a debt: it accesses a page, acts, and accesses again.
    fn in_guest(&mut self, cpu: usize, act: impl FnOnce(&mut Machine<Translation>, &mut Vm, usize, hw_model::Tag)) {
        self.enter(cpu, false);
        let Some((vm, vcpu)) = self.running[cpu] else { return };
        let tag = hw_model::Tag(self.vms[vm].vcpus[vcpu].tags.tag().get());
        act(&mut self.machine, &mut self.vms[vm], vcpu, tag);
        self.look(cpu);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || any::<prop::sample::Index>().prop_map(|index| index.index(12));
    let step = prop_oneof![
        8 => (number(), number(), number()).prop_map(|(cpu, vm, vcpu)| Step::Switch { cpu, vm, vcpu }),
        8 => (number(), prop_oneof![3 => Just(false), 1 => Just(true)])
            .prop_map(|(cpu, refused)| Step::Enter { cpu, refused }),
        3 => number().prop_map(|cpu| Step::FlushHere { cpu }),
        3 => number().prop_map(|cpu| Step::FlushEverywhere { cpu }),
        1 => number().prop_map(|cpu| Step::Void { cpu }),
        1 => (number(), any::<bool>()).prop_map(|(vm, everywhere)| Step::Remap { vm, everywhere }),
        1 => (number(), any::<u8>()).prop_map(|(vm, vcpus)| Step::Replace { vm, vcpus }),
    ];
    prop::collection::vec(step, 1..400)
}

const SCHEMES: [Scheme; 3] = [Scheme::FlushAlways, Scheme::Generation, Scheme::Epoch];

proptest! {
    #[test]
    fn no_life_of_vms_sees_what_was_flushed(steps in steps(), tags in 1..8_u32, scheme in 0..3_usize) {
        // The generations' promise that a running VM keeps its tag needs one tag per pCPU.
        let tags = if SCHEMES[scheme] == Scheme::Generation { tags.max(3) } else { tags };
        let mut host = Host::new(SCHEMES[scheme], tags, Mutant::None);
        steps.iter().for_each(|step| host.step(step));
        prop_assert_eq!(host.stale, None);
    }
}

/// Random steps without proptest, because finding a mistake takes many lives.
struct Dice(fastrand::Rng);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0.usize(..sides)
    }

    fn step(&mut self) -> Step {
        let cpu = self.roll(CPUS);
        match self.roll(25) {
            0..8 => Step::Switch { cpu, vm: self.roll(12), vcpu: self.roll(12) },
            8..16 => Step::Enter { cpu, refused: self.roll(4) == 0 },
            16..19 => Step::FlushHere { cpu },
            19..22 => Step::FlushEverywhere { cpu },
            22 => Step::Void { cpu },
            23 => Step::Remap { vm: self.roll(12), everywhere: self.roll(2) == 0 },
            _ => Step::Replace { vm: self.roll(12), vcpus: u8::try_from(self.roll(3)).expect("is small") },
        }
    }
}

/// Number of seeds of a hundred with which a life of 20 000 steps finds the mistake.
fn found(scheme: Scheme, mutant: Mutant) -> usize {
    (0..100)
        .filter(|&seed| {
            let mut dice = Dice(fastrand::Rng::with_seed(seed));
            let tags = u32::try_from(dice.roll(3)).expect("is small");
            let tags = if scheme == Scheme::Generation { tags + 3 } else { tags + 1 };
            let mut host = Host::new(scheme, tags, mutant);
            (0..20_000).any(|_| {
                host.step(&dice.step());
                host.stale.is_some()
            })
        })
        .count()
}

#[test]
fn every_planted_mistake_is_found_where_the_scheme_can_make_it() {
    for mutant in MUTANTS {
        let (epoch, generation) = (found(Scheme::Epoch, mutant), found(Scheme::Generation, mutant));
        println!("{mutant:?}: found in {epoch} of 100 lives with epochs, {generation} with generations");
        let (by_epoch, by_generation) = match mutant {
            // A tag for life is neither recycled at once nor taken from a running VM.
            Mutant::RecycledTagsNotFlushed | Mutant::RunningTagGivenAway => (false, true),
            _ => (true, true),
        };
        if by_epoch {
            assert!(epoch >= 50, "{mutant:?}: {epoch} of 100");
        }
        if by_generation {
            assert!(generation >= 50, "{mutant:?}: {generation} of 100");
        }
    }
}

#[test]
fn lives_without_a_mistake_find_nothing() {
    for scheme in SCHEMES {
        assert_eq!(found(scheme, Mutant::None), 0, "{scheme:?}");
    }
}
