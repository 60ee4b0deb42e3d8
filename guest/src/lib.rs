//! The part of the measuring guest that needs no machine: it parses the boot data, and computes results.
//!
//! * [`command_line`]: the settings, and the nearest known word for a misspelt one.
//! * [`acpi`]: the list of CPUs, from RSDP to MADT.
//! * [`random`]: the generator of the random experiments, repeatable from a seed.
//! * [`batches`]: median and minimum of repeated measurements.
//! * [`percentiles`]: mean and percentiles of many, and the time that a CPU was away.
//! * [`cpu_set`]: a set of CPUs.
//! * [`hypercall`]: the Hyper-V hypercalls as data.
//! * [`sequence`]: the numbers that reveal a stale translation.

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
