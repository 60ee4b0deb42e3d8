//! The one place that names an architecture.
//!
//! Each architecture's folder is a module of the same structure: `host`, the machine for the hypervisor itself;
//! `guest`, the machine that a guest sees; and a back end, `svm` or `el2`, with the virtualization hardware. The same
//! file name has the same role.
//!
//! Each folder's `mod.rs` re-exports the names below. This file takes the architecture of the build and re-exports
//! them, so the rest of the hypervisor says `arch::irq::wait()` and does not know its architecture. Each must define:
//!
//! | name | what |
//! |---|---|
//! | `boot` | entry from the boot loader; ends in [`crate::start`] on the boot pCPU and [`crate::run_cpu`] on the others |
//! | `paging` | host page tables: `direct_map` and its inverse, `map_mmio`, `map_stack` |
//! | `percpu` | `ArchPerCpu`; finding the block of this pCPU: `this`, `try_this` |
//! | `irq` | exceptions, host interrupts: `wait`, `mask`; the stack that a panic shows: `stack_pointer`, `for_each_return_address`; `read_null` |
//! | `interrupts` | the local interrupt controller: `kick`, `kick_all`, `arm_timer`, `stop_others`, `own_page` |
//! | `tsc` | the host's clock: `now`, `hz`, `nanos`, and conversions |
//! | `serial` | `Serial`, the UART of the log |
//! | `power` | `exit`, `stay`, `stop_this_cpu` |
//! | `virtio` | `find_console`, which finds the control port's device, and its `ConsoleTransport` |
//! | `virtualization` | the machine's virtualization features: `check`, `findings`, `features`, `describe`; `enable` and `HostContext` of a pCPU; `SLICES_PER_SECOND`, `spares_first_cpu` |
//! | `tags` | TLB tags: `pool`, `cpu`, and the parts of a VM, a vCPU and a pCPU in a `Pool` |
//! | `gate` | masks host interrupts around an entry (x86-64: GIF): `hold`, `take`, `release` |
//! | `vcpu` | `ArchVcpu`, a vCPU's state: `load`, `enter`, `unload` and queries of the loop |
//! | `exit` | `handle`, the one match on the exit reason |
//! | `routing` | `Posted`, interrupts that others leave for a vCPU; `take_posted`, `prepare` |
//! | `platform` | `Platform`, shared by the vCPUs of a VM; `serial_interrupt` |
//! | `uart` | `Uart`, the guests' serial port |
//! | `loader` | `ram_layout`, `load` |
//! | `format` | `Stage2Format` and `stage2_format`, the format of stage-2 tables |
//! | `tlb` | flushes for changes of stage 2: `publish`, `flush`, `flush_local`; `rules`, for the check of a trace |
//! | `emulate` | `Decoded`, the cache of emulated instructions |
//!
//! Unsafe code is only in this folder. Both architectures share these files: [`ram`] wraps host memory and needs only
//! their `paging::direct_map`. [`bank`] wraps the memory of a VM, [`block`] a CPU's own pages, [`control_port`] the
//! device of the control port. `clock` converts ticks, and [`trace`] records stage-2 changes in debug builds.

#[cfg_attr(
    target_arch = "aarch64",
    allow(dead_code, reason = "no instructions are emulated there, and nothing is read often")
)]
pub(crate) mod bank;
pub(crate) mod block;
mod clock;
#[cfg(not(test))]
pub(crate) mod control_port;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod ram;
pub(crate) mod tables;
pub(crate) mod trace;

#[cfg(all(not(test), target_arch = "aarch64"))]
mod aarch64;
#[cfg(all(not(test), target_arch = "x86_64"))]
mod x86_64;

#[cfg(all(not(test), target_arch = "aarch64"))]
pub(crate) use aarch64::*;
#[cfg(test)]
pub(crate) use fake::*;
#[cfg(all(not(test), target_arch = "x86_64"))]
pub(crate) use x86_64::*;
