//! The code under test on `hw_model`'s walking machine: every access to a table and every instruction is a step, between
//! two of which another thread may run and the hardware does as it likes. A [`Mutant`] spoils one of these steps.

use std::collections::BTreeMap;

use addr::{Gpa, Hpa};
use hw_model::walks::{Barrier as Wait, Geometry, Invalidate, Rules, Walks};
use shuttle::sync::{Arc, Mutex, MutexGuard};
use stage2::tlbi::{self, Barrier, Features, Maintenance, Tlbi};
use stage2::{Cell, Pages, Stale, Tlb};

macro_rules! mutants {
    ($($(#[$what:meta])* $name:ident,)*) => {
        /// What is done wrong.
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
    /// The first DSB of a payment is missing.
    NoBarrierBefore,
    /// The DSB between the two TLBIs is missing.
    NoBarrierBetween,
    /// The last DSB is missing.
    NoBarrierAfter,
    /// DSBs wait for stores only.
    BarrierForStores,
    /// DSBs wait for this processor only.
    BarrierForOne,
    /// DSBs make stores known to this processor only.
    StoresForOne,
    /// The DSB after a new entry is missing.
    NotPublished,
    /// Entries are written without release semantics.
    NoRelease,
    /// The second TLBI, for what both stages say, is missing.
    NoCombined,
    /// TLBIs are not broadcast.
    NotBroadcast,
    /// Broken entries stay as they were until they are made.
    NoBreak,
    /// Exchanges do not look at what was there.
    PlainStore,
    /// The level that a TLBI names is off by one.
    WrongLevel,
    /// TLBIs for pages name their level where leaves of another size may still be cached.
    LevelNamed,
    /// A reported conflict is not resolved.
    ConflictStays,
    /// TLBIs leave pointers to tables alone.
    LeavesOnly,
    /// Tables are freed although somebody walks them.
    FreedEarly,
    /// TLBIs are asked for while another VM is loaded.
    OtherVm,
    /// Two VMs have one VMID.
    SharedVmid,
    /// Who was denied does not flush before it tries again.
    NoLocal,
    /// What is cleared is not flushed before it is copied.
    NoFlush,
    /// Pages are copied before they are cleared.
    CopiedFirst,
    /// The hypervisor marks before it writes.
    MarkedFirst,
    /// Who opens a page wakes its table first.
    WokenFirst,
    /// Who opens a page does not wake its table.
    NotWoken,
    /// What was lost counts as received.
    ForgottenOnCancel,
    /// Operations are not granted the flushes in their middle.
    NoFlushInside,
    /// What is unmapped or protected is not flushed.
    NoFlushOfRange,
}

/// All that there is, beside the code under test.
pub(crate) struct World {
    pub(crate) walks: Walks,
    /// Guest memory by host page: what was written there last.
    pub(crate) ram: BTreeMap<u64, u64>,
    /// Where pages of VMs turned out to be in host memory.
    pub(crate) frames: BTreeMap<(usize, u64), u64>,
    /// VMIDs and roots.
    vms: Vec<(u32, u64)>,
    /// The entries that each processor has read last, the last one first.
    read: BTreeMap<usize, [(u64, usize); 2]>,
    /// Tables that are woken too early, by whom.
    woken: BTreeMap<usize, (u64, usize)>,
    /// Tables that became quiet, and that were woken.
    pub(crate) hushed: u64,
    pub(crate) awakened: u64,
    /// Number of DSBs that each processor has had since its last payment began.
    barriers: BTreeMap<usize, u32>,
    next_value: u64,
}

pub(crate) struct Machine {
    world: Mutex<World>,
    pub(crate) rules: Rules,
    features: Features,
    pub(crate) mutant: Mutant,
    /// What the hardware walks ahead of use: pages from zero on.
    pages: u64,
}

impl Machine {
    pub(crate) fn new(rules: Rules, geometry: Geometry, cpus: usize, pages: u64, mutant: Mutant) -> Arc<Self> {
        use shuttle::rand::{Rng, thread_rng};
        let walks = Walks::new(rules, geometry, cpus, thread_rng().r#gen());
        let features = Features { ttl: thread_rng().r#gen(), ranges: thread_rng().r#gen() };
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
            next_value: 1,
        };
        Arc::new(Self { world: Mutex::new(world), rules, features, mutant, pages })
    }

    /// One step of a thread. Before it, the hardware moves.
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
    /// Something is written to a page of host memory.
    pub(crate) fn write(&mut self, hpa: u64) {
        self.ram.insert(hpa & !0xfff, self.next_value);
        self.next_value += 1;
    }

    pub(crate) fn read(&self, hpa: u64) -> u64 {
        self.ram.get(&(hpa & !0xfff)).copied().unwrap_or(0)
    }

    /// There is one VM more.
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

    /// A processor turns to a VM.
    pub(crate) fn load_vm(&mut self, cpu: usize, vm: usize) {
        if let Some(&(vmid, root)) = self.vms.get(vm) {
            self.walks.load_vm(cpu, vmid, root);
        }
    }
}

/// A processor on which a thread of the code under test runs, and the VM for which it does.
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

    /// Nested and Arm spell a broken entry so.
    fn is_busy(&self, bits: u64) -> bool {
        bits == 1 << if self.machine.rules == Rules::Nested { 11 } else { 57 }
    }

    /// The bit of a quiet table, if this is an entry that names one.
    fn quiet(&self, bits: u64) -> u64 {
        if !names_table(bits) {
            return 0;
        }
        bits & 1 << if self.machine.rules == Rules::Nested { 9 } else { 55 }
    }

    /// The table is woken before the page is opened, and not after that.
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

/// Tables lie where no other memory is.
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
        let breaks = self.is_busy(new) || self.is_busy(old);
        if self.is(Mutant::NoBreak) && breaks {
            if self.is_busy(old) {
                world.walks.store(self.number, place, new, true);
            }
            return Ok(());
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
        // Nobody else can see it, so it is no step of its own.
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
    /// Pays a debt, if anything is owed.
    pub(crate) fn pay(&self, stale: Stale) {
        if stale.is_empty() {
            return;
        }
        self.begin_payment();
        if self.machine.rules == Rules::Nested {
            // Everybody is kicked out and flushes before it enters again; we wait.
            self.machine.step().walks.invalidate(self.number, Invalidate::All, !self.is(Mutant::NotBroadcast));
            self.machine.step().walks.barrier(self.number, Wait::Full);
        } else {
            self.machine.features.pay(stale, self);
        }
    }

    /// The hardware has reported a conflict.
    pub(crate) fn resolve_conflict(&self) {
        self.begin_payment();
        tlbi::resolve_conflict(self);
    }

    /// Forgets a denial, as the processor that faulted does.
    pub(crate) fn forget(&self, gpa: Gpa) {
        self.begin_payment();
        tlbi::forget(gpa, self);
    }

    /// What is paid concerns the VM that is loaded. Only who pays, or enters, has loaded one: what was loaded before is of no
    /// use to anybody.
    fn begin_payment(&self) {
        let mut world = self.machine.step();
        world.barriers.insert(self.number, 0);
        world.load_vm(self.number, if self.is(Mutant::OtherVm) { 1 - self.vm } else { self.vm });
    }
}

/// The same processor, where the thread itself pays and no operation asks for it.
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
