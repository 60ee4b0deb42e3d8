//! Random lives of VMs on a machine whose TLBs never drop an entry by themselves ([`hw_model`]), with the released
//! schemes. Known mistakes of other hypervisors are planted, to check that such a life finds them.

use hw_model::Machine;
use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};
use tlb_tag::{CpuTags, Flush, Pool, Scheme, TagRange, VcpuTags};

/// The translation of a page, and its age: enough to tell whether it may still be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Translation {
    /// Unique, also among vCPUs of VMs that are gone.
    vcpu: u64,
    /// Version of the guest's own tables.
    version: u64,
    /// Version of the VM's stage 2.
    stage2: u64,
}

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// An entry that was refused counts as one that has flushed.
    DebtLostOnAbortedEntry,
    /// The change of pCPU is not noticed: the vCPU keeps its old tag of this pCPU. (Two pCPUs that count the same
    /// generation, as KVM warns: A, B, and A again.)
    NoVoidOnMigration,
    /// When tags are reused, only the tag of this entry is flushed. (Xen, 2019 to 2025.)
    RecycledTagsNotFlushed,
    /// A flush affects the first tag instead of the entry's own. (Xen, 2024: a number became a truth value.)
    FlushesTheFirstTag,
    /// The guest's request to flush everything is lost.
    VoidIsForgotten,
    /// Running vCPUs do not learn of a change of stage 2.
    EpochIsForgotten,
    /// One-shot flushes are never requested.
    NeverFlushes,
}

const MUTANTS: [Mutant; 7] = [
    Mutant::DebtLostOnAbortedEntry,
    Mutant::NoVoidOnMigration,
    Mutant::RecycledTagsNotFlushed,
    Mutant::FlushesTheFirstTag,
    Mutant::VoidIsForgotten,
    Mutant::EpochIsForgotten,
    Mutant::NeverFlushes,
];

struct Vm {
    pool: usize,
    epoch: u64,
    stage2: u64,
    vcpus: Vec<Vcpu>,
}

struct Vcpu {
    name: u64,
    tags: VcpuTags,
    ran_on: Option<usize>,
    /// Translations older than this must not be used.
    version: u64,
}

struct Host {
    machine: Machine<Translation>,
    pools: Vec<Pool>,
    /// By pCPU, by pool.
    cpus: Vec<Vec<CpuTags>>,
    vms: Vec<Vm>,
    names: u64,
    mutant: Mutant,
    /// A use of a stale entry, if there was one.
    stale: Option<String>,
    entries: u64,
}

#[derive(Clone, Debug)]
enum Step {
    /// A vCPU runs on a pCPU for some entries; the bits of `refused` say which of them do not happen.
    Run { vm: usize, vcpu: usize, cpu: usize, entries: u8, refused: u8 },
    /// A vCPU that is about to run changes its own tables, and requests a flush of everything.
    Void { vm: usize, vcpu: usize },
    /// The hypervisor takes something from the VM, and waits until no vCPU can use it.
    Remap { vm: usize },
    /// The VM ends, and another begins.
    Replace { vm: usize, vcpus: u8 },
}

const CPUS: usize = 2;
const PAGE: u64 = 1;

impl Host {
    fn new(pools: Vec<Pool>, mutant: Mutant) -> Self {
        let cpus = (0..CPUS).map(|_| pools.iter().map(Pool::cpu).collect()).collect();
        let mut host = Self {
            machine: Machine::new(CPUS),
            pools,
            cpus,
            vms: Vec::new(),
            names: 0,
            mutant,
            stale: None,
            entries: 0,
        };
        for pool in 0..host.pools.len() {
            let vm = host.new_vm(pool, 2);
            host.vms.push(vm);
            let vm = host.new_vm(pool, 3);
            host.vms.push(vm);
        }
        host
    }

    fn new_vm(&mut self, pool: usize, vcpus: u8) -> Vm {
        let vcpus = (0..vcpus).map(|_| {
            self.names += 1;
            Vcpu { name: self.names, tags: self.pools[pool].vcpu(), ran_on: None, version: 0 }
        });
        Vm { pool, epoch: 0, stage2: 0, vcpus: vcpus.collect() }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Run { vm, vcpu, cpu, entries, refused } => self.run(vm, vcpu, cpu % CPUS, entries, refused),
            Step::Void { vm, vcpu } => {
                let count = self.vms.len();
                let vm = &mut self.vms[vm % count];
                let count = vm.vcpus.len();
                let vcpu = &mut vm.vcpus[vcpu % count];
                vcpu.version += 1;
                if self.mutant != Mutant::VoidIsForgotten {
                    vcpu.tags.void();
                }
            }
            Step::Remap { vm } => {
                let count = self.vms.len();
                let vm = &mut self.vms[vm % count];
                vm.stage2 += 1;
                if self.mutant != Mutant::EpochIsForgotten {
                    vm.epoch += 1;
                }
            }
            Step::Replace { vm, vcpus } => {
                let at = vm % self.vms.len();
                let pool = self.vms[at].pool;
                let old = core::mem::take(&mut self.vms[at].vcpus);
                for vcpu in old {
                    self.pools[pool].release(vcpu.tags);
                }
                self.vms[at] = self.new_vm(pool, vcpus % 4 + 1);
            }
        }
    }

    fn run(&mut self, vm: usize, vcpu: usize, cpu: usize, entries: u8, refused: u8) {
        let count = self.vms.len();
        let vm = &mut self.vms[vm % count];
        let count = vm.vcpus.len();
        let vcpu = &mut vm.vcpus[vcpu % count];
        let pool = vm.pool;
        let first = hw_model::Tag(self.pools[pool].range().first().get());
        let tags = &mut self.cpus[cpu][pool];

        let came_back = vcpu.ran_on == Some(cpu);
        let ran_before = vcpu.ran_on.replace(cpu).is_some();
        vcpu.tags.arrive(tags, came_back || (ran_before && self.mutant == Mutant::NoVoidOnMigration));

        for index in 0..entries {
            let entry = vcpu.tags.enter(tags, vm.epoch);
            let (tag, flush) = (hw_model::Tag(entry.tag().get()), entry.flush());
            if refused >> (index % 8) & 1 != 0 {
                if self.mutant == Mutant::DebtLostOnAbortedEntry {
                    entry.completed();
                }
                // The vCPU loop checks again before it enters; it may also stop here.
                continue;
            }
            entry.completed();
            self.entries += 1;

            let aimed_at = if self.mutant == Mutant::FlushesTheFirstTag { first } else { tag };
            match flush {
                _ if self.mutant == Mutant::NeverFlushes => {}
                Flush::Nothing => {}
                Flush::Tag => self.machine.flush_tag(cpu, aimed_at),
                Flush::Everything if self.mutant == Mutant::RecycledTagsNotFlushed => {
                    self.machine.flush_tag(cpu, aimed_at);
                }
                Flush::Everything => self.machine.flush_everything(cpu),
            }

            // In the guest: the TLB's answer must be the VM's own and not older than the last flush.
            let now = Translation { vcpu: vcpu.name, version: vcpu.version, stage2: vm.stage2 };
            for seen in self.machine.answers(cpu, tag, PAGE) {
                if seen != now {
                    self.stale.get_or_insert(format!("entry {}: {seen:?} where {now:?} is right", self.entries));
                }
            }
            self.machine.walk(cpu, tag, PAGE, now);
            // The guest changes its tables and flushes by itself, as it may without an exit: only on this pCPU.
            if index == 1 {
                vcpu.version += 1;
                self.machine.flush_page(cpu, tag, PAGE);
                self.machine.walk(cpu, tag, PAGE, Translation { version: vcpu.version, ..now });
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || any::<prop::sample::Index>().prop_map(|index| index.index(16));
    let step = prop_oneof![
        12 => (number(), number(), number(), 1..4_u8, prop_oneof![3 => Just(0), 1 => any::<u8>()])
            .prop_map(|(vm, vcpu, cpu, entries, refused)| Step::Run { vm, vcpu, cpu, entries, refused }),
        2 => (number(), number()).prop_map(|(vm, vcpu)| Step::Void { vm, vcpu }),
        1 => number().prop_map(|vm| Step::Remap { vm }),
        1 => (number(), any::<u8>()).prop_map(|(vm, vcpus)| Step::Replace { vm, vcpus }),
    ];
    prop::collection::vec(step, 1..400)
}

/// Pools of all schemes, with few tags.
fn pools(tags: u32, can_flush_one_tag: bool) -> Vec<Pool> {
    let mut first = 1;
    [Scheme::FlushAlways, Scheme::Generation, Scheme::Epoch, Scheme::Epoch]
        .into_iter()
        .map(|scheme| {
            let count = if scheme == Scheme::FlushAlways { 1 } else { tags };
            let pool = Pool::new(scheme, TagRange::new(first, count), can_flush_one_tag);
            first += count;
            pool
        })
        .collect()
}

proptest! {
    #[test]
    fn no_life_of_vms_sees_what_was_flushed(
        steps in steps(), tags in 1..8_u32, can_flush_one_tag in any::<bool>()
    ) {
        let mut host = Host::new(pools(tags, can_flush_one_tag), Mutant::None);
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
        let byte = |number: usize| u8::try_from(number).expect("is small");
        match self.roll(16) {
            0..12 => Step::Run {
                vm: self.roll(16),
                vcpu: self.roll(16),
                cpu: self.roll(2),
                entries: byte(self.roll(3) + 1),
                refused: if self.roll(4) == 0 { byte(self.roll(256)) } else { 0 },
            },
            12..14 => Step::Void { vm: self.roll(16), vcpu: self.roll(16) },
            14 => Step::Remap { vm: self.roll(16) },
            _ => Step::Replace { vm: self.roll(16), vcpus: byte(self.roll(4)) },
        }
    }
}

/// Number of seeds of a hundred with which a life of 2000 steps finds the mistake, for one scheme.
fn found(scheme: Scheme, mutant: Mutant) -> usize {
    (0..100)
        .filter(|&seed| {
            let mut dice = Dice(fastrand::Rng::with_seed(seed));
            let tags = u32::try_from(dice.roll(4) + 2).expect("is small");
            let mut host = Host::new(vec![Pool::new(scheme, TagRange::new(3, tags), true)], mutant);
            (0..2000).any(|_| {
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
            // This scheme never reuses all tags at once.
            Mutant::RecycledTagsNotFlushed => (false, true),
            // This scheme flushes everything or nothing.
            Mutant::FlushesTheFirstTag => (true, false),
            _ => (true, true),
        };
        if by_epoch {
            assert!(epoch >= 90, "{mutant:?}: {epoch} of 100");
        }
        if by_generation {
            assert!(generation >= 90, "{mutant:?}: {generation} of 100");
        }
    }
}

#[test]
fn lives_without_a_mistake_find_nothing() {
    for scheme in [Scheme::FlushAlways, Scheme::Generation, Scheme::Epoch] {
        assert_eq!(found(scheme, Mutant::None), 0, "{scheme:?}");
    }
}
