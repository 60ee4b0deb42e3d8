//! A guest was stopped at memory that it has: memory that is mapped when it is first touched, or a write that a dirty log
//! wants to know of.
//!
//! Nothing is waited for and nothing that the whole VM uses is written, but for the one entry of stage 2 that the fault
//! is about. Tables for entries that have to be split are kept ready by each vCPU.

use addr::Gpa;
use stage2::{Access, BATCH, Fault, Granularity, MapError, Pace, Spare, Stale};

use super::logging::AllTlbs;
use super::memory::Memory;
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
        Self { spare: Spare::new(), owed: Stale::EMPTY, splits: 0, pace: None }
    }
}

/// The vCPU was stopped as it wanted to use `gpa` in the ways that `wanted` names.
// By itself, so that other exits have no part in what it needs of the stack.
#[inline(never)]
pub(crate) fn settle(run: &mut Running<'_>, gpa: Gpa, wanted: Access) -> Settled {
    let memory = &run.vm.memory;
    if !memory.has(gpa) {
        return Settled::NoMemory;
    }
    let began = tsc::now();
    // Tables that are cut off meanwhile stay until we are through.
    let _walking = memory.logging().walk(run.cpu.id);
    let tlbs = AllTlbs::of(run.vm);
    let granularity = memory.logging().granularity();
    let kit = &mut run.owner.kit;
    if wanted.write && granularity != Granularity::Whole {
        kit.prepare(memory, run.vm.config.vcpus, began);
    }
    let before = kit.spare.count();
    let fault = memory.tree().fault(memory.tables(), &tlbs, gpa, wanted, granularity, &mut kit.spare);
    let settled = match fault {
        Fault::Retry { now, later } => {
            if wanted.write && granularity != Granularity::Whole {
                run.tally.add(|count| &count.dirty_faults, 1);
                let splits = before - kit.spare.count();
                if splits != 0 {
                    run.tally.add(|count| &count.dirty_splits, splits);
                    kit.owe(later, splits, &tlbs);
                }
            }
            if !now.is_empty() {
                tlb::flush_local(now);
                run.tally.add(|count| &count.stage2_local_flushes, 1);
            }
            Settled::Again
        }
        Fault::Denied(_) => Settled::Denied,
        Fault::Unmapped => match kit.populate(memory, &tlbs, gpa) {
            Ok(()) => {
                run.tally.add(|count| &count.pages_populated, 1);
                Settled::Again
            }
            Err(MapError::OutOfTables) => Settled::OutOfTables,
            Err(_) => Settled::NoMemory,
        },
    };
    run.tally.add(|count| &count.stage2_broadcasts, tlbs.flushes());
    run.tally.add(|count| &count.stage2_stall_ticks, tsc::now().saturating_sub(began));
    settled
}

impl Kit {
    /// Has tables ready for a write, as far as the log's rate allows. Without them, the large page counts as written whole.
    fn prepare(&mut self, memory: &Memory, vcpus: u32, now: u64) {
        let allowed = match memory.logging().rate() {
            None => TABLES_FOR_A_WRITE,
            Some((log, per_second)) => {
                let share = u64::from(per_second.div_ceil(vcpus));
                let pace = match &mut self.pace {
                    Some((of, pace)) if *of == log => pace,
                    pace => &mut pace.insert((log, Pace::new(share, tsc::hz(), now))).1,
                };
                pace.allowed(now).min(TABLES_FOR_A_WRITE)
            }
        };
        if allowed > self.spare.count() {
            // What the pool does not have is done without.
            let _ = self.spare.fill(memory.tables(), allowed);
        }
    }

    /// A fault of ours has split large pages, and owes `later` for it.
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

    /// Maps the page that holds `gpa`, where memory is mapped when it is touched.
    fn populate(&mut self, memory: &Memory, tlbs: &AllTlbs<'_>, gpa: Gpa) -> Result<(), MapError> {
        let unmapped = MapError::Beyond(gpa);
        let level = memory.level_on_touch().ok_or(unmapped)?;
        let hpa = memory.host_page(gpa, level).ok_or(unmapped)?;
        self.spare.fill(memory.tables(), TABLES_FOR_A_PAGE)?;
        memory.tree().populate(memory.tables(), tlbs, &mut self.spare, gpa, hpa, level, Access::ALL)?;
        Ok(())
    }
}
