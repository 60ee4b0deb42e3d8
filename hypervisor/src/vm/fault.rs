//! A guest was stopped at memory that it has: memory that is mapped when it is first touched, or a write that a dirty log
//! wants to know of.
//!
//! Nothing is waited for and nothing that the whole VM uses is written, but for the one entry of stage 2 that the fault
//! is about. Tables for entries that have to be split are kept ready by each vCPU.

use addr::{Gpa, PageSize};
use stage2::{Access, BATCH, Fault, Granularity, MapError, Pace, Spare, Stale, Stream, Walking};

use super::logging::AllTlbs;
use super::memory::{Memory, Stopped};
use crate::arch::{tlb, tsc};
use crate::vcpu::run::Running;

/// What a vCPU keeps for the faults that it meets.
pub(crate) struct Kit {
    spare: Spare,
    /// What its splits owe to everybody. Many of them make one flush.
    owed: Stale,
    /// How many splits that is.
    splits: u64,
    /// How many it may do, for the log of that number.
    pace: Option<(u32, Pace)>,
    /// Where it splits.
    stream: Stream,
}

/// Tables that mapping one page can take: all below the root.
const TABLES_FOR_A_PAGE: u64 = 3;
/// Tables that one write can take: a leaf of 1 GiB becomes a table, and one of its parts another.
const TABLES_FOR_A_WRITE: u64 = 2;

/// What came of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The guest can try again.
    Again,
    /// The page is not for this access.
    Denied,
    /// The VM has no memory there.
    NoMemory,
    /// The host has no page left for a table.
    OutOfTables,
}

/// What ends a VM whose memory cannot be mapped.
pub(crate) const OUT_OF_TABLES: &str = "touches memory for which the host has no stage-2 table left";
/// What would end a VM whose memory is not mapped although it should be.
pub(crate) const NOT_MAPPED: &str = "has memory that stage 2 does not map";

impl Kit {
    /// Nothing yet.
    pub(crate) const fn new() -> Self {
        Self { spare: Spare::new(), owed: Stale::EMPTY, splits: 0, pace: None, stream: Stream::new() }
    }
}

/// The vCPU was stopped at memory, `at` this place, as it wanted to use `gpa` in the ways that `wanted` names.
#[inline]
pub(crate) fn settle(run: &mut Running<'_>, at: Stopped, gpa: Gpa, wanted: Access) -> Settled {
    match run.vm.memory.level_on_touch() {
        Some(level) if !at.is_mapped => populate(run, at.region, gpa, level),
        _ => open(run, gpa, wanted),
    }
}

/// Maps the page that holds `gpa`, in this region, where memory is mapped when it is touched.
// This and the next are functions by themselves, so that other exits have no part in what they need of the stack.
#[inline(never)]
fn populate(run: &mut Running<'_>, region: u32, gpa: Gpa, level: u32) -> Settled {
    let memory = &run.vm.memory;
    let Some(hpa) = memory.host_page(region, gpa, level) else { return Settled::NoMemory };
    let (tables, spare) = (memory.tables(), &mut run.owner.kit.spare);
    let (tlbs, walking) = (AllTlbs::of(run.vm), memory.logging().walk(run.cpu.id));
    let populated = memory.walk(&tlbs, &walking).populate(spare, gpa, hpa, level, Access::ALL);
    drop(walking);
    let settled = match populated {
        Ok(()) => {
            run.tally.add(|count| &count.pages_populated, 1);
            Settled::Again
        }
        // The guest comes back, and finds a table.
        Err(MapError::OutOfTables) if spare.fill(tables, TABLES_FOR_A_PAGE).is_ok() => Settled::Again,
        Err(MapError::OutOfTables) => Settled::OutOfTables,
        Err(_) => Settled::NoMemory,
    };
    count_stall(run);
    settled
}

/// Opens the page for what is wanted, if the guest may do that.
#[inline(never)]
fn open(run: &mut Running<'_>, gpa: Gpa, wanted: Access) -> Settled {
    let memory = &run.vm.memory;
    let granularity = memory.logging().granularity();
    let (tlbs, walking) = (AllTlbs::of(run.vm), memory.logging().walk(run.cpu.id));
    let fault = memory.walk(&tlbs, &walking).fault(gpa, wanted, granularity);
    let settled = match fault {
        Fault::Large => open_large(run, walking, gpa, wanted, granularity),
        fault => {
            drop(walking);
            follow(run, fault)
        }
    };
    if wanted.write && granularity != Granularity::Whole {
        run.tally.add(|count| &count.dirty_faults, 1);
    }
    count_stall(run);
    settled
}

/// Splits the large page that holds `gpa` until it is a small one. Without a table, all of it counts as written.
#[cold]
#[inline(never)]
fn open_large(
    run: &mut Running<'_>,
    walking: Walking<'_>,
    gpa: Gpa,
    wanted: Access,
    mut granularity: Granularity,
) -> Settled {
    loop {
        if !split(run, &walking, gpa, granularity) {
            granularity = Granularity::Whole;
        }
        match run.vm.memory.walk(&AllTlbs::of(run.vm), &walking).fault(gpa, wanted, granularity) {
            Fault::Large => {}
            fault => return follow(run, fault),
        }
    }
}

/// What becomes of the guest after a fault of a small page.
#[inline(always)]
fn follow(run: &Running<'_>, fault: Fault) -> Settled {
    match fault {
        Fault::Retry(denial) => {
            if let Some(gpa) = denial.gpa() {
                tlb::forget(gpa);
                run.tally.add(|count| &count.stage2_local_flushes, 1);
            }
            Settled::Again
        }
        Fault::Denied(_) => Settled::Denied,
        // The processor has seen a page. Where it does not say at which address, that was found out by a walk of the guest's
        // tables, which another vCPU may have changed meanwhile: to memory that nobody has touched. The guest tries again.
        Fault::Unmapped if run.vm.memory.level_on_touch().is_some() => Settled::Again,
        Fault::Unmapped | Fault::Large => Settled::NoMemory,
    }
}

/// The time since the exit is one that the guest has lost to stage 2.
#[inline]
fn count_stall(run: &Running<'_>) {
    let stall = tsc::now().wrapping_sub(run.owner.arch.left_at());
    run.tally.add(|count| &count.stage2_stall_ticks, stall);
}

/// Splits the large page that holds `gpa`, and those behind it if the guest goes from one to the next, as far as the log's
/// rate allows; says whether it did.
fn split(run: &mut Running<'_>, walking: &Walking<'_>, gpa: Gpa, granularity: Granularity) -> bool {
    let memory = &run.vm.memory;
    let tlbs = AllTlbs::of(run.vm);
    let kit = &mut run.owner.kit;
    // Where each small page faults by itself, the faults of large ones are few among them.
    let is_stream = granularity == Granularity::Watched;
    let ahead = if is_stream { kit.stream.ahead_of(gpa, PageSize::Size2M.bytes()) } else { 0 };
    let Some(tables) = kit.prepare(memory, run.vm.config.vcpus, tsc::now(), ahead) else { return false };
    let ahead = ahead.min(tables - 1);
    let before = kit.spare.count();
    let split = memory.walk(&tlbs, walking).split_at_fault(gpa, granularity, ahead, &mut kit.spare);
    let Ok((owed, end)) = split else { return false };
    kit.stream.has_split(ahead, end);
    let splits = before - kit.spare.count();
    kit.owe(owed, splits, &tlbs);
    run.tally.add(|count| &count.dirty_splits, splits);
    run.tally.add(|count| &count.stage2_broadcasts, tlbs.flushes());
    true
}

impl Kit {
    /// Has tables ready for a write and for `ahead` large pages more, and says how many of them the log's rate allows, if any.
    fn prepare(&mut self, memory: &Memory, vcpus: u32, now: u64, ahead: u64) -> Option<u64> {
        let wanted = TABLES_FOR_A_WRITE + ahead;
        let allowed = match memory.logging().rate() {
            None => wanted,
            Some((log, per_second)) => {
                let share = u64::from(per_second.div_ceil(vcpus));
                let pace = match &mut self.pace {
                    Some((of, pace)) if *of == log => pace,
                    pace => &mut pace.insert((log, Pace::new(share, tsc::hz(), now))).1,
                };
                pace.allowed(now).min(wanted)
            }
        };
        if allowed > self.spare.count() && self.spare.fill(memory.tables(), allowed).is_err() {
            // What the pool does not have is done without.
            let _ = self.spare.fill(memory.tables(), allowed.min(TABLES_FOR_A_WRITE));
        }
        let tables = allowed.min(self.spare.count());
        (tables > 0).then_some(tables)
    }

    /// A fault of ours has split large pages, and owes `later` for it, which is paid when there is enough of it.
    fn owe(&mut self, later: Stale, splits: u64, tlbs: &AllTlbs<'_>) {
        if let Some((_, pace)) = &mut self.pace {
            pace.spend(splits);
        }
        self.owed = self.owed.merge(later);
        self.splits += splits;
        if self.splits >= BATCH as u64 {
            core::mem::replace(&mut self.owed, Stale::EMPTY).pay(tlbs);
            self.splits = 0;
        }
    }
}
