//! Which tag a VM has: the part that all pCPUs share.
//!
//! For [`Scheme::Generation`] each pCPU has a slot with the tag that it runs under. An arriving vCPU whose VM has a tag
//! of the current generation writes it there by one compare-exchange, without a lock. A rollover holds the lock. It
//! first publishes the new generation and then empties the slots, one by one: a VM that it finds there is running, and
//! keeps its tag. The two meet in the slot. Either the arrival was first, and the rollover keeps its tag; or the slot
//! is empty, and the arrival asks again under the lock.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;

use super::cpu::{CpuTags, Name};
use super::vcpu::VcpuTags;
use crate::pool::Scheme;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::tag::{Tag, TagRange};

/// Maximum number of tags in a pool: each pCPU keeps two words per tag.
const LARGEST_TABLE: u32 = 1024;

/// A VM's tag in a generation: the generation in the upper bits, the index in the range in the lower bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(u64);

const INDEX_BITS: u32 = 16;
/// The first generation of a machine.
pub(super) const FIRST_GENERATION: u64 = 1;

impl Id {
    /// No tag. In a slot: the pCPU has met no new tag since the last rollover.
    pub(super) const NONE: Self = Self(0);
    /// In a slot: the pCPU runs no VM of this pool.
    const IDLE: Self = Self(1);

    const fn new(generation: u64, index: u32) -> Self {
        Self(generation << INDEX_BITS | index as u64)
    }

    pub(super) const fn generation(self) -> u64 {
        self.0 >> INDEX_BITS
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
    pub(super) const fn index(self) -> u32 {
        self.0 as u32 & ((1 << INDEX_BITS) - 1)
    }
}

/// The tags that VMs of one scheme share, on all pCPUs of a machine.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    /// Whether TLBs may still hold entries under these tags that an earlier pool has left.
    inherits: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) scheme: Scheme,
    pub(super) range: TagRange,
    /// The current generation. 48 bits never overflow.
    generation: AtomicU64,
    /// By pCPU: the [`Id`] that it runs with.
    slots: Box<[Slot]>,
    handed_out: Mutex<HandedOut>,
    /// Number of VMs made so far. Names are never reused.
    made: AtomicU64,
}

/// On a cache line of its own: its pCPU writes it at each arrival and departure.
#[derive(Debug)]
#[repr(align(128))]
struct Slot(AtomicU64);

#[derive(Debug)]
struct HandedOut {
    /// By index: whether the tag belongs to a VM, for life or in this generation.
    used: Box<[bool]>,
    /// By pCPU: the tag that it ran with at the last rollover.
    kept: Box<[Id]>,
    /// Index where the search for a free tag continues.
    next: u32,
}

impl Pool {
    /// A pool of the tags in `range`, for VMs on a machine with this many pCPUs.
    #[must_use]
    pub fn new(scheme: Scheme, range: TagRange, cpus: usize) -> Self {
        let count = if scheme == Scheme::FlushAlways { 1 } else { range.count().min(LARGEST_TABLE) };
        let range = TagRange::new(range.first().get(), count);
        let shared = Arc::new(Shared {
            scheme,
            range,
            generation: AtomicU64::new(FIRST_GENERATION),
            slots: (0..cpus).map(|_| Slot(AtomicU64::new(Id::IDLE.0))).collect(),
            handed_out: Mutex::new(HandedOut {
                used: vec![false; count as usize].into_boxed_slice(),
                kept: vec![Id::NONE; cpus].into_boxed_slice(),
                next: 0,
            }),
            made: AtomicU64::new(0),
        });
        Self { shared, inherits: false }
    }

    /// The same pool, of tags that were another pool's before. TLBs may still hold entries under them: each pCPU
    /// flushes those before its first entry with one of these tags.
    #[must_use]
    pub fn inheriting(self) -> Self {
        Self { inherits: true, ..self }
    }

    /// How tags are assigned.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.shared.scheme
    }

    /// The tags.
    #[must_use]
    pub fn range(&self) -> TagRange {
        self.shared.range
    }

    /// The state of pCPU `number`, which has entered no VM yet.
    ///
    /// # Panics
    /// The machine has fewer pCPUs.
    #[must_use]
    pub fn cpu(&self, number: usize) -> CpuTags {
        assert!(number < self.shared.slots.len(), "pCPU {number} of {}", self.shared.slots.len());
        CpuTags::new(number, self.shared.range, self.inherits)
    }

    /// How many tags are some VM's for life. None with other schemes than [`Scheme::Epoch`].
    #[must_use]
    pub fn homes(&self) -> u32 {
        match self.shared.scheme {
            Scheme::FlushAlways | Scheme::Generation => 0,
            Scheme::Epoch => {
                let handed_out = self.shared.handed_out.lock();
                u32::try_from(handed_out.used.iter().filter(|used| **used).count()).unwrap_or(u32::MAX)
            }
        }
    }

    /// The part of a new VM.
    #[must_use]
    pub fn vm(&self) -> VmTags {
        let name = self.shared.made.fetch_add(1, Ordering::Relaxed) + 1;
        let mut home = None;
        let id = match self.shared.scheme {
            Scheme::FlushAlways => Id::new(FIRST_GENERATION, 0),
            Scheme::Generation => Id::NONE,
            Scheme::Epoch => {
                home = self.shared.handed_out.lock().take_free();
                // Without a home tag it shares one.
                Id::new(FIRST_GENERATION, home.unwrap_or_else(|| self.shared.any(name)))
            }
        };
        VmTags(Arc::new(Vm {
            shared: self.shared.clone(),
            name,
            home,
            id: AtomicU64::new(id.0),
            made: AtomicU64::new(0),
        }))
    }
}

/// A VM's part of a pool: its tag. The tag returns to the pool when the last reference is dropped.
#[derive(Clone, Debug)]
pub struct VmTags(Arc<Vm>);

#[derive(Debug)]
struct Vm {
    shared: Arc<Shared>,
    name: u64,
    /// Index of the tag that the VM owns for life.
    home: Option<u32>,
    /// The [`Id`] of its tag.
    id: AtomicU64,
    /// Number of vCPUs made so far.
    made: AtomicU64,
}

impl VmTags {
    /// A new vCPU of the VM.
    #[must_use]
    pub fn vcpu(&self) -> VcpuTags {
        let number = self.0.made.fetch_add(1, Ordering::Relaxed);
        VcpuTags::new(self.clone(), Name::new(self.0.name, number))
    }

    /// The tag under which TLBs may hold entries of the VM now, for a flush on all pCPUs. The caller first changes
    /// stage 2, then executes a barrier that makes walks see the change, then calls this. A vCPU that arrives later
    /// with another tag walks the changed tables. `None` if no vCPU of the VM has run yet.
    #[must_use]
    pub fn tag(&self) -> Option<Tag> {
        let id = Id(self.0.id.load(Ordering::Acquire));
        (id != Id::NONE).then(|| self.0.shared.range.at(id.index()))
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.0.shared
    }

    /// A vCPU of the VM arrives at pCPU `cpu`, and runs there with the returned tag until it departs. Also returns
    /// whether a new generation began.
    pub(super) fn claim(&self, cpu: usize) -> (Id, bool) {
        let id = Id(self.0.id.load(Ordering::Acquire));
        let shared = self.shared();
        if shared.scheme != Scheme::Generation {
            return (id, false);
        }
        let slot = &shared.slots[cpu].0;
        let before = slot.load(Ordering::Relaxed);
        if before != Id::NONE.0
            && id.generation() == shared.generation.load(Ordering::Acquire)
            && slot.compare_exchange(before, id.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return (id, false);
        }
        self.claim_slowly(cpu)
    }

    #[cold]
    fn claim_slowly(&self, cpu: usize) -> (Id, bool) {
        let shared = self.shared();
        let mut handed_out = shared.handed_out.lock();
        let before = Id(self.0.id.load(Ordering::Relaxed));
        let (id, begins) = if before.generation() == shared.generation.load(Ordering::Relaxed) {
            (before, false)
        } else {
            shared.assign(&mut handed_out, self.0.name, before)
        };
        self.0.id.store(id.0, Ordering::Release);
        shared.slots[cpu].0.store(id.0, Ordering::Release);
        (id, begins)
    }

    /// The vCPU departs from pCPU `cpu`.
    pub(super) fn release(&self, cpu: usize) {
        let shared = self.shared();
        if shared.scheme == Scheme::Generation {
            // A swap, not a store: if a rollover has emptied the slot, the swap tells the pCPU about the generation
            // before its next arrival compares one.
            shared.slots[cpu].0.swap(Id::IDLE.0, Ordering::AcqRel);
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // A tag of a generation returns with the generation. Entries that TLBs still hold under it are recognized by
        // the vCPU's name.
        if let Some(home) = self.home {
            self.shared.handed_out.lock().used[home as usize] = false;
        }
    }
}

impl Shared {
    /// A tag that other VMs have too.
    #[expect(clippy::cast_possible_truncation, reason = "less than the count")]
    fn any(&self, name: u64) -> u32 {
        (name % u64::from(self.range.count())) as u32
    }

    /// A tag of the current generation for a VM whose tag is from an older one.
    fn assign(&self, handed_out: &mut HandedOut, name: u64, before: Id) -> (Id, bool) {
        let generation = self.generation.load(Ordering::Relaxed);
        if before != Id::NONE {
            let same = Id::new(generation, before.index());
            // It ran on some pCPU during the rollover, and may still run: only the same tag is possible.
            if handed_out.keep(before, same) {
                return (same, false);
            }
            // Its entries in TLBs do not matter, but to keep the number saves a change.
            let used = &mut handed_out.used[before.index() as usize];
            if !core::mem::replace(used, true) {
                return (same, false);
            }
        }
        if let Some(index) = handed_out.take_free() {
            return (Id::new(generation, index), false);
        }
        self.roll_over(handed_out, generation + 1);
        let index = handed_out.take_free().unwrap_or_else(|| self.any(name));
        (Id::new(generation + 1, index), true)
    }

    fn roll_over(&self, handed_out: &mut HandedOut, generation: u64) {
        self.generation.store(generation, Ordering::Release);
        handed_out.used.fill(false);
        handed_out.next = 0;
        for (slot, kept) in self.slots.iter().zip(&mut handed_out.kept) {
            match Id(slot.0.swap(Id::NONE.0, Ordering::AcqRel)) {
                // It has run since before the last rollover.
                Id::NONE => {}
                Id::IDLE => *kept = Id::NONE,
                running => *kept = running,
            }
            if *kept != Id::NONE {
                handed_out.used[kept.index() as usize] = true;
            }
        }
    }
}

impl HandedOut {
    /// Takes a free tag. Returns its index.
    fn take_free(&mut self) -> Option<u32> {
        let from = self.next as usize;
        let free = |used: &[bool]| used.iter().position(|used| !used);
        let at = free(&self.used[from..]).map(|at| from + at).or_else(|| free(&self.used[..from]))?;
        self.used[at] = true;
        let index = u32::try_from(at).ok()?;
        self.next = (index + 1) % u32::try_from(self.used.len()).unwrap_or(1);
        Some(index)
    }

    /// Whether a pCPU ran with `before` at the last rollover; if so, records `now` for it.
    fn keep(&mut self, before: Id, now: Id) -> bool {
        let mut found = false;
        for kept in self.kept.iter_mut().filter(|kept| **kept == before) {
            *kept = now;
            found = true;
        }
        found
    }
}
