//! The state of a VM's dirty log for faults and for the hypervisor's own writes, with or without an active log.
//!
//! The log of a VM has *slots*, pieces of its memory that are short enough to be harvested in one step. A fault reads
//! one word here to learn whether a log is active. The leaves of stage 2 record the guest's writes. Here are only the
//! marks of writes that do not use stage 2, by the hypervisor and devices.

use alloc::vec::Vec;

use abi::payload::{DirtyLogging, DirtySource, Split};
use addr::{Gpa, GpaRange, PAGE_BYTES};
use stage2::{DirtyLog, Epochs, Granularity, MarkWord, Policy, Source, Walker};
use vcpu_layout::MailboxField;

use crate::frames::{Exhausted, reserve};
use crate::mutants::{self, Mutant};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use crate::vm::fault::OnFault;
use crate::vm::visits::walkers;

/// Bytes of a slot: 64 large pages.
const SLOT_BYTES: u64 = 128 << 20;

/// A VM's dirty log, for code that writes to memory.
pub(crate) struct DirtyState {
    /// The action of a fault: the only word of the log that a fault reads.
    pub(in crate::vm) on_fault: OnFault,
    /// Whether memory may be unmapped: it is mapped at its first touch, or a log was ever started, after which small
    /// pages become large ones again. Never reset, because a fault may be in progress.
    has_gaps: AtomicBool,
    /// Maximum number of splits per second; no limit if it is 0.
    splits_per_second: AtomicU32,
    /// Number of the log.
    number: AtomicU32,
    slots: Vec<Slot>,
    walkers: Epochs<Vec<Walker>>,
    /// Flushes of all vCPUs for stage 2, by the host's own CPU.
    flushes: AtomicU64,
    /// Large pages that came back.
    collapses: AtomicU64,
}

impl MailboxField for DirtyState {}

/// A piece of memory with a log of its own.
pub(crate) struct Slot {
    /// Its addresses.
    pub(crate) range: GpaRange,
    marks: Vec<MarkWord>,
}

/// A log of one slot.
pub(crate) type SlotLog<'a> = DirtyLog<&'a [MarkWord]>;

impl Slot {
    /// The log of this slot, kept in this way.
    pub(crate) fn log(&self, policy: Policy, source: Source) -> SlotLog<'_> {
        DirtyLog::new(self.range, source, policy, self.marks.as_slice())
            .expect("slots are made of pages and have their marks")
    }
}

/// When pages are split, in the words of the crate.
pub(crate) fn policy(split: Split) -> Policy {
    match split {
        Split::Lazy => Policy::Lazy,
        Split::Eager => Policy::Eager,
        Split::Adaptive => Policy::Adaptive,
    }
}

/// What records writes, as a type of the crate.
pub(crate) fn source(source: DirtySource) -> Source {
    match source {
        DirtySource::WriteProtect => Source::WriteProtect,
        DirtySource::Hardware => Source::Hardware,
        DirtySource::Pml => Source::Listed,
    }
}

impl DirtyState {
    /// No log runs of these regions, which have gaps in stage 2 or not.
    ///
    /// # Errors
    /// When the host has too little memory for the marks.
    pub(crate) fn new(regions: &[GpaRange], has_gaps: bool) -> Result<Self, Exhausted> {
        let pieces = regions.iter().flat_map(|region| {
            (0..region.bytes().div_ceil(SLOT_BYTES)).filter_map(|number| {
                let start = region.start.0 + number * SLOT_BYTES;
                GpaRange::new(Gpa(start), SLOT_BYTES.min(region.end().0 - start))
            })
        });
        let mut slots = Vec::new();
        reserve(&mut slots, pieces.clone().count())?;
        for range in pieces {
            let words = usize::try_from(range.bytes().div_ceil(64 * PAGE_BYTES)).map_err(|_| Exhausted)?;
            let mut marks = Vec::new();
            reserve(&mut marks, words)?;
            marks.extend((0..words).map(|_| MarkWord::new()));
            slots.push(Slot { range, marks });
        }
        Ok(Self {
            on_fault: OnFault::new(),
            has_gaps: AtomicBool::new(has_gaps),
            splits_per_second: AtomicU32::new(0),
            number: AtomicU32::new(0),
            slots,
            walkers: walkers()?,
            flushes: AtomicU64::new(0),
            collapses: AtomicU64::new(0),
        })
    }

    /// The slots, in ascending order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The walkers of stage 2.
    #[inline]
    pub(crate) fn walkers(&self) -> &Epochs<Vec<Walker>> {
        &self.walkers
    }

    /// Whether memory may be found unmapped.
    #[inline]
    pub(crate) fn has_gaps(&self) -> bool {
        self.has_gaps.load(Ordering::Relaxed)
    }

    /// Memory may be found unmapped from now on.
    pub(in crate::vm) fn expect_gaps(&self) {
        self.has_gaps.store(true, Ordering::SeqCst);
    }

    /// The log's number, and the maximum number of splits per second, if limited.
    pub(crate) fn rate(&self) -> Option<(u32, u32)> {
        match self.splits_per_second.load(Ordering::Relaxed) {
            0 => None,
            rate => Some((self.number.load(Ordering::Relaxed), rate)),
        }
    }

    /// A log runs from now on.
    pub(crate) fn begin(&self, how: &DirtyLogging, by: Source) {
        self.splits_per_second.store(how.splits_per_second.unwrap_or(0), Ordering::Relaxed);
        self.number.fetch_add(1, Ordering::Relaxed);
        self.has_gaps.store(true, Ordering::SeqCst);
        self.on_fault.set(match policy(how.split) {
            Policy::Eager | Policy::Adaptive if by.is_hardware() => Granularity::Recorded,
            _ => Granularity::WriteProtected,
        });
        // Before anything is copied: see `wrote`.
        fence(Ordering::SeqCst);
    }

    /// No log runs any more.
    pub(crate) fn end(&self) {
        self.on_fault.set(Granularity::Whole);
    }

    /// The hypervisor, or a device, has just written `bytes` bytes from `gpa` on.
    ///
    /// Either a log that begins at this moment sees the write, or this call sees that the log has begun.
    #[inline]
    pub(crate) fn wrote(&self, gpa: Gpa, bytes: u64) {
        fence(Ordering::SeqCst);
        if self.on_fault.get() != Granularity::Whole && !mutants::is(Mutant::HostWriteNotMarked) {
            self.mark(gpa, bytes);
        }
    }

    #[cold]
    fn mark(&self, gpa: Gpa, bytes: u64) {
        let Some(written) = GpaRange::new(gpa, bytes) else { return };
        let first = self.slots.partition_point(|slot| slot.range.end() <= gpa);
        for slot in self.slots.iter().skip(first).take_while(|slot| slot.range.start < written.end()) {
            // How it is kept does not matter to marks.
            slot.log(Policy::Lazy, Source::WriteProtect).mark(written);
        }
    }

    /// Counts flushes of all vCPUs.
    pub(crate) fn count_flushes(&self, flushes: u64) {
        self.flushes.fetch_add(flushes, Ordering::Relaxed);
    }

    /// Counts large pages that came back.
    pub(crate) fn count_collapses(&self, count: u64) {
        self.collapses.fetch_add(count, Ordering::Relaxed);
    }

    /// Flushes of all vCPUs, and large pages that came back.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.flushes.load(Ordering::Relaxed), self.collapses.load(Ordering::Relaxed))
    }
}
