//! The half of the measuring guest that needs no machine: reading what it was booted with, and arithmetic on results.
//!
//! * [`command_line`]: the settings, and the nearest known word for a misspelt one.
//! * [`acpi`]: which CPUs there are, from RSDP to MADT.
//! * [`random`]: the generator of the random experiments, repeatable from a seed.
//! * [`batches`]: median and minimum of repeated measurements.
//! * [`percentiles`]: mean and percentiles of many, and the time that a CPU was away.
//! * [`cpu_set`]: a set of CPUs.
//! * [`hypercall`]: the Hyper-V hypercalls as data.
//! * [`sequence`]: the numbers by which a stale translation gives itself away.

#![no_std]
#![forbid(unsafe_code)]

pub mod acpi;
pub mod batches;
pub mod command_line;
pub mod cpu_set;
pub mod hypercall;
pub mod percentiles;
pub mod random;
pub mod sequence;

#[cfg(test)]
mod tests;
