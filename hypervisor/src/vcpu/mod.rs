//! A virtual CPU: what others see of it, what its pCPU owns, what is counted.
//!
//! The three live on cache lines of their own, told apart by who writes them: the mailbox by everybody, the counters by
//! the pCPU that runs the vCPU and read by anybody, the rest by that pCPU alone. Who holds the lock of the owner's part is
//! the one that runs the vCPU; it is taken once per stay on a pCPU, not per exit.

pub(crate) mod run;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use abi::counters::{ExitReason, VcpuCounters};
use crossbeam_utils::CachePadded;
use sched::{CpuId, Mailbox, VirtualTime};
use shootdown::{Presence, Requests};
use spin::{Mutex, MutexGuard};
use tlb_tag::VcpuTags;

use crate::arch::routing::Posted;
use crate::arch::vcpu::ArchVcpu;

/// One vCPU of a VM.
pub(crate) struct Vcpu {
    reach: Reach,
    mailbox: CachePadded<MailboxLines>,
    counters: CachePadded<Counters>,
    owner: CachePadded<Mutex<Owner>>,
}

/// What a shootdown touches of each target: one cache line, and the whole of it.
#[repr(C, align(64))]
struct Reach {
    mailbox: Mailbox,
    presence: Presence,
    requests: Requests,
}

const _: () = assert!(size_of::<Reach>() == 64);

/// What everybody writes, beyond [`Reach`].
struct MailboxLines {
    posted: Posted,
    /// When the vCPU was last put into a run queue, in host TSC ticks.
    queued_at: AtomicU64,
    /// The pCPU that ran the vCPU last, where it is woken again. Written by the owner when it moves.
    home: AtomicU32,
    /// Virtual time on the clock of the home pCPU's run queue, while blocked. Written by the owner when it blocks.
    virtual_time: AtomicU64,
}

/// What the pCPU that runs the vCPU owns.
pub(crate) struct Owner {
    /// Registers and interrupt state.
    pub(crate) arch: ArchVcpu,
    /// The pCPU that it ran on last.
    pub(crate) ran_on: Option<CpuId>,
    /// Entry in a pCPU's list of timers that wakes the vCPU, if it left one behind.
    pub(crate) timer: Option<(CpuId, crate::cpu::timers::Key)>,
    /// Whether the vCPU counts as one that only another vCPU can make run again.
    pub(crate) parked: bool,
}

impl Vcpu {
    /// A vCPU that waits for its first post.
    pub(crate) fn new(arch: ArchVcpu, home: CpuId) -> Self {
        Self {
            reach: Reach { mailbox: Mailbox::blocked(), presence: Presence::new(), requests: Requests::new() },
            mailbox: CachePadded::new(MailboxLines {
                posted: Posted::new(),
                queued_at: AtomicU64::new(0),
                home: AtomicU32::new(home.0),
                virtual_time: AtomicU64::new(0),
            }),
            counters: CachePadded::new(Counters::default()),
            owner: CachePadded::new(Mutex::new(Owner { arch, ran_on: None, timer: None, parked: true })),
        }
    }

    /// The word through which others reach the vCPU.
    #[inline]
    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.reach.mailbox
    }

    /// Whether it is in its guest, and where.
    #[inline]
    pub(crate) fn presence(&self) -> &Presence {
        &self.reach.presence
    }

    /// What it was asked to flush.
    #[inline]
    pub(crate) fn requests(&self) -> &Requests {
        &self.reach.requests
    }

    /// What others left for its interrupt controller.
    #[inline]
    pub(crate) fn posted(&self) -> &Posted {
        &self.mailbox.posted
    }

    /// What is counted.
    #[inline]
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Takes the owner's part; waits if the pCPU that ran the vCPU before has not quite let go.
    pub(crate) fn own(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock()
    }

    /// What is left to give back when the vCPU is gone for good.
    pub(crate) fn into_tags(self) -> VcpuTags {
        self.owner.into_inner().into_inner().arch.into_tags()
    }

    /// The pCPU that ran it last.
    pub(crate) fn home(&self) -> CpuId {
        CpuId(self.mailbox.home.load(Ordering::Relaxed))
    }

    pub(crate) fn set_home(&self, cpu: CpuId) {
        self.mailbox.home.store(cpu.0, Ordering::Relaxed);
    }

    /// Its virtual time on the clock of its home, while blocked.
    pub(crate) fn virtual_time(&self) -> VirtualTime {
        self.mailbox.virtual_time.load(Ordering::Relaxed)
    }

    pub(crate) fn set_virtual_time(&self, time: VirtualTime) {
        self.mailbox.virtual_time.store(time, Ordering::Relaxed);
    }

    /// It waits for a pCPU since `now`.
    pub(crate) fn set_queued_at(&self, now: u64) {
        self.mailbox.queued_at.store(now, Ordering::Relaxed);
    }

    /// How long it has waited for a pCPU by `now`, in ticks. Clocks of two pCPUs may differ by a little.
    pub(crate) fn waited(&self, now: u64) -> u64 {
        now.saturating_sub(self.mailbox.queued_at.load(Ordering::Relaxed))
    }
}

/// A counter that one pCPU writes and others may read at any time.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`. An ordinary load and store, not a locked instruction: there is one writer.
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// As it stands.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! define {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What is counted per vCPU; [`VcpuCounters`] says what each means.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            exits: [Counter; ExitReason::COUNT],
            $($(#[$doc])* pub(crate) $name: Counter,)*
        }

        impl Counters {
            /// All counters as they stand. Each is exact; they may be a few exits apart from each other.
            pub(crate) fn snapshot(&self) -> VcpuCounters {
                VcpuCounters {
                    exits: core::array::from_fn(|reason| self.exits[reason].get()),
                    $($name: self.$name.get(),)*
                }
            }
        }
    };
}
abi::vcpu_counters!(define);

impl Counters {
    /// Counts an exit.
    #[inline]
    pub(crate) fn exit(&self, reason: ExitReason) {
        self.exits[reason as usize].add(1);
    }
}
