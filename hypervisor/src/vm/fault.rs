//! Resolves a fault of stage 2: the guest accesses a device, touches memory for the first time, or writes to a page
//! that a dirty log or the cache of decoded instructions has write-protected.
//!
//! The handler never waits, and writes nothing that the whole VM uses, except the one stage-2 entry of the fault. Each
//! vCPU keeps tables ready for entries that must be split.

use abi::counters::ExitReason;
use addr::{Gpa, PageSize};
use sched::CpuId;
use stage2::{Access, BATCH, Denial, Fault, Format, Granularity, Pace, Spare, Stale, Stream, Tree, Walk, Walking};

use super::address_space::{AllTlbs, Stage2Format};
use super::memory::Memory;
use super::rivals::{first_touch, write_protect};
use crate::arch::tables::{TablePool, with_known_format};
use crate::arch::{Arch, Machine, VcpuState};
use crate::sync::{AtomicU8, Ordering};
use crate::vcpu::run::Running;

/// A vCPU's spare tables and state for its faults.
pub(crate) struct FaultState {
    pub(super) spare: Spare,
    /// The flush on all pCPUs that its splits require. Many splits share one flush.
    owed: Stale,
    /// Number of these splits.
    splits: u64,
    /// The limit on its splits, for the log with that number.
    pace: Option<(u32, Pace)>,
    /// The addresses of its splits.
    stream: Stream,
}

/// Tables that one write can take: a leaf of 1 GiB becomes a table, and one of its parts another.
const TABLES_FOR_A_WRITE: u64 = 2;

/// The rights that a denied access needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// The rights.
    pub(crate) access: Access,
    /// A walk of the guest's own tables needs them, not an instruction.
    pub(crate) is_table_walk: bool,
}

/// What happens to the guest after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolved {
    /// It tries the access again, after the TLB has lost the entry that denied it.
    Again(Denial),
    /// The VM has no memory there: the access is to a device, or to an empty address. Or it is a child's access to
    /// memory that its parent has given it without this right.
    Device,
    /// The same, of a child.
    DeviceOfChild,
    /// A child has memory there, but its parent has taken it away for now.
    #[allow(dead_code, reason = "not every architecture has parents")]
    NoAccess,
    /// A parent reads a page that it has deposited. It finds nothing there. Linux does so without intent: it reads
    /// whole words at the end of a buffer, whatever comes behind it (`load_unaligned_zeropad`).
    #[allow(dead_code, reason = "not every architecture has parents")]
    Deposited,
    /// Its VM ends.
    End(Problem),
}

/// Why a fault ends a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// The host has no page left for a table.
    OutOfTables,
    /// Stage 2 does not map memory that the VM has, or not for this access: a bug of the hypervisor.
    NotMapped,
    /// The VM is a parent, and has deposited the page. It does more than read it.
    Deposited,
}

impl Problem {
    /// The words for the VM's end.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::OutOfTables => "touches memory for which the host has no stage-2 table left",
            Self::NotMapped => "has memory that stage 2 does not map",
            Self::Deposited => "writes to memory that it has deposited for a partition, or executes it",
        }
    }
}

impl FaultState {
    /// Nothing yet.
    pub(crate) const fn new() -> Self {
        Self { spare: Spare::new(), owed: Stale::EMPTY, splits: 0, pace: None, stream: Stream::new() }
    }
}

/// Resolves a vCPU's fault at `gpa`. `is_present`: stage 2 maps a page there. Only then is `needs` called, which
/// returns the needs of the access.
///
/// Counts the exit, except that of a device.
#[inline]
pub(crate) fn resolve_fault(
    run: &mut Running<'_>,
    gpa: Gpa,
    is_present: bool,
    needs: impl FnOnce() -> Needs,
) -> Resolved {
    let memory = &run.vm.memory;
    // For most devices this takes one comparison. A child's memory always has gaps.
    if !is_present && !memory.dirty.has_gaps() {
        return Resolved::Device;
    }
    let Some(region) = memory.region_at(gpa) else {
        return if memory.is_lent() { fault_of_child(run, gpa, is_present, needs()) } else { Resolved::Device };
    };
    run.tally.exit(ExitReason::Stage2Fault);
    match memory.level_on_touch() {
        Some(level) if !is_present => first_touch::populate(run, region, gpa, level),
        _ => open(run, gpa, needs()),
    }
}

/// A child's fault: it has no frames.
#[cold]
#[inline(never)]
fn fault_of_child(run: &mut Running<'_>, gpa: Gpa, is_present: bool, needs: Needs) -> Resolved {
    let opened = if is_present { open_lent(run, gpa, needs) } else { None };
    let resolved = opened.map_or_else(|| Machine::fault_of_child(run, gpa, needs.access), Resolved::Again);
    if resolved == Resolved::Device {
        return Resolved::DeviceOfChild;
    }
    run.tally.exit(ExitReason::Stage2Fault);
    count_stall(run);
    resolved
}

/// Lets a child write to a small page that its log has write-protected, if it may.
fn open_lent(run: &Running<'_>, gpa: Gpa, needs: Needs) -> Option<Denial> {
    let memory = &run.vm.memory;
    let (tlbs, walking) = (AllTlbs::of(run.vm), memory.announce(run.cpu.id));
    let granularity = memory.dirty.on_fault.get();
    let fault = memory.walk(&tlbs, &walking).fault(gpa, needs.access, granularity);
    if needs.access.write && granularity != Granularity::Whole {
        run.tally.add(|count| &count.dirty_faults, 1);
    }
    match fault {
        Fault::Retry(denial) => Some(denial),
        Fault::Large | Fault::Unmapped | Fault::Denied(_) => None,
    }
}

/// Grants the rights that the access `needs`, if the guest may have them.
#[inline(always)]
fn open(run: &mut Running<'_>, gpa: Gpa, needs: Needs) -> Resolved {
    let vm = run.vm;
    with_known_format!(vm.memory.tree(), |tree| open_in(run, tree, gpa, needs))
}

#[inline(never)]
fn open_in<F: Format>(run: &mut Running<'_>, tree: &Tree<F>, gpa: Gpa, needs: Needs) -> Resolved {
    let memory = &run.vm.memory;
    let granularity = memory.dirty.on_fault.get();
    let (tlbs, walking) = (AllTlbs::of(run.vm), memory.announce(run.cpu.id));
    let fault = tree.walk(memory.tables(), &tlbs, &walking).fault(gpa, needs.access, granularity);
    let resolved = match fault {
        Fault::Large => open_large(run, walking, gpa, needs, granularity),
        fault => follow(run, walking, fault, gpa, needs),
    };
    if needs.access.write && granularity != Granularity::Whole {
        run.tally.add(|count| &count.dirty_faults, 1);
    }
    count_stall(run);
    resolved
}

/// Splits the large page that holds `gpa` down to a small one. Without a table, all of it counts as written; a fetch
/// cannot do without.
#[cold]
#[inline(never)]
fn open_large(
    run: &mut Running<'_>,
    walking: Walking<'_>,
    gpa: Gpa,
    needs: Needs,
    mut granularity: Granularity,
) -> Resolved {
    loop {
        if needs.access.execute {
            if !split_for_fetch(run, &walking, gpa) {
                return Resolved::End(Problem::OutOfTables);
            }
        } else if !split(run, &walking, gpa, granularity) {
            granularity = Granularity::Whole;
        }
        match run.vm.memory.walk(&AllTlbs::of(run.vm), &walking).fault(gpa, needs.access, granularity) {
            Fault::Large => {}
            fault => return follow(run, walking, fault, gpa, needs),
        }
    }
}

/// The result of a fault on a small page. The walk ends first, because a page that becomes writable again takes another
/// walk.
#[inline(always)]
fn follow(run: &Running<'_>, walking: Walking<'_>, fault: Fault, gpa: Gpa, needs: Needs) -> Resolved {
    drop(walking);
    match fault {
        Fault::Retry(denial) => Resolved::Again(denial),
        Fault::Denied(_) => write_protect::denied(run, gpa, needs),
        // The processor has found a mapped page. If it does not report the address, a walk of the guest's tables has
        // found it. Another vCPU may have changed them since, to memory that was never touched. The guest retries.
        Fault::Unmapped if run.vm.memory.level_on_touch().is_some() => Resolved::Again(Denial::NONE),
        Fault::Unmapped if run.vm.memory.visits.is_some() => {
            let is_read = !needs.access.write && !needs.access.execute && !needs.is_table_walk;
            if is_read { Resolved::Deposited } else { Resolved::End(Problem::Deposited) }
        }
        Fault::Unmapped | Fault::Large => Resolved::End(Problem::NotMapped),
    }
}

/// The guest has lost the time since the exit to stage 2.
#[inline]
pub(super) fn count_stall(run: &Running<'_>) {
    let stall = Machine::now().wrapping_sub(run.owner.arch.left_at());
    run.tally.add(|count| &count.stage2_stall_ticks, stall);
}

/// Splits the large page that holds `gpa`, within the log's rate limit, and those behind it if the guest writes to one
/// after the other. Returns whether it did.
fn split(run: &mut Running<'_>, walking: &Walking<'_>, gpa: Gpa, granularity: Granularity) -> bool {
    let memory = &run.vm.memory;
    let tlbs = AllTlbs::of(run.vm);
    let state = &mut run.owner.fault_state;
    // If each small page faults by itself, few of the faults are on large pages.
    let is_stream = granularity == Granularity::Recorded;
    let ahead = if is_stream { state.stream.ahead_of(gpa, PageSize::Size2M.bytes()) } else { 0 };
    let Some(tables) = state.prepare(memory, run.vm.config.vcpus, Machine::now(), ahead) else { return false };
    let ahead = ahead.min(tables - 1);
    let before = state.spare.count();
    let split = memory.walk(&tlbs, walking).split_at_fault(gpa, granularity, ahead, &mut state.spare);
    let Ok((owed, end)) = split else { return false };
    state.stream.has_split(ahead, end);
    let splits = before - state.spare.count();
    state.owe(owed, splits, &tlbs);
    run.tally.add(|count| &count.dirty_splits, splits);
    run.tally.add(|count| &count.stage2_broadcasts, tlbs.flushes());
    true
}

/// Splits the large page that holds `gpa`, from which the guest fetches: only small pages are executable here. No log
/// limits that. Returns whether there was a table for it.
fn split_for_fetch(run: &mut Running<'_>, walking: &Walking<'_>, gpa: Gpa) -> bool {
    let (memory, tlbs) = (&run.vm.memory, AllTlbs::of(run.vm));
    let spare = &mut run.owner.fault_state.spare;
    if spare.count() == 0 && spare.fill(memory.tables(), 1).is_err() {
        return false;
    }
    // The parts are as written, or as write-protected, as the whole.
    let split = memory.walk(&tlbs, walking).split_at_fault(gpa, Granularity::WriteProtected, 0, spare);
    split.map(|(owed, _)| owed.pay(&tlbs)).is_ok()
}

impl Memory {
    /// Index of the region of frames that holds `gpa`; `None` if there are none.
    #[inline]
    fn region_at(&self, gpa: Gpa) -> Option<u32> {
        Some((0..).zip(&self.backing.regions).find(|(_, region)| region.contains(gpa))?.0)
    }

    /// Announces that this pCPU is about to walk stage 2: no table that it can find is freed until the returned guard
    /// is dropped.
    ///
    /// # Panics
    /// This pCPU walks already.
    #[inline]
    pub(crate) fn announce(&self, cpu: CpuId) -> Walking<'_> {
        self.dirty.walkers().enter(cpu.index()).expect("a pCPU walks stage 2 for one reason at a time")
    }

    /// Walks stage 2, on a pCPU that has [announced](Self::announce) itself.
    #[inline(always)]
    pub(crate) fn walk<'a>(
        &'a self,
        tlbs: &'a AllTlbs<'_>,
        walking: &'a Walking<'_>,
    ) -> Walk<'a, Stage2Format, TablePool, AllTlbs<'a>> {
        self.tree.walk(&self.tables, tlbs, walking)
    }
}

/// The action of a fault on a page that a dirty log has write-protected. The log sets this word, and a fault on a small
/// page reads nothing else of the log.
pub(super) struct OnFault(AtomicU8);

impl OnFault {
    /// For memory without a log.
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(Self::OFF))
    }

    const OFF: u8 = 0;
    const PROTECTED: u8 = 1;
    const RECORDED: u8 = 2;

    /// The action now.
    #[inline]
    pub(super) fn get(&self) -> Granularity {
        match self.0.load(Ordering::Relaxed) {
            Self::OFF => Granularity::Whole,
            Self::PROTECTED => Granularity::WriteProtected,
            _ => Granularity::Recorded,
        }
    }

    /// What faults do from now on.
    pub(super) fn set(&self, granularity: Granularity) {
        let word = match granularity {
            Granularity::Whole => Self::OFF,
            Granularity::WriteProtected => Self::PROTECTED,
            Granularity::Recorded => Self::RECORDED,
        };
        self.0.store(word, Ordering::SeqCst);
    }
}

impl FaultState {
    /// Prepares tables for a write and for up to `ahead` more large pages. Returns how many of them the log's rate
    /// allows, if any.
    fn prepare(&mut self, memory: &Memory, vcpus: u32, now: u64, ahead: u64) -> Option<u64> {
        let wanted = TABLES_FOR_A_WRITE + ahead;
        let allowed = match memory.dirty_state().rate() {
            None => wanted,
            Some((log, per_second)) => {
                let share = u64::from(per_second.div_ceil(vcpus));
                let pace = match &mut self.pace {
                    Some((of, pace)) if *of == log => pace,
                    pace => &mut pace.insert((log, Pace::new(share, Machine::hz(), now))).1,
                };
                pace.allowed(now).min(wanted)
            }
        };
        if allowed > self.spare.count() && self.spare.fill(memory.tables(), allowed).is_err() {
            // If the pool has too few tables, it continues with fewer.
            let _ = self.spare.fill(memory.tables(), allowed.min(TABLES_FOR_A_WRITE));
        }
        let tables = allowed.min(self.spare.count());
        (tables > 0).then_some(tables)
    }

    /// This fault split large pages. Their flush is batched: `later` is flushed when a batch is full.
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
