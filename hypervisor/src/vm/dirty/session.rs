//! An active dirty log: rounds of harvesting, a mirror that they update, and the return of large pages at the end.
//!
//! The housekeeping pCPU does all of this, in short steps with other work in between. Guests continue: no step holds
//! anything that a fault waits for. A page is copied after it was cleared and flushed; the types of `stage2` enforce
//! this order.

use alloc::boxed::Box;
use alloc::vec::Vec;

use abi::dirty::{Comparison, DirtyInfo, Round};
use abi::payload::{DirtyLogging, DirtySource, Split};
use addr::{Gpa, PAGE_BYTES, PageSize};
use stage2::{Collapse, Format, Limbo, Pace, Rounds, Shape, Source, Spare, Start, Walking};

use super::log::{self, SlotLog};
use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::cpu::preemption::preemption_point;
use crate::frames::{Exhausted, Frames, reserve};
use crate::mutants::{self, Mutant};
use crate::trace::longest;
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;

mod eager;

/// Pages that are copied or compared in one step.
const PAGES_AT_ONCE: usize = 64;
/// Words of 64 pages, and such words that are made to numbers, between which interrupts are let in.
const WORDS_AT_ONCE: usize = 1024;
const FOUND_AT_ONCE: usize = 16;
/// Bytes of a page, as a length.
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);
/// Content of a lost page in the mirror.
const NONSENSE: u8 = 0xa5;
/// Number of large pages that come back at a time: one flush for all of them.
const COLLAPSES: usize = 16;
/// How often per second: 400 large pages. A guest that walks through all of its memory notices each flush, and the
/// return is not urgent.
const COLLAPSE_PERIODS: u64 = 25;
/// Maximum number of probes per step that find nothing.
const LOOKS: usize = 4;
/// Tables that may wait for walkers to leave.
const WAITING_TABLES: usize = 32;

/// A log of a VM, from its start until its large pages are back.
pub(crate) struct Session {
    how: DirtyLogging,
    source: Source,
    /// A copy of each slot.
    mirror: Option<Vec<Frames>>,
    /// Which pages of each slot are sent and not acknowledged.
    sent: Vec<Rounds<Vec<u64>>>,
    /// The result of a round in a slot: a bit for each page, and the numbers of the pages whose bits are set. There is
    /// room for the longest slot, so a round allocates nothing.
    dirty: Vec<u64>,
    found: Vec<u64>,
    rounds: u64,
    pages: u64,
    spare: Spare,
    phase: Phase,
    job: Option<Job>,
    limbo: Box<Limbo<WAITING_TABLES>>,
    /// Pace of the return of large pages: each time flushes all of the VM's TLBs.
    comeback: Pace,
}

/// Work besides the requests.
enum Phase {
    /// Large pages from here on are still to be split ahead of the guest.
    Splitting { slot: usize, from: Gpa, pace: Option<Pace>, splits: u64 },
    /// Nothing.
    Logging { splits: u64 },
    /// The log has ended. The pages of this slot become writable next.
    Releasing { slot: usize },
    /// Small pages from here on may become large again. At the end, waiting tables are freed.
    Collapsing { slot: usize, from: Gpa },
    /// All is as it was.
    Over,
}

/// A request.
enum Job {
    Round { slot: usize, copied: usize, lose: bool, began: u64, harvest_ticks: u64, round: Round },
    Compare { page: u64, comparison: Comparison },
}

/// Result of a request.
pub(crate) enum Done {
    Round(Round),
    Compared(Comparison),
}

/// Why a log cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartError {
    /// The host has too little memory.
    OutOfMemory,
    /// The machine does not record writes.
    NoHardwareLog,
    /// It records them, and keeps no list.
    NoPml,
    /// The VM owns devices, whose writes nothing records.
    OwnsDevices,
}

impl From<Exhausted> for StartError {
    fn from(_: Exhausted) -> Self {
        Self::OutOfMemory
    }
}

/// What records writes for a log with these settings.
fn source_of(vm: &Vm, how: &DirtyLogging) -> Result<Source, StartError> {
    let records_writes = vm.memory.tree().format().records_writes();
    match how.source {
        None if Machine::lists_writes() => Ok(Source::Listed),
        None if records_writes => Ok(Source::Hardware),
        None => Ok(Source::WriteProtect),
        Some(DirtySource::Hardware) if !records_writes => Err(StartError::NoHardwareLog),
        Some(DirtySource::Pml) if !Machine::lists_writes() => Err(StartError::NoPml),
        Some(source) => Ok(log::source(source)),
    }
}

/// This pCPU is about to walk the VM's stage 2.
fn walk(vm: &Vm) -> Walking<'_> {
    vm.memory.announce(cpu::this().id)
}

impl Session {
    /// Starts a log of `vm`: all of its memory counts as written.
    ///
    /// # Errors
    /// The host has too little memory, or the machine cannot record writes, or devices write to the memory. Only large
    /// pages at the ends of slots may have been split.
    pub(crate) fn start(vm: &Vm, how: DirtyLogging, with_mirror: bool) -> Result<Self, StartError> {
        if vm.memory.devices().is_some() {
            return Err(StartError::OwnsDevices);
        }
        let source = source_of(vm, &how)?;
        let state = vm.memory.dirty_state();
        let policy = log::policy(how.split);
        let slots = state.slots();
        let mut mirror = None;
        if with_mirror {
            let copies = mirror.insert(Vec::new());
            reserve(copies, slots.len())?;
            for slot in slots {
                copies.push(Frames::allocate(slot.range.bytes(), PAGE_BYTES)?);
            }
        }
        let mut sent = Vec::new();
        reserve(&mut sent, slots.len())?;
        for slot in slots {
            let log = slot.log(policy, source);
            sent.push(
                Rounds::new(&log, zeros(words_of(&log))?, preemption_point).expect("there is a bit for each page"),
            );
        }
        let longest = slots.iter().map(|slot| words_of(&slot.log(policy, source))).max().unwrap_or(0);
        let dirty = zeros(longest)?;
        let mut found = Vec::new();
        reserve(&mut found, longest * 64)?;

        let mut spare = Spare::new();
        let tlbs = AllTlbs::of_kept(vm);
        state.begin(&how, source);
        for slot in slots {
            let log = slot.log(policy, source);
            let started = log.start(vm.memory.walk(&tlbs, &walk(vm)), Start::AllDirty, &mut spare);
            match started {
                Ok(stale) => stale.pay(&tlbs),
                Err(_) => {
                    state.end();
                    return Err(StartError::OutOfMemory);
                }
            }
        }
        state.count_flushes(tlbs.flushes());
        let first = slots.first().map_or(Gpa(0), |slot| slot.range.start);
        let phase = if how.split == Split::Eager {
            let pace = how.splits_per_second.map(|rate| Pace::new(rate.into(), Machine::hz(), Machine::now()));
            Phase::Splitting { slot: 0, from: first, pace, splits: 0 }
        } else {
            Phase::Logging { splits: 0 }
        };
        let limbo = Box::new(Limbo::new());
        let comeback = Pace::new(1, Machine::hz() / COLLAPSE_PERIODS, Machine::now());
        Ok(Self {
            how,
            source,
            mirror,
            sent,
            dirty,
            found,
            rounds: 0,
            pages: 0,
            spare,
            phase,
            job: None,
            limbo,
            comeback,
        })
    }

    /// Ends the log. The following steps undo its changes.
    pub(crate) fn stop(&mut self, vm: &Vm) {
        vm.memory.dirty_state().end();
        self.mirror = None;
        self.phase = Phase::Releasing { slot: 0 };
    }

    /// Whether the log runs.
    pub(crate) fn is_logging(&self) -> bool {
        matches!(self.phase, Phase::Splitting { .. } | Phase::Logging { .. })
    }

    /// Whether no work is left at all.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Whether there is something to do now.
    pub(crate) fn has_work(&mut self) -> bool {
        self.job.is_some()
            || match self.phase {
                Phase::Logging { .. } | Phase::Over => false,
                Phase::Collapsing { .. } => self.comeback.allowed(Machine::now()) > 0,
                Phase::Splitting { .. } | Phase::Releasing { .. } => true,
            }
    }

    /// Whether a request is unfinished.
    pub(crate) fn is_busy(&self) -> bool {
        self.job.is_some()
    }

    /// Whether there is a mirror.
    pub(crate) fn has_mirror(&self) -> bool {
        self.mirror.is_some()
    }

    /// State of the log.
    pub(crate) fn info(&self, vm: &Vm) -> DirtyInfo {
        let (splits_ahead, is_splitting) = match self.phase {
            Phase::Splitting { splits, .. } => (splits, true),
            Phase::Logging { splits } => (splits, false),
            _ => (0, false),
        };
        DirtyInfo {
            running: self.is_logging().then_some(DirtyLogging {
                source: Some(match self.source {
                    Source::WriteProtect => DirtySource::WriteProtect,
                    Source::Hardware => DirtySource::Hardware,
                    Source::Listed => DirtySource::Pml,
                }),
                ..self.how
            }),
            mirror: self.has_mirror(),
            rounds: self.rounds,
            pages: self.pages,
            splits_ahead,
            is_splitting,
            is_collapsing: matches!(self.phase, Phase::Releasing { .. } | Phase::Collapsing { .. }),
            ..info_without_log(vm)
        }
    }

    /// Begins a round.
    pub(crate) fn begin_round(&mut self, lose: bool) {
        self.rounds += 1;
        let round = Round { number: self.rounds, at_ns: Machine::nanos(), ..Round::default() };
        let began = Machine::now();
        self.found.clear();
        self.job = Some(Job::Round { slot: 0, copied: 0, lose, began, harvest_ticks: 0, round });
    }

    /// Begins to compare the mirror with a VM that is paused.
    pub(crate) fn begin_comparison(&mut self) {
        self.job = Some(Job::Compare { page: 0, comparison: Comparison { pages: 0, different: 0, first: None } });
    }

    /// Does a little of the work. Returns the result of a request when it is complete.
    pub(crate) fn step(&mut self, vm: &Vm) -> Option<Done> {
        if self.job.is_some() {
            return self.step_job(vm);
        }
        let tlbs = AllTlbs::of_kept(vm);
        longest::busy_with(match self.phase {
            Phase::Splitting { .. } => "dirty log: splits ahead",
            Phase::Releasing { .. } => "dirty log: release",
            Phase::Collapsing { .. } => "dirty log: large pages that come back",
            Phase::Logging { .. } | Phase::Over => "dirty log",
        });
        match self.phase {
            Phase::Splitting { .. } => self.split_ahead(vm, &tlbs),
            Phase::Releasing { slot } => self.release(vm, &tlbs, slot),
            Phase::Collapsing { slot, from } => self.collapse(vm, &tlbs, slot, from),
            Phase::Logging { .. } | Phase::Over => {}
        }
        vm.memory.dirty_state().count_flushes(tlbs.flushes());
        None
    }

    fn step_job(&mut self, vm: &Vm) -> Option<Done> {
        match self.job.take()? {
            Job::Round { mut slot, mut copied, lose, began, mut harvest_ticks, mut round } => {
                if copied < self.found.len() {
                    longest::busy_with("dirty log: copy");
                    self.copy(vm, slot - 1, &self.found[copied..], lose);
                    copied += PAGES_AT_ONCE;
                } else if slot < self.sent.len() {
                    longest::busy_with("dirty log: harvest");
                    let since = Machine::now();
                    self.harvest(vm, slot, &mut round);
                    harvest_ticks += Machine::now().saturating_sub(since);
                    round.pages += self.found.len() as u64;
                    copied = if self.mirror.is_some() { 0 } else { self.found.len() };
                    slot += 1;
                } else {
                    self.finish(vm, lose);
                    round.nanos = Machine::ticks_to_nanos(Machine::now().saturating_sub(began));
                    round.harvest_nanos = Machine::ticks_to_nanos(harvest_ticks);
                    self.pages += round.pages;
                    return Some(Done::Round(round));
                }
                self.job = Some(Job::Round { slot, copied, lose, began, harvest_ticks, round });
                None
            }
            Job::Compare { page, comparison } => {
                longest::busy_with("dirty log: comparison");
                self.compare(vm, page, comparison)
            }
        }
    }

    fn log<'a>(&self, vm: &'a Vm, slot: usize) -> SlotLog<'a> {
        vm.memory.dirty_state().slots()[slot].log(log::policy(self.how.split), self.source)
    }

    /// Finds the dirty pages of a slot and cleans them. Their numbers are in `found` then; they may be copied.
    fn harvest(&mut self, vm: &Vm, slot: usize, round: &mut Round) {
        if slot == 0 {
            // What is written from now on may be left to the next round.
            vm.memory.collect_reports(vm.vcpus());
        }
        let log = self.log(vm, slot);
        let (tlbs, walking) = (AllTlbs::of_kept(vm), walk(vm));
        let stage2 = vm.memory.walk(&tlbs, &walking);
        self.found.clear();
        let mut is_clean = true;
        for (words, first) in self.dirty[..words_of(&log)].chunks_mut(WORDS_AT_ONCE).zip((0..).step_by(WORDS_AT_ONCE)) {
            log.get(stage2, first, words);
            is_clean &= words.iter().all(|word| *word == 0);
            preemption_point();
        }
        if is_clean {
            return;
        }
        if mutants::is(Mutant::CopyBeforeClear) {
            let is_set = |page: &u64| self.dirty[(page / 64) as usize] >> (page % 64) & 1 != 0;
            let pages: Vec<u64> = (0..log.slot().bytes() / PAGE_BYTES).filter(is_set).collect();
            pages.chunks(PAGES_AT_ONCE).for_each(|pages| self.copy(vm, slot, pages, false));
        }
        let dirty = &self.dirty[..words_of(&log)];
        let cleared = self.sent[slot].clear(&log, stage2, 0, dirty);
        let copyable = cleared.flush(&tlbs, walking, vm.memory.dirty_state().walkers());
        if !mutants::is(Mutant::CopyBeforeClear) {
            for (number, pages) in copyable.words().enumerate() {
                self.found.extend(pages);
                if number % FOUND_AT_ONCE == 0 {
                    preemption_point();
                }
            }
        }
        round.flushes += tlbs.flushes();
        vm.memory.dirty_state().count_flushes(tlbs.flushes());
    }

    /// Brings some pages of the mirror up to date; with nonsense, if they shall be lost.
    #[inline(never)]
    fn copy(&self, vm: &Vm, slot: usize, pages: &[u64], lose: bool) {
        let Some(mirror) = self.mirror.as_ref().and_then(|mirror| mirror.get(slot)) else { return };
        let start = vm.memory.dirty_state().slots()[slot].range.start;
        let mut bytes = [NONSENSE; PAGE];
        for page in pages.iter().take(PAGES_AT_ONCE) {
            preemption_point();
            let offset = page * PAGE_BYTES;
            let is_read = lose || vm.memory.read(Gpa(start.0 + offset), &mut bytes);
            let is_written = mirror.write(offset, &bytes);
            debug_assert!(is_read && is_written, "the mirror is as long as the slot");
        }
    }

    /// All of a round was copied: it has arrived, or is lost.
    fn finish(&mut self, vm: &Vm, lose: bool) {
        for slot in 0..self.sent.len() {
            if lose {
                let log = self.log(vm, slot);
                self.sent[slot].cancel(&log, preemption_point);
            } else {
                self.sent[slot].acknowledge(preemption_point);
            }
        }
    }

    #[inline(never)]
    fn compare(&mut self, vm: &Vm, page: u64, mut comparison: Comparison) -> Option<Done> {
        let mirror = self.mirror.as_ref()?;
        let slots = vm.memory.dirty_state().slots();
        let mut first = 0;
        let mut place = None;
        for (slot, frames) in slots.iter().zip(mirror) {
            let count = slot.range.bytes() / PAGE_BYTES;
            if page < first + count {
                place = Some((slot, frames, page - first, count));
                break;
            }
            first += count;
        }
        let Some((slot, frames, from, count)) = place else { return Some(Done::Compared(comparison)) };
        let end = count.min(from + PAGES_AT_ONCE as u64);
        let mut here = [0; PAGE];
        let mut there = [0; PAGE];
        for number in from..end {
            preemption_point();
            let offset = number * PAGE_BYTES;
            let gpa = Gpa(slot.range.start.0 + offset);
            let is_read = vm.memory.read(gpa, &mut here) && frames.read(offset, &mut there);
            debug_assert!(is_read, "the mirror is as long as the slot");
            comparison.pages += 1;
            if !are_equal(&here, &there) {
                comparison.different += 1;
                comparison.first.get_or_insert(gpa.0);
            }
        }
        self.job = Some(Job::Compare { page: page + (end - from), comparison });
        None
    }

    /// Lets the guest write freely to a slot again.
    fn release(&mut self, vm: &Vm, tlbs: &AllTlbs<'_>, slot: usize) {
        let slots = vm.memory.dirty_state().slots();
        self.phase = match slots.get(slot) {
            Some(_) => {
                self.log(vm, slot).stop(vm.memory.walk(tlbs, &walk(vm)));
                Phase::Releasing { slot: slot + 1 }
            }
            None => Phase::Collapsing { slot: 0, from: slots.first().map_or(Gpa(0), |slot| slot.range.start) },
        };
    }

    /// Makes the small pages around `from` large again, if nothing else prevents it.
    fn collapse(&mut self, vm: &Vm, tlbs: &AllTlbs<'_>, slot: usize, from: Gpa) {
        let memory = &vm.memory;
        self.limbo.reclaim(memory.tables(), memory.dirty_state().walkers());
        let slots = memory.dirty_state().slots();
        let Some(place) = slots.get(slot) else {
            if self.limbo.waiting() == 0 {
                core::mem::take(&mut self.spare).give_back(memory.tables());
                self.phase = Phase::Over;
            }
            return;
        };
        let end = place.range.end();
        let mut shape = memory.shape();
        let mut at = from;
        // If there is nothing to do, look at a few more.
        for _ in 0..LOOKS {
            let place = |number: usize| Gpa(at.0 + number as u64 * PageSize::Size2M.bytes());
            let next = place(COLLAPSES);
            let places: [Gpa; COLLAPSES] = core::array::from_fn(place);
            let outcomes = self.collapse_at(vm, tlbs, &mut shape, places, 1);
            // The last part of a larger page: perhaps that comes back as well.
            let ends_larger = next.page(PageSize::Size1G) > at && !outcomes.contains(&Collapse::Full);
            let larger = ends_larger.then(|| self.collapse_at(vm, tlbs, &mut shape, [at], 2));
            if outcomes.contains(&Collapse::Full) || larger == Some([Collapse::Full]) {
                // Pages that are back already are found to be large.
                break;
            }
            at = next;
            if outcomes.contains(&Collapse::Done) || at >= end {
                break;
            }
        }
        self.phase = if at >= end {
            Phase::Collapsing { slot: slot + 1, from: slots.get(slot + 1).map_or(at, |slot| slot.range.start) }
        } else {
            Phase::Collapsing { slot, from: at }
        };
    }

    fn collapse_at<const M: usize>(
        &mut self,
        vm: &Vm,
        tlbs: &AllTlbs<'_>,
        shape: &mut Shape,
        places: [Gpa; M],
        level: u32,
    ) -> [Collapse; M] {
        let memory = &vm.memory;
        let walkers = memory.dirty_state().walkers();
        let mut stage2 = memory.walk_mut(tlbs, shape);
        let outcomes = stage2.collapse_together(&mut self.limbo, walkers, places, level);
        let done = outcomes.iter().filter(|&&outcome| outcome == Collapse::Done).count() as u64;
        memory.dirty_state().count_collapses(done);
        if done != 0 {
            self.comeback.spend(1);
        }
        outcomes
    }
}

/// Word by word: without a library of the system, slices are compared byte by byte.
fn are_equal(one: &[u8; PAGE], other: &[u8; PAGE]) -> bool {
    let pairs = one.as_chunks().0.iter().zip(other.as_chunks().0);
    pairs.into_iter().all(|(one, other)| u128::from_ne_bytes(*one) == u128::from_ne_bytes(*other))
}

/// Number of words with a bit for each page of a slot.
fn words_of(log: &SlotLog<'_>) -> usize {
    usize::try_from(log.slot().bytes().div_ceil(64 * PAGE_BYTES)).unwrap_or(usize::MAX)
}

fn zeros(count: usize) -> Result<Vec<u64>, Exhausted> {
    let mut words = Vec::new();
    reserve(&mut words, count)?;
    while words.len() < count {
        words.resize(count.min(words.len() + WORDS_AT_ONCE), 0);
        preemption_point();
    }
    Ok(words)
}

/// The information about a VM without a log.
pub(crate) fn info_without_log(vm: &Vm) -> DirtyInfo {
    let (flushes, collapses) = vm.memory.dirty_state().counts();
    DirtyInfo {
        at_ns: Machine::nanos(),
        running: None,
        mirror: false,
        paused: vm.is_paused(),
        rounds: 0,
        pages: 0,
        splits_ahead: 0,
        is_splitting: false,
        flushes,
        collapses,
        is_collapsing: false,
        table_bytes: vm.memory.table_bytes(),
    }
}
