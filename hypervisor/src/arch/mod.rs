//! The one place that names an architecture.
//!
//! Each architecture's folder is a module of the same structure: `host`, the machine for the hypervisor itself;
//! `guest`, the machine that a guest sees; and a back end, `svm` or `el2`, with the virtualization hardware. The same
//! file name has the same role.
//!
//! [`Arch`] is the contract: what the core needs of a machine, and what it relies on. [`Machine`] is the one of this
//! build, chosen here and nowhere else: on bare metal the architecture's, in tests the [`fake`].
//!
//! Unsafe code is only in this folder. Both architectures share these files: [`ram`] wraps host memory and needs only
//! their `paging::direct_map`. [`guest_ram`] wraps a VM's memory, [`block`] a CPU's own pages, [`growing`] a list that
//! others read, [`control_port`] the device of the control port. `ticks` converts them to time, `mappings` adds to the
//! hypervisor's own address space, and `stack` finds return addresses for a report. [`trace`] records stage-2 changes
//! in debug builds.

pub(crate) mod block;
mod contract;
#[cfg(not(test))]
mod control_port;
#[cfg(test)]
pub(crate) mod fake;
#[allow(dead_code, reason = "not every architecture has parents")]
pub(crate) mod growing;
pub(crate) mod guest_ram;
#[cfg(any(test, target_arch = "x86_64"))]
mod hypercall;
#[cfg(not(test))]
mod mappings;
pub(crate) mod ram;
mod stack;
pub(crate) mod tables;
#[cfg(not(test))]
mod ticks;
pub(crate) mod trace;
#[cfg_attr(test, allow(dead_code, reason = "the fake machine tells nothing"))]
mod weaknesses;

#[cfg(all(not(test), target_arch = "aarch64"))]
mod aarch64;
#[cfg(all(not(test), target_arch = "x86_64"))]
mod x86_64;

pub(crate) use contract::{Arch, ControlPort, GivenFunctions, HostConsole, VcpuState};

#[cfg(all(not(test), target_arch = "aarch64"))]
use aarch64 as machine;
#[cfg(test)]
use fake as machine;
#[cfg(all(not(test), target_arch = "x86_64"))]
use x86_64 as machine;

/// The machine of this build.
pub(crate) use machine::Machine;
// The shared files of this folder use these.
use machine::paging;
#[cfg(not(test))]
use machine::{clock, virtio};
