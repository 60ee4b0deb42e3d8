//! The machine. The only file that names an architecture.
//!
//! Each architecture defines the same names: `apic` (interrupts between CPUs, timer), `attempt` (instructions that may
//! fault), `boot`, `code_pages` (pages for code that is written at run time), `control` (identification and control
//! registers), `cpu_local`, `encode` (machine code), `forms` (ways to touch memory), `hyperv` (the Hyper-V interface as
//! guests see it), `interrupts`, `modes` (short trips into other CPU modes), `power`, `probe` (runs code until it ends),
//! `registers`, `remap` (pages that all CPUs see), `round_trip` (loops to be measured), `serial`, `tlb`, `tsc`, `window`
//! (pages that experiments map and unmap).

#![expect(
    unsafe_code,
    reason = "this is where the guest meets the machine: instructions, tables that hardware reads, entry from assembly"
)]

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
