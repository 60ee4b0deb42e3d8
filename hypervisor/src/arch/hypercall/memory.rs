//! Calls about the memory that a parent gives to a child: deposits for the hypervisor, and pages for the guest.
//!
//! The crate `partition` keeps the description: whose each page is, and what is where in a child. Stage 2 follows it. A
//! page that is taken away, from the parent by a deposit or from a child, is free for its next use only after all TLBs
//! are flushed, and the hypervisor itself has left it ([`visits`](crate::vm::visits)):
//!
//! ```text
//!   the description changes --> stage 2 is cleared --> flush, wait --> the page is free --> new pages are mapped
//! ```
//!
//! All of this happens under the lock of the descriptions. A vCPU of the child that faults meanwhile waits for the
//! lock, and then finds what is so. The flush waits for vCPUs to leave their guests, or the emulation of an
//! instruction; neither needs the lock.

#![expect(unsafe_code, reason = "gives deposited pages to the tables of stage 2")]

use alloc::vec::Vec;
use core::ops::Range;

use abi::payload::VmConfig;
use addr::{Gpa, GpaRange, Hpa, PAGE_BYTES};
use hyperv_defs::memory::{
    Deposit, GpaAccess, LARGE_PAGES, MapPages, Mapping, UnmapPages, Withdraw, number_of_page, page_of_number,
};
use hyperv_defs::{PartitionId, Status};
use log::warn;
use partition::{Entry, Ledger, Partition, Progress, Released, Use};
use stage2::{Access, Denial, Fault, MapError, Source, Stale};

use super::Ended;
use super::budget::Budget;
use super::parent::{Caller, Children, Deposited, Family};
use crate::arch::tables::TablePool;
use crate::mutants::{self, Mutant};
use crate::vcpu::run::Running;
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;
use crate::vm::fault::{Problem, Resolved};
use crate::vm::memory::Memory;
use crate::vm::tags::VmTags;

/// Deposited pages of one flush.
const DEPOSITS_AT_ONCE: u16 = 64;
/// Tables for the ends of a range, where larger pages must be split.
const TABLES_FOR_ENDS: u64 = 2;
/// Tables for a single page.
const TABLES_FOR_A_PAGE: u64 = 3;

/// HvCallDepositMemory: the parent loses the pages.
pub(super) fn deposit(caller: &Caller<'_>, deposit: &Deposit<'_>) -> Result<Ended, Status> {
    let mut claimed = Vec::new();
    claimed.try_reserve_exact(DEPOSITS_AT_ONCE.into()).map_err(|_| Status::NoResources)?;
    let mut parent = caller.lock();
    let (mut done, mut result) = parent.claim(deposit, DEPOSITS_AT_ONCE, |page| claimed.push(page));

    let taken = take_from(caller.vm, &claimed);
    let (child, ledger) = parent.child_mut(deposit.partition)?;
    for &page in &claimed[taken..] {
        ledger.withdraw(page);
        (done, result) = (u16::try_from(taken).unwrap_or(done), Err(Status::NoResources));
    }
    for &page in &claimed[..taken] {
        child.deposits.add(page, &mut caller.store());
    }
    caller.ended_after(done, result)
}

/// Takes pages away from the parent. On return nobody uses them. Returns how many there are: all, unless the host has
/// no table for them.
fn take_from(vm: &Vm, pages: &[u64]) -> usize {
    let mut stale = Stale::EMPTY;
    let mut taken = 0;
    {
        let mut shape = vm.memory.shape();
        let tlbs = AllTlbs::of(vm);
        let mut walk = vm.memory.walk_mut(&tlbs, &mut shape);
        for run in pages.chunk_by(|one, next| one + 1 == *next) {
            let unmapped = pages_from(run[0], run.len() as u64).and_then(|range| walk.unmap(range).ok());
            let Some(owed) = unmapped else { break };
            stale = stale.merge(owed);
            taken += run.len();
        }
    }
    finish_taking(vm, stale);
    taken
}

/// The second half of taking pages away, after stage 2 was cleared. On return nobody uses them any more.
fn finish_taking(vm: &Vm, stale: Stale) {
    if !mutants::is(Mutant::TakenNotFlushed) {
        stale.pay(&AllTlbs::of(vm));
    }
    vm.memory.wait_for_visitors();
}

/// Gives a page, which is clear, back to the parent. Returns whether there were tables for it.
fn give_back(vm: &Vm, page: u64) -> bool {
    let memory = &vm.memory;
    let (Some(range), Some(hpa)) = (pages_from(page, 1), memory.backing.pages(page, 1)) else { return false };
    let tlbs = AllTlbs::of(vm);
    memory.walk_mut(&tlbs, &mut memory.shape()).map(range, hpa, Access::ALL).is_ok()
}

/// HvCallWithdrawMemory: the parent has free pages back, which are clear.
pub(super) fn withdraw(caller: &Caller<'_>, withdraw: &Withdraw) -> Result<Ended, Status> {
    let budget = Budget::start();
    let mut parent = caller.lock();
    let (child, ledger) = parent.child_mut(withdraw.partition)?;
    let store = &mut caller.store();
    let start = caller.checked.control().rep_start();
    for done in 0..withdraw.count {
        if done != 0 && budget.is_spent() {
            return caller.ended_after(done, Ok(()));
        }
        let Some(page) = child.deposits.withdraw(store) else {
            return caller.ended_after(done, Err(Status::NoResources));
        };
        let told = caller.output.write_at(8 * u64::from(start + done), &page.to_le_bytes());
        if let Err(status) = told.and_then(|()| give_back(caller.vm, page).then_some(()).ok_or(Status::NoResources)) {
            child.deposits.add(page, store);
            return caller.ended_after(done, Err(status));
        }
        ledger.withdraw(page);
    }
    caller.done()
}

/// A part of HvCallDeletePartition: the parent has pages back that it did not withdraw.
pub(super) fn delete(family: &Family<'_>, id: PartitionId, most: usize) -> Result<Progress, Status> {
    family.lock().delete(id, most, &mut family.store(), |page| {
        if !give_back(family.vm, page) {
            warn!("{}: page {page:#x} was deposited, and stage 2 has no table to map it again", family.vm.name());
        }
    })
}

/// HvCallMapGpaPages.
pub(super) fn map(caller: &Caller<'_>, map: &MapPages<'_>) -> Result<Ended, Status> {
    let elements = Elements { first: number_of_page(map.first), is_large: map.is_large, count: map.what.len() };
    change(
        caller,
        map.partition,
        elements,
        |child, more, ledger, store| {
            let room = match map.what {
                Mapping::Pages(..) => child.prepare_written(elements.pages(), store),
                Mapping::NoAccess(_) => Ok(()),
            };
            match room {
                Ok(()) => child.map_pages(map, more, ledger, store),
                Err(status) => (Released::default(), Err(status)),
            }
        },
        |vm, done| {
            let Mapping::Pages(sources, access) = map.what else { return };
            let pages = sources.iter().take(done.into()).flatten().map(number_of_page);
            map_all(caller.vm, vm, elements, pages, access);
        },
    )
}

/// HvCallUnmapGpaPages.
pub(super) fn unmap(caller: &Caller<'_>, unmap: &UnmapPages) -> Result<Ended, Status> {
    let elements = Elements { first: number_of_page(unmap.first), is_large: unmap.is_large, count: unmap.count };
    change(
        caller,
        unmap.partition,
        elements,
        |child, more, ledger, store| child.unmap_pages(unmap, more, ledger, store),
        |_, _| {},
    )
}

/// Pages of a child that a call is about.
#[derive(Clone, Copy)]
struct Elements {
    first: u64,
    is_large: bool,
    count: u16,
}

impl Elements {
    const fn step(self) -> u64 {
        if self.is_large { LARGE_PAGES } else { 1 }
    }

    fn pages(self) -> Range<u64> {
        self.first..self.first + u64::from(self.count) * self.step()
    }

    /// Tables that their mapping and unmapping can need.
    fn tables(self) -> u64 {
        let end = self.pages().end;
        let touched = |shift: u32| ((end - 1) >> shift) - (self.first >> shift) + 1;
        let below = if self.is_large { 0 } else { touched(9) };
        if self.count == 0 { 0 } else { below + touched(18) + touched(27) + TABLES_FOR_ENDS }
    }
}

/// Changes a child's memory: its description, then stage 2. `describe` stops when its argument says that there is no
/// more time; `follow` maps so many elements into the child's VM.
fn change(
    caller: &Caller<'_>,
    id: PartitionId,
    elements: Elements,
    describe: impl FnOnce(&mut Partition, &dyn Fn() -> bool, &Ledger, &mut Deposited<'_>) -> (Released, Result<(), Status>),
    follow: impl FnOnce(&Vm, u16),
) -> Result<Ended, Status> {
    let budget = Budget::start();
    let store = &mut caller.store();
    let mut parent = caller.lock();
    let vm = caller.children.vm(id);
    let (child, ledger) = parent.child_mut(id)?;
    // So that nothing of what follows can fail.
    if let Ok(vm) = &vm {
        feed(child, vm.memory.tables(), elements.tables(), store)?;
    }

    let (released, result) = describe(child, &|| !budget.is_third_spent(), ledger, store);
    let done = released.done;
    let Ok(vm) = vm else {
        child.settle(released, ledger, store);
        return caller.ended_after(done, result);
    };
    if released.needs_flush() {
        let changed = released.changed.clone();
        let written = |pages| {
            if child.is_tracking() && !mutants::is(Mutant::WrittenForgotten) {
                child.written().add(pages, store);
            }
        };
        if mutants::is(Mutant::FlushedBeforeCleared) {
            finish_taking(&vm, Stale::WHOLE);
            let _forgotten = unmap_from(&vm, changed, written);
        } else {
            finish_taking(&vm, unmap_from(&vm, changed, written));
        }
    }
    child.settle(released, ledger, store);
    caller.preemption_point();
    follow(&vm, done);
    caller.ended_after(done, result)
}

/// Clears these pages in stage 2. Calls `written` with those that may have been written since they were clean.
fn unmap_from(vm: &Vm, pages: Range<u64>, mut written: impl FnMut(Range<u64>)) -> Stale {
    let Some(range) = pages_from(pages.start, pages.end - pages.start) else { return Stale::EMPTY };
    let mut shape = vm.memory.shape();
    let tlbs = AllTlbs::of(vm);
    let mut walk = vm.memory.walk_mut(&tlbs, &mut shape);
    let mut written = |range: GpaRange| written(pages_of(range));
    if let Ok(stale) = walk.unmap_logged(range, Source::Hardware, &mut written) {
        return stale;
    }
    // There are tables to split the large pages at its ends, unless a test takes them away. Then these go as well; a
    // fault brings the rest of them back.
    let first = pages.start & !(LARGE_PAGES - 1);
    let whole = pages_from(first, pages.end.next_multiple_of(LARGE_PAGES) - first);
    whole.and_then(|range| walk.unmap_logged(range, Source::Hardware, written).ok()).unwrap_or(Stale::WHOLE)
}

/// Maps pages of the parent, where nothing is mapped or what is wanted. What has no table, or is not a large page for
/// the host, is mapped by faults.
fn map_all(parent: &Vm, vm: &Vm, elements: Elements, pages: impl Iterator<Item = u64>, access: GpaAccess) {
    let mut shape = vm.memory.shape();
    let tlbs = AllTlbs::of(vm);
    let mut walk = vm.memory.walk_mut(&tlbs, &mut shape);
    let mut map = |run: &Run| {
        let Some(range) = pages_from(run.first, run.pages) else { return Ok(()) };
        vm.memory.map_lent(&mut walk, range, run.hpa, rights(access))
    };
    let step = elements.step();
    let mut map_run = |run: &Run| match map(run) {
        Err(MapError::Overlaps(_)) if run.pages > step => run.in_steps(step).try_for_each(|part| match map(&part) {
            Err(MapError::Overlaps(_)) => Ok(()),
            result => result,
        }),
        result => result,
    };
    let mut finish = |run: Option<Run>| {
        let Some(run) = run else { return };
        match map_run(&run) {
            Ok(()) | Err(MapError::Overlaps(_) | MapError::OutOfTables) => {}
            Err(error) => warn!("{}: {} pages of its memory from {:#x} on: {error}", vm.name(), run.pages, run.first),
        }
    };

    let mut run: Option<Run> = None;
    for (number, page) in (0..).zip(pages) {
        let first = elements.first + number * step;
        let next = parent.memory.backing.pages(page, step).map(|hpa| Run { first, pages: step, hpa });
        match (&mut run, &next) {
            (Some(run), Some(next)) if run.precedes(next) => run.pages += step,
            _ => finish(core::mem::replace(&mut run, next)),
        }
    }
    finish(run);
    drop(shape);
    if !elements.is_large
        && let Some(range) = pages_from(elements.first, 1)
    {
        vm.memory.join_from(range.start);
    }
}

/// Pages of a child that are consecutive in host memory, too.
struct Run {
    first: u64,
    pages: u64,
    hpa: Hpa,
}

impl Run {
    fn precedes(&self, next: &Self) -> bool {
        self.first + self.pages == next.first && self.hpa.0 + self.pages * PAGE_BYTES == next.hpa.0
    }

    fn in_steps(&self, step: u64) -> impl Iterator<Item = Self> {
        let (first, hpa) = (self.first, self.hpa.0);
        (0..self.pages / step).map(move |n| n * step).map(move |offset| Self {
            first: first + offset,
            pages: step,
            hpa: Hpa(hpa + offset * PAGE_BYTES),
        })
    }
}

const fn rights(access: GpaAccess) -> Access {
    Access { read: true, write: access.write, execute: access.execute }
}

/// The addresses of `count` pages from this number on.
pub(super) fn pages_from(first: u64, count: u64) -> Option<GpaRange> {
    GpaRange::new(page_of_number(first).ok()?, count.checked_mul(PAGE_BYTES)?)
}

/// The numbers of the pages in a range.
pub(super) fn pages_of(range: GpaRange) -> Range<u64> {
    number_of_page(range.start)..number_of_page(range.end())
}

/// Takes free deposited pages, until `tables` has this number to spare.
fn feed(child: &mut Partition, tables: &TablePool, count: u64, store: &mut Deposited<'_>) -> Result<(), Status> {
    while tables.spare_pages() < count {
        let page = child.deposits.take(Use::Stage2, store).ok_or(Status::InsufficientMemory)?;
        let hpa = store.host_page(page).ok_or(Status::InsufficientMemory)?;
        // SAFETY: the page is in a frame of the parent, which the child's VM keeps alive. The parent has deposited it:
        // since then it has neither the parent's guest nor a visitor, and the ledger lets no child have it. The list of
        // deposits has just given it up, until `return_tables`.
        unsafe { tables.give(hpa) };
    }
    Ok(())
}

/// The memory of a child that has just been initialized.
pub(super) fn of_child(caller: &Caller<'_>, child: &mut Partition, config: &VmConfig) -> Result<Memory, Status> {
    let store = &mut caller.store();
    let tags = VmTags::new(config).map_err(|_| Status::NoResources)?;
    let tables = TablePool::of_given_pages();
    feed(child, &tables, 1, store)?;
    Memory::of_child(tags, tables).map_err(|tables| {
        while let Some(table) = tables.take_back() {
            return_table(child, table, store);
        }
        Status::NoResources
    })
}

/// A child's VM has ended: as many of its tables as there is time for become free pages of its deposits again. Returns
/// whether all are.
pub(super) fn return_tables(family: &Family<'_>, id: PartitionId, memory: &mut Memory, budget: Budget) -> bool {
    let mut parent = family.lock();
    let Ok((child, _)) = parent.child_mut(id) else { return true };
    let store = &mut family.store();
    while !budget.is_spent() {
        let Some(table) = memory.take_table() else { return true };
        return_table(child, table, store);
    }
    false
}

fn return_table(child: &mut Partition, table: Hpa, store: &mut Deposited<'_>) {
    if let Some(page) = store.memory.backing.page_at(table) {
        child.deposits.put(page, Use::Stage2, store);
    }
}

/// The fault of a child at `gpa`, with an access that needs these rights.
#[cold]
pub(in crate::arch) fn fault(run: &mut Running<'_>, children: &Children, gpa: Gpa, needs: Access) -> Resolved {
    let Some(child) = run.vm.as_child() else { return Resolved::Device };
    let mut store = Deposited::of(&child.parent.memory);
    // Not as a walker, and not during an emulation.
    let mut parent = Family { vm: &child.parent, children, caller: Some(run.vcpu) }.lock();
    let Ok((partition, _)) = parent.child_mut(child.id) else { return Resolved::Again(Denial::NONE) };
    let number = number_of_page(gpa);
    let (source, access) = match partition.page(number, &store) {
        Entry::Absent => return Resolved::Device,
        Entry::NoAccess => return Resolved::NoAccess,
        Entry::Page { source, access } => (source, rights(access)),
    };
    if !access.includes(needs) {
        return Resolved::Device;
    }

    let memory = &run.vm.memory;
    let (mut shape, tlbs) = (memory.shape(), AllTlbs::of(run.vm));
    let mut walk = memory.walk_mut(&tlbs, &mut shape);
    match walk.walk().fault(gpa, needs, memory.granularity()) {
        Fault::Retry(denial) => return Resolved::Again(denial),
        // The first write to a large page while writes are tracked, or the first fetch where only small ones are
        // executable. A write can do without a table.
        Fault::Large => {
            if feed(partition, memory.tables(), 1, &mut store).is_err() && needs.execute {
                return Resolved::End(Problem::OutOfTables);
            }
            memory.split_lent(walk.walk(), gpa, needs);
            return Resolved::Again(Denial::NONE);
        }
        Fault::Unmapped | Fault::Denied(_) => {}
    }
    // Described, and not mapped: there was no table for it.
    if feed(partition, memory.tables(), TABLES_FOR_A_PAGE, &mut store).is_err() {
        return Resolved::End(Problem::OutOfTables);
    }
    let (Some(range), Some(hpa)) = (pages_from(number, 1), child.parent.memory.backing.pages(source, 1)) else {
        return Resolved::End(Problem::NotMapped);
    };
    match memory.map_lent(&mut walk, range, hpa, access) {
        Ok(()) | Err(MapError::OutOfTables) => Resolved::Again(Denial::NONE),
        Err(_) => Resolved::End(Problem::NotMapped),
    }
}
