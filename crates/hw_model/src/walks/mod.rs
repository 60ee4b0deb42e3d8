//! A machine that walks stage-2 tables, and does everything that the manual allows.
//!
//! A test tells [`Machine`](crate::Machine) what a walk finds. This machine walks by itself, at any time, through the
//! tables that the code under test writes. It keeps leaves, pointers to tables, and combined entries of both stages
//! until an invalidation covers them. It reads old versions of entries that no barrier has published, and acts on
//! broadcasts as late as possible. Between any two steps of the code it may do any of this ([`Walks::stir`]).
//!
//! A [`Violation`] must never happen. The machine detects most of them at once. A lost write is found by the test,
//! which compares pages with their copies. The errors, and what detects them:
//!
//! | | error | detected by |
//! |---|---|---|
//! | V1 | two translations of one address | [`Violation::MultiHit`]; where both sizes are allowed the guest may stop ([`Stop::Conflict`]), and faults for ever if nothing resolves it |
//! | V2 | an old translation is used | [`Violation::StaleUse`], for pages that the test has declared gone |
//! | V3 | a freed table is walked | [`Violation::FreedWalk`], for hardware and software |
//! | V4 | a frame is freed too early | [`Violation::FreedEarly`] for tables; for guest memory it is V2 |
//! | V5 | two VMs under one VMID | [`Violation::TwoVms`] |
//! | V6 | a write is lost | the test, which compares the guest's pages with their copies |
//! | V7 | a store overwrites what the hardware has recorded | as V6: the record is lost |
//! | V8 | an entry is made before the old one is gone | as V1: both are cached |
//! | V9 | a barrier is missing or too weak | as V1 and V2: stores are read late, invalidations arrive late; [`Violation::NotCompleted`] if no barrier follows at all. ISB is not modelled: entering the guest is one |
//! | V10 | an endless fault | the test, which has a limit |
//! | V11 | half an entry is read | not modelled: entries are read and written whole |
//! | V12 | an invalidation of the wrong VM, level, or kind | as V1, V2 and V4: it removes nothing. It affects the VM that its pCPU has [loaded](Walks::load_vm) |
//!
//! For [nested pages](Rules::Nested) there are no barriers, and denials are not cached: V8 to V10 cannot happen. The
//! same holds for [extended page tables](Rules::Extended), where a cached denial denies once. V5 cannot happen there,
//! because a combined entry belongs to a root as well.

mod memory;
mod replayed;
mod rules;
mod tlb;
mod violation;
mod walker;

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use memory::Memory;
pub use rules::Rules;
pub use tlb::Invalidate;
use tlb::{Kind, TlbEntry, Vm};
pub use violation::Violation;

/// Kind of barrier (Arm ARM, B2.3: DSB).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// The walkers of this pCPU see the stores (NSHST).
    LocalStores,
    /// All walkers see the stores (ISHST).
    Stores,
    /// As `LocalStores`, and invalidations of this pCPU are complete (NSH).
    Local,
    /// As `Stores`, and all invalidations of the thread are complete everywhere (ISH).
    Full,
}

/// Why the guest stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing is mapped.
    Translation,
    /// The access is not allowed.
    Permission,
    /// The access flag is clear.
    AccessFlag,
    /// Entries of two sizes are cached for the address. This is allowed, and so is reporting it.
    Conflict,
}

/// Layout of the tables.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bits of an address that one table translates.
    pub index_bits: u32,
    /// Number of levels.
    pub levels: u32,
}

/// Counts of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Broadcast invalidations.
    pub broadcasts: u64,
    /// Local invalidations.
    pub locals: u64,
    /// Speculative walks.
    pub walks: u64,
    /// Writes that the hardware recorded in leaves.
    pub recorded: u64,
    /// Accesses that stopped the guest.
    pub stops: u64,
}

/// pCPUs that share memory. Thread `n` of the code under test runs on pCPU `n`.
#[derive(Debug)]
pub struct Walks {
    rules: Rules,
    geometry: Geometry,
    memory: Memory,
    cpus: Vec<Cpu>,
    tables: BTreeSet<u64>,
    next_table: u64,
    /// Pages of VMs whose translation, or whose right to be written, is declared gone.
    gone: BTreeMap<(u32, u64), Gone>,
    violations: Vec<Violation>,
    events: Events,
    random: Rng,
    /// It uses cached entries, and old versions of tables, for as long as possible, the oldest first.
    stubborn: bool,
    /// An address that was invalidated recently: a walk now may find what should be gone.
    coveted: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    Translation,
    Write,
}

#[derive(Clone, Debug, Default)]
struct Cpu {
    entries: Vec<TlbEntry>,
    /// Invalidations that it has not acted on yet, with their threads.
    inbox: Vec<Asked>,
    /// The barrier that its thread needs to complete its invalidations.
    owes: Option<Barrier>,
    vm: Vm,
    /// Whether it runs its guest, and so may walk.
    in_guest: bool,
}

impl Cpu {
    /// The cached entries for an address of the loaded VM.
    fn known(&self, gpa: u64, rules: Rules) -> impl Iterator<Item = &TlbEntry> {
        self.entries.iter().filter(move |entry| entry.is_of(self.vm, rules) && entry.covers(gpa))
    }
}

/// An invalidation, its thread, and its VM.
#[derive(Clone, Copy, Debug)]
struct Asked {
    invalidate: Invalidate,
    thread: usize,
    vm: Vm,
}

/// First address of tables, so that no table looks like guest memory.
const TABLES_START: u64 = 1 << 32;

/// Host memory that only the old content of tables points to, from before they were allocated.
pub const EARLIER_LIFE: u64 = 0xdead_0000;

impl Walks {
    /// A machine without tables. `seed` selects what it does by itself.
    #[must_use]
    pub fn new(rules: Rules, geometry: Geometry, cpus: usize, seed: u64) -> Self {
        Self {
            rules,
            geometry,
            memory: Memory::new(cpus),
            cpus: vec![Cpu::default(); cpus],
            tables: BTreeSet::new(),
            next_table: TABLES_START,
            gone: BTreeMap::new(),
            violations: Vec::new(),
            events: Events::default(),
            random: Rng::with_seed(seed),
            stubborn: seed & 2 != 0,
            coveted: None,
        }
    }

    /// Sets the root for all pCPUs, while none is in its guest.
    pub fn set_root(&mut self, root: u64) {
        self.cpus.iter_mut().for_each(|cpu| cpu.vm = Vm { vmid: 0, root });
    }

    /// A pCPU outside its guest loads the VM with this VMID, whose tables start at `root` (VTTBR_EL2).
    pub fn load_vm(&mut self, cpu: usize, vmid: u32, root: u64) {
        self.cpus[cpu].vm = Vm { vmid, root };
    }

    /// VMID and root of the loaded VM.
    #[must_use]
    pub fn loaded_vm(&self, cpu: usize) -> (u32, u64) {
        (self.cpus[cpu].vm.vmid, self.cpus[cpu].vm.root)
    }

    /// The violations so far.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// The counts so far.
    #[must_use]
    pub fn events(&self) -> Events {
        self.events
    }

    /// `count` adjacent tables, aligned to their size, which `thread` has filled with zeros. Until a walker knows this,
    /// it may find the old content: leaves that point to [`EARLIER_LIFE`], or tables that are gone. No table is
    /// allocated twice.
    pub fn allocate(&mut self, thread: usize, count: u64) -> u64 {
        let first = self.next_table.next_multiple_of(count * 4096);
        self.next_table = first + count * 4096;
        for table in (first..self.next_table).step_by(4096) {
            self.memory.add_table(thread, table, 1 << self.geometry.index_bits, self.rules.earlier_life(EARLIER_LIFE));
            self.tables.insert(table);
        }
        self.stored(thread);
        first
    }

    /// Frees a table. No entry may point to it.
    pub fn free(&mut self, table: u64) {
        self.tables.remove(&table);
        let leads = |entry: &TlbEntry| entry.kind == Kind::Table(table);
        if self.cpus.iter().any(|cpu| cpu.entries.iter().any(leads)) {
            self.violations.push(Violation::FreedEarly(table));
        }
    }

    /// A thread reads an entry.
    pub fn load(&mut self, thread: usize, place: (u64, usize)) -> u64 {
        self.check_live(place.0);
        self.memory.load(thread, place)
    }

    /// A thread exchanges an entry.
    ///
    /// # Errors
    /// The current value, if it is not `old`.
    pub fn compare_exchange(&mut self, thread: usize, place: (u64, usize), old: u64, new: u64) -> Result<(), u64> {
        let now = self.load(thread, place);
        if now != old {
            return Err(now);
        }
        self.store(thread, place, new, true);
        Ok(())
    }

    /// A thread overwrites an entry, with release semantics or plainly.
    pub fn store(&mut self, thread: usize, place: (u64, usize), bits: u64, release: bool) {
        self.check_live(place.0);
        self.memory.store(thread, place, bits, release);
        self.stored(thread);
    }

    fn stored(&mut self, thread: usize) {
        if self.rules.orders_stores() {
            self.memory.publish(thread);
        }
    }

    /// A thread waits for its stores, and perhaps for its invalidations.
    pub fn barrier(&mut self, thread: usize, barrier: Barrier) {
        match barrier {
            Barrier::LocalStores | Barrier::Local => self.memory.publish_to(thread, thread),
            Barrier::Stores | Barrier::Full => self.memory.publish(thread),
        }
        match barrier {
            Barrier::LocalStores | Barrier::Stores => {}
            Barrier::Local => self.deliver(thread, thread),
            Barrier::Full => (0..self.cpus.len()).for_each(|cpu| self.deliver(cpu, thread)),
        }
        let owes = &mut self.cpus[thread].owes;
        *owes = owes.filter(|needed| barrier != Barrier::Full && barrier != *needed);
    }

    /// A thread invalidates, on its own pCPU or on all. Some pCPUs act on it at once, even before they know the
    /// thread's stores; others wait until the next barrier.
    pub fn invalidate(&mut self, thread: usize, invalidate: Invalidate, everywhere: bool) {
        let asked = Asked { invalidate, thread, vm: self.cpus[thread].vm };
        let cpus = if everywhere { 0..self.cpus.len() } else { thread..thread + 1 };
        let owes = &mut self.cpus[thread].owes;
        if everywhere {
            self.events.broadcasts += 1;
            *owes = Some(Barrier::Full);
        } else {
            self.events.locals += 1;
            *owes = owes.or(Some(Barrier::Local));
        }
        for cpu in cpus {
            if self.pick(4) == 0 {
                self.forget(cpu, asked);
            } else {
                self.cpus[cpu].inbox.push(asked);
            }
        }
        if let Invalidate::Guest { start, .. } = invalidate {
            self.coveted = Some(start);
        }
    }

    /// A pCPU enters its guest.
    pub fn enter(&mut self, cpu: usize) {
        if self.cpus[cpu].owes.is_some() {
            self.violations.push(Violation::NotCompleted);
        }
        self.cpus[cpu].in_guest = true;
    }

    /// A pCPU leaves its guest.
    pub fn leave(&mut self, cpu: usize) {
        self.cpus[cpu].in_guest = false;
    }

    /// The page of this VM must not be translated any more, on any pCPU.
    pub fn declare_unmapped(&mut self, vmid: u32, gpa: u64) {
        self.gone.insert((vmid, gpa & !0xfff), Gone::Translation);
    }

    /// The page must not be written any more.
    pub fn declare_read_only(&mut self, vmid: u32, gpa: u64) {
        self.gone.insert((vmid, gpa & !0xfff), Gone::Write);
    }

    /// The page may be used again in any way that the tables allow.
    pub fn declare_usable(&mut self, vmid: u32, gpa: u64) {
        self.gone.remove(&(vmid, gpa & !0xfff));
    }

    /// The guest that runs on `cpu` reads or writes at `gpa`. Returns the host address, unless it stops.
    ///
    /// # Errors
    /// Why the guest stops.
    pub fn access(&mut self, cpu: usize, gpa: u64, write: bool) -> Result<u64, Stop> {
        let result = self.translate(cpu, gpa, write);
        match result {
            Ok(_) => match self.gone.get(&(self.cpus[cpu].vm.vmid, gpa & !0xfff)) {
                Some(Gone::Translation) => self.violations.push(Violation::StaleUse(gpa)),
                Some(Gone::Write) if write => self.violations.push(Violation::StaleUse(gpa)),
                Some(Gone::Write) | None => {}
            },
            Err(_) => {
                self.events.stops += 1;
                if self.rules.denies_once() {
                    let Cpu { entries, vm, .. } = &mut self.cpus[cpu];
                    entries.retain(|entry| !(entry.is_of(*vm, self.rules) && entry.covers(gpa)));
                }
            }
        }
        result
    }

    /// The hardware does something by itself, or nothing: a speculative walk in the pages from `from` on, a late
    /// invalidation, an eviction.
    pub fn stir(&mut self, from: u64, pages: u64) {
        let cpu = self.pick(self.cpus.len() as u64);
        let cpu = usize::try_from(cpu).expect("few");
        match self.pick(8) {
            0..4 if self.cpus[cpu].in_guest => {
                let any = from + self.pick(pages) * 4096;
                let gpa = self.coveted.filter(|_| any & 1 << 12 == 0).unwrap_or(any);
                let _ = self.walk(cpu, gpa);
            }
            4 => {
                let waiting = self.cpus[cpu].inbox.len() as u64;
                if waiting > 0 {
                    let at = usize::try_from(self.pick(waiting)).expect("few");
                    let asked = self.cpus[cpu].inbox.remove(at);
                    self.forget(cpu, asked);
                }
            }
            5 if !self.stubborn && self.pick(4) == 0 && !self.cpus[cpu].entries.is_empty() => {
                let at = self.pick(self.cpus[cpu].entries.len() as u64);
                self.cpus[cpu].entries.swap_remove(usize::try_from(at).expect("few"));
            }
            _ => {}
        }
    }

    /// A number below `below`, from the seed.
    pub fn pick(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// `cpu` acts on all invalidations of `thread`.
    fn deliver(&mut self, cpu: usize, thread: usize) {
        let asked = std::mem::take(&mut self.cpus[cpu].inbox);
        for asked in asked {
            if asked.thread == thread {
                self.forget(cpu, asked);
            } else {
                self.cpus[cpu].inbox.push(asked);
            }
        }
    }

    fn forget(&mut self, cpu: usize, asked: Asked) {
        let index_bits = self.geometry.index_bits;
        let is_meant = |entry: &TlbEntry| entry.is_meant(asked.vm, asked.invalidate, self.rules);
        let goes = |entry: &TlbEntry| is_meant(entry) && entry.goes(asked.invalidate, index_bits);
        self.cpus[cpu].entries.retain(|entry| !goes(entry));
    }

    fn check_live(&mut self, table: u64) -> bool {
        let live = self.tables.contains(&table);
        if !live {
            self.violations.push(Violation::FreedWalk(table));
        }
        live
    }
}
