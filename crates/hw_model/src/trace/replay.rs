//! Replays a trace on the machine with page-table walkers.

use std::collections::BTreeMap;

use super::{Event, Mistake, Step, Trace};
use crate::walks::{Barrier, Geometry, Invalidate, Rules, Violation, Walks};

/// Result of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The violations, with their line in the trace; at most [`MOST`](Outcome::MOST).
    pub violations: Vec<(usize, Violation)>,
    /// Number of speculative walks.
    pub walks: u64,
    /// Number of entries that a `flushed` promised to be gone, and that the replay looked for in all TLBs.
    pub checked: u64,
}

impl Outcome {
    /// A replay ends after this many violations.
    pub const MOST: usize = 20;
}

const INDEX_BITS: u32 = 9;
const TABLE_BYTES: u64 = 4096;
/// Number of recent addresses near which the hardware walks.
const RECENT: usize = 16;
/// How many events ahead the hardware knows the next changes.
const AHEAD: usize = 256;

impl Trace {
    /// Repeats the events on the machine; `seed` selects its speculative walks.
    ///
    /// # Errors
    /// The trace contradicts itself: the old value of an exchange is not the last value written.
    pub fn replay(&self, seed: u64) -> Result<Outcome, Mistake> {
        let geometry = Geometry { index_bits: INDEX_BITS, levels: self.levels };
        let mut replay = Replay {
            rules: self.rules,
            levels: self.levels,
            walks: Walks::new(self.rules, geometry, self.cpus, seed),
            tables: BTreeMap::new(),
            cpus: vec![Cpu::default(); self.cpus],
            recent: Vec::new(),
            violations: Vec::new(),
            checked: 0,
        };
        for (at, step) in self.steps.iter().enumerate() {
            if step.event == Event::Leave {
                replay.walk_to_what_comes(step.cpu, &self.steps[at..]);
            }
            replay.step(step).map_err(|why| Mistake { line: step.line, why })?;
            if let Event::Enter { .. } = step.event {
                replay.walk_to_what_comes(step.cpu, &self.steps[at..]);
            }
            if replay.violations.len() >= Outcome::MOST {
                break;
            }
        }
        let walks = replay.walks.events().walks;
        Ok(Outcome { violations: replay.violations, walks, checked: replay.checked })
    }
}

/// A table's place in a tree.
#[derive(Clone, Copy, Debug)]
enum Position {
    /// Below no table, like a root.
    Alone,
    /// One of the tables next to a root.
    Beside { root: u64 },
    /// This entry points to it.
    Below { table: u64, index: usize },
}

/// The addresses that an entry translates.
#[derive(Clone, Copy, Debug)]
struct Range {
    root: u64,
    gpa: u64,
    level: u32,
}

#[derive(Clone, Debug, Default)]
struct Cpu {
    /// VMID and root of the VM whose guest it runs.
    inside: Option<(u32, u64)>,
    /// Entries that it has changed and whose old values TLBs may still hold.
    stale: Vec<(u64, usize, u64)>,
    /// When its flush began.
    flushing_since: usize,
    /// By VMID: when it last flushed its entries, or began to use the VMID. For machines that flush with an entry.
    flushed: BTreeMap<u32, usize>,
    /// By VMID: everything older than this must be flushed at the next use.
    owes: BTreeMap<u32, usize>,
    /// What its next entry flushes.
    flushes: Option<bool>,
}

struct Replay {
    rules: Rules,
    levels: u32,
    walks: Walks,
    tables: BTreeMap<u64, Position>,
    cpus: Vec<Cpu>,
    recent: Vec<u64>,
    violations: Vec<(usize, Violation)>,
    checked: u64,
}

impl Replay {
    /// Does one event, with the hardware's walks before and after it.
    fn step(&mut self, step: &Step) -> Result<(), String> {
        let Step { line, cpu, event } = *step;
        let near = self.near(event);
        self.walk_near(near);
        self.stir();
        match event {
            Event::Exchange { table, index, old, new } => self.exchange(cpu, (table, index), old, new)?,
            Event::Store { table, index, bits } => {
                self.must_be_table(table)?;
                self.walks.store(cpu, (table, index), bits, false);
                self.link((table, index), bits);
            }
            Event::Allocate { table, count } => self.allocate(cpu, table, count)?,
            Event::Free { table } => {
                self.must_be_table(table)?;
                self.walks.free(table);
                self.tables.remove(&table);
            }
            Event::Barrier(barrier) => self.walks.barrier(cpu, barrier),
            Event::Tlbi { invalidate, everywhere } => self.walks.invalidate(cpu, invalidate, everywhere),
            Event::EntryFlushes { all } => self.cpus[cpu].flushes = Some(all),
            Event::Load { vmid, root } => self.walks.load_vm(cpu, vmid, root),
            Event::Enter { vmid, root } => self.enter(line, cpu, vmid, root),
            Event::Leave => {
                self.walks.leave(cpu);
                self.cpus[cpu].inside = None;
            }
            Event::Flush { .. } => self.cpus[cpu].flushing_since = line,
            Event::Flushed { root, start, end } => self.flushed(line, cpu, root, start..end),
        }
        self.walk_near(near);
        let found = self.walks.take_violations();
        self.violations.extend(found.into_iter().map(|violation| (line, violation)));
        self.violations.truncate(Outcome::MOST);
        Ok(())
    }

    fn must_be_table(&self, table: u64) -> Result<(), String> {
        let is_table = self.tables.contains_key(&table);
        if is_table { Ok(()) } else { Err(format!("{table:#x} is not a table at this moment")) }
    }

    fn allocate(&mut self, cpu: usize, first: u64, count: u64) -> Result<(), String> {
        if !(1..=16).contains(&count) || !first.is_multiple_of(count * TABLE_BYTES) || first >> 48 != 0 {
            return Err(format!("{count} tables cannot be at {first:#x}"));
        }
        for table in (first..).step_by(4096).take(usize::try_from(count).unwrap_or(0)) {
            self.walks.adopt(cpu, table);
            self.tables.insert(table, if table == first { Position::Alone } else { Position::Beside { root: first } });
        }
        Ok(())
    }

    fn exchange(&mut self, cpu: usize, place: (u64, usize), old: u64, new: u64) -> Result<(), String> {
        self.must_be_table(place.0)?;
        // A pCPU that changes an entry has read the path to it.
        let mut above = self.tables.get(&place.0).copied();
        let mut way = Vec::new();
        while let Some(Position::Below { table, index }) = above.filter(|_| way.len() < 5) {
            way.push((table, index));
            above = self.tables.get(&table).copied();
        }
        for place in way.into_iter().rev() {
            self.walks.load(cpu, place);
        }
        self.walks
            .exchange_seen(cpu, place, old, new)
            .map_err(|now| format!("the entry says {now:#x}, and not {old:#x}, which nobody has written"))?;
        self.link(place, new);
        if old & 1 != 0 && self.table_in(new).is_none() {
            self.cpus[cpu].stale.push((place.0, place.1, new));
        }
        Ok(())
    }

    /// A table that an entry points to is below it.
    fn link(&mut self, (table, index): (u64, usize), bits: u64) {
        if let Some(below) = self.table_in(bits) {
            self.tables.insert(below, Position::Below { table, index });
        }
    }

    fn table_in(&self, bits: u64) -> Option<u64> {
        let address = bits & 0xffff_ffff_f000;
        (bits & 1 != 0 && self.tables.contains_key(&address)).then_some(address)
    }

    fn enter(&mut self, line: usize, cpu: usize, vmid: u32, root: u64) {
        self.walks.load_vm(cpu, vmid, root);
        let this = &mut self.cpus[cpu];
        this.inside = Some((vmid, root));
        if self.rules == Rules::Nested {
            match this.flushes.take() {
                Some(true) => {
                    this.flushed.clear();
                    this.flushed.insert(vmid, line);
                    self.walks.invalidate(cpu, Invalidate::Everything, false);
                    self.walks.barrier(cpu, Barrier::Local);
                }
                Some(false) => {
                    this.flushed.insert(vmid, line);
                    self.walks.invalidate(cpu, Invalidate::All, false);
                    self.walks.barrier(cpu, Barrier::Local);
                }
                None => {
                    this.flushed.entry(vmid).or_insert(line);
                }
            }
            let this = &mut self.cpus[cpu];
            if this.owes.remove(&vmid).is_some_and(|since| this.flushed[&vmid] < since) {
                self.violations.push((line, Violation::NotCompleted));
            }
        }
        self.walks.enter(cpu);
    }

    /// Checks a pCPU's claim that no TLB holds the entries that it has changed.
    fn flushed(&mut self, line: usize, payer: usize, root: u64, range: std::ops::Range<u64>) {
        if self.rules == Rules::Nested {
            self.flushed_by_entries(line, self.cpus[payer].flushing_since, root);
        }
        let mut stale = std::mem::take(&mut self.cpus[payer].stale);
        stale.retain(|&(table, index, bits)| {
            let Some(whole) = self.range_of((table, index)) else { return false };
            let is_meant = whole.root == root && range.contains(&whole.gpa);
            if is_meant && self.walks.still_says((table, index), bits) {
                self.checked += 1;
                self.walks.expect_no_more(root, whole.gpa, whole.level, bits);
            }
            !is_meant
        });
        self.cpus[payer].stale = stale;
    }

    /// For machines that flush with an entry: each pCPU in the VM's guest has left it since, and flushes before the
    /// next entry.
    fn flushed_by_entries(&mut self, line: usize, since: usize, root: u64) {
        for (number, cpu) in self.cpus.iter_mut().enumerate() {
            let inside = cpu.inside.filter(|inside| inside.1 == root).map(|inside| inside.0);
            if inside.is_some_and(|vmid| cpu.flushed[&vmid] < since) {
                self.violations.push((line, Violation::NotCompleted));
                continue;
            }
            for vmid in self.walks.forget_outside(number, root, inside) {
                cpu.owes.insert(vmid, since);
            }
        }
    }

    /// The addresses that an entry translates, if its table is in a tree.
    fn range_of(&self, (table, index): (u64, usize)) -> Option<Range> {
        let span = |level: u32| 1_u64 << (12 + INDEX_BITS * level);
        let of_table = match *self.tables.get(&table)? {
            Position::Alone => Range { root: table, gpa: 0, level: self.levels },
            Position::Beside { root } => {
                Range { root, gpa: (table - root) / TABLE_BYTES * span(self.levels), level: self.levels }
            }
            Position::Below { table, index } => self.range_of((table, index))?,
        };
        let level = of_table.level.checked_sub(1)?;
        Some(Range { root: of_table.root, gpa: of_table.gpa + index as u64 * span(level), level })
    }

    /// The event's addresses.
    fn near(&self, event: Event) -> Option<Range> {
        let place = match event {
            Event::Exchange { table, index, .. } => (table, index),
            Event::Free { table } => match self.tables.get(&table)? {
                Position::Below { table, index } => (*table, *index),
                _ => return None,
            },
            _ => return None,
        };
        self.range_of(place)
    }

    /// The hardware walks speculatively near the event.
    fn walk_near(&mut self, near: Option<Range>) {
        let Some(Range { gpa, level, .. }) = near else { return };
        for cpu in 0..self.cpus.len() {
            let page = self.walks.pick(1 << (INDEX_BITS * level.min(3)));
            let gpa = gpa + page * 4096;
            self.walks.walk_ahead(cpu, gpa);
            if self.recent.len() < RECENT {
                self.recent.push(gpa);
            } else {
                let at = usize::try_from(self.walks.pick(RECENT as u64)).unwrap_or(0);
                self.recent[at] = gpa;
            }
        }
    }

    /// While a pCPU is in its guest, the hardware walks to entries that are about to change: a fault there may be why
    /// the guest exits.
    fn walk_to_what_comes(&mut self, cpu: usize, steps: &[Step]) {
        for step in steps.iter().take(AHEAD) {
            if let Some(Range { gpa, level, .. }) = self.near(step.event) {
                let page = self.walks.pick(1 << (INDEX_BITS * level.min(3)));
                self.walks.walk_ahead(cpu, gpa + page * 4096);
            }
        }
    }

    fn stir(&mut self) {
        for _ in 0..self.walks.pick(4) {
            if self.recent.is_empty() {
                return;
            }
            let at = usize::try_from(self.walks.pick(self.recent.len() as u64)).unwrap_or(0);
            self.walks.stir(self.recent[at], 2);
        }
    }
}
