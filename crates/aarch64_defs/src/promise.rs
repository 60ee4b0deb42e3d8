//! What a guest was told of its processor, and whether another processor keeps that promise.
//!
//! A guest reads its processor's registers at its boot and acts on them for as long as it runs. So it can go on only
//! where all that it was told still holds. Another model is no obstacle: a guest that has looked at the model for its
//! errata runs on with what it found.
//!
//! ```
//! use aarch64_defs::features::IdRegisters;
//! use aarch64_defs::promise::Promise;
//!
//! let told = Promise {
//!     hz: 62_500_000,
//!     midr: 0x410f_d0c0,
//!     id_registers: IdRegisters::offered(|_, _| 0x1111_1111_1111_1111),
//!     ctr: 0x9444_c004,
//!     dczid: 4,
//!     vtr: 0x90b8_0003,
//!     workarounds: [-1; 3],
//! };
//! let slower = Promise { hz: 24_000_000, ..told };
//! assert!(told.check(&slower).unwrap_err().to_string().contains("62500 kHz"));
//! assert_eq!(told.check(&told), Ok(()));
//! ```

use core::fmt;

use crate::features::{IdRegisters, Lack};

/// What a guest is told of its processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// CNTFRQ_EL0: counts of the system counter per second.
    pub hz: u64,
    /// MIDR_EL1: maker and model.
    pub midr: u64,
    /// Its features.
    pub id_registers: IdRegisters,
    /// CTR_EL0: the lines of the caches, and which maintenance is needed (Arm ARM, D24.2.34).
    pub ctr: u64,
    /// DCZID_EL0: how much DC ZVA clears.
    pub dczid: u64,
    /// ICH_VTR_EL2, of which the guest sees a part in ICC_CTLR_EL1 (IHI 0069, 12.4.12).
    pub vtr: u64,
    /// The firmware's answers about SMCCC_ARCH_WORKAROUND_1 to 3: negative if it has no such function, 0 if it does
    /// something, 1 if it need not be called.
    pub workarounds: [i32; 3],
}

/// What a guest was told, and does not hold here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The counter runs at another rate: the guest's, and that here.
    Rate(u64, u64),
    /// The processor has another maker: MIDR_EL1.Implementer of both.
    Maker(u64, u64),
    /// A feature is missing.
    Feature(Lack),
    /// A property of the caches, by its field and register.
    Caches(&'static str),
    /// The codes of signed pointers are the model's own, and the model is another.
    PointerCodes,
    /// The interface of the interrupt controller has other sizes.
    Interface,
    /// The processor needs SMCCC_ARCH_WORKAROUND_n, with this n, and the guest does not know that, or there is none.
    Workaround(u32),
}

impl Promise {
    /// Whether a guest that was told this can go on where `here` holds.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self, here: &Self) -> Result<(), Broken> {
        if self.hz != here.hz {
            return Err(Broken::Rate(self.hz, here.hz));
        }
        let makers = (self.midr >> 24 & 0xff, here.midr >> 24 & 0xff);
        if makers.0 != makers.1 {
            return Err(Broken::Maker(makers.0, makers.1));
        }
        if let Some(lack) = here.id_registers.lacks(&self.id_registers) {
            return Err(Broken::Feature(lack));
        }
        const MODEL: u64 = 0xfff << 4;
        if self.id_registers.has_makers_pointer_codes() && (self.midr ^ here.midr) & MODEL != 0 {
            return Err(Broken::PointerCodes);
        }
        caches(self, here)?;
        // PRIbits, PREbits, IDbits, SEIS, A3V.
        const SIZES: u64 = 0x7ff << 21;
        if (self.vtr ^ here.vtr) & SIZES != 0 {
            return Err(Broken::Interface);
        }
        match (1..).zip(self.workarounds.iter().zip(&here.workarounds)).find(|(_, (told, here))| {
            // Where nothing is needed, a call for nothing does no harm.
            told != here && **here != 1
        }) {
            Some((number, _)) => Err(Broken::Workaround(number)),
            None => Ok(()),
        }
    }
}

/// The properties of the caches on which a guest's loops and omissions rely.
fn caches(told: &Promise, here: &Promise) -> Result<(), Broken> {
    const IDC: u64 = 1 << 28;
    const DIC: u64 = 1 << 29;
    const PIPT: u64 = 0b11;
    let line = |ctr: u64, shift: u32| ctr >> shift & 0xf;
    let policy = |ctr: u64| ctr >> 14 & 0b11;
    let lacks_bit = |bit: u64| told.ctr & bit != 0 && here.ctr & bit == 0;
    // The guest's loops step by the lines that it knows.
    let broken = if line(here.ctr, 0) < line(told.ctr, 0) {
        "IminLine (CTR_EL0)"
    } else if line(here.ctr, 16) < line(told.ctr, 16) {
        "DminLine (CTR_EL0)"
    } else if lacks_bit(IDC) {
        "IDC (CTR_EL0)"
    } else if lacks_bit(DIC) {
        "DIC (CTR_EL0)"
    } else if policy(here.ctr) != policy(told.ctr) && policy(here.ctr) != PIPT {
        "L1Ip (CTR_EL0)"
    } else if !has_same_zeros(told.dczid, here.dczid) {
        "BS (DCZID_EL0)"
    } else {
        return Ok(());
    };
    Err(Broken::Caches(broken))
}

/// Whether DC ZVA does what the guest knows, or the guest knows that it must not use it.
const fn has_same_zeros(told: u64, here: u64) -> bool {
    const PROHIBITED: u64 = 1 << 4;
    told & PROHIBITED != 0 || (told ^ here) & (PROHIBITED | 0xf) == 0
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(told, here) => {
                write!(f, "its counter runs at {} kHz, and this machine's at {} kHz", told / 1000, here / 1000)
            }
            Self::Maker(told, here) => {
                write!(f, "it ran on a processor of another maker (implementer {told:#x}, and this one has {here:#x})")
            }
            Self::Feature(lack) => write!(f, "this processor lacks {lack}, which its guest was told of"),
            Self::Caches(what) => write!(f, "this processor's caches are not what its guest was told: {what}"),
            Self::PointerCodes => {
                write!(f, "its guest signs pointers by codes of the processor's model, and this one is another model")
            }
            Self::Interface => write!(
                f,
                "this processor's interface of the interrupt controller has other sizes (ICH_VTR_EL2) than its guest \
                 was told"
            ),
            Self::Workaround(number) => write!(
                f,
                "this processor has a weakness that its guest was not told of (SMCCC_ARCH_WORKAROUND_{number})"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
