//! Trapped system registers: their values, and the effect of writes.
//!
//! The ID registers show the guest's features: [`super::id_registers`]. Registers of hidden features trap, and are
//! undefined here. [`crate::arch::aarch64::el2`] sets the traps.

use aarch64_defs::syndrome::{SystemAccess, SystemRegister};
use abi::counters::ExitReason;
use log::debug;

use super::{delivery, platform};
use crate::arch::VcpuState as _;
use crate::cpu::scheduler;
use crate::device::generic_timer::Register;
use crate::vcpu::run::{Next, Running};

/// MRS, MSR and system instructions.
#[inline]
pub(in crate::arch::aarch64) fn access(run: &mut Running<'_>, access: SystemAccess) -> Next {
    let SystemAccess { register, general, is_read } = access;
    let tally = run.tally;
    if is_read {
        tally.exit(ExitReason::SysregRead);
        let timer = || match timer_register(register) {
            Some(register) => Some(run.owner.arch.read_physical_timer(register)),
            None => is_counter(register).then(|| run.owner.arch.count()),
        };
        match read(run, register).or_else(timer).or_else(|| run.owner.arch.debug.read(register)) {
            Some(value) => {
                run.owner.arch.set_general(general, value);
                run.owner.arch.skip();
            }
            None => refuse(run, register),
        }
    } else {
        tally.exit(ExitReason::SysregWrite);
        let value = run.owner.arch.general(general);
        if write(run, register, value) {
            run.owner.arch.skip();
        } else {
            refuse(run, register);
        }
    }
    Next::Resume
}

#[cold]
fn refuse(run: &mut Running<'_>, register: SystemRegister) {
    debug!("{} vCPU {}: {register:?} does not exist", run.vm.name(), run.index);
    run.owner.arch.undefined();
}

/// The guest's read; `None` if it has no such register.
fn read(run: &Running<'_>, register: SystemRegister) -> Option<u64> {
    let value = match register.parts() {
        // ID registers.
        (3, 0, 0, crm @ 1..=7, op2) => run.owner.arch.id_registers.get(crm, op2),
        // REVIDR_EL1, AIDR_EL1.
        (3, 0, 0, 0, 6) | (3, 1, 0, 0, 7) => 0,
        // ACTLR_EL1.
        (3, 0, 1, 0, 1) => 0,
        // Debug registers: [`crate::arch::aarch64::el2::debug`].
        _ => return None,
    };
    Some(value)
}

/// The register of the physical timer with this encoding, if it is one.
fn timer_register(register: SystemRegister) -> Option<Register> {
    match register.parts() {
        (3, 3, 14, 2, 0) => Some(Register::Value),
        (3, 3, 14, 2, 1) => Some(Register::Control),
        (3, 3, 14, 2, 2) => Some(Register::Compare),
        _ => None,
    }
}

/// Whether it is the physical counter, with or without ordering of its own: CNTPCT_EL0, CNTPCTSS_EL0.
fn is_counter(register: SystemRegister) -> bool {
    matches!(register.parts(), (3, 3, 14, 0, 1 | 5))
}

/// The guest's write; false if it has no such register.
fn write(run: &mut Running<'_>, register: SystemRegister, value: u64) -> bool {
    match register.parts() {
        // ICC_SGI1R_EL1.
        (3, 0, 12, 11, 5) => {
            delivery::send_sgi(run, value);
            true
        }
        // The physical timer: the pCPU's own goes off not later than this one.
        (3, 3, 14, 2, 0..=2) => {
            if let Some(register) = timer_register(register) {
                run.owner.arch.write_physical_timer(register, value);
                scheduler::arm(run.cpu, run.vm.share(), run.owner.arch.deadline());
            }
            true
        }
        // ICC_ASGI1R_EL1, ICC_SGI0R_EL1: for groups of interrupts that do not exist.
        (3, 0, 12, 11, 6 | 7) => true,
        // ICC_DIR_EL1, which traps while the list registers do not hold everything.
        (3, 0, 12, 11, 1) => {
            let [b0, b1, b2, ..] = value.to_le_bytes();
            let intid = u32::from_le_bytes([b0, b1, b2, 0]);
            run.owner.arch.gic.deactivate(intid, &mut run.vm.platform().distributor.lock());
            platform::deliver_news_of(run);
            true
        }
        // Cache maintenance by set and way: caches are coherent, and for a device that reads behind them it is no means
        // on a machine with several processors.
        (1, 0, 7, 6 | 10 | 14, 2) => true,
        // ACTLR_EL1, CSSELR_EL1 if it traps.
        (3, 0, 1, 0, 1) => true,
        _ => run.owner.arch.debug.write(register, value),
    }
}
