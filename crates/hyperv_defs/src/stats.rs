//! Pages of statistics: counters of 64 bits, by index (Linux' `mshv_debugfs_counters.c`, x86-64). Times are in units of
//! 100 ns. Only the counters that Dunlin has are named; all others are zero.

/// Counters of the hypervisor (HV_HYPERVISOR_COUNTER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HypervisorCounter {
    /// Logical processors.
    Processors = 1,
    /// Partitions, the caller's own among them.
    Partitions = 2,
    /// Pages of memory.
    Pages = 3,
    /// VPs of all partitions.
    Vps = 4,
}

/// Counters of a logical processor (HV_CPU_COUNTER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessorCounter {
    /// Time since the hypervisor started.
    GlobalTime = 1,
    /// Interrupts of devices and of its timer.
    HardwareInterrupts = 4,
    /// Interrupts by other processors.
    Ipis = 6,
    /// Interrupts of its timer.
    TimerInterrupts = 8,
}

/// Counters of a partition (HV_PROCESS_COUNTER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartitionCounter {
    /// Its VPs.
    Vps = 1,
    /// Pages deposited for it.
    DepositedPages = 5,
    /// Its pages of guest physical memory.
    GpaPages = 6,
    /// Flushes of the whole TLB of one of its VPs.
    TlbFlushes = 8,
    /// Its id.
    PartitionId = 26,
    /// Large pages of its second translation that were split for a dirty log.
    PagesShattered = 31,
    /// Its children.
    Children = 46,
}

/// Counters of a VP (HV_THREAD_COUNTER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VpCounter {
    /// Time in the guest, and in the hypervisor on its behalf.
    TotalRunTime = 1,
    /// Time in the hypervisor for it.
    HypervisorRunTime = 2,
    /// Hypercalls.
    Hypercalls = 7,
    /// Accesses to control registers that exit.
    ControlRegisters = 11,
    /// Instructions for ports.
    IoInstructions = 13,
    /// HLT.
    Halts = 15,
    /// CPUID.
    Cpuid = 19,
    /// Accesses to MSRs that exit.
    Msrs = 21,
    /// Other exits, exceptions and PAUSE among them.
    OtherIntercepts = 23,
    /// Exits for an interrupt of the host.
    ExternalInterrupts = 25,
    /// Exits because the guest became able to take an interrupt.
    PendingInterrupts = 27,
    /// Emulated accesses to memory.
    EmulatedInstructions = 29,
    /// Number of moves to another processor.
    Migrations = 45,
    /// Requests to flush its whole TLB.
    WholeFlushes = 48,
    /// Its pages that were flushed one by one.
    FlushedPages = 50,
    /// Interrupts that it got.
    VirtualInterrupts = 59,
    /// Hypercalls that are none of the following.
    OtherHypercalls = 65,
    /// Hypercalls that send interrupts.
    InterruptHypercalls = 67,
    /// Hypercalls that flush TLBs.
    MmuHypercalls = 68,
    /// Faults of the second translation.
    NestedPageFaults = 71,
    /// Time ready to run, without a processor.
    WaitingTime = 75,
}

/// Number of words at the start of a page that can be nonzero: all indices above are below it.
pub const WORDS: usize = 80;

/// The beginning of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters([[u8; 8]; WORDS]);

impl Default for Counters {
    fn default() -> Self {
        Self([[0; 8]; WORDS])
    }
}

macro_rules! index {
    ($($kind:ty)*) => {$(
        impl From<$kind> for usize {
            fn from(counter: $kind) -> Self {
                counter as Self
            }
        }
    )*};
}
index!(HypervisorCounter ProcessorCounter PartitionCounter VpCounter);

impl Counters {
    /// With this counter.
    #[must_use]
    pub fn with(mut self, counter: impl Into<usize>, value: u64) -> Self {
        if let Some(word) = self.0.get_mut(counter.into()) {
            *word = value.to_le_bytes();
        }
        self
    }

    /// A counter.
    #[must_use]
    pub fn get(&self, counter: impl Into<usize>) -> u64 {
        self.0.get(counter.into()).map_or(0, |word| u64::from_le_bytes(*word))
    }

    /// As it is in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_flattened()
    }
}

const _: () = assert!((VpCounter::WaitingTime as usize) < WORDS && (PartitionCounter::Children as usize) < WORDS);
