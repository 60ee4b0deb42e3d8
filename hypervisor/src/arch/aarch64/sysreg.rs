//! System registers that leave the guest: what they read as, what a write does.
//!
//! The ID registers say what a guest may use. They are the machine's, without what is not switched between guests (SVE, SME,
//! memory tagging) and what guests are kept away from (performance monitors, trace, error records, partitions of
//! caches). The rest reads as zero, or is not there.

use aarch64_defs::syndrome::{SystemAccess, SystemRegister};
use abi::counters::ExitReason;
use log::debug;

use super::register::read_register;
use super::{platform, routing};
use crate::vcpu::run::{Next, Running};

/// MRS, MSR and system instructions.
#[inline]
pub(super) fn access(run: &mut Running<'_>, access: SystemAccess) -> Next {
    let SystemAccess { register, general, is_read } = access;
    let tally = run.tally;
    if is_read {
        tally.exit(ExitReason::SysregRead);
        match read(register).or_else(|| run.owner.arch.debug.read(register)) {
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
    debug!("{} vCPU {}: {register:?} is not there", run.vm.name(), run.index);
    run.owner.arch.undefined();
}

/// Fields of four bits, by their number, of an ID register.
const fn fields<const N: usize>(numbers: [u32; N]) -> u64 {
    let mut mask = 0;
    let mut index = 0;
    while index < N {
        mask |= 0xf << (4 * numbers[index]);
        index += 1;
    }
    mask
}

/// ID_AA64PFR0_EL1: error records, SVE, secure EL2, partitions, activity monitors, realms; second and third version of what
/// speculation may not do, which has registers.
const HIDDEN_PFR0: u64 = fields([7, 8, 9, 10, 11, 13]);
/// ID_AA64PFR1_EL1: tags of memory, fractions of error records and partitions, SME, random number traps, non-maskable
/// interrupts.
const HIDDEN_PFR1: u64 = fields([2, 3, 4, 6, 7, 9]);
/// ID_AA64DFR0_EL1: what stays are the version of the debug architecture and its breakpoints.
const SHOWN_DFR0: u64 = fields([0, 3, 5, 7]);
/// ID_AA64MMFR1_EL1: VHE, limited ordering regions, HCRX_EL2.
const HIDDEN_MMFR1: u64 = fields([2, 4, 10]);
/// ID_AA64MMFR2_EL1: nested virtualization, traps of EL2.
const HIDDEN_MMFR2: u64 = fields([6, 14]);

/// What a guest reads; `None` where it has no such register.
fn read(register: SystemRegister) -> Option<u64> {
    let value = match register.parts() {
        // ID registers: op0 3, op1 0, CRn 0, CRm 1 to 7.
        (3, 0, 0, 4, 0) => {
            let value = read_register!("id_aa64pfr0_el1") & !HIDDEN_PFR0;
            // CSV2 beyond 1 has registers of its own.
            let csv2 = (value >> 56 & 0xf).min(1);
            value & !(0xf << 56) | csv2 << 56
        }
        (3, 0, 0, 4, 1) => read_register!("id_aa64pfr1_el1") & !HIDDEN_PFR1,
        (3, 0, 0, 5, 0) => read_register!("id_aa64dfr0_el1") & SHOWN_DFR0,
        (3, 0, 0, 6, 0) => read_register!("id_aa64isar0_el1"),
        (3, 0, 0, 6, 1) => read_register!("id_aa64isar1_el1"),
        (3, 0, 0, 6, 2) => read_register!("s3_0_c0_c6_2"),
        (3, 0, 0, 7, 0) => read_register!("id_aa64mmfr0_el1"),
        (3, 0, 0, 7, 1) => read_register!("id_aa64mmfr1_el1") & !HIDDEN_MMFR1,
        (3, 0, 0, 7, 2) => read_register!("id_aa64mmfr2_el1") & !HIDDEN_MMFR2,
        // Those of AArch32 matter to programs of 32 bits only, those that are reserved read as zero.
        (3, 0, 0, 1, 0) => read_register!("id_pfr0_el1"),
        (3, 0, 0, 1, 1) => read_register!("id_pfr1_el1"),
        (3, 0, 0, 1, 4) => read_register!("id_mmfr0_el1"),
        (3, 0, 0, 1, 5) => read_register!("id_mmfr1_el1"),
        (3, 0, 0, 1, 6) => read_register!("id_mmfr2_el1"),
        (3, 0, 0, 1, 7) => read_register!("id_mmfr3_el1"),
        (3, 0, 0, 2, 0) => read_register!("id_isar0_el1"),
        (3, 0, 0, 2, 1) => read_register!("id_isar1_el1"),
        (3, 0, 0, 2, 2) => read_register!("id_isar2_el1"),
        (3, 0, 0, 2, 3) => read_register!("id_isar3_el1"),
        (3, 0, 0, 2, 4) => read_register!("id_isar4_el1"),
        (3, 0, 0, 2, 5) => read_register!("id_isar5_el1"),
        (3, 0, 0, 2, 6) => read_register!("id_mmfr4_el1"),
        (3, 0, 0, 2, 7) => read_register!("s3_0_c0_c2_7"),
        (3, 0, 0, 3, 0) => read_register!("mvfr0_el1"),
        (3, 0, 0, 3, 1) => read_register!("mvfr1_el1"),
        (3, 0, 0, 3, 2) => read_register!("mvfr2_el1"),
        (3, 0, 0, 1..=7, _) => 0,
        // REVIDR_EL1, AIDR_EL1.
        (3, 0, 0, 0, 6) | (3, 1, 0, 0, 7) => 0,
        // ACTLR_EL1.
        (3, 0, 1, 0, 1) => 0,
        // Debug registers: [`super::debug`].
        _ => return None,
    };
    Some(value)
}

/// What a guest writes; false where it has no such register.
fn write(run: &mut Running<'_>, register: SystemRegister, value: u64) -> bool {
    match register.parts() {
        // ICC_SGI1R_EL1.
        (3, 0, 12, 11, 5) => {
            routing::send_sgi(run, value);
            true
        }
        // ICC_ASGI1R_EL1, ICC_SGI0R_EL1: for groups of interrupts that do not exist.
        (3, 0, 12, 11, 6 | 7) => true,
        // ICC_DIR_EL1, which traps while the list registers do not hold everything.
        (3, 0, 12, 11, 1) => {
            let [b0, b1, b2, ..] = value.to_le_bytes();
            let intid = u32::from_le_bytes([b0, b1, b2, 0]);
            run.owner.arch.gic.deactivate(intid, &mut run.vm.platform().distributor.lock());
            platform::deliver_news(run.vm);
            true
        }
        // Cache maintenance by set and way: caches are coherent, and the guest has no device that reads behind them.
        (1, 0, 7, 6 | 10 | 14, 2) => true,
        // ACTLR_EL1, CSSELR_EL1 where it traps.
        (3, 0, 1, 0, 1) => true,
        _ => run.owner.arch.debug.write(register, value),
    }
}
