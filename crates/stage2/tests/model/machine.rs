//! The code under test on `hw_model`'s machine with page-table walkers. Every access to a table and every instruction
//! is a step. Between two steps another thread may run, and the hardware may do anything that the manuals allow. A
//! [`Mutant`] breaks one of these steps.

use std::collections::BTreeMap;

use addr::{Gpa, Hpa};
use hw_model::walks::{Barrier as Wait, Geometry, Invalidate, Rules, Walks};
use shuttle::sync::{Arc, Mutex, MutexGuard};
use stage2::tlbi::{self, Barrier, Maintenance, Tlbi, TlbiFeatures};
use stage2::{Cell, Denial, Pages, Stale, Tlb};

macro_rules! mutants {
    ($($(#[$what:meta])* $name:ident,)*) => {
        /// The broken step.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Mutant {
            $($(#[$what])* $name,)*
        }

        impl Mutant {
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

mutants! {
    Nothing,
    /// The first DSB of a flush is missing.
    NoBarrierBefore,
    /// The DSB between the two TLBIs is missing.
    NoBarrierBetween,
    /// The last DSB is missing.
    NoBarrierAfter,
    /// DSBs wait for stores only.
    BarrierForStores,
    /// DSBs wait for this processor only.
    BarrierForOne,
    /// DSBs make stores visible to this processor only.
    StoresForOne,
    /// The DSB after a new entry is missing.
    NotPublished,
    /// Entries are written without release semantics.
    NoRelease,
    /// The second TLBI, for what both stages say, is missing.
    NoCombined,
    /// INVVPID stands in the place of INVEPT.
    CombinedOnly,
    /// TLBIs are not broadcast.
    NotBroadcast,
    /// Broken entries stay unchanged until they are made.
    NoBreak,
    /// Broken entries become empty.
    Emptied,
    /// Exchanges ignore the old value.
    PlainStore,
    /// The level that a TLBI names is off by one.
    WrongLevel,
    /// TLBIs for pages name their level where leaves of another size may still be cached.
    LevelNamed,
    /// A reported conflict is not resolved.
    ConflictStays,
    /// TLBIs leave pointers to tables alone.
    LeavesOnly,
    /// Tables are freed although a processor walks them.
    FreedEarly,
    /// TLBIs are issued while another VM is loaded.
    OtherVm,
    /// Two VMs have one VMID.
    SharedVmid,
    /// A processor does not flush a denied access before it retries.
    NoLocal,
    /// Cleared pages are not flushed before the copy.
    NoFlush,
    /// Pages are copied before they are cleared.
    CopiedFirst,
    /// The hypervisor marks before it writes.
    MarkedFirst,
    /// A fault wakes the table before it makes the page writable.
    WokenFirst,
    /// A fault makes a page writable and does not wake the table.
    NotWoken,
    /// What the hardware has listed is not reported.
    NotReported,
    /// A lost round counts as received.
    ForgottenOnCancel,
    /// Flushes in the middle of operations are skipped.
    NoFlushInside,
    /// Unmapped or protected pages are not flushed.
    NoFlushOfRange,
}

/// Everything except the code under test.
pub(crate) struct World {
    pub(crate) walks: Walks,
    /// Guest memory by host page: what was written there last.
    pub(crate) ram: BTreeMap<u64, u64>,
    /// Host address of each VM's pages, as found.
    pub(crate) frames: BTreeMap<(usize, u64), u64>,
    /// VMIDs and roots.
    vms: Vec<(u32, u64)>,
    /// The last two entries that each processor has read, the last one first.
    read: BTreeMap<usize, [(u64, usize); 2]>,
    /// Tables that are woken too early, by processor.
    woken: BTreeMap<usize, (u64, usize)>,
    /// Tables that became quiet, and that were woken.
    pub(crate) hushed: u64,
    pub(crate) awakened: u64,
    /// Number of DSBs of each processor since its last flush began.
    barriers: BTreeMap<usize, u32>,
    /// What each processor has listed of its guest's writes, and not reported.
    pub(crate) listed: BTreeMap<usize, Vec<u64>>,
    next_value: u64,
}

pub(crate) struct Machine {
    world: Mutex<World>,
    pub(crate) rules: Rules,
    features: TlbiFeatures,
    pub(crate) mutant: Mutant,
    /// Addresses that the hardware walks speculatively: pages from zero on.
    pages: u64,
}

impl Machine {
    pub(crate) fn new(rules: Rules, geometry: Geometry, cpus: usize, pages: u64, mutant: Mutant) -> Arc<Self> {
        use shuttle::rand::{Rng, thread_rng};
        let walks = Walks::new(rules, geometry, cpus, thread_rng().r#gen());
        let features = TlbiFeatures { ttl: thread_rng().r#gen(), ranges: thread_rng().r#gen() };
        let world = World {
            walks,
            ram: BTreeMap::new(),
            frames: BTreeMap::new(),
            vms: Vec::new(),
            read: BTreeMap::new(),
            woken: BTreeMap::new(),
            hushed: 0,
            awakened: 0,
            barriers: BTreeMap::new(),
            listed: BTreeMap::new(),
            next_value: 1,
        };
        Arc::new(Self { world: Mutex::new(world), rules, features, mutant, pages })
    }

    /// One step of a thread. Before it, the hardware makes its moves.
    pub(crate) fn step(&self) -> MutexGuard<'_, World> {
        let mut world = self.world.lock().expect("nobody panics");
        for _ in 0..world.walks.pick(3) {
            let pages = self.pages;
            world.walks.stir(0, pages);
        }
        if let Some(violation) = world.walks.violations().first() {
            panic!("{violation}");
        }
        world
    }
}

impl World {
    /// Records a write to a page of host memory.
    pub(crate) fn write(&mut self, hpa: u64) {
        self.ram.insert(hpa & !0xfff, self.next_value);
        self.next_value += 1;
    }

    pub(crate) fn read(&self, hpa: u64) -> u64 {
        self.ram.get(&(hpa & !0xfff)).copied().unwrap_or(0)
    }

    /// Adds a VM.
    pub(crate) fn add_vm(&mut self, root: u64, mutant: Mutant) {
        let number = u32::try_from(self.vms.len()).expect("few");
        self.vms.push((if mutant == Mutant::SharedVmid { 0 } else { number }, root));
    }

    pub(crate) fn declare_unmapped(&mut self, vm: usize, gpa: u64) {
        self.walks.declare_unmapped(self.vms[vm].0, gpa);
    }

    pub(crate) fn declare_read_only(&mut self, vm: usize, gpa: u64) {
        self.walks.declare_read_only(self.vms[vm].0, gpa);
    }

    pub(crate) fn declare_usable(&mut self, vm: usize, gpa: u64) {
        self.walks.declare_usable(self.vms[vm].0, gpa);
    }

    /// Loads a VM on a processor.
    pub(crate) fn load_vm(&mut self, cpu: usize, vm: usize) {
        if let Some(&(vmid, root)) = self.vms.get(vm) {
            self.walks.load_vm(cpu, vmid, root);
        }
    }
}

/// A processor that runs a thread of the code under test, for one VM.
#[derive(Clone)]
pub(crate) struct Cpu {
    pub(crate) machine: Arc<Machine>,
    pub(crate) number: usize,
    pub(crate) vm: usize,
}

impl Cpu {
    /// The same processor, for another VM.
    pub(crate) fn of(&self, vm: usize) -> Self {
        Self { vm, ..self.clone() }
    }

    pub(crate) fn pick(&self, below: u64) -> u64 {
        self.machine.step().walks.pick(below)
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.machine.mutant == mutant
    }

    /// NPT and EPT encode a broken entry in one way, Arm in another one.
    fn is_broken(&self, bits: u64) -> bool {
        bits & 1 << if matches!(self.machine.rules, Rules::Arm { .. }) { 57 } else { 11 } != 0
    }

    /// The quiet bit, if this entry points to a quiet table.
    fn quiet(&self, bits: u64) -> u64 {
        if !names_table(bits) {
            return 0;
        }
        let place = match self.machine.rules {
            Rules::Nested => 59,
            Rules::Extended => 52,
            Rules::Arm { .. } => 55,
        };
        bits & 1 << place
    }

    /// Wakes the table before the page becomes writable, and not after.
    fn wake_first(&self, place: (u64, usize), new: u64) {
        let mut world = self.machine.step();
        let Some([leaf, table]) = world.read.get(&self.number).copied() else { return };
        let bits = world.walks.load(self.number, table);
        if leaf == place && new & 1 != 0 && !names_table(new) {
            if self.quiet(bits) != 0 {
                world.walks.store(self.number, table, bits & !self.quiet(bits), true);
            }
            world.woken.insert(self.number, table);
            let dawdles = world.walks.pick(2) == 0;
            drop(world);
            if dawdles {
                shuttle::thread::yield_now();
            }
        }
    }
}

/// Tables are where no other memory is.
fn names_table(bits: u64) -> bool {
    bits & 1 != 0 && bits & 0xffff_ffff_f000 >= 1 << 32
}

impl Pages for Cpu {
    fn allocate(&self) -> Option<Hpa> {
        self.allocate_root(1)
    }

    fn allocate_root(&self, count: u32) -> Option<Hpa> {
        Some(Hpa(self.machine.step().walks.allocate(self.number, count.into())))
    }

    fn free(&self, hpa: Hpa) {
        self.machine.step().walks.free(hpa.0);
    }

    fn load(&self, cell: Cell) -> u64 {
        let mut world = self.machine.step();
        let place = (cell.table().0, cell.index());
        let last = world.read.get(&self.number).map_or((0, 0), |read| read[0]);
        world.read.insert(self.number, [place, last]);
        let bits = world.walks.load(self.number, place);
        let was_woken = world.woken.remove(&self.number) == Some(place);
        if was_woken { bits & !self.quiet(bits) } else { bits }
    }

    fn compare_exchange(&self, cell: Cell, old: u64, new: u64) -> Result<(), u64> {
        let place = (cell.table().0, cell.index());
        if self.is(Mutant::WokenFirst) {
            self.wake_first(place, new);
        }
        let mut world = self.machine.step();
        match (self.quiet(old) != 0, self.quiet(new) != 0) {
            (true, false) if names_table(new) && self.is(Mutant::NotWoken) => return Ok(()),
            (true, false) if names_table(new) => world.awakened += 1,
            (false, true) => world.hushed += 1,
            _ => {}
        }
        let breaks = self.is_broken(new) || self.is_broken(old);
        if self.is(Mutant::NoBreak) && breaks {
            if self.is_broken(old) {
                world.walks.store(self.number, place, new, true);
            }
            return Ok(());
        }
        if self.is(Mutant::Emptied) && breaks {
            let [old, new] = [old, new].map(|bits| if self.is_broken(bits) { 0 } else { bits });
            return world.walks.compare_exchange(self.number, place, old, new);
        }
        if self.is(Mutant::PlainStore) {
            world.walks.store(self.number, place, new, true);
            return Ok(());
        }
        if self.is(Mutant::NoRelease) {
            let now = world.walks.load(self.number, place);
            if now != old {
                return Err(now);
            }
            world.walks.store(self.number, place, new, false);
            return Ok(());
        }
        world.walks.compare_exchange(self.number, place, old, new)
    }

    fn write_private(&self, cell: Cell, bits: u64) {
        // No other thread can see it, so it is no step.
        let mut world = self.machine.world.lock().expect("nobody panics");
        world.walks.store(self.number, (cell.table().0, cell.index()), bits, false);
    }
}

impl Tlb for Cpu {
    fn publish(&self) {
        match self.machine.mutant {
            Mutant::NotPublished => {}
            Mutant::StoresForOne => self.machine.step().walks.barrier(self.number, Wait::LocalStores),
            _ => self.machine.step().walks.barrier(self.number, Wait::Stores),
        }
    }

    fn flush(&self, stale: Stale) {
        if !self.is(Mutant::NoFlushInside) {
            self.pay(stale);
        }
    }

    fn relax(&self) {
        drop(self.machine.step());
        shuttle::thread::yield_now();
    }
}

impl Cpu {
    /// Flushes, if there is anything to flush.
    pub(crate) fn pay(&self, stale: Stale) {
        if stale.is_empty() {
            return;
        }
        self.begin_payment();
        if let Rules::Arm { .. } = self.machine.rules {
            return self.machine.features.pay(stale, self);
        }
        // All processors leave their guests and flush before they enter again; we wait.
        let what = if self.is(Mutant::CombinedOnly) { Invalidate::Combined } else { Invalidate::All };
        self.machine.step().walks.invalidate(self.number, what, !self.is(Mutant::NotBroadcast));
        self.machine.step().walks.barrier(self.number, Wait::Full);
    }

    /// Resolves a conflict that the hardware has reported.
    pub(crate) fn resolve_conflict(&self) {
        self.begin_payment();
        tlbi::resolve_conflict(self);
    }

    /// Flushes a denied access, like the processor that faulted.
    pub(crate) fn forget(&self, denial: Denial, gpa: Gpa) {
        self.begin_payment();
        denial.flush(gpa, self);
    }

    /// A flush concerns the loaded VM. Only a flush or an entry loads a VM; nothing uses an earlier one.
    fn begin_payment(&self) {
        let mut world = self.machine.step();
        world.barriers.insert(self.number, 0);
        world.load_vm(self.number, if self.is(Mutant::OtherVm) { 1 - self.vm } else { self.vm });
    }
}

/// The same processor, where the thread itself flushes instead of an operation.
pub(crate) struct Payer<'a>(pub(crate) &'a Cpu);

impl Tlb for Payer<'_> {
    fn publish(&self) {
        self.0.publish();
    }
    fn flush(&self, stale: Stale) {
        self.0.pay(stale);
    }
    fn relax(&self) {
        self.0.relax();
    }
}

impl Maintenance for Cpu {
    fn dsb(&self, barrier: Barrier) {
        let mut world = self.machine.step();
        let barriers = world.barriers.entry(self.number).or_default();
        *barriers += 1;
        let left_out = match *barriers {
            1 => self.is(Mutant::NoBarrierBefore),
            2 => self.is(Mutant::NoBarrierBetween),
            _ => self.is(Mutant::NoBarrierAfter),
        };
        if left_out {
            let dawdles = world.walks.pick(4) == 0;
            drop(world);
            if dawdles {
                shuttle::thread::yield_now();
            }
            return;
        }
        let wait = match barrier {
            Barrier::LocalStores => Wait::LocalStores,
            Barrier::Stores if self.is(Mutant::StoresForOne) => Wait::LocalStores,
            Barrier::Stores => Wait::Stores,
            Barrier::Local | Barrier::Full if self.is(Mutant::BarrierForStores) => Wait::Stores,
            Barrier::Full if self.is(Mutant::BarrierForOne) => Wait::Local,
            Barrier::Local => Wait::Local,
            Barrier::Full => Wait::Full,
        };
        world.walks.barrier(self.number, wait);
    }

    fn isb(&self) {}

    fn tlbi(&self, operation: Tlbi) {
        let mut world = self.machine.step();
        let by_address = |ipa: Gpa, level: Option<u32>, leaves| Invalidate::Guest {
            start: ipa.0,
            end: ipa.0 + operation.bytes(),
            level: match self.machine.mutant {
                Mutant::WrongLevel => Some(level.map_or(1, |level| level + 1)),
                Mutant::LevelNamed if leaves => Some(0),
                _ => level,
            },
            leaves: leaves || self.is(Mutant::LeavesOnly),
        };
        let (invalidate, everywhere) = match operation {
            Tlbi::Ipa { leaves, everywhere, ipa, level } => (by_address(ipa, level, leaves), everywhere),
            Tlbi::Range { leaves, ipa, .. } => (by_address(ipa, None, leaves), true),
            Tlbi::Combined { .. } if self.is(Mutant::NoCombined) => return,
            Tlbi::Combined { everywhere } => (Invalidate::Combined, everywhere),
            Tlbi::All { everywhere } => (Invalidate::All, everywhere),
        };
        world.walks.invalidate(self.number, invalidate, everywhere && !self.is(Mutant::NotBroadcast));
    }
}
