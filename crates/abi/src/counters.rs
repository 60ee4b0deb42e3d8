//! Counters per vCPU.
//!
//! The pCPU that runs a vCPU writes its counters, in the vCPU's own cache lines; the reader sums them. Times are in
//! ticks of the host's clock; [`crate::control::HostInfo::clock_hz`] converts them into seconds.

use serde::{Deserialize, Serialize};

macro_rules! exit_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Why a guest exited, in classes that mean the same on every architecture.
        ///
        /// The names are those of KVM's counters where the meaning is equal, so that existing dashboards work.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum ExitReason {
            $($(#[$doc])* $variant,)*
        }

        impl ExitReason {
            /// All reasons, in the order of the counters.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Number of reasons.
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
    /// The guest became able to take a pending interrupt.
    InterruptWindow = "irq_window_exits",
    /// The guest became able to take a pending NMI.
    NmiWindow = "nmi_window_exits",
    /// HLT or similar: idle until an interrupt.
    Halt = "halt_exits",
    /// PAUSE or similar: spinning while others wait for the pCPU.
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
    /// A stage-2 fault that needed no emulation.
    Stage2Fault = "stage2_fault_exits",
    /// A hypercall.
    Hypercall = "hypercalls",
    /// Write to an intercepted control register.
    ControlRegister = "cr_exits",
    /// An exception that the hypervisor intercepts.
    Exception = "exception_exits",
    /// Anything else.
    Other = "other_exits",
}

/// Names and describes a vCPU's counters, except its exits, for all code that counts, sums or shows them: passes the
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
            /// Times the vCPU blocked in a halt (not counted if it had pending work at once).
            blocks,
            /// Times the vCPU ran on another pCPU than before.
            migrations,
            /// Entries that flushed TLB entries, of this vCPU only or of all.
            tlb_flushes,
            /// Of these, entries that flushed the entries of all guests on the pCPU.
            tlb_flushes_all,
            /// Entries that gave the vCPU another tag.
            tag_assignments,
            /// Entries that began a new generation of tags on their pCPU.
            tag_generations,
            /// Hypercalls by which this vCPU flushed TLBs of others.
            flush_calls,
            /// Target vCPUs of these calls, the caller not counted.
            flush_targets,
            /// Of these, vCPUs that were kicked out of their guest; the others flush before they next enter.
            flush_kicks,
            /// Ticks that these calls waited for kicked vCPUs to leave the guest.
            flush_wait_ticks,
            /// Pages of this vCPU that were flushed one by one, for any requester.
            flush_pages,
            /// Requests to flush all of this vCPU's entries, from any requester.
            flush_whole,
            /// Hypercalls by which this vCPU sent interrupts.
            ipi_calls,
            /// Emulated instructions that were cached. Hits plus misses are all lookups.
            decode_hits,
            /// Emulated instructions that had to be decoded.
            decode_misses,
            /// Decoded instructions that were cached.
            decode_insertions,
            /// Cached instructions that others replaced.
            decode_replaced,
            /// Cached instructions that were dropped because of a write to the page of their code.
            decode_evicted_by_code_writes,
            /// Cached instructions that were dropped because of a write to a page table on the walk to their code.
            decode_evicted_by_table_writes,
            /// Cached instructions that were dropped because a processor walked a page table on the walk to their code:
            /// nested paging of SVM treats each walk as a write.
            decode_evicted_by_walks,
            /// Stage-2 faults of writes and walks to pages that are protected for cached instructions.
            decode_write_faults,
            /// Walks of the guest's page tables by the emulator, without those that a check of a cached walk replaced.
            emulator_walks,
            /// Instructions that could not be emulated, so that the guest got an exception.
            emulations_refused,
            /// Exits of a child that were handed to its parent, for its VMM: ports, devices, errors.
            vmm_exits,
            /// Exits of a child that were handed to its parent because the parent had taken the memory away.
            vmm_faults,
            /// Pages that were mapped in stage 2 at a first touch of this vCPU.
            pages_populated,
            /// Writes that faulted so that a dirty log could record them.
            dirty_faults,
            /// Large stage-2 pages that these faults split.
            dirty_splits,
            /// Faults on memory after which this vCPU flushed entries of its own pCPU only.
            stage2_local_flushes,
            /// Faults on memory after which this vCPU flushed entries of all pCPUs.
            stage2_broadcasts,
            /// Ticks from exit to entry in faults on memory: the delay of this vCPU by a dirty log, or by memory that
            /// is mapped late.
            stage2_stall_ticks,
            /// Ticks in the guest.
            guest_ticks,
            /// Ticks in the hypervisor for this vCPU.
            host_ticks,
            /// Ticks ready to run while every allowed pCPU was busy.
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
            /// All counters except the exits, by name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds the counters of another vCPU.
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
