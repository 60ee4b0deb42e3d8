//! A virtual CPU: the part that other pCPUs see, the part that its pCPU owns, and its counters.
//!
//! All of it is one block, laid out by writer. Any pCPU writes the mailbox. The pCPU that runs the vCPU writes the
//! counters and the owner's part. That pCPU holds the lock of the owner's part. It takes the lock once each time it
//! runs the vCPU, not per exit, and gets with it the proof that counting needs.

pub(crate) mod activity;
pub(crate) mod run;
pub(crate) mod unannounced;
pub(crate) mod unsent;

use alloc::vec::Vec;
use core::ops::Deref;

use abi::counters::{ExitReason, VcpuCounters};
use sched::{CpuId, Mailbox, VirtualTime};
use shootdown::{Presence, Requests};
use vcpu_layout::{MailboxField, Owned, OwnerField, OwnerGuard, OwnerWord, Proof, lay_out};

use crate::arch::{Arch, Machine, VcpuState};
use crate::layout::OwnPages;
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Mutex, Ordering};
use crate::vm::VcpuRef;
use crate::vm::fault::FaultState;
use unsent::Unsent;

/// This machine's types: events that others leave for a vCPU, its tags, and its state.
type Posted = <Machine as Arch>::Posted;
type VcpuTags = <Machine as Arch>::VcpuTags;
type ArchVcpu = <Machine as Arch>::Vcpu;

/// One vCPU of a VM.
#[lay_out]
pub(crate) struct Vcpu {
    #[layout(mailbox)]
    shared: SharedLine,
    /// Interrupts that others have left for its interrupt controller.
    #[layout(mailbox)]
    posted: Posted,
    /// When the vCPU was last put into a run queue, in ticks of the host clock.
    #[layout(mailbox)]
    queued_at: AtomicU64,
    /// The pCPU that ran the vCPU last, where it wakes again. The owner writes it when it moves.
    #[layout(mailbox)]
    home: AtomicU32,
    /// Virtual time on the clock of the home pCPU's run queue, while blocked. Written by the owner when it blocks.
    #[layout(mailbox)]
    virtual_time: AtomicU64,
    /// Reasons that keep it out of its guest, besides a pause of its VM: [`suspend`](crate::vm::child::suspend).
    #[layout(mailbox)]
    suspended: AtomicU8,
    /// The handle that a waker puts into a run queue; `None` after the vCPU has left its guest for good.
    #[layout(mailbox)]
    handle: Mutex<Option<VcpuRef>>,
    /// Its own pages besides this block.
    #[layout(frozen)]
    own_pages: Vec<OwnPages>,
    #[layout(owner)]
    counters: Counters,
    #[layout(owner)]
    owner: Owned<Owner>,
    /// An interrupt that it has not sent to all yet.
    #[layout(owner)]
    unsent: Unsent,
}

/// Everything that a shootdown reads or writes of a target vCPU: one cache line of 64 bytes.
///
/// The owner writes to this line too, when it enters and leaves its guest. So a sender needs one line only. Without
/// senders the line stays in the owner's cache.
#[repr(C)]
struct SharedLine {
    mailbox: Mailbox,
    presence: Presence,
    requests: Requests,
}

const _: () = assert!(size_of::<SharedLine>() == 64 && Vcpu::OFFSET_SHARED.is_multiple_of(64));

impl MailboxField for SharedLine {}
impl MailboxField for Posted {}
impl OwnerField for Counters {}

/// Data that the pCPU that runs the vCPU owns.
pub(crate) struct Owner {
    /// Registers and interrupt state.
    pub(crate) arch: ArchVcpu,
    /// The pCPU that it ran on last.
    pub(crate) ran_on: Option<CpuId>,
    /// Entry in a pCPU's list of timers that wakes the vCPU, if it left one behind.
    pub(crate) timer: Option<(CpuId, crate::cpu::timers::Key)>,
    /// What it has run without its VM being charged for it, in ticks of the host clock.
    pub(crate) uncharged: u64,
    /// Whether its VM counts the vCPU as dormant.
    pub(crate) is_counted_dormant: bool,
    /// Its spare tables and state for faults on memory.
    pub(crate) fault_state: FaultState,
}

impl Vcpu {
    /// A vCPU that waits for its first post.
    pub(crate) fn new(arch: ArchVcpu, home: CpuId) -> Self {
        Self::lay_out(VcpuFields {
            shared: SharedLine { mailbox: Mailbox::blocked(), presence: Presence::new(), requests: Requests::new() },
            posted: Posted::new(),
            queued_at: AtomicU64::new(0),
            home: AtomicU32::new(home.0),
            virtual_time: AtomicU64::new(0),
            suspended: AtomicU8::new(0),
            handle: Mutex::new(None),
            own_pages: arch.own_pages().collect(),
            counters: Counters::default(),
            unsent: Unsent::default(),
            owner: Owned::new(Owner {
                arch,
                ran_on: None,
                timer: None,
                uncharged: 0,
                is_counted_dormant: true,
                fault_state: FaultState::new(),
            }),
        })
    }

    /// Sets the handle that wakes it.
    pub(crate) fn set_handle(&self, handle: VcpuRef) {
        *self.handle.lock() = Some(handle);
    }

    /// The handle for a run queue, unless the vCPU has left its guest for good.
    pub(crate) fn handle(&self) -> Option<VcpuRef> {
        self.handle.lock().clone()
    }

    /// The vCPU has left its guest for good: its handle no longer keeps the VM alive.
    pub(crate) fn drop_handle(&self) {
        let handle = self.handle.lock().take();
        // Dropped outside the lock: the handle may be the last reference to the lock's own memory.
        drop(handle);
    }

    /// The word through which others reach the vCPU.
    #[inline]
    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.shared.mailbox
    }

    /// Whether it is in its guest, and where.
    #[inline]
    pub(crate) fn presence(&self) -> &Presence {
        &self.shared.presence
    }

    /// Its flush requests.
    #[inline]
    pub(crate) fn requests(&self) -> &Requests {
        &self.shared.requests
    }

    /// Pages besides this block that only its owner writes.
    pub(crate) fn own_pages(&self) -> &[OwnPages] {
        &self.own_pages
    }

    /// Interrupts that others have left for its interrupt controller.
    #[inline]
    pub(crate) fn posted(&self) -> &Posted {
        &self.posted
    }

    /// An interrupt that it has not sent to all yet.
    fn unsent(&self) -> &Unsent {
        &self.unsent
    }

    /// Its counters, for reading.
    #[inline]
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Its counters, for the pCPU with the `proof` of running it.
    #[inline]
    pub(crate) fn tally<'a>(&'a self, proof: Proof<'a>) -> Tally<'a> {
        Tally { counters: &self.counters, proof }
    }

    /// Reasons that keep it out of its guest.
    pub(crate) fn suspended(&self) -> &AtomicU8 {
        &self.suspended
    }

    /// Takes the owner's part, unless a pCPU runs the vCPU.
    #[allow(dead_code, reason = "not every architecture has parents")]
    pub(crate) fn try_own(&self) -> Option<OwnerGuard<'_, Owner>> {
        self.owner.try_run()
    }

    /// Takes the owner's part; waits if the pCPU that ran the vCPU before has not quite let go.
    pub(crate) fn own(&self) -> OwnerGuard<'_, Owner> {
        self.owner.run()
    }

    /// Its tags, to be freed when the vCPU is removed.
    pub(crate) fn into_tags(self) -> VcpuTags {
        self.owner.into_inner().arch.into_tags()
    }

    /// The pCPU that ran it last.
    pub(crate) fn home(&self) -> CpuId {
        CpuId(self.home.load(Ordering::Relaxed))
    }

    pub(crate) fn set_home(&self, cpu: CpuId) {
        self.home.store(cpu.0, Ordering::Relaxed);
    }

    /// Its virtual time on the clock of its home, while blocked.
    pub(crate) fn virtual_time(&self) -> VirtualTime {
        self.virtual_time.load(Ordering::Relaxed)
    }

    pub(crate) fn set_virtual_time(&self, time: VirtualTime) {
        self.virtual_time.store(time, Ordering::Relaxed);
    }

    /// It waits for a pCPU since `now`.
    pub(crate) fn set_queued_at(&self, now: u64) {
        self.queued_at.store(now, Ordering::Relaxed);
    }

    /// How long it has waited for a pCPU by `now`, in ticks. Clocks of two pCPUs may differ by a little.
    pub(crate) fn waited(&self, now: u64) -> u64 {
        now.saturating_sub(self.queued_at.load(Ordering::Relaxed))
    }
}

macro_rules! define {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a vCPU; [`VcpuCounters`] describes each.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            exits: [OwnerWord; ExitReason::COUNT],
            $($(#[$doc])* pub(crate) $name: OwnerWord,)*
        }

        impl Counters {
            /// Exits by reason.
            pub(crate) fn exits(&self) -> [u64; ExitReason::COUNT] {
                core::array::from_fn(|reason| self.exits[reason].get())
            }

            /// Current values of all counters. Each is exact; they may differ by a few exits from each other.
            pub(crate) fn snapshot(&self) -> VcpuCounters {
                VcpuCounters {
                    exits: self.exits(),
                    $($name: self.$name.get(),)*
                }
            }
        }
    };
}
abi::vcpu_counters!(define);

/// The counters of a vCPU, for the pCPU that runs it.
#[derive(Clone, Copy)]
pub(crate) struct Tally<'a> {
    counters: &'a Counters,
    proof: Proof<'a>,
}

impl Tally<'_> {
    /// Counts an exit.
    #[inline]
    pub(crate) fn exit(self, reason: ExitReason) {
        self.counters.exits[reason as usize].add(self.proof, 1);
    }

    /// Adds `amount` to the counter that `which` chooses.
    #[inline]
    pub(crate) fn add(self, which: impl FnOnce(&Counters) -> &OwnerWord, amount: u64) {
        which(self.counters).add(self.proof, amount);
    }
}

impl Deref for Tally<'_> {
    type Target = Counters;

    #[inline]
    fn deref(&self) -> &Counters {
        self.counters
    }
}
