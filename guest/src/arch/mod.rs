//! The machine. The only file that names an architecture.
//!
//! Each architecture defines the same modules: `attempt` (instructions that may fault), `boot`, `control`
//! (identification and control registers), `controller` (interrupts between CPUs, timer), `cpu_local`, `entries` (of
//! page tables), `host_writes` (instructions by which the hypervisor writes to memory), `interrupts`, `power`,
//! `registers`, `remap` (pages that all CPUs share), `remote` (flushes of other TLBs without interrupts), `round_trip`
//! (measured loops), `serial`, `tlb`, `tsc`, `vectors`. Its other modules are for its own experiments.

#![expect(
    unsafe_code,
    reason = "this is where the guest meets the machine: instructions, tables that hardware reads, entry from assembly"
)]

#[cfg(target_arch = "aarch64")]
mod aarch64;
pub(crate) mod ram;
pub(crate) mod window;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
