//! What is counted per vCPU.
//!
//! Counters are written by the pCPU that runs the vCPU, in the vCPU's own cache lines, and summed by whoever reads
//! them. Times are in TSC ticks of the host; [`crate::control::HostInfo::tsc_hz`] turns them into seconds.

use serde::{Deserialize, Serialize};

macro_rules! exit_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Why a guest was left, in classes that mean the same on every architecture.
        ///
        /// The names follow KVM's counters where the meaning is equal, so that dashboards and habits carry over.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum ExitReason {
            $($(#[$doc])* $variant,)*
        }

        impl ExitReason {
            /// All reasons, in the order of the counters.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// How many reasons there are.
            pub const COUNT: usize = Self::ALL.len();

            /// The reason's name in tables, JSON and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

exit_reasons! {
    /// A host interrupt: timer, kick, device.
    HostInterrupt = "irq_exits",
    /// The guest became ready to take an interrupt that was waiting.
    InterruptWindow = "irq_window_exits",
    /// The guest became ready to take an NMI that was waiting.
    NmiWindow = "nmi_window_exits",
    /// HLT or its like: nothing to do until an interrupt.
    Halt = "halt_exits",
    /// PAUSE or its like: spinning while others wait for the pCPU.
    Pause = "pause_exits",
    /// CPUID.
    Cpuid = "cpuid_exits",
    /// Read of a model-specific or system register.
    SysregRead = "msr_read_exits",
    /// Write of a model-specific or system register.
    SysregWrite = "msr_write_exits",
    /// Port I/O.
    PortIo = "io_exits",
    /// Access to an emulated device in memory.
    Mmio = "mmio_exits",
    /// Stage-2 fault that was settled without emulation.
    Stage2Fault = "stage2_fault_exits",
    /// A hypercall.
    Hypercall = "hypercalls",
    /// Write to a control register that the hypervisor keeps an eye on.
    ControlRegister = "cr_exits",
    /// An exception that the hypervisor intercepts.
    Exception = "exception_exits",
    /// Anything else.
    Other = "other_exits",
}

/// Counters of one vCPU since its VM was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuCounters {
    /// Entries into the guest.
    pub entries: u64,
    /// Exits by [`ExitReason`], in the order of [`ExitReason::ALL`].
    pub exits: [u64; ExitReason::COUNT],
    /// Interrupts delivered to the guest.
    pub irq_injections: u64,
    /// NMIs delivered to the guest.
    pub nmi_injections: u64,
    /// Exceptions delivered to the guest by the hypervisor.
    pub exception_injections: u64,
    /// Times the vCPU blocked in a halt (a halt that found work at once does not count).
    pub blocks: u64,
    /// Times the vCPU was picked by a pCPU other than the one before.
    pub migrations: u64,
    /// Entries that flushed TLB entries, of this vCPU alone or of all.
    pub tlb_flushes: u64,
    /// Of these, entries that flushed the entries of all guests on the pCPU.
    pub tlb_flushes_all: u64,
    /// Entries that gave the vCPU another tag.
    pub tag_assignments: u64,
    /// Entries that began a new generation of tags on their pCPU.
    pub tag_generations: u64,
    /// Hypercalls by which this vCPU had TLBs of others flushed.
    pub flush_calls: u64,
    /// vCPUs that these calls were for, the caller not counted.
    pub flush_targets: u64,
    /// Of these, vCPUs that were in the guest and were kicked out of it; the others flush before they next enter.
    pub flush_kicks: u64,
    /// Ticks that these calls waited for kicked vCPUs to leave the guest.
    pub flush_wait_ticks: u64,
    /// Pages of this vCPU that were flushed one by one, for whoever asked.
    pub flush_pages: u64,
    /// Requests to flush all of this vCPU's entries, whoever asked.
    pub flush_whole: u64,
    /// Hypercalls by which this vCPU sent interrupts.
    pub ipi_calls: u64,
    /// Ticks in the guest.
    pub guest_ticks: u64,
    /// Ticks in the hypervisor on behalf of this vCPU.
    pub host_ticks: u64,
    /// Ticks ready to run while every allowed pCPU was busy with others.
    pub wait_ticks: u64,
}

impl VcpuCounters {
    /// Sum of all exits.
    #[must_use]
    pub fn total_exits(&self) -> u64 {
        self.exits.iter().sum()
    }

    /// Exits of one reason.
    #[must_use]
    pub fn exits_for(&self, reason: ExitReason) -> u64 {
        self.exits[reason as usize]
    }

    /// Counts one exit.
    pub fn count_exit(&mut self, reason: ExitReason) {
        self.exits[reason as usize] += 1;
    }
}
