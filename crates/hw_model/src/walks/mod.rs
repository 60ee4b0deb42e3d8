//! A machine that walks stage-2 tables, and takes every liberty that the manual leaves to it.
//!
//! Where [`Machine`](crate::Machine) is told what a walk finds, this one walks by itself, whenever it likes, through the
//! very tables that the code under test writes. It keeps leaves, pointers to tables, and what both stages say together
//! for as long as no invalidation covers them, reads old versions of entries that no barrier has made known, and acts on
//! broadcasts as late as it may. Between any two steps of the code something of this happens ([`Walks::stir`]).
//!
//! What must never be is a [`Violation`]. Most are seen at once; that a write was lost, the test finds out by comparing
//! pages with their copies.

mod memory;
mod rules;
mod tlb;
mod violation;

use std::collections::{BTreeMap, BTreeSet};

use memory::{Memory, Place};
pub use rules::Rules;
use rules::{Descriptor, Leaf};
pub use tlb::Invalidate;
use tlb::{Entry, Kind, Rights};
pub use violation::Violation;

/// Which barrier (Arm ARM, B2.3: DSB).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// Stores are known to the walkers of this pCPU (NSHST).
    LocalStores,
    /// Stores are known to all walkers (ISHST).
    Stores,
    /// The same as `LocalStores`, and invalidations of this pCPU are complete (NSH).
    Local,
    /// The same as `Stores`, and all invalidations of the thread are complete everywhere (ISH).
    Full,
}

/// What stopped the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing is mapped.
    Translation,
    /// It may not.
    Permission,
    /// The access flag is clear.
    AccessFlag,
    /// Entries of two sizes are cached for the address, which is allowed, and so is saying so.
    Conflict,
}

/// How the tables are laid out.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bits of an address that one table translates.
    pub index_bits: u32,
    /// Number of levels.
    pub levels: u32,
}

/// Things that have happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Broadcast invalidations.
    pub broadcasts: u64,
    /// Local ones.
    pub locals: u64,
    /// Walks that the hardware made by itself.
    pub walks: u64,
    /// Writes that it recorded in leaves.
    pub recorded: u64,
    /// Accesses that stopped the guest.
    pub stops: u64,
}

/// pCPUs that share memory. Thread `n` of the code under test runs on pCPU `n`.
#[derive(Debug)]
pub struct Walks {
    rules: Rules,
    geometry: Geometry,
    root: u64,
    memory: Memory,
    cpus: Vec<Cpu>,
    tables: BTreeSet<u64>,
    next_table: u64,
    /// Pages whose translation, or whose right to be written, is declared gone.
    gone: BTreeMap<u64, Gone>,
    violations: Vec<Violation>,
    events: Events,
    random: u64,
    /// It uses what it remembers for as long as it can, the oldest first.
    stubborn: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    Translation,
    Write,
}

#[derive(Clone, Debug, Default)]
struct Cpu {
    entries: Vec<Entry>,
    /// Invalidations that it has yet to act on, and whose they are.
    inbox: Vec<(Invalidate, usize)>,
    /// Whether it runs its guest, and so may walk.
    in_guest: bool,
}

/// Where tables lie, so that none is mistaken for guest memory.
const TABLES_START: u64 = 1 << 32;

impl Walks {
    /// A machine without tables. `seed` decides what it does by itself.
    #[must_use]
    pub fn new(rules: Rules, geometry: Geometry, cpus: usize, seed: u64) -> Self {
        Self {
            rules,
            geometry,
            root: 0,
            memory: Memory::new(cpus),
            cpus: vec![Cpu::default(); cpus],
            tables: BTreeSet::new(),
            next_table: TABLES_START,
            gone: BTreeMap::new(),
            violations: Vec::new(),
            events: Events::default(),
            random: seed | 1,
            stubborn: seed & 2 != 0,
        }
    }

    /// Where walks start. Changed only while nobody is in the guest.
    pub fn set_root(&mut self, root: u64) {
        self.root = root;
    }

    /// Rules that were broken so far.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// What has happened so far.
    #[must_use]
    pub fn events(&self) -> Events {
        self.events
    }

    /// `count` tables of zeros, side by side, at a multiple of their size. None is ever given out twice.
    pub fn allocate(&mut self, count: u64) -> u64 {
        let first = self.next_table.next_multiple_of(count * 4096);
        self.next_table = first + count * 4096;
        for table in (first..self.next_table).step_by(4096) {
            self.memory.add_table(table, 1 << self.geometry.index_bits);
            self.tables.insert(table);
        }
        first
    }

    /// A table is given back. Nothing may lead to it.
    pub fn free(&mut self, table: u64) {
        self.tables.remove(&table);
        let leads = |entry: &Entry| entry.kind == Kind::Table(table);
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
    /// With what it says, when that is not `old`.
    pub fn compare_exchange(&mut self, thread: usize, place: (u64, usize), old: u64, new: u64) -> Result<(), u64> {
        let now = self.load(thread, place);
        if now != old {
            return Err(now);
        }
        self.store(thread, place, new, true);
        Ok(())
    }

    /// A thread writes an entry, whatever it says: with release semantics, or plainly.
    pub fn store(&mut self, thread: usize, place: (u64, usize), bits: u64, release: bool) {
        self.check_live(place.0);
        self.memory.store(thread, place, bits, release);
        if self.rules == Rules::Nested {
            // Walkers see stores in order, and exchanges at once.
            self.memory.publish(thread);
        }
    }

    /// A thread waits for its stores, and perhaps for its invalidations.
    pub fn barrier(&mut self, thread: usize, barrier: Barrier) {
        self.memory.publish(thread);
        match barrier {
            Barrier::LocalStores | Barrier::Stores => {}
            Barrier::Local => self.deliver(thread, thread),
            Barrier::Full => (0..self.cpus.len()).for_each(|cpu| self.deliver(cpu, thread)),
        }
    }

    /// A thread invalidates, on its own pCPU or on all. It may take until the next barrier.
    pub fn invalidate(&mut self, thread: usize, invalidate: Invalidate, everywhere: bool) {
        if everywhere {
            self.events.broadcasts += 1;
            self.cpus.iter_mut().for_each(|cpu| cpu.inbox.push((invalidate, thread)));
        } else {
            self.events.locals += 1;
            self.cpus[thread].inbox.push((invalidate, thread));
        }
    }

    /// A pCPU enters its guest.
    pub fn enter(&mut self, cpu: usize) {
        if self.cpus.iter().any(|other| other.inbox.iter().any(|(_, thread)| *thread == cpu)) {
            self.violations.push(Violation::NotCompleted);
        }
        self.cpus[cpu].in_guest = true;
    }

    /// A pCPU leaves its guest.
    pub fn leave(&mut self, cpu: usize) {
        self.cpus[cpu].in_guest = false;
    }

    /// The page must not be translated any more, by anybody.
    pub fn declare_unmapped(&mut self, gpa: u64) {
        self.gone.insert(gpa & !0xfff, Gone::Translation);
    }

    /// The page must not be written any more.
    pub fn declare_read_only(&mut self, gpa: u64) {
        self.gone.insert(gpa & !0xfff, Gone::Write);
    }

    /// The page may be used again in any way that the tables allow.
    pub fn declare_usable(&mut self, gpa: u64) {
        self.gone.remove(&(gpa & !0xfff));
    }

    /// The guest on `cpu`, which is in it, reads or writes at `gpa`. Where in host memory, if it is not stopped.
    ///
    /// # Errors
    /// When it is stopped.
    pub fn access(&mut self, cpu: usize, gpa: u64, write: bool) -> Result<u64, Stop> {
        let result = self.translate(cpu, gpa, write);
        match result {
            Ok(_) => match self.gone.get(&(gpa & !0xfff)) {
                Some(Gone::Translation) => self.violations.push(Violation::StaleUse(gpa)),
                Some(Gone::Write) if write => self.violations.push(Violation::StaleUse(gpa)),
                Some(Gone::Write) | None => {}
            },
            Err(_) => self.events.stops += 1,
        }
        result
    }

    /// The hardware does something by itself, or nothing: a walk ahead of use in the pages from `from` on, a late
    /// invalidation, an entry that is displaced.
    pub fn stir(&mut self, from: u64, pages: u64) {
        let cpu = self.pick(self.cpus.len() as u64);
        let cpu = usize::try_from(cpu).expect("few");
        match self.pick(8) {
            0..4 if self.cpus[cpu].in_guest => {
                let gpa = from + self.pick(pages) * 4096;
                let _ = self.walk(cpu, gpa);
            }
            4 => {
                let waiting = self.cpus[cpu].inbox.len() as u64;
                if waiting > 0 {
                    let at = usize::try_from(self.pick(waiting)).expect("few");
                    let (invalidate, _) = self.cpus[cpu].inbox.remove(at);
                    self.forget(cpu, invalidate);
                }
            }
            5 if !self.stubborn && self.pick(4) == 0 && !self.cpus[cpu].entries.is_empty() => {
                let at = self.pick(self.cpus[cpu].entries.len() as u64);
                self.cpus[cpu].entries.swap_remove(usize::try_from(at).expect("few"));
            }
            _ => {}
        }
    }

    /// A number below `below`, as the seed has it.
    pub fn pick(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    /// Any translation that is cached may answer, or a walk.
    fn translate(&mut self, cpu: usize, gpa: u64, write: bool) -> Result<u64, Stop> {
        if self.conflicts(cpu, gpa) && (self.stubborn || self.pick(2) == 0) {
            return Err(Stop::Conflict);
        }

        // What denies may be the answer as well, where denials are cached; else the tables are asked again.
        let usable = |rights: &Rights| (rights.read && (!write || rights.write)) || self.rules.caches_denials();
        let cached: Vec<Rights> = self.cpus[cpu]
            .entries
            .iter()
            .filter(|entry| entry.covers(gpa))
            .filter_map(Entry::rights)
            .filter(usable)
            .collect();
        let at = if self.stubborn { 0 } else { self.pick(cached.len() as u64 + 1) };
        let rights = match cached.get(usize::try_from(at).expect("few")) {
            Some(rights) => *rights,
            None => self.walk(cpu, gpa)?,
        };
        self.apply(gpa, write, rights, cpu)
    }

    /// Whether leaves of two sizes are cached for an address, on a processor that may report it.
    fn conflicts(&self, cpu: usize, gpa: u64) -> bool {
        let reports = matches!(self.rules, Rules::Arm { bbm: 2, .. });
        let covering = self.cpus[cpu].entries.iter().filter(|entry| entry.covers(gpa) && entry.rights().is_some());
        let mut levels = covering.map(|entry| entry.level);
        let first = levels.next();
        reports && levels.any(|level| Some(level) != first)
    }

    /// An access by these rights.
    fn apply(&mut self, gpa: u64, write: bool, rights: Rights, cpu: usize) -> Result<u64, Stop> {
        if !rights.read && !write {
            return Err(Stop::Permission);
        }
        if !write || rights.write {
            return Ok(gpa.wrapping_add(rights.distance));
        }
        if rights.recorded { self.record_write(cpu, gpa) } else { Err(Stop::Permission) }
    }

    /// A write that has to be recorded first: in the leaf as it is now, in one step.
    fn record_write(&mut self, cpu: usize, gpa: u64) -> Result<u64, Stop> {
        let (place, level, bits) = self.newest_leaf(gpa)?;
        let Descriptor::Leaf(leaf) = self.rules.decode(level, bits) else { return Err(Stop::Translation) };
        if !leaf.write && !leaf.recorded {
            return Err(Stop::Permission);
        }
        if leaf.recorded {
            self.events.recorded += 1;
            self.memory.hardware_store(place, self.rules.with_write(self.rules.with_accessed(bits)));
        }
        let leaf = Leaf { write: true, recorded: false, ..leaf };
        let rights = self.remember_leaf(cpu, gpa, level, leaf);
        Ok(gpa.wrapping_add(rights.distance))
    }

    /// The leaf that translates an address now.
    fn newest_leaf(&mut self, gpa: u64) -> Result<(Place, u32, u64), Stop> {
        let (mut table, mut level) = self.start(gpa);
        loop {
            self.check_live(table);
            let place = (table, self.index(gpa, level));
            let bits = self.memory.newest(place);
            match self.rules.decode(level, bits) {
                Descriptor::Table(next) => (table, level) = (next, level - 1),
                Descriptor::Leaf(_) => return Ok((place, level, bits)),
                Descriptor::Invalid => return Err(Stop::Translation),
            }
        }
    }

    /// A walk: from the root or from any pointer to a table that is cached, by any version that may be read. What it
    /// passes may be remembered, or not.
    fn walk(&mut self, cpu: usize, gpa: u64) -> Result<Rights, Stop> {
        self.events.walks += 1;
        let (mut table, mut level) = self.start(gpa);

        // Both stages together may also be made of what is remembered of the second, where that may deny.
        let leaf = self.cpus[cpu].entries.iter().find_map(|entry| match entry.kind {
            Kind::Leaf(rights) if entry.covers(gpa) => Some((entry.level, rights)),
            Kind::Leaf(_) | Kind::Combined(_) | Kind::Table(_) => None,
        });
        if let Some((level, rights)) = leaf.filter(|_| self.rules.caches_denials() && self.pick(2) == 0) {
            self.remember(cpu, Kind::Combined(rights), gpa, level, 0);
            return Ok(rights);
        }

        let shortcuts: Vec<_> = self.cpus[cpu]
            .entries
            .iter()
            .filter(|entry| entry.covers(gpa))
            .filter_map(|entry| match entry.kind {
                Kind::Table(next) => Some((next, entry.level - 1)),
                Kind::Leaf(_) | Kind::Combined(_) => None,
            })
            .collect();
        let way = usize::try_from(self.pick(shortcuts.len() as u64 + 1)).expect("few");
        if let Some(&shortcut) = shortcuts.get(way) {
            (table, level) = shortcut;
        }

        loop {
            if !self.check_live(table) {
                return Err(Stop::Translation);
            }
            let place = (table, self.index(gpa, level));
            let versions = self.memory.readable(cpu, place) as u64;
            let age = usize::try_from(self.pick(versions)).expect("few");
            let bits = self.memory.walk(cpu, place, age);
            match self.rules.decode(level, bits) {
                Descriptor::Invalid => return Err(Stop::Translation),
                Descriptor::Table(next) => {
                    if self.pick(2) == 0 {
                        self.remember(cpu, Kind::Table(next), gpa, level, level);
                    }
                    (table, level) = (next, level - 1);
                }
                Descriptor::Leaf(leaf) if !leaf.accessed => {
                    if !self.rules.sets_accessed() {
                        return Err(Stop::AccessFlag);
                    }
                    // In one step, so only in what is there now.
                    if age != 0 {
                        return Err(Stop::Translation);
                    }
                    self.memory.hardware_store(place, self.rules.with_accessed(bits));
                    return Ok(self.remember_leaf(cpu, gpa, level, leaf));
                }
                Descriptor::Leaf(leaf) => return Ok(self.remember_leaf(cpu, gpa, level, leaf)),
            }
        }
    }

    fn remember_leaf(&mut self, cpu: usize, gpa: u64, level: u32, leaf: Leaf) -> Rights {
        let start = gpa & !(self.span(level) - 1);
        let distance = leaf.output.wrapping_sub(start);
        let rights = Rights { distance, read: leaf.read, write: leaf.write, recorded: leaf.recorded };
        if !leaf.uncached {
            // A leaf may be kept in pieces of any size.
            let piece = u32::try_from(self.pick(u64::from(level) + 1)).expect("few levels");
            match self.pick(4) {
                0 => {}
                1 => self.remember(cpu, Kind::Leaf(rights), gpa, level, piece),
                2 => self.remember(cpu, Kind::Combined(rights), gpa, level, piece),
                _ => {
                    self.remember(cpu, Kind::Leaf(rights), gpa, level, piece);
                    self.remember(cpu, Kind::Combined(rights), gpa, level, piece);
                }
            }
        }
        rights
    }

    fn remember(&mut self, cpu: usize, kind: Kind, gpa: u64, level: u32, size: u32) {
        let bytes = self.span(size);
        let entry = Entry { kind, start: gpa & !(bytes - 1), bytes, level };
        let mixes = self.rules.mixes_sizes();
        let arm = self.rules.caches_denials();
        let entries = &mut self.cpus[cpu].entries;
        let conflict = entries.iter().any(|other| {
            let Some((mine, theirs)) = entry.rights().zip(other.rights()) else { return false };
            let differ = mine.distance != theirs.distance || (!mixes && entry.level != other.level);
            arm && entry.overlaps(other) && differ
        });
        if conflict {
            self.violations.push(Violation::MultiHit(gpa));
        }
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }

    /// `cpu` acts on all that `thread` has asked of it.
    fn deliver(&mut self, cpu: usize, thread: usize) {
        let asked = std::mem::take(&mut self.cpus[cpu].inbox);
        for (invalidate, by) in asked {
            if by == thread {
                self.forget(cpu, invalidate);
            } else {
                self.cpus[cpu].inbox.push((invalidate, by));
            }
        }
    }

    fn forget(&mut self, cpu: usize, invalidate: Invalidate) {
        let index_bits = self.geometry.index_bits;
        self.cpus[cpu].entries.retain(|entry| !entry.goes(invalidate, index_bits));
    }

    fn check_live(&mut self, table: u64) -> bool {
        let live = self.tables.contains(&table);
        if !live {
            self.violations.push(Violation::FreedWalk(table));
        }
        live
    }

    /// The root table for an address, and its level.
    fn start(&self, gpa: u64) -> (u64, u32) {
        let levels = self.geometry.levels;
        (self.root + gpa / self.span(levels) * 4096, levels - 1)
    }

    fn index(&self, gpa: u64, level: u32) -> usize {
        usize::try_from(gpa / self.span(level) % (1 << self.geometry.index_bits)).expect("small")
    }

    fn span(&self, level: u32) -> u64 {
        1 << (12 + self.geometry.index_bits * level)
    }
}
