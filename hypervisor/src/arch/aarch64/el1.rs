//! The system registers that a guest has to itself.
//!
//! They stay in the processor while the vCPU stays on its pCPU, across all exits: EL2 uses none of them.

#![expect(unsafe_code, reason = "the registers decide how a guest's addresses are translated")]

use aarch64_defs::registers::sctlr;

use super::register::{isb, read_register, write_register};
use super::virtualization;

macro_rules! registers {
    ($all:ident: $($field:ident = $name:literal,)*) => {
        /// Registers of one vCPU while they are not in a processor.
        #[derive(Clone, Debug, Default)]
        pub(super) struct $all {
            $($field: u64,)*
        }

        impl $all {
            /// Brings them into the processor.
            fn load(&self) {
                $(
                    // SAFETY: means nothing to EL2, and nothing that a guest could not have written itself.
                    unsafe { write_register!($name, self.$field) };
                )*
            }

            /// Takes them from the processor, where they stay as well.
            fn save(&mut self) {
                $(self.$field = read_register!($name);)*
            }
        }
    };
}

registers! { Ordinary:
    sctlr = "sctlr_el1",
    cpacr = "cpacr_el1",
    ttbr0 = "ttbr0_el1",
    ttbr1 = "ttbr1_el1",
    tcr = "tcr_el1",
    mair = "mair_el1",
    amair = "amair_el1",
    esr = "esr_el1",
    afsr0 = "afsr0_el1",
    afsr1 = "afsr1_el1",
    far = "far_el1",
    par = "par_el1",
    vbar = "vbar_el1",
    contextidr = "contextidr_el1",
    tpidr_el0 = "tpidr_el0",
    tpidrro_el0 = "tpidrro_el0",
    tpidr_el1 = "tpidr_el1",
    sp_el0 = "sp_el0",
    sp_el1 = "sp_el1",
    elr = "elr_el1",
    spsr = "spsr_el1",
    csselr = "csselr_el1",
    cntkctl = "cntkctl_el1",
}

// Keys for pointer authentication, by their encodings.
registers! { Keys:
    ia_low = "s3_0_c2_c1_0",
    ia_high = "s3_0_c2_c1_1",
    ib_low = "s3_0_c2_c1_2",
    ib_high = "s3_0_c2_c1_3",
    da_low = "s3_0_c2_c2_0",
    da_high = "s3_0_c2_c2_1",
    db_low = "s3_0_c2_c2_2",
    db_high = "s3_0_c2_c2_3",
    ga_low = "s3_0_c2_c3_0",
    ga_high = "s3_0_c2_c3_1",
}

/// All of them.
#[derive(Clone, Debug)]
pub(super) struct El1 {
    ordinary: Ordinary,
    keys: Keys,
    has_keys: bool,
}

impl El1 {
    /// The registers at reset.
    pub(super) fn new() -> Self {
        Self {
            ordinary: Ordinary { sctlr: sctlr::EL1_RESET, ..Ordinary::default() },
            keys: Keys::default(),
            has_keys: virtualization::features().has_pointer_authentication,
        }
    }

    /// Brings them into this pCPU.
    pub(super) fn load(&self) {
        self.ordinary.load();
        if self.has_keys {
            self.keys.load();
        }
        isb();
    }

    /// Takes them from this pCPU.
    pub(super) fn save(&mut self) {
        self.ordinary.save();
        if self.has_keys {
            self.keys.save();
        }
    }
}
