//! The events of one pCPU: only it writes them, and only the pCPU with the control port reads them.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::control::EVENTS_CHUNK;
use abi::counters::ExitReason;
use abi::trace::{Event, Events, RunEnd, What};
use crossbeam_utils::CachePadded;

/// Events that a pCPU keeps until they are read.
const EVENTS: usize = 8192;
const SLOTS_AT_ONCE: usize = 1024;

/// The host has too little memory for a ring.
#[derive(Debug)]
pub(crate) struct OutOfMemory;

/// An event in the ring: the time, and three words.
type Slot = [AtomicU64; 3];

/// The ring.
pub(super) struct Ring {
    slots: Vec<Slot>,
    /// Events that were ever written, and ever lost.
    written: CachePadded<AtomicU64>,
    lost: AtomicU64,
    /// The writer is active: an event of an interrupt at that time is lost.
    is_busy: AtomicBool,
    /// Number of events ever read, and the number of lost events when the trace began.
    read: CachePadded<AtomicU64>,
    lost_before: AtomicU64,
}

impl Ring {
    /// An empty one.
    /// `in_between` is called now and then.
    pub(super) fn new(mut in_between: impl FnMut()) -> Result<Self, OutOfMemory> {
        let mut slots: Vec<Slot> = Vec::new();
        slots.try_reserve_exact(EVENTS).map_err(|_| OutOfMemory)?;
        while slots.len() < EVENTS {
            let count = (EVENTS - slots.len()).min(SLOTS_AT_ONCE);
            slots.extend((0..count).map(|_| Slot::default()));
            in_between();
        }
        Ok(Self {
            slots,
            written: CachePadded::default(),
            lost: AtomicU64::new(0),
            is_busy: AtomicBool::new(false),
            read: CachePadded::default(),
            lost_before: AtomicU64::new(0),
        })
    }

    fn slot(&self, number: u64) -> Option<&Slot> {
        self.slots.get(usize::try_from(number).ok()? % EVENTS)
    }

    /// Writes an event, or loses it.
    pub(super) fn push(&self, event: Event) {
        let lose = || self.lost.store(self.lost.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if self.is_busy.load(Ordering::Relaxed) {
            return lose();
        }
        self.is_busy.store(true, Ordering::Relaxed);
        let number = self.written.load(Ordering::Relaxed);
        // The reader has finished with the events that it has counted as read.
        let is_full = number - self.read.load(Ordering::Acquire) >= EVENTS as u64;
        match self.slot(number) {
            Some(slot) if !is_full => {
                slot.iter().zip(packed(event)).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
                self.written.store(number + 1, Ordering::Release);
            }
            _ => lose(),
        }
        self.is_busy.store(false, Ordering::Relaxed);
    }

    /// Drops all unread events.
    pub(super) fn forget(&self) {
        self.read.store(self.written.load(Ordering::Acquire), Ordering::Release);
        self.lost_before.store(self.lost.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The oldest events, which make room for others.
    pub(super) fn take(&self) -> Events {
        let first = self.read.load(Ordering::Relaxed);
        let end = self.written.load(Ordering::Acquire).min(first + EVENTS_CHUNK as u64);
        let events = (first..end).filter_map(|number| {
            let slot = self.slot(number)?;
            unpacked(core::array::from_fn(|word| slot[word].load(Ordering::Relaxed)))
        });
        let events = events.collect();
        self.read.store(end, Ordering::Release);
        let lost = self.lost.load(Ordering::Relaxed) - self.lost_before.load(Ordering::Relaxed);
        Events { lost, events }
    }
}

const RUN_BEGAN: u64 = 0;
const RUN_ENDED: u64 = 1;
const EXIT: u64 = 2;
const KICKED: u64 = 3;
const FLUSHED: u64 = 4;

const RUN_ENDS: [RunEnd; 4] = [RunEnd::Blocked, RunEnd::Paused, RunEnd::Preempted, RunEnd::Ended];

/// An event in three words: the time; two numbers of 32 bits; the kind, and a third number.
fn packed(Event { at, what }: Event) -> [u64; 3] {
    let (kind, first, second, third) = match what {
        What::RunBegan { vm, vcpu } => (RUN_BEGAN, vm, vcpu, 0),
        What::RunEnded(end) => (RUN_ENDED, end as u32, 0, 0),
        What::Exit { reason, ticks } => (EXIT, reason as u32, ticks, 0),
        What::Kicked { pcpus, first } => (KICKED, pcpus, first, 0),
        What::Flushed { targets, kicked, ticks } => (FLUSHED, targets, kicked, ticks),
    };
    [at, u64::from(first) << 32 | u64::from(second), kind << 32 | u64::from(third)]
}

fn unpacked([at, numbers, kind]: [u64; 3]) -> Option<Event> {
    let (first, second) = (upper(numbers), lower(numbers));
    let what = match kind >> 32 {
        RUN_BEGAN => What::RunBegan { vm: first, vcpu: second },
        RUN_ENDED => What::RunEnded(*RUN_ENDS.get(first as usize)?),
        EXIT => What::Exit { reason: *ExitReason::ALL.get(first as usize)?, ticks: second },
        KICKED => What::Kicked { pcpus: first, first: second },
        FLUSHED => What::Flushed { targets: first, kicked: second, ticks: lower(kind) },
        _ => return None,
    };
    Some(Event { at, what })
}

const fn upper(word: u64) -> u32 {
    (word >> 32) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is wanted")]
const fn lower(word: u64) -> u32 {
    word as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> impl Iterator<Item = Event> {
        let exits = ExitReason::ALL.iter().map(|&reason| What::Exit { reason, ticks: u32::MAX });
        let ends = RUN_ENDS.into_iter().map(What::RunEnded);
        let others = [
            What::RunBegan { vm: u32::MAX, vcpu: 3 },
            What::Kicked { pcpus: 64, first: 63 },
            What::Flushed { targets: 1, kicked: u32::MAX, ticks: 7 },
        ];
        (u64::MAX - 100..).zip(exits.chain(ends).chain(others)).map(|(at, what)| Event { at, what })
    }

    #[test]
    fn event_is_read_as_it_was_written() {
        let ring = Ring::new(|| {}).expect("memory");
        events().for_each(|event| ring.push(event));
        assert_eq!(ring.take(), Events { lost: 0, events: events().collect() });
        assert_eq!(ring.take(), Events { lost: 0, events: Vec::new() });
    }

    #[test]
    fn newest_events_are_lost_and_counted_when_nobody_reads() {
        let ring = Ring::new(|| {}).expect("memory");
        let event = |at| Event { at, what: What::RunEnded(RunEnd::Blocked) };
        (0..EVENTS as u64 + 5).for_each(|at| ring.push(event(at)));
        let mut seen = Vec::new();
        loop {
            let Events { lost, events } = ring.take();
            assert_eq!(lost, 5);
            if events.is_empty() {
                break;
            }
            seen.extend(events.into_iter().map(|event| event.at));
        }
        assert!(seen.into_iter().eq(0..EVENTS as u64));
        ring.push(event(77));
        ring.forget();
        assert_eq!(ring.take(), Events { lost: 0, events: Vec::new() });
    }
}
