//! Memory as walkers see it: late.
//!
//! Every word keeps its history. The software reads and exchanges the newest version. A walker may read any version,
//! unless its pCPU *knows* that it is overwritten. A pCPU's walker learns of a version in two ways: the writer, or a
//! thread that has seen the version, completes a DSB; or the walker reads a word that was written later with release
//! semantics.

use std::collections::BTreeMap;

/// For each thread, how many of its stores are known.
type Clock = Vec<u64>;

/// Address of a table, and index of the entry.
pub(super) type Place = (u64, usize);

#[derive(Clone, Debug)]
struct Version {
    bits: u64,
    /// The thread and the number of its store; `None` for a write by the hardware, which all walkers know.
    writer: Option<(usize, u64)>,
    /// The stores that a reader of this version learns of.
    released: Option<Clock>,
}

#[derive(Debug)]
pub(super) struct Memory {
    words: BTreeMap<Place, Vec<Version>>,
    /// The stores that each thread knows, its own included.
    threads: Vec<Clock>,
    /// The stores that each pCPU's walker knows.
    walkers: Vec<Clock>,
}

impl Memory {
    pub(super) fn new(cpus: usize) -> Self {
        Self { words: BTreeMap::new(), threads: vec![vec![0; cpus]; cpus], walkers: vec![vec![0; cpus]; cpus] }
    }

    /// Adds a page. All walkers know its old content, `before` in each word. A thread has just zeroed it by plain
    /// stores.
    pub(super) fn add_table(&mut self, thread: usize, table: u64, entries: usize, before: u64) {
        self.threads[thread][thread] += 1;
        let writer = Some((thread, self.threads[thread][thread]));
        for index in 0..entries {
            let before = Version { bits: before, writer: None, released: None };
            self.words.insert((table, index), vec![before, Version { bits: 0, writer, released: None }]);
        }
    }

    /// Adds a page that a thread has just zeroed by plain stores. Its versions from an earlier use as a table stay.
    pub(super) fn add_table_again(&mut self, thread: usize, table: u64, entries: usize, before: u64) {
        if !self.words.contains_key(&(table, 0)) {
            return self.add_table(thread, table, entries, before);
        }
        (0..entries).for_each(|index| self.store(thread, (table, index), 0, false));
    }

    pub(super) fn newest(&self, place: Place) -> u64 {
        self.words[&place].last().expect("each word has a version").bits
    }

    /// A thread reads, with acquire semantics.
    pub(super) fn load(&mut self, thread: usize, place: Place) -> u64 {
        let version = self.words[&place].last().expect("each word has a version");
        if let Some(clock) = &version.released {
            merge(&mut self.threads[thread], clock);
        }
        version.bits
    }

    /// A thread writes; with release semantics, or plainly.
    pub(super) fn store(&mut self, thread: usize, place: Place, bits: u64, release: bool) {
        self.threads[thread][thread] += 1;
        let released = release.then(|| self.threads[thread].clone());
        let version = Version { bits, writer: Some((thread, self.threads[thread][thread])), released };
        self.words.get_mut(&place).expect("a word of a table").push(version);
    }

    /// The hardware replaces the newest version.
    pub(super) fn hardware_store(&mut self, place: Place, bits: u64) {
        self.words.get_mut(&place).expect("a word of a table").push(Version { bits, writer: None, released: None });
    }

    /// All walkers learn of everything that a thread knows.
    pub(super) fn publish(&mut self, thread: usize) {
        (0..self.walkers.len()).for_each(|cpu| self.publish_to(cpu, thread));
    }

    /// One walker learns of everything that a thread knows.
    pub(super) fn publish_to(&mut self, cpu: usize, thread: usize) {
        merge(&mut self.walkers[cpu], &self.threads[thread]);
    }

    /// Number of versions that a walker may read; 0 is the newest.
    pub(super) fn readable(&mut self, cpu: usize, place: Place) -> usize {
        let walkers = &self.walkers;
        let versions = self.words.get_mut(&place).expect("a word of a table");
        let known =
            |walker: &Clock, version: &Version| version.writer.is_none_or(|(thread, number)| walker[thread] >= number);
        let oldest = |walker: &Clock, versions: &[Version]| {
            versions.iter().rposition(|version| known(walker, version)).unwrap_or(0)
        };
        let keep = walkers.iter().map(|walker| oldest(walker, versions)).min().unwrap_or(0);
        versions.drain(..keep);
        versions.len() - oldest(&walkers[cpu], versions)
    }

    /// A walker reads the version with `age` newer ones.
    pub(super) fn walk(&mut self, cpu: usize, place: Place, age: usize) -> u64 {
        let versions = &self.words[&place];
        let version = &versions[versions.len() - 1 - age];
        if let Some(clock) = &version.released {
            merge(&mut self.walkers[cpu], clock);
        }
        version.bits
    }
}

fn merge(into: &mut Clock, from: &Clock) {
    into.iter_mut().zip(from).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}
