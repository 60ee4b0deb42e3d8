//! Pages of the parent that show statistics: of the host, the parent and its children.
//!
//! The counters are where they always are, with the pCPUs that count. The pCPU that keeps house copies them into the
//! pages ([`Statistics::renew`]): each page once in 100 ms, and at most 64 pages in 10 ms. So counting costs nothing
//! more, and a page is 110 ms old at most, and with more than 640 pages by 10 ms for each 64 of them.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use abi::counters::{ExitReason, VcpuCounters};
use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::stats::{Counters, HypervisorCounter, PartitionCounter, ProcessorCounter, VpCounter};
use hyperv_defs::vp::{StatsArea, StatsObject, StatsPage, Vp};
use hyperv_defs::{PartitionId, Status};

use super::Ended;
use super::parent::{Caller, Family};
use crate::arch::{Arch, Machine};
use crate::sync::Mutex;
use crate::vm::Vm;
use crate::vm::table::table;
use crate::{cpu, frames};

/// How often a page is written.
const PERIOD_NANOS: u64 = 100_000_000;
/// Pages that are written at a time.
const AT_A_TIME: usize = 64;

/// The pages of one parent.
pub(in crate::arch) struct Statistics {
    shown: Mutex<Shown>,
    /// There are none. It spares a parent without pages the lock.
    is_empty: AtomicBool,
}

struct Shown {
    pages: Vec<(StatsPage, Gpa)>,
    /// The page that is next in this period.
    next: usize,
    /// When the next period begins.
    due: u64,
}

impl Statistics {
    pub(super) fn new() -> Self {
        Self { shown: Mutex::new(Shown { pages: Vec::new(), next: 0, due: 0 }), is_empty: AtomicBool::new(true) }
    }

    fn add(&self, page: StatsPage, gpa: Gpa) -> Result<(), Status> {
        let mut shown = self.shown.lock();
        shown.pages.try_reserve(1).map_err(|_| Status::NoResources)?;
        shown.pages.push((page, gpa));
        shown.due = 0;
        self.is_empty.store(false, Ordering::Release);
        Ok(())
    }

    /// On return, nothing more is written to the pages that `are_gone`.
    fn remove(&self, are_gone: impl Fn(&StatsPage) -> bool) {
        let mut shown = self.shown.lock();
        shown.pages.retain(|(page, _)| !are_gone(page));
        shown.next = 0;
        self.is_empty.store(shown.pages.is_empty(), Ordering::Release);
    }

    /// The same for all pages of a child.
    pub(super) fn remove_partition(&self, id: PartitionId) {
        self.remove(|page| match page.object {
            StatsObject::Partition(other) => other == id,
            StatsObject::Vp(vp) => vp.partition == id,
            StatsObject::Hypervisor | StatsObject::Processor(_) => false,
        });
    }

    /// The same for all pages of a child's VP.
    pub(super) fn remove_vp(&self, vp: Vp) {
        self.remove(|page| page.object == StatsObject::Vp(vp));
    }

    /// The same for all pages: the parent begins anew.
    pub(super) fn remove_all(&self) {
        self.remove(|_| true);
    }

    /// Writes those pages whose turn it is at `now`.
    pub(in crate::arch) fn renew(&self, family: &Family<'_>, now: u64) {
        if self.is_empty.load(Ordering::Acquire) {
            return;
        }
        let mut shown = self.shown.lock();
        if shown.next == 0 {
            if now < shown.due {
                return;
            }
            shown.due = now + Machine::nanos_to_ticks(PERIOD_NANOS);
        }
        let (first, all) = (shown.next, shown.pages.len());
        let end = all.min(first + AT_A_TIME);
        for (page, gpa) in &shown.pages[first..end] {
            write(family, page, *gpa);
        }
        shown.next = if end == all { 0 } else { end };
    }
}

/// HvCallMapStatsPage2. The page is cleared, and shows what there is within 10 ms.
pub(super) fn map(caller: &Caller<'_>, page: &StatsPage, location: Gpa) -> Result<Ended, Status> {
    let mut parent = caller.lock();
    let number = parent.map_stats_page(page, location)?;
    let gpa = Gpa(number * PAGE_BYTES);
    let shown = caller.children.statistics.add(*page, gpa).and_then(|()| {
        let is_there = caller.vm.memory.write(gpa, &EMPTY);
        if is_there { caller.output.write(&number.to_le_bytes()) } else { Err(Status::InvalidParameter) }
    });
    if let Err(status) = shown {
        caller.children.statistics.remove(|other| other == page);
        parent.unmap_stats_page(page)?;
        return Err(status);
    }
    caller.done()
}

const EMPTY: [u8; 4096] = [0; 4096];

/// HvCallUnmapStatsPage.
pub(super) fn unmap(caller: &Caller<'_>, page: &StatsPage) -> Result<Ended, Status> {
    let mut parent = caller.lock();
    // First the hypervisor stops writing there, then the page is the parent's alone.
    caller.children.statistics.remove(|other| other == page);
    parent.unmap_stats_page(page)?;
    caller.done()
}

/// Writes a page, if there is something to tell.
fn write(family: &Family<'_>, page: &StatsPage, gpa: Gpa) {
    // Everything is on a VP's own page. What counts for its parent alone, nobody counts.
    if page.area != StatsArea::Own {
        return;
    }
    let counters = match page.object {
        StatsObject::Hypervisor => Some(of_host()),
        StatsObject::Processor(number) => of_processor(number),
        StatsObject::Partition(PartitionId::SELF) => of_parent(family),
        StatsObject::Partition(id) => of_child(family, id),
        StatsObject::Vp(vp) => of_vp(family, vp),
    };
    if let Some(counters) = counters {
        // A parent that has no memory there sees nothing.
        let _ = family.vm.memory.write(gpa, counters.bytes());
    }
}

fn of_host() -> Counters {
    let (vms, vps) = {
        let table = table();
        (table.all_alive().count(), table.all_alive().map(|vm| vm.vcpus().len()).sum::<usize>())
    };
    Counters::default()
        .with(HypervisorCounter::Processors, cpu::count() as u64)
        .with(HypervisorCounter::Partitions, vms as u64)
        .with(HypervisorCounter::Pages, frames::total_bytes() / PAGE_BYTES)
        .with(HypervisorCounter::Vps, vps as u64)
}

fn of_processor(number: u32) -> Option<Counters> {
    let taken = &cpu::all().get(number as usize)?.taken;
    let counters = Counters::default()
        .with(ProcessorCounter::GlobalTime, Machine::nanos() / NANOS_PER_UNIT)
        .with(ProcessorCounter::HardwareInterrupts, taken.device.get() + taken.timer.get())
        .with(ProcessorCounter::Ipis, taken.kick.get())
        .with(ProcessorCounter::TimerInterrupts, taken.timer.get());
    Some(counters)
}

/// `None`: what it deposits is being changed. The page keeps what it shows until the next time.
fn of_parent(family: &Family<'_>) -> Option<Counters> {
    let parent = family.children.try_lock()?;
    let deposited: u64 = parent.children().map(|child| child.deposits.total()).sum();
    let counters = of_vps(family.vm)
        .with(PartitionCounter::DepositedPages, deposited)
        .with(PartitionCounter::GpaPages, family.vm.config.memory_bytes / PAGE_BYTES)
        .with(PartitionCounter::PartitionId, PartitionId::SELF.0)
        .with(PartitionCounter::Children, parent.children().len() as u64);
    Some(counters)
}

/// The same of a child.
fn of_child(family: &Family<'_>, id: PartitionId) -> Option<Counters> {
    let (deposited, vps) = {
        let parent = family.children.try_lock()?;
        let child = parent.child(id).ok()?;
        (child.deposits.total(), child.vps().len())
    };
    // Before it is initialized, it has deposits only.
    let counters = family.children.vm(id).map_or_else(|_| Counters::default(), |vm| of_vps(&vm));
    let counters = counters
        .with(PartitionCounter::Vps, vps as u64)
        .with(PartitionCounter::DepositedPages, deposited)
        .with(PartitionCounter::PartitionId, id.0);
    Some(counters)
}

/// What the VPs of a partition have done.
fn of_vps(vm: &Vm) -> Counters {
    let mut sum = VcpuCounters::default();
    vm.vcpus().iter().for_each(|vcpu| sum.add(&vcpu.counters().snapshot()));
    Counters::default()
        .with(PartitionCounter::Vps, vm.vcpus().len() as u64)
        .with(PartitionCounter::TlbFlushes, sum.flush_whole)
        .with(PartitionCounter::PagesShattered, sum.dirty_splits)
}

fn of_vp(family: &Family<'_>, vp: Vp) -> Option<Counters> {
    let at = |vm: &Vm| vm.vcpus().get(vp.index as usize).map(|vcpu| vcpu.counters().snapshot());
    let counters = match vp.partition {
        PartitionId::SELF => at(family.vm),
        id => at(&*family.children.vm(id).ok()?),
    };
    counters.map(|counters| vp_counters(&counters))
}

/// Times are counted in these.
const NANOS_PER_UNIT: u64 = 100;

fn vp_counters(all: &VcpuCounters) -> Counters {
    let time = |ticks| Machine::ticks_to_nanos(ticks) / NANOS_PER_UNIT;
    let exits = |reasons: &[ExitReason]| reasons.iter().map(|reason| all.exits_for(*reason)).sum::<u64>();
    let calls = exits(&[ExitReason::Hypercall]);
    Counters::default()
        .with(VpCounter::TotalRunTime, time(all.guest_ticks + all.host_ticks))
        .with(VpCounter::HypervisorRunTime, time(all.host_ticks))
        .with(VpCounter::Hypercalls, calls)
        .with(VpCounter::ControlRegisters, exits(&[ExitReason::ControlRegister]))
        .with(VpCounter::IoInstructions, exits(&[ExitReason::PortIo]))
        .with(VpCounter::Halts, exits(&[ExitReason::Halt]))
        .with(VpCounter::Cpuid, exits(&[ExitReason::Cpuid]))
        .with(VpCounter::Msrs, exits(&[ExitReason::SysregRead, ExitReason::SysregWrite]))
        .with(VpCounter::OtherIntercepts, exits(&[ExitReason::Pause, ExitReason::Exception, ExitReason::Other]))
        .with(VpCounter::ExternalInterrupts, exits(&[ExitReason::HostInterrupt]))
        .with(VpCounter::PendingInterrupts, exits(&[ExitReason::InterruptWindow, ExitReason::NmiWindow]))
        .with(VpCounter::EmulatedInstructions, exits(&[ExitReason::Mmio]))
        .with(VpCounter::Migrations, all.migrations)
        .with(VpCounter::WholeFlushes, all.flush_whole)
        .with(VpCounter::FlushedPages, all.flush_pages)
        .with(VpCounter::VirtualInterrupts, all.irq_injections)
        .with(VpCounter::OtherHypercalls, calls.saturating_sub(all.ipi_calls + all.flush_calls))
        .with(VpCounter::InterruptHypercalls, all.ipi_calls)
        .with(VpCounter::MmuHypercalls, all.flush_calls)
        .with(VpCounter::NestedPageFaults, exits(&[ExitReason::Stage2Fault, ExitReason::Mmio]))
        .with(VpCounter::WaitingTime, time(all.wait_ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_exits_add_up_to_all_exits() {
        let mut all = VcpuCounters::default();
        for (reason, count) in ExitReason::ALL.iter().zip(1..) {
            all.exits[*reason as usize] = 1 << count;
        }
        (all.ipi_calls, all.flush_calls) = (3, 5);
        let counters = vp_counters(&all);
        let classes = [
            VpCounter::Hypercalls,
            VpCounter::ControlRegisters,
            VpCounter::IoInstructions,
            VpCounter::Halts,
            VpCounter::Cpuid,
            VpCounter::Msrs,
            VpCounter::OtherIntercepts,
            VpCounter::ExternalInterrupts,
            VpCounter::PendingInterrupts,
            VpCounter::NestedPageFaults,
        ];
        assert_eq!(classes.map(|class| counters.get(class)).iter().sum::<u64>(), all.total_exits());
        let hypercalls = [VpCounter::OtherHypercalls, VpCounter::InterruptHypercalls, VpCounter::MmuHypercalls];
        let sum = hypercalls.map(|class| counters.get(class)).iter().sum::<u64>();
        assert_eq!(sum, counters.get(VpCounter::Hypercalls));
    }
}
