//! The hardware's walks, for an access and speculative.

use super::memory::Place;
use super::rules::{Descriptor, Leaf};
use super::tlb::{Kind, Rights, TlbEntry};
use super::{Rules, Stop, Violation, Walks};

impl Walks {
    /// The answer is any cached translation, or a walk.
    pub(super) fn translate(&mut self, cpu: usize, gpa: u64, write: bool) -> Result<u64, Stop> {
        if self.conflicts(cpu, gpa) && (self.stubborn || self.pick(2) == 0) {
            return Err(Stop::Conflict);
        }

        // A denying entry may be the answer too, where denials are cached; else the tables are walked again.
        let may_deny = self.rules.caches_denials() || self.rules.denies_once();
        let usable = |rights: &Rights| (rights.read && (!write || rights.write)) || may_deny;
        let cached: Vec<Rights> =
            self.cpus[cpu].known(gpa, self.rules).filter_map(TlbEntry::rights).filter(usable).collect();
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
        let covering = self.cpus[cpu].known(gpa, self.rules).filter(|entry| entry.rights().is_some());
        let mut levels = covering.map(|entry| entry.level);
        let first = levels.next();
        reports && levels.any(|level| Some(level) != first)
    }

    /// An access with these rights.
    fn apply(&mut self, gpa: u64, write: bool, rights: Rights, cpu: usize) -> Result<u64, Stop> {
        if !rights.read && !write {
            return Err(Stop::Permission);
        }
        if !write || rights.write {
            return Ok(gpa.wrapping_add(rights.distance));
        }
        if rights.recorded { self.record_write(cpu, gpa) } else { Err(Stop::Permission) }
    }

    /// A write that is recorded first: in the current leaf, in one step.
    fn record_write(&mut self, cpu: usize, gpa: u64) -> Result<u64, Stop> {
        let (place, level, bits) = self.newest_leaf(cpu, gpa)?;
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
    fn newest_leaf(&mut self, cpu: usize, gpa: u64) -> Result<(Place, u32, u64), Stop> {
        let (mut table, mut level) = self.start(cpu, gpa);
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

    /// A walk: from the root or from any cached pointer to a table, with any version that may be read. It may cache
    /// what it reads.
    pub(super) fn walk(&mut self, cpu: usize, gpa: u64) -> Result<Rights, Stop> {
        self.events.walks += 1;
        let (mut table, mut level) = self.start(cpu, gpa);

        // A combined entry may also use a cached stage-2 leaf, where that may deny.
        let leaf = self.cpus[cpu].known(gpa, self.rules).find_map(|entry| match entry.kind {
            Kind::Leaf(rights) => Some((entry.level, rights)),
            Kind::Combined(_) | Kind::Table(_) => None,
        });
        let may_deny = self.rules.caches_denials() || self.rules.denies_once();
        if let Some((level, rights)) = leaf.filter(|_| may_deny && self.pick(2) == 0) {
            self.remember(cpu, Kind::Combined(rights), gpa, level, 0);
            return Ok(rights);
        }

        let shortcuts: Vec<_> = self.cpus[cpu]
            .known(gpa, self.rules)
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
            let age = if self.stubborn { versions - 1 } else { self.pick(versions) };
            let age = usize::try_from(age).expect("few");
            let bits = self.memory.walk(cpu, place, age);
            match self.rules.decode(level, bits) {
                Descriptor::Invalid => return Err(Stop::Translation),
                Descriptor::Table(next) => {
                    let used = self.rules.with_used_table(bits);
                    if age == 0 && used != bits {
                        self.memory.hardware_store(place, used);
                    }
                    if self.pick(2) == 0 {
                        self.remember(cpu, Kind::Table(next), gpa, level, level);
                    }
                    (table, level) = (next, level - 1);
                }
                Descriptor::Leaf(leaf) if !leaf.accessed => {
                    if !self.rules.sets_accessed() {
                        return Err(Stop::AccessFlag);
                    }
                    // In one step, so only in the current version.
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
            // A leaf may be cached in pieces of any size.
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
        let vm = self.cpus[cpu].vm;
        let entry = TlbEntry { kind, vm, start: gpa & !(bytes - 1), bytes, level };
        let mixes = self.rules.mixes_sizes();
        let arm = self.rules.caches_denials();
        let entries = &mut self.cpus[cpu].entries;
        let conflict = entries.iter().any(|other| {
            let Some((mine, theirs)) = entry.rights().zip(other.rights()) else { return false };
            let differ = mine.distance != theirs.distance || (!mixes && entry.level != other.level);
            arm && other.vm == vm && entry.overlaps(other) && differ
        });
        let is_tagged_twice = self.rules == Rules::Extended;
        if !is_tagged_twice && entries.iter().any(|other| other.vm.vmid == vm.vmid && other.vm.root != vm.root) {
            self.violations.push(Violation::TwoVms(vm.vmid));
        }
        if conflict {
            self.violations.push(Violation::MultiHit(gpa));
        }
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }

    /// The root table for an address, and its level.
    fn start(&self, cpu: usize, gpa: u64) -> (u64, u32) {
        let levels = self.geometry.levels;
        (self.cpus[cpu].vm.root + gpa / self.span(levels) * 4096, levels - 1)
    }

    fn index(&self, gpa: u64, level: u32) -> usize {
        usize::try_from(gpa / self.span(level) % (1 << self.geometry.index_bits)).expect("small")
    }

    fn span(&self, level: u32) -> u64 {
        1 << (12 + self.geometry.index_bits * level)
    }
}
