//! Random lives of VMs on a machine whose TLBs forget nothing ([`hw_model`]), with the schemes as they ship; and the
//! mistakes that others have made, planted, to see that such a life finds them.

use hw_model::Machine;
use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};
use tlb_tag::{CpuTags, Flush, Pool, Scheme, TagRange, VcpuTags};

/// What a page was translated to, and when: enough to tell whether it may still be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Translation {
    /// Never the same for two vCPUs, also of VMs that are gone.
    vcpu: u64,
    /// Of the guest's own tables.
    version: u64,
    /// Of the VM's stage 2.
    stage2: u64,
}

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// An entry that was refused counts as one that has flushed.
    DebtLostOnAbortedEntry,
    /// The change of pCPU goes unnoticed: the tag of the last stay here is taken for good. (Two pCPUs that count the same
    /// generation, as KVM warns of: A, B, and A again.)
    NoVoidOnMigration,
    /// When tags are handed out again, only the tag of this entry is flushed. (Xen, 2019 to 2025.)
    RecycledTagsNotFlushed,
    /// A flush hits the first tag instead of the entry's own. (Xen, 2024: a number became a truth value.)
    FlushesTheFirstTag,
    /// The guest's wish that everything goes is forgotten.
    VoidIsForgotten,
    /// A change of stage 2 is not told to those who run.
    EpochIsForgotten,
    /// One-shot flushes are not asked for at all.
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
    /// Translations older than this must not be seen.
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
    /// What must not have been seen, and was.
    stale: Option<String>,
    entries: u64,
}

#[derive(Clone, Debug)]
enum Step {
    /// A vCPU runs on a pCPU for some entries; the bits of `refused` say which of them do not happen.
    Run { vm: usize, vcpu: usize, cpu: usize, entries: u8, refused: u8 },
    /// A vCPU is about to run and changes its own tables, and asks for everything to be flushed.
    Void { vm: usize, vcpu: usize },
    /// The hypervisor takes something from the VM, and waits until nobody can use it.
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
                // The vCPU loop looks again before it enters; it may also give up here.
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

            // In the guest: whatever the TLB may answer must be ours and not older than the last flush.
            let now = Translation { vcpu: vcpu.name, version: vcpu.version, stage2: vm.stage2 };
            for seen in self.machine.answers(cpu, tag, PAGE) {
                if seen != now {
                    self.stale.get_or_insert(format!("entry {}: {seen:?} where {now:?} is right", self.entries));
                }
            }
            self.machine.walk(cpu, tag, PAGE, now);
            // The guest changes its tables and flushes by itself, as it may without an exit: here, and only here.
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

/// Pools of all schemes side by side, of few tags.
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

/// Random steps without proptest's machinery, for the many lives that finding a mistake takes.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % sides).expect("is small")
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

/// Seeds of a hundred in which a life of 2000 steps finds the mistake, for one scheme.
fn found(scheme: Scheme, mutant: Mutant) -> usize {
    (0..100)
        .filter(|&seed| {
            let mut dice = Dice(seed);
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
            // Never hands all tags out again at once.
            Mutant::RecycledTagsNotFlushed => (false, true),
            // Flushes everything or nothing.
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
