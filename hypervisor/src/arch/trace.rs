//! Records this host's actions on stage-2 tables and TLBs, as lines that `hw_model` replays on a machine whose TLBs
//! never drop an entry by themselves.
//!
//! Only a build with debug assertions has this code, and it records only at log level `trace`. The records go to a ring
//! of fixed size, so guests run nearly as fast as without it. The ring is written to the log when a VM ends.
//! `hw_model::trace` defines the lines.
//!
//! A [`step`] is done and recorded under one lock, so the records of table entries are in the order of the changes.
//! Other events are only [recorded](note): an entry and a TLBI just before they happen, an exit and a barrier just
//! after, an allocated or freed table under the pool's lock. Each of these makes the trace harder to satisfy than the
//! real events, never easier.

use core::fmt;

use addr::{Gpa, Hpa};
use stage2::{Cell, Stale};
#[cfg(debug_assertions)]
use stage2::{Scope, What};

/// One thing that a pCPU does.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "each architecture has instructions of its own")]
pub(crate) enum TraceEvent {
    /// An entry was exchanged.
    Exchange { cell: Cell, old: u64, new: u64 },
    /// An entry of a table that is in no tree was written.
    Store { cell: Cell, bits: u64 },
    /// So many tables, side by side, were taken and are zero.
    Allocate { table: Hpa, count: u32 },
    /// A table was given back.
    Free { table: Hpa },
    /// A barrier is done.
    Barrier { name: &'static str },
    /// TLB maintenance by address. The level is that which the instruction names.
    Tlbi { name: &'static str, start: Gpa, bytes: u64, level: Option<u32> },
    /// TLB maintenance of everything that a name covers.
    TlbiAll { name: &'static str },
    /// The entry that follows flushes: one tag, or everything.
    EntryFlushes { what: &'static str },
    /// This pCPU turns to a VM.
    Load { tag: u32, root: Hpa },
    /// A guest is entered.
    Enter { tag: u32, root: Hpa },
    /// It was left.
    Leave { tag: u32, root: Hpa },
    /// This pCPU is about to flush for the VM.
    Flush { root: Hpa },
    /// No pCPU uses stale entries of this range any more.
    Flushed { root: Hpa, start: Gpa, end: Gpa },
}

/// Acts and records, if recording is on: in one step for other pCPUs.
#[inline(always)]
pub(crate) fn step<T>(act: impl FnOnce() -> T, event: impl FnOnce(&T) -> Option<TraceEvent>) -> T {
    #[cfg(debug_assertions)]
    if recorder::is_on() {
        return recorder::step(act, event);
    }
    let _ = event;
    act()
}

/// Records an event that is about to happen, or has happened.
#[inline(always)]
pub(crate) fn note(event: impl FnOnce() -> TraceEvent) {
    step(|| (), |()| Some(event()));
}

/// Records that every pCPU has flushed `stale` of the VM with this root.
#[inline(always)]
pub(crate) fn paid(root: Hpa, stale: Stale) {
    #[cfg(debug_assertions)]
    if stale.scope() == Scope::AllCpus {
        let done = |start: Gpa, end: u64| note(|| TraceEvent::Flushed { root, start, end: Gpa(end) });
        match stale.what() {
            What::Nothing => {}
            What::Pages(pages) => pages.as_slice().iter().for_each(|page| done(*page, page.0 + addr::PAGE_BYTES)),
            What::Range(range) => done(range.start, range.end().0),
            What::Whole => done(Gpa(0), u64::MAX),
        }
    }
    let _ = (root, stale);
}

/// A VM has ended: writes the events since the last call to the log.
#[inline(always)]
pub(crate) fn tell() {
    #[cfg(debug_assertions)]
    recorder::tell();
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exchange { cell, old, new } => {
                write!(f, "exchange table={:#x} index={} old={old:#x} new={new:#x}", cell.table().0, cell.index())
            }
            Self::Store { cell, bits } => {
                write!(f, "store table={:#x} index={} bits={bits:#x}", cell.table().0, cell.index())
            }
            Self::Allocate { table, count } => write!(f, "allocate table={:#x} count={count}", table.0),
            Self::Free { table } => write!(f, "free table={:#x}", table.0),
            Self::Barrier { name } => write!(f, "barrier {name}"),
            Self::Tlbi { name, start, bytes, level } => {
                write!(f, "tlbi {name} start={:#x} bytes={bytes:#x}", start.0)?;
                level.map_or(Ok(()), |level| write!(f, " level={level}"))
            }
            Self::TlbiAll { name } => write!(f, "tlbi {name}"),
            Self::EntryFlushes { what } => write!(f, "entry-flushes {what}"),
            Self::Load { tag, root } => write!(f, "load vmid={tag} root={:#x}", root.0),
            Self::Enter { tag, root } => write!(f, "enter vmid={tag} root={:#x}", root.0),
            Self::Leave { .. } => f.write_str("leave"),
            Self::Flush { root } => write!(f, "flush root={:#x}", root.0),
            Self::Flushed { root, start, end } => {
                write!(f, "flushed root={:#x} start={:#x} end={:#x}", root.0, start.0, end.0)
            }
        }
    }
}

#[cfg(debug_assertions)]
mod recorder {
    use addr::Hpa;
    use log::LevelFilter;
    use spin::Mutex;

    use super::TraceEvent;
    use crate::arch::machine::tlb;
    use crate::cpu;

    /// Maximum number of events between two ends of VMs. Later events are lost, and the trace says so.
    const EVENTS: usize = 1 << 16;
    /// How many events back to look for an exit.
    const BACK: usize = 16;

    struct Ring {
        events: [(u32, TraceEvent); EVENTS],
        count: usize,
        /// Something found no room.
        is_full: bool,
    }

    static RING: Mutex<Ring> =
        Mutex::new(Ring { events: [(0, TraceEvent::Free { table: Hpa(0) }); EVENTS], count: 0, is_full: false });

    pub(super) fn is_on() -> bool {
        log::max_level() == LevelFilter::Trace
    }

    pub(super) fn step<T>(act: impl FnOnce() -> T, event: impl FnOnce(&T) -> Option<TraceEvent>) -> T {
        let cpu = cpu::try_this().map_or(0, |cpu| cpu.id.0);
        let mut ring = RING.lock();
        let result = act();
        if let Some(event) = event(&result) {
            ring.add(cpu, event);
        }
        result
    }

    impl Ring {
        fn add(&mut self, cpu: u32, event: TraceEvent) {
            if let TraceEvent::Enter { tag, root } = event
                && self.goes_on(cpu, tag, root)
            {
                return;
            }
            let at = self.count;
            match self.events.get_mut(at) {
                Some(place) if !self.is_full => {
                    *place = (cpu, event);
                    self.count += 1;
                }
                _ => self.is_full = true,
            }
        }

        /// The guest that is entered has just exited, and since then only other pCPUs' entries and exits were recorded.
        /// Then it counts as not having exited, which is the stricter case for changes of its tables.
        fn goes_on(&mut self, cpu: u32, tag: u32, root: Hpa) -> bool {
            let comes_or_goes =
                |event: &TraceEvent| matches!(event, TraceEvent::Enter { .. } | TraceEvent::Leave { .. });
            let last = self.count;
            for at in (last.saturating_sub(BACK)..last).rev() {
                match self.events[at] {
                    (of, TraceEvent::Leave { tag: left, root: of_vm }) if of == cpu => {
                        let is_same = left == tag && of_vm == root && !self.is_full;
                        if is_same {
                            self.events.copy_within(at + 1..last, at);
                            self.count -= 1;
                        }
                        return is_same;
                    }
                    (_, event) if comes_or_goes(&event) => {}
                    _ => return false,
                }
            }
            false
        }
    }

    pub(super) fn tell() {
        if !is_on() {
            return;
        }
        log::trace!("stage2: machine cpus={} {}", cpu::count(), tlb::rules());
        let mut told = 0;
        loop {
            let mut ring = RING.lock();
            if told == ring.count {
                if core::mem::take(&mut ring.is_full) {
                    log::trace!("stage2: full");
                }
                ring.count = 0;
                return;
            }
            let (cpu, event) = ring.events[told];
            drop(ring);
            log::trace!("stage2: cpu={cpu} {event}");
            told += 1;
        }
    }
}
