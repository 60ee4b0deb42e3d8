//! The system registers that belong to a guest alone.
//!
//! They stay in the processor while the vCPU is on its pCPU, across all exits: EL2 uses none of them.
//!
//! Some processors translate for EL1 while they are at EL2, speculatively: by an AT instruction that is never reached
//! (Cortex-A76 erratum 1165522, A57 1319537, A72 1319367, A55 1530923). The result goes into the TLB under the VMID of
//! that moment. So while VTTBR_EL2 and these registers do not belong to the same guest, no stage-1 table may be walked.
//! [`disable_walks`] ensures this, and [`El1::load`] ends it as its last step. The notices say to set both EPD bits.
//! These have an effect only while SCTLR_EL1.M is set: without it, addresses translate to themselves.

#![expect(unsafe_code, reason = "the registers decide how a guest's addresses are translated")]

use aarch64_defs::registers::{sctlr, tcr_el1};
use serde::{Deserialize, Serialize};

use crate::arch::aarch64::el2;
use crate::arch::aarch64::register::{isb, read_register, write_register};

macro_rules! registers {
    ($all:ident: $($field:ident = $name:literal,)*) => {
        /// Registers of one vCPU while they are not in a processor.
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
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

            /// Reads them from the processor, where they stay as well.
            fn save(&mut self) {
                $(self.$field = read_register!($name);)*
            }
        }
    };
}

registers! { Ordinary:
    cpacr = "cpacr_el1",
    ttbr0 = "ttbr0_el1",
    ttbr1 = "ttbr1_el1",
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

/// What a file keeps of them. A guest without pointer authentication has keys of zero.
#[derive(Serialize, Deserialize)]
pub(super) struct State {
    control: u64,
    translation: u64,
    ordinary: Ordinary,
    keys: Keys,
}

/// All of them.
#[derive(Clone, Debug)]
pub(super) struct El1 {
    control: u64,
    translation: u64,
    ordinary: Ordinary,
    keys: Keys,
    has_keys: bool,
}

impl El1 {
    /// The registers at reset.
    pub(super) fn new() -> Self {
        Self {
            control: sctlr::EL1_RESET,
            translation: 0,
            ordinary: Ordinary::default(),
            keys: Keys::default(),
            has_keys: el2::features().has_pointer_authentication,
        }
    }

    /// Their state while they are not in a processor.
    pub(super) fn state(&self) -> State {
        let Self { control, translation, ordinary, keys, has_keys: _ } = self.clone();
        State { control, translation, ordinary, keys }
    }

    /// Takes over a state while they are not in a processor.
    pub(super) fn set_state(&mut self, state: &State) {
        self.control = state.control;
        self.translation = state.translation;
        self.ordinary = state.ordinary.clone();
        self.keys = state.keys.clone();
    }

    /// Loads them into this pCPU. Walks are disabled there, and stage 2 is the guest's already.
    pub(super) fn load(&self) {
        self.ordinary.load();
        if self.has_keys {
            self.keys.load();
        }
        // The inputs of walks are in effect before walks are allowed.
        isb();
        Walks { control: self.control, translation: self.translation }.resume();
    }

    /// Saves them from this pCPU, and disables walks.
    pub(super) fn save(&mut self) {
        self.ordinary.save();
        if self.has_keys {
            self.keys.save();
        }
        let walks = disable_walks();
        (self.control, self.translation) = (walks.control, walks.translation);
    }
}

/// The old values of the registers that enable walks of EL1's tables: SCTLR_EL1 and TCR_EL1.
pub(super) struct Walks {
    control: u64,
    translation: u64,
}

/// No table of EL1 is walked from here on. Stage 2 may be another guest's.
pub(super) fn disable_walks() -> Walks {
    let walks = Walks { control: read_register!("sctlr_el1"), translation: read_register!("tcr_el1") };
    // SAFETY: no effect on EL2; the guest gets back the old value before it is entered.
    unsafe { write_register!("tcr_el1", walks.translation | tcr_el1::EPD0 | tcr_el1::EPD1) };
    // Not the other way round: the tables that it turns on must not be walked.
    isb();
    // SAFETY: as above.
    unsafe { write_register!("sctlr_el1", walks.control | sctlr::M) };
    isb();
    walks
}

impl Walks {
    /// Allows walks again. Stage 2 belongs to the guest whose tables they are.
    pub(super) fn resume(self) {
        // SAFETY: the guest's.
        unsafe { write_register!("sctlr_el1", self.control) };
        isb();
        // SAFETY: as above.
        unsafe { write_register!("tcr_el1", self.translation) };
        isb();
    }
}
