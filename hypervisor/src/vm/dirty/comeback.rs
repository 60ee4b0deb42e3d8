//! A child's small pages become large ones: after its memory was tracked, and after its parent has mapped them.
//!
//! A tracked large page is split at its first write, and later its TLB entries are many. And Linux maps the memory of
//! most guests page by page, even where it has a large page for them. So when tracking has ended, or pages were mapped,
//! the first pCPU looks for tables whose pages together are one large page, and puts that in their place. It works in
//! short steps with other work in between, and at the pace at which other VMs' large pages come back: the guest notices
//! each flush, and there is no hurry. The tables are spare ones of the child then, for what comes next.
//!
//! A step holds the lock of the tree's shape, and so does the begin of tracking. So nothing is joined while it is
//! tracked: a large page would count as written if one of its pages was.

use addr::{Gpa, PageSize};
use stage2::{Collapse, Limbo, Pace, Search};

use crate::arch::{Arch, Machine};
use crate::cpu;
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicU32, Ordering, per_host};
use crate::vm::Vm;
use crate::vm::address_space::AllTlbs;
use crate::vm::memory::Memory;
use crate::vm::table::table;

/// Large pages that come back at a time: one flush for all of them.
const AT_ONCE: usize = 16;
/// How often per second. In tests, time passes slowly.
const PERIODS: u64 = if cfg!(test) { 100_000 } else { 25 };
/// Entries of stage 2 that a step looks at, at most, to find a table.
const LOOKS: u32 = 512;
/// Tables that may wait for walkers to leave.
const WAITING_TABLES: usize = 2 * AT_ONCE;

/// What is left to do for a child's memory.
#[derive(Debug)]
pub(in crate::vm) struct Comeback {
    /// Where to look next, if anywhere.
    from: Option<Gpa>,
    limbo: Limbo<WAITING_TABLES>,
    pace: Option<Pace>,
    /// Whether it is among [`UNFINISHED`].
    is_counted: bool,
}

per_host! {
    /// Number of memories with something to do.
    static UNFINISHED: AtomicU32 = AtomicU32::new(0);
}

impl Comeback {
    /// There is nothing to do.
    pub(in crate::vm) const fn new() -> Self {
        Self { from: None, limbo: Limbo::new(), pace: None, is_counted: false }
    }

    /// There may be pages to be joined, from this address on.
    pub(super) fn begin(&mut self, from: Gpa) {
        // What is behind a table that cannot be joined is looked at again. It costs little: such a table shows it by
        // its first entries.
        self.from = Some(self.from.map_or(from, |before| before.min(from)));
        self.pace.get_or_insert_with(|| Pace::new(1, Machine::hz() / PERIODS, Machine::now()));
        if !core::mem::replace(&mut self.is_counted, true) {
            UNFINISHED.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a step has something to do now.
    fn is_due(&mut self) -> bool {
        self.is_counted && self.pace.as_mut().is_some_and(|pace| pace.allowed(Machine::now()) > 0)
    }

    /// The child has ended: nobody walks its tables any more.
    pub(in crate::vm) fn end(&mut self, memory: &Memory) {
        if !mutants::is(Mutant::JoinedTablesKept) {
            self.limbo.reclaim(memory.tables(), memory.dirty_state().walkers());
        }
        self.from = None;
        self.finish();
    }

    fn finish(&mut self) {
        if self.from.is_none() && self.limbo.waiting() == 0 && core::mem::take(&mut self.is_counted) {
            UNFINISHED.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn step(&mut self, vm: &Vm) {
        let memory = &vm.memory;
        let walkers = memory.dirty_state().walkers();
        self.limbo.reclaim(memory.tables(), walkers);
        if let Some(from) = self.from {
            let tlbs = AllTlbs::of_kept(vm);
            let mut shape = memory.shape();
            let mut stage2 = memory.walk_mut(&tlbs, &mut shape);
            let (mut places, mut next) = ([NOWHERE; AT_ONCE], Some(from));
            if memory.is_tracked() {
                // Its end begins it again.
                next = None;
            }
            for place in &mut places {
                match next.map(|from| stage2.walk().next_table(from, LOOKS)) {
                    Some(Search::Found(table)) => {
                        *place = table;
                        next = Some(Gpa(table.0 + PageSize::Size2M.bytes()));
                    }
                    Some(Search::Further(from)) => {
                        next = Some(from);
                        break;
                    }
                    Some(Search::End) | None => {
                        next = None;
                        break;
                    }
                }
            }
            let outcomes = stage2.collapse_together(&mut self.limbo, walkers, places, 1);
            // Pages that are back already are no tables next time.
            self.from = if outcomes.contains(&Collapse::Full) { Some(from) } else { next };
            let mut done = 0;
            for (place, _) in places.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Collapse::Done) {
                done += 1;
                // Writable memory that is not tracked counts as written. Otherwise the first harvest would not
                // write-protect this page, and a write to it would count for all of it.
                let _is_there = stage2.walk().mark_written(*place);
            }
            if done != 0 {
                self.pace.as_mut().into_iter().for_each(|pace| pace.spend(1));
            }
            memory.dirty_state().count_collapses(done);
            memory.dirty_state().count_flushes(tlbs.flushes());
        }
        self.finish();
    }
}

/// No page is there.
const NOWHERE: Gpa = Gpa(u64::MAX);

/// A step for one of the children that need one. Only the first pCPU calls it. Returns whether there was one. The child
/// is charged for it: its parent could map pages all the time, and slow down others on this pCPU.
pub(crate) fn work() -> bool {
    if UNFINISHED.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let is_due = |vm: &Vm| vm.memory.comeback().is_some_and(|comeback| comeback.lock().is_due());
    let due = table().all_alive().find(|vm| is_due(vm)).cloned();
    let Some(vm) = due else { return false };
    let began = Machine::now();
    if let Some(comeback) = vm.memory.comeback() {
        comeback.lock().step(&vm);
    }
    cpu::charge_work(vm.share(), began);
    true
}
