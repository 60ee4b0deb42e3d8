//! The syndrome: why the processor entered EL2 (Arm ARM, ESR_EL2).

/// Exception classes, ESR_EL2 bits 31:26.
pub mod class {
    /// WFI or WFE.
    pub const WFX: u32 = 0x01;
    /// Floating point, SIMD or SVE.
    pub const FP: u32 = 0x07;
    /// Pointer authentication.
    pub const PAUTH: u32 = 0x09;
    /// An illegal execution state.
    pub const ILLEGAL_STATE: u32 = 0x0e;
    /// HVC of AArch64.
    pub const HVC64: u32 = 0x16;
    /// SMC of AArch64.
    pub const SMC64: u32 = 0x17;
    /// MSR, MRS or a system instruction.
    pub const SYSTEM: u32 = 0x18;
    /// SVE.
    pub const SVE: u32 = 0x19;
    /// SME.
    pub const SME: u32 = 0x1d;
    /// Instruction abort of the guest.
    pub const INSTRUCTION_ABORT: u32 = 0x20;
    /// Data abort of the guest.
    pub const DATA_ABORT: u32 = 0x24;
}

/// ESR_EL2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syndrome(pub u64);

impl Syndrome {
    /// The exception class, see [`class`].
    #[must_use]
    #[inline]
    pub const fn class(self) -> u32 {
        (self.0 >> 26 & 0x3f) as u32
    }

    /// Whether the instruction has 32 bits; only AArch32 has shorter ones.
    #[must_use]
    pub const fn is_long(self) -> bool {
        self.0 & 1 << 25 != 0
    }

    /// For [`class::WFX`]: the instruction.
    #[must_use]
    #[inline]
    pub const fn wait(self) -> Wait {
        // ISS.TI: bit 0 is set for WFE, bit 1 for an instruction with a time (FEAT_WFxT). RV: RN is the register of the
        // time.
        let limit = match (self.0 & 1 << 1 != 0, self.0 & 1 << 2 != 0) {
            (false, _) => Limit::None,
            (true, true) => Limit::General(self.bits(5, 5)),
            (true, false) => Limit::Unknown,
        };
        Wait { is_event: self.0 & 1 != 0, limit }
    }

    /// For [`class::SYSTEM`]: the instruction.
    #[must_use]
    #[inline]
    pub const fn system(self) -> SystemAccess {
        SystemAccess {
            register: SystemRegister::new(
                self.bits(20, 2),
                self.bits(14, 3),
                self.bits(10, 4),
                self.bits(1, 4),
                self.bits(17, 3),
            ),
            general: self.bits(5, 5),
            is_read: self.0 & 1 != 0,
        }
    }

    /// For aborts: the kind of fault (DFSC, IFSC).
    #[must_use]
    #[inline]
    pub const fn fault(self) -> Fault {
        match self.bits(0, 6) {
            0x04..=0x07 => Fault::Translation,
            0x08..=0x0b => Fault::AccessFlag,
            0x0c..=0x0f => Fault::Permission,
            0x30 => Fault::TlbConflict,
            _ => Fault::Other,
        }
    }

    /// For aborts: the access was the walk of a stage-1 table.
    #[must_use]
    #[inline]
    pub const fn is_table_walk(self) -> bool {
        self.0 & 1 << 7 != 0
    }

    /// For data aborts: the access was a write (WnR), or the maintenance of a cache.
    #[must_use]
    #[inline]
    pub const fn is_write(self) -> bool {
        self.0 & 1 << 6 != 0
    }

    /// For aborts: the virtual address (FAR_EL2) is not known.
    #[must_use]
    pub const fn has_no_address(self) -> bool {
        self.0 & 1 << 10 != 0
    }

    /// For [`class::DATA_ABORT`]: the access, if the syndrome describes it.
    #[must_use]
    #[inline]
    pub const fn data_access(self) -> Option<DataAccess> {
        if self.0 & 1 << 24 == 0 {
            return None;
        }
        Some(DataAccess {
            bytes: 1 << self.bits(22, 2),
            is_signed: self.0 & 1 << 21 != 0,
            general: self.bits(16, 5),
            is_64_bit: self.0 & 1 << 15 != 0,
            is_write: self.0 & 1 << 6 != 0,
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked to at most 6 bits")]
    const fn bits(self, shift: u32, count: u32) -> u8 {
        (self.0 >> shift & ((1 << count) - 1)) as u8
    }
}

/// WFI, WFE, WFIT or WFET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// It waits for an event (WFE, WFET), not for an interrupt.
    pub is_event: bool,
    /// The longest wait.
    pub limit: Limit,
}

/// When a wait ends without an interrupt or event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Never.
    None,
    /// When CNTVCT_EL0 reaches this general register; 31 is the zero register.
    General(u8),
    /// The syndrome does not give the time.
    Unknown,
}

/// What to do for a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The guest spins: let other vCPUs run, then continue. A wait for an event may end at any time.
    Yield,
    /// The wait is over.
    Over,
    /// Sleep until an interrupt, or until this count of CNTVCT_EL0.
    Sleep(Option<u64>),
}

impl Wait {
    /// What to do at the count `now` of CNTVCT_EL0. `general` returns a general register (Arm ARM, WFIT: counts are
    /// unsigned).
    #[must_use]
    #[inline]
    pub fn rest(self, now: u64, general: impl FnOnce(u8) -> u64) -> Rest {
        match self {
            Self { is_event: true, .. } => Rest::Yield,
            Self { limit: Limit::None, .. } => Rest::Sleep(None),
            Self { limit: Limit::General(number), .. } => {
                let end = general(number);
                if now < end { Rest::Sleep(Some(end)) } else { Rest::Over }
            }
            // A wait may end too early, but not too late.
            Self { limit: Limit::Unknown, .. } => Rest::Over,
        }
    }
}

/// An MRS, MSR or system instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemAccess {
    /// The register.
    pub register: SystemRegister,
    /// The general register; 31 is the zero register.
    pub general: u8,
    /// MRS, not MSR.
    pub is_read: bool,
}

/// The encoding of a system register.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SystemRegister(pub u16);

impl SystemRegister {
    /// By op0, op1, CRn, CRm, op2.
    #[must_use]
    pub const fn new(op0: u8, op1: u8, crn: u8, crm: u8, op2: u8) -> Self {
        Self(
            (op0 as u16 & 3) << 14
                | (op1 as u16 & 7) << 11
                | (crn as u16 & 15) << 7
                | (crm as u16 & 15) << 3
                | op2 as u16 & 7,
        )
    }

    /// op0, op1, CRn, CRm, op2.
    #[must_use]
    pub const fn parts(self) -> (u8, u8, u8, u8, u8) {
        let [low, high] = self.0.to_le_bytes();
        let whole = self.0;
        (high >> 6, high >> 3 & 7, (whole >> 7 & 15) as u8, low >> 3 & 15, low & 7)
    }
}

impl core::fmt::Debug for SystemRegister {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (op0, op1, crn, crm, op2) = self.parts();
        write!(f, "S{op0}_{op1}_C{crn}_C{crm}_{op2}")
    }
}

/// A load or store, from the syndrome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataAccess {
    /// 1, 2, 4 or 8.
    pub bytes: u8,
    /// A load extends the sign.
    pub is_signed: bool,
    /// The general register; 31 is the zero register.
    pub general: u8,
    /// A load fills 64 bits, not 32.
    pub is_64_bit: bool,
    /// A store.
    pub is_write: bool,
}

/// Why an access failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is mapped.
    Translation,
    /// The access flag is clear.
    AccessFlag,
    /// The access is not allowed.
    Permission,
    /// Two TLB entries contradict each other.
    TlbConflict,
    /// Anything else.
    Other,
}

/// Name of an exception class.
#[must_use]
pub const fn class_name(class: u32) -> &'static str {
    match class {
        0x00 => "unknown reason",
        0x01 => "WFI or WFE",
        0x07 => "floating point",
        0x0e => "illegal execution state",
        0x15..=0x17 => "call",
        0x18 => "system register",
        0x19 => "SVE",
        0x1d => "SME",
        0x20 | 0x21 => "instruction abort",
        0x22 => "misaligned PC",
        0x24 | 0x25 => "data abort",
        0x26 => "misaligned stack pointer",
        0x2f => "SError",
        0x30..=0x35 => "debug exception",
        0x3c => "breakpoint instruction",
        _ => "exception",
    }
}

#[cfg(test)]
mod tests;
