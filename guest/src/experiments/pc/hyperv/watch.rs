//! CPUs that watch a page, to show whether a flush has reached them.
//!
//! A watcher reads the page repeatedly with interrupts off and without an exit, so that its TLB keeps the translation
//! as long as the machine allows. In each round it first takes the number of the current look, then reads, and stores
//! both for CPU 0. After a call has returned, CPU 0 begins a new look. All that watchers read in it must be the page's
//! contents since before the call.

use core::sync::atomic::{AtomicU64, Ordering};

use guest_model::cpu_set::CpuSet;

use super::Answer;
use crate::arch::boot::MAX_CPUS;
use crate::arch::remap::{self, Kind};
use crate::arch::tlb;
use crate::cpu;

/// What one watcher has read, and in which look.
#[repr(align(128))]
struct Report {
    value: AtomicU64,
    look: AtomicU64,
}

static REPORTS: [Report; MAX_CPUS] = [const { Report { value: AtomicU64::new(0), look: AtomicU64::new(0) } }; MAX_CPUS];

/// The current look; [`STOP`] ends all watching.
static LOOK: AtomicU64 = AtomicU64::new(0);
static ADDRESS: AtomicU64 = AtomicU64::new(0);
const STOP: u64 = u64::MAX;

/// How the page is mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapping {
    /// 4 KiB.
    Small,
    /// 4 KiB, global.
    Global,
    /// As part of 2 MiB.
    Large,
}

/// A page that moves between two frames, and its watchers.
pub(super) struct Watch {
    watchers: CpuSet,
    mapping: Mapping,
    /// The page's contents: a number that rises with each move.
    value: u64,
    look: u64,
    patience: u64,
}

/// The result of a flush after a move.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    /// The result of the call.
    pub(super) answer: Answer,
    /// Watchers that read the old frame after the call had returned, or did not read at all.
    pub(super) missed: usize,
    /// Whether CPU 0, the caller, read the new one.
    pub(super) caller: bool,
}

/// Frames 2 MiB apart. So a large page around one, moved to one around the other, shows the other at the same address.
/// Each CPU has nine frames in a row.
fn frames() -> [u64; 2] {
    let first = remap::frame(11, 1);
    [first, remap::frame(68, 0)]
}

impl Watch {
    /// Lets `watchers` watch. Those that cannot be given the job do not.
    pub(super) fn start(watchers: &CpuSet, patience: u64) -> Self {
        let mut watch = Self { watchers: CpuSet::EMPTY, mapping: Mapping::Small, value: 0, look: 0, patience };
        LOOK.store(0, Ordering::SeqCst);
        tlb::keep_global(true);
        frames().iter().for_each(|frame| remap::fill(*frame, 0));
        watch.remap(Mapping::Small);
        for index in watchers.iter() {
            REPORTS[index].look.store(0, Ordering::SeqCst);
            if cpu::give(index, keep_watch) {
                watch.watchers.insert(index);
            }
        }
        watch
    }

    /// The watchers.
    pub(super) fn watchers(&self) -> &CpuSet {
        &self.watchers
    }

    /// Maps the page in another way.
    pub(super) fn remap(&mut self, mapping: Mapping) {
        self.mapping = mapping;
        let address = self.point();
        ADDRESS.store(address, Ordering::SeqCst);
        tlb::flush_page(address);
    }

    /// Address of the page.
    pub(super) fn address(&self) -> u64 {
        ADDRESS.load(Ordering::SeqCst) & !0xfff
    }

    /// Moves the page, calls `flush`, and checks which CPUs see the new frame.
    pub(super) fn see(&mut self, flush: impl FnOnce(u64) -> Answer) -> Seen {
        // All watchers have the old frame in their TLBs.
        self.next_look();
        remap::load(ADDRESS.load(Ordering::SeqCst));

        self.value += 1;
        remap::fill(frames()[usize::from(self.value & 1 != 0)], self.value);
        let address = self.point();
        let answer = flush(address & !0xfff);

        let caller = remap::load(address) == self.value;
        let looked = self.next_look();
        let missed = |index: &usize| REPORTS[*index].value.load(Ordering::Relaxed) != self.value;
        let missed = if looked { self.watchers.iter().filter(missed).count() } else { self.watchers.len() };
        // Whatever the call did, the caller starts the next move with a valid translation.
        tlb::flush_page(address);
        Seen { answer, missed, caller }
    }

    /// Ends the watching. Answers whether all watchers came back.
    pub(super) fn stop(self) -> bool {
        LOOK.store(STOP, Ordering::SeqCst);
        let all = cpu::wait_for_all(self.patience).is_none();
        tlb::keep_global(false);
        all
    }

    /// Points the page at the frame of the current value.
    fn point(&self) -> u64 {
        let frame = frames()[usize::from(self.value & 1 != 0)];
        match self.mapping {
            Mapping::Small => remap::point(remap::WATCHED, frame, Kind::Plain),
            Mapping::Global => remap::point(remap::WATCHED, frame, Kind::Global),
            Mapping::Large => return remap::large(frame),
        }
        remap::address(remap::WATCHED)
    }

    /// Begins a new look, and waits until every watcher has read once in it.
    fn next_look(&mut self) -> bool {
        self.look += 1;
        LOOK.store(self.look, Ordering::SeqCst);
        let watchers = self.watchers;
        let look = self.look;
        cpu::wait_until(self.patience, || {
            watchers.iter().all(|index| REPORTS[index].look.load(Ordering::Acquire) >= look)
        })
    }
}

/// A watcher's job.
fn keep_watch(cpu: usize) {
    tlb::keep_global(true);
    let report = &REPORTS[cpu];
    loop {
        let look = LOOK.load(Ordering::Acquire);
        if look == STOP {
            break;
        }
        let value = remap::load(ADDRESS.load(Ordering::Relaxed));
        report.value.store(value, Ordering::Relaxed);
        report.look.store(look, Ordering::Release);
    }
    tlb::keep_global(false);
}
