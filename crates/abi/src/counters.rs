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

/// Names and describes the counters of a vCPU but for its exits, once for all who count, add up or show them: hands the
/// list to the macro `then`.
#[macro_export]
macro_rules! vcpu_counters {
    ($then:ident) => {
        $then! {
            /// Entries into the guest.
            entries,
            /// Interrupts delivered to the guest.
            irq_injections,
            /// NMIs delivered to the guest.
            nmi_injections,
            /// Exceptions delivered to the guest by the hypervisor.
            exception_injections,
            /// Times the vCPU blocked in a halt (a halt that found work at once does not count).
            blocks,
            /// Times the vCPU was picked by a pCPU other than the one before.
            migrations,
            /// Entries that flushed TLB entries, of this vCPU alone or of all.
            tlb_flushes,
            /// Of these, entries that flushed the entries of all guests on the pCPU.
            tlb_flushes_all,
            /// Entries that gave the vCPU another tag.
            tag_assignments,
            /// Entries that began a new generation of tags on their pCPU.
            tag_generations,
            /// Hypercalls by which this vCPU had TLBs of others flushed.
            flush_calls,
            /// vCPUs that these calls were for, the caller not counted.
            flush_targets,
            /// Of these, vCPUs that were in the guest and were kicked out of it; the others flush before they next enter.
            flush_kicks,
            /// Ticks that these calls waited for kicked vCPUs to leave the guest.
            flush_wait_ticks,
            /// Pages of this vCPU that were flushed one by one, for whoever asked.
            flush_pages,
            /// Requests to flush all of this vCPU's entries, whoever asked.
            flush_whole,
            /// Hypercalls by which this vCPU sent interrupts.
            ipi_calls,
            /// Emulated instructions that were known already. Hits and misses together are all that were looked for.
            decode_hits,
            /// Emulated instructions that had to be decoded.
            decode_misses,
            /// Decoded instructions that were remembered.
            decode_insertions,
            /// Remembered instructions that made room for others.
            decode_replaced,
            /// Remembered instructions that were forgotten because somebody wrote to the page of their code.
            decode_evicted_by_code_writes,
            /// Remembered instructions that were forgotten because somebody wrote to a page table on the way to their code.
            decode_evicted_by_table_writes,
            /// Remembered instructions that were forgotten because a processor walked a page table on the way to their code: nested
            /// paging of SVM takes each walk for a write.
            decode_evicted_by_walks,
            /// Stage-2 faults of writes and walks to pages that are protected for remembered instructions.
            decode_write_faults,
            /// Walks of the guest's page tables that the emulator has done; those that a look at the entries of an earlier
            /// one confirmed are not counted.
            emulator_walks,
            /// Instructions that could not be emulated; the guest got an exception.
            emulations_refused,
            /// Pages that were mapped in stage 2 because this vCPU touched them first.
            pages_populated,
            /// Writes that a dirty log stopped, to be recorded.
            dirty_faults,
            /// Large stage-2 pages that these faults split.
            dirty_splits,
            /// Faults on memory after which this vCPU flushed entries of its own pCPU, and no others.
            stage2_local_flushes,
            /// Faults on memory after which this vCPU flushed entries of all pCPUs.
            stage2_broadcasts,
            /// Ticks from exit to entry in faults on memory: how long a dirty log, or memory that is mapped late, held this vCPU up.
            stage2_stall_ticks,
            /// Ticks in the guest.
            guest_ticks,
            /// Ticks in the hypervisor on behalf of this vCPU.
            host_ticks,
            /// Ticks ready to run while every allowed pCPU was busy with others.
            wait_ticks,
        }
    };
}

macro_rules! define {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one vCPU since its VM was created.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct VcpuCounters {
            /// Exits by [`ExitReason`], in the order of [`ExitReason::ALL`].
            pub exits: [u64; ExitReason::COUNT],
            $($(#[$doc])* pub $name: u64,)*
        }

        impl VcpuCounters {
            /// All counters but the exits, by name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds those of another vCPU.
            pub fn add(&mut self, other: &Self) {
                for (sum, more) in self.exits.iter_mut().zip(other.exits) {
                    *sum = sum.saturating_add(more);
                }
                $(self.$name = self.$name.saturating_add(other.$name);)*
            }
        }
    };
}
vcpu_counters!(define);

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
