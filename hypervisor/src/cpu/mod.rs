//! Physical CPUs and their own data.
//!
//! A [`PerCpu`] block is laid out by writer: its own pCPU, or any pCPU. Blocks are made once, when the machine's CPUs
//! are known, and live for ever. So all code passes around `&'static PerCpu`.

pub(crate) mod preemption;
pub(crate) mod room;
pub(crate) mod scheduler;
pub(crate) mod step;
pub(crate) mod timers;

use alloc::vec::Vec;

use crossbeam_utils::CachePadded;
use spin::Once;
use vcpu_layout::{MailboxField, OwnerField, OwnerWord, lay_out};

use crate::arch::block::Block;
use crate::arch::{Arch, Machine};
use crate::control;
use crate::io::iommu;
use crate::sync::{AtomicBool, AtomicU64, Ordering, per_host};
use crate::vm::dirty::comeback;
use crate::vm::visits::FoundLately;
use preemption::preemption_point_before;

/// Maximum number of pCPUs in use; further ones stay asleep.
pub(crate) const MAX_CPUS: usize = 64;

/// Number of a pCPU: 0 is the boot pCPU, the others follow without gaps.
pub(crate) use sched::CpuId;
use sched::Share;

/// Data of one pCPU.
#[lay_out]
pub(crate) struct PerCpu {
    /// The architecture's part; first, because the way to find the block begins in it.
    #[layout(nested)]
    pub(crate) arch: <Machine as Arch>::PerCpu,
    /// Which pCPU this is.
    #[layout(frozen)]
    pub(crate) id: CpuId,
    /// Whether the pCPU has started.
    #[layout(cold)]
    pub(crate) online: AtomicBool,
    /// Host interrupts taken, by vector.
    #[layout(owner)]
    pub(crate) taken: Taken,
    /// Deadlines of the vCPUs that blocked here.
    #[layout(mailbox)]
    pub(crate) timers: timers::Timers,
    /// The run queue and its state.
    #[layout(nested)]
    pub(crate) scheduler: scheduler::Scheduler,
    /// Pages of memory that may go away.
    #[layout(owner)]
    pub(crate) found_lately: FoundLately,
    #[layout(owner)]
    host_context: Once<<Machine as Arch>::HostContext>,
}

const _: () = assert!(PerCpu::OFFSET_ARCH == 0);

impl MailboxField for timers::Timers {}
impl OwnerField for Taken {}
impl OwnerField for <Machine as Arch>::HostContext {}

/// Host interrupts that a pCPU has taken. Written by their handlers on the owner only.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Kicks by other pCPUs.
    pub(crate) kick: OwnerWord,
    /// The pCPU's own timer.
    pub(crate) timer: OwnerWord,
    /// Devices of the host.
    pub(crate) device: OwnerWord,
    /// Spurious interrupts.
    pub(crate) spurious: OwnerWord,
    /// Non-maskable interrupts.
    pub(crate) nmi: OwnerWord,
}

impl PerCpu {
    /// The block of a pCPU that has not started yet.
    pub(crate) fn new(id: CpuId, arch: <Machine as Arch>::PerCpu) -> Self {
        Self::lay_out(PerCpuFields {
            arch,
            id,
            online: AtomicBool::new(false),
            taken: Taken::default(),
            timers: timers::Timers::default(),
            scheduler: scheduler::Scheduler::new(),
            found_lately: FoundLately::default(),
            host_context: Once::new(),
        })
    }

    /// The pCPU's context for running guests; made at its first use, on the pCPU itself.
    #[inline]
    pub(crate) fn host_context(&self) -> &<Machine as Arch>::HostContext {
        self.host_context.call_once(Machine::enable)
    }
}

per_host! {
    static BLOCKS: Once<Vec<Block<PerCpu>>> = Once::new();
}

/// Sets the list of pCPUs, in order of their numbers. Called once, before any pCPU looks for its block.
pub(crate) fn init(blocks: impl Iterator<Item = PerCpu>) {
    BLOCKS.call_once(|| blocks.enumerate().map(|(number, block)| Block::new(number, block)).collect());
}

/// The block of the pCPU that runs this: one load.
#[inline(always)]
pub(crate) fn this() -> &'static PerCpu {
    Machine::this()
}

/// As [`this`], for code that may run before the pCPUs have their blocks.
pub(crate) fn try_this() -> Option<&'static PerCpu> {
    Machine::try_this()
}

/// All pCPUs, in order of their numbers.
pub(crate) fn all() -> &'static [Block<PerCpu>] {
    BLOCKS.get().map_or(&[], Vec::as_slice)
}

/// The block of the pCPU with this number.
///
/// # Panics
/// When the machine has no such pCPU.
pub(crate) fn by_id(id: CpuId) -> &'static PerCpu {
    &all()[id.index()]
}

/// Number of pCPUs.
pub(crate) fn count() -> usize {
    all().len()
}

/// Whether every pCPU has started.
pub(crate) fn all_online() -> bool {
    all().iter().all(|cpu| cpu.online.load(Ordering::Acquire))
}

/// Work of a pCPU after an exit for an interrupt, and between two vCPUs. The control port has its turn some thousand
/// times a second at most, so that vCPUs that take turns do not wait for it each time.
pub(crate) fn housekeeping(cpu: &PerCpu) {
    let now = Machine::now();
    cpu.timers.expire(now);
    scheduler::release(cpu, now);
    if cpu.id == BOOT {
        if now < NEXT_POLL.load(Ordering::Relaxed) {
            // The next tick comes soon then.
            BUSY.store(true, Ordering::Relaxed);
        } else {
            poll();
        }
    }
}

/// All such work: of a pCPU that would idle otherwise. Returns whether there is more to do soon. An interrupt of a VM's
/// device is no reason for a turn of the control port.
pub(crate) fn finish_housekeeping(cpu: &PerCpu) -> bool {
    let now = Machine::now();
    cpu.timers.expire(now);
    scheduler::release(cpu, now);
    cpu.id == BOOT && is_called(cpu, now) && poll()
}

/// Whether the control port has something to do, as far as is known, or a look whether it has is due.
fn is_called(cpu: &PerCpu, now: u64) -> bool {
    is_busy(cpu) || calls() != CALLS_SEEN.load(Ordering::Relaxed) || now >= NEXT_LOOK.load(Ordering::Relaxed)
}

/// Charges a VM with this share for what this pCPU has done for it since `began`, when it kept house.
pub(crate) fn charge_work(share: &Share, began: u64) {
    scheduler::charge_work(this(), share, began);
}

/// Has the pCPU that keeps house do so soon.
pub(crate) fn call_housekeeper() {
    Machine::kick(BOOT);
}

fn poll() -> bool {
    let calls_before = calls();
    let mut has_more = control::poll();
    preemption_point_before("large pages that come back");
    has_more |= comeback::work();
    preemption_point_before("events of IOMMUs");
    iommu::report();
    preemption_point_before("switch");
    // Interrupts that were taken meanwhile may be calls for more.
    has_more |= calls() != calls_before;
    BUSY.store(has_more, Ordering::Relaxed);
    CALLS_SEEN.store(calls_before, Ordering::Relaxed);
    let now = Machine::now();
    NEXT_POLL.store(now + Machine::nanos_to_ticks(POLL_NANOS), Ordering::Relaxed);
    NEXT_LOOK.store(now + Machine::nanos_to_ticks(LOOK_NANOS), Ordering::Relaxed);
    has_more
}

/// Interrupts that this pCPU has taken and that may be for the control port.
fn calls() -> u64 {
    let taken = &this().taken;
    taken.kick.get().wrapping_add(taken.device.get())
}

/// Minimum time between two turns of the control port while vCPUs run.
const POLL_NANOS: u64 = 100_000;
/// The same for a pCPU without work that nobody calls: the port's devices call, but their interrupts may get lost, and
/// guests' output waits. Half of a tick, so that each tick is a look.
const LOOK_NANOS: u64 = 5_000_000;

per_host! {
    /// Whether the pCPU that keeps house has more to do soon.
    static BUSY: CachePadded<AtomicBool> = CachePadded::new(AtomicBool::new(false));
    /// Host time at which the control port may have its next turn.
    static NEXT_POLL: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
    /// When it looks for something to do although nobody calls.
    static NEXT_LOOK: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
    /// The calls before its last turn.
    static CALLS_SEEN: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
}

/// Whether this pCPU should soon keep house again.
pub(crate) fn is_busy(cpu: &PerCpu) -> bool {
    cpu.id == BOOT && BUSY.load(Ordering::Relaxed)
}

/// The pCPU that booted; it speaks on the control port.
const BOOT: CpuId = CpuId(0);
