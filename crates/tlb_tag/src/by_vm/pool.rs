//! Which tag a VM has: the part that all pCPUs share. `rivals.rs` has the scheme that changes tags.

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
pub(super) struct Id(pub(super) u64);

const INDEX_BITS: u32 = 16;
/// The first generation of a machine.
pub(super) const FIRST_GENERATION: u64 = 1;

impl Id {
    /// No tag. In a slot: the pCPU has met no new tag since the last rollover.
    pub(super) const NONE: Self = Self(0);
    /// In a slot: the pCPU runs no VM of this pool.
    pub(super) const IDLE: Self = Self(1);

    pub(super) const fn new(generation: u64, index: u32) -> Self {
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
    pub(super) generation: AtomicU64,
    /// By pCPU: the [`Id`] that it runs with.
    pub(super) slots: Box<[Slot]>,
    pub(super) handed_out: Mutex<HandedOut>,
    /// Number of VMs made so far. Names are never reused.
    made: AtomicU64,
}

/// On a cache line of its own: its pCPU writes it at each arrival and departure.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot(pub(super) AtomicU64);

#[derive(Debug)]
pub(super) struct HandedOut {
    /// By index: whether the tag belongs to a VM, for life or in this generation.
    pub(super) used: Box<[bool]>,
    /// By pCPU: the tag that it ran with at the last rollover.
    pub(super) kept: Box<[Id]>,
    /// Index where the search for a free tag continues.
    pub(super) next: u32,
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
pub struct VmTags(pub(super) Arc<Vm>);

#[derive(Debug)]
pub(super) struct Vm {
    shared: Arc<Shared>,
    pub(super) name: u64,
    /// Index of the tag that the VM owns for life.
    home: Option<u32>,
    /// The [`Id`] of its tag.
    pub(super) id: AtomicU64,
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
        if self.shared().scheme != Scheme::Generation {
            return (id, false);
        }
        self.claim_in_generation(cpu, id)
    }

    /// The vCPU departs from pCPU `cpu`.
    pub(super) fn release(&self, cpu: usize) {
        let shared = self.shared();
        if shared.scheme == Scheme::Generation {
            shared.vacate(cpu);
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
    pub(super) fn any(&self, name: u64) -> u32 {
        (name % u64::from(self.range.count())) as u32
    }
}

impl HandedOut {
    /// Takes a free tag. Returns its index.
    pub(super) fn take_free(&mut self) -> Option<u32> {
        let from = self.next as usize;
        let free = |used: &[bool]| used.iter().position(|used| !used);
        let at = free(&self.used[from..]).map(|at| from + at).or_else(|| free(&self.used[..from]))?;
        self.used[at] = true;
        let index = u32::try_from(at).ok()?;
        self.next = (index + 1) % u32::try_from(self.used.len()).unwrap_or(1);
        Some(index)
    }
}
