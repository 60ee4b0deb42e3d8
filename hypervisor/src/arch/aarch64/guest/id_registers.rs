//! ID registers of the pCPUs, and the ID registers that guests read.
//!
//! Each pCPU adds its own when it starts. Guests read what all have in common, within the allow-list of
//! [`aarch64_defs::features`], on any pCPU. A guest from another host goes on to read what it was told there.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use aarch64_defs::features::IdRegisters;
use spin::{Mutex, Once};

use crate::arch::aarch64::register::read_register;

/// The common features of the pCPUs that have started so far.
static COMMON: Mutex<Option<IdRegisters>> = Mutex::new(None);
/// The guests' registers, from the first request on.
static OFFERED: Once<Arc<IdRegisters>> = Once::new();
/// The features of two pCPUs differ.
static DIFFER: AtomicBool = AtomicBool::new(false);
/// Some pCPU has registers of error records (ID_AA64PFR0_EL1.RAS).
static ANY_RAS: AtomicBool = AtomicBool::new(false);
/// Some pCPU has limited ordering regions (ID_AA64MMFR1_EL1.LO).
static ANY_LOR: AtomicBool = AtomicBool::new(false);

/// Adds this pCPU. Each does so once, before it is online.
pub(in crate::arch::aarch64) fn add_this_cpu() {
    let own = IdRegisters::offered(read);
    if read(4, 0) >> 28 & 0xf != 0 {
        ANY_RAS.store(true, Ordering::Relaxed);
    }
    if read(7, 1) >> 16 & 0xf != 0 {
        ANY_LOR.store(true, Ordering::Relaxed);
    }
    let mut common = COMMON.lock();
    let merged = common.as_ref().map_or(own, |common| common.common(&own));
    if merged != own || common.is_some_and(|common| common != merged) {
        DIFFER.store(true, Ordering::Relaxed);
    }
    *common = Some(merged);
}

/// The guests' registers. Called when all pCPUs are online.
pub(in crate::arch::aarch64) fn offered() -> &'static Arc<IdRegisters> {
    OFFERED.call_once(|| Arc::new(COMMON.lock().unwrap_or_else(|| IdRegisters::offered(read))))
}

/// Whether guests do not see some feature because only a part of the pCPUs has it.
pub(in crate::arch::aarch64) fn differ() -> bool {
    DIFFER.load(Ordering::Relaxed)
}

/// Whether some pCPU has registers of error records.
pub(in crate::arch::aarch64) fn any_ras() -> bool {
    ANY_RAS.load(Ordering::Relaxed)
}

/// Whether some pCPU has limited ordering regions.
pub(in crate::arch::aarch64) fn any_lor() -> bool {
    ANY_LOR.load(Ordering::Relaxed)
}

macro_rules! registers {
    ($($crm:literal)*) => {
        /// This pCPU's register with op0 3, op1 0, CRn 0: all of them are readable, reserved ones as zero.
        fn read(crm: u8, op2: u8) -> u64 {
            match (crm, op2) {
                $(
                    ($crm, 0) => read_register!(concat!("s3_0_c0_c", $crm, "_0")),
                    ($crm, 1) => read_register!(concat!("s3_0_c0_c", $crm, "_1")),
                    ($crm, 2) => read_register!(concat!("s3_0_c0_c", $crm, "_2")),
                    ($crm, 3) => read_register!(concat!("s3_0_c0_c", $crm, "_3")),
                    ($crm, 4) => read_register!(concat!("s3_0_c0_c", $crm, "_4")),
                    ($crm, 5) => read_register!(concat!("s3_0_c0_c", $crm, "_5")),
                    ($crm, 6) => read_register!(concat!("s3_0_c0_c", $crm, "_6")),
                    ($crm, 7) => read_register!(concat!("s3_0_c0_c", $crm, "_7")),
                )*
                _ => 0,
            }
        }
    };
}
registers!(1 2 3 4 5 6 7);
