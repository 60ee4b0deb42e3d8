//! The one place that names an architecture.
//!
//! Each architecture's folder is a module of the same shape: `host`, the machine as the hypervisor itself uses it; `guest`, the
//! machine that a guest sees; and a back end, `svm` or `el2`, which is what virtualization is there. The same file name is the
//! same role.
//!
//! The names below are re-exported by each folder's `mod.rs`; the one being built for is taken here and re-exported, so
//! that the rest of the hypervisor says `arch::irq::wait()` and never learns which one it runs on.
//! Each must define:
//!
//! | name | what |
//! |---|---|
//! | `boot` | entry from the boot loader; ends in [`crate::start`] on the boot pCPU and [`crate::run_cpu`] on the others |
//! | `paging` | host page tables: `direct_map` and its inverse, `map_mmio`, `map_stack` |
//! | `percpu` | `ArchPerCpu`; finding the block of this pCPU: `this`, `try_this` |
//! | `irq` | exceptions, host interrupts: `wait`, `mask`; the stack that a panic shows: `stack_pointer`, `for_each_return_address`; `read_null` |
//! | `interrupts` | the local interrupt controller: `kick`, `kick_all`, `arm_timer`, `stop_others`, `own_page` |
//! | `tsc` | the host's clock: `now`, `hz`, `nanos`, and from one to the other |
//! | `serial` | `Serial`, the UART of the log |
//! | `power` | `exit`, `stay`, `stop_this_cpu` |
//! | `virtio` | `find_console`, where the control port's device is, and its `ConsoleTransport` |
//! | `virtualization` | what the machine offers for guests: `check`, `findings`, `features`, `describe`; `enable` and `HostContext` of a pCPU; `SLICES_PER_SECOND`, `spares_first_cpu` |
//! | `tags` | TLB tags: `pool`, `cpu`, and what a VM, a vCPU and a pCPU have of a `Pool` |
//! | `gate` | who may interrupt the vCPU loop: `hold`, `take`, `release` |
//! | `vcpu` | `ArchVcpu`, a vCPU's state: `load`, `enter`, `unload` and what the loop asks of it |
//! | `exit` | `handle`, the one match on why a guest was left |
//! | `routing` | `Posted`, what others leave for a vCPU; `take_posted`, `prepare` |
//! | `platform` | `Platform`, what vCPUs of a VM share; `serial_interrupt` |
//! | `uart` | `Uart`, the serial port that guests have |
//! | `loader` | `ram_layout`, `load` |
//! | `format` | `Stage2Format` and `stage2_format`, the format of stage-2 tables |
//! | `tlb` | what changes of stage 2 owe to TLBs: `publish`, `flush`, `flush_local`; `rules`, by which a trace is judged |
//! | `emulate` | `Decoded`, what is remembered of instructions that are emulated |
//!
//! Unsafe code lives in this folder and nowhere else. [`ram`] is the shell around host memory that both architectures
//! share: it needs only their `paging::direct_map`. [`bank`] is that around the memory of a VM, [`block`] that around what
//! a CPU has to itself, [`control_port`] that around the device of the byte stream to the tool. `clock` is what both make of their ticks,
//! [`trace`] what debug builds tell of stage 2.

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
