//! The processor features that guests get: ID registers, field by field (Arm ARM DDI 0487, D24.2, "ID_AA64...").
//!
//! `REGISTERS` is an allow-list. A field outside the list reads as zero, which nearly always means "not implemented".
//! If another value means that, the field is in the list with that value. A field in the list reads as on the
//! processor, but at most as the list allows. So features newer than this list are not offered. The code that offers a
//! feature also does what the feature needs at EL2 (a trap off, registers to switch).
//!
//! A VM's vCPUs run on any pCPU, so guests get what all pCPUs have: [`IdRegisters::common`].
//!
//! ```
//! use aarch64_defs::features::IdRegisters;
//!
//! // A processor that has the most of everything, and one without cryptography (ID_AA64ISAR0_EL1.AES, bits 7:4).
//! let rich = IdRegisters::offered(|_, _| 0x2222_2222_2222_2222);
//! let poor = IdRegisters::offered(|_, _| 0x2222_2222_2222_2202);
//! assert_eq!(rich.get(6, 0) >> 4 & 0xf, 2);
//! assert_eq!(rich.common(&poor).get(6, 0) >> 4 & 0xf, 0);
//! ```

use core::fmt;

/// How to offer a four-bit field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A larger number means more features; offer at most this.
    UpTo(u8),
    /// The same, as a signed number: 0xf is -1, "not implemented".
    Signed(i8),
    /// The value names a kind. All pCPUs must agree on it, or it is not offered. At most this.
    Same(u8),
    /// Always this.
    Is(u8),
}

use Rule::{Is, Same, Signed, UpTo};

/// One field: its lowest bit, its name in the manual, and its rule.
type Field = (u32, &'static str, Rule);

/// One ID register with op0 3, op1 0, CRn 0.
#[derive(Clone, Copy, Debug)]
struct Register {
    name: &'static str,
    crm: u8,
    op2: u8,
    /// Describes AArch32, and has a meaning only if EL0 may use AArch32.
    is_aarch32: bool,
    fields: &'static [Field],
}

/// The registers in AArch64's own format.
const fn wide(name: &'static str, (crm, op2): (u8, u8), fields: &'static [Field]) -> Register {
    Register { name, crm, op2, is_aarch32: false, fields }
}

/// Registers that describe AArch32.
const fn narrow(name: &'static str, (crm, op2): (u8, u8), fields: &'static [Field]) -> Register {
    Register { name, crm, op2, is_aarch32: true, fields }
}

/// Maximum number of bits of a guest's physical address, and its encoding in ID_AA64MMFR0_EL1.PARange.
pub const GUEST_PHYSICAL_BITS: u32 = 40;
const PA_RANGE: u8 = 2;

/// The allow-list, in the order of the encodings.
const REGISTERS: &[Register] = &[
    // State0 is A32, State1 T32, State2 a trivial Jazelle. Not: ThumbEE, AMU, RAS.
    narrow(
        "ID_PFR0_EL1",
        (1, 0),
        &[
            (0, "State0", UpTo(1)),
            (4, "State1", UpTo(3)),
            (8, "State2", UpTo(1)),
            (16, "CSV2", UpTo(1)),
            (24, "DIT", UpTo(1)),
        ],
    ),
    // Its other fields concern EL1 in AArch32, which guests do not have (HCR_EL2.RW).
    narrow("ID_PFR1_EL1", (1, 1), &[(16, "GenTimer", UpTo(1)), (28, "GIC", UpTo(1))]),
    narrow(
        "ID_MMFR0_EL1",
        (1, 4),
        &[
            (0, "VMSA", UpTo(5)),
            (8, "OuterShr", UpTo(1)),
            (12, "ShareLvl", UpTo(1)),
            (20, "AuxReg", UpTo(2)),
            (28, "InnerShr", UpTo(1)),
        ],
    ),
    narrow("ID_MMFR1_EL1", (1, 5), &[(28, "BPred", UpTo(4))]),
    narrow("ID_MMFR2_EL1", (1, 6), &[(16, "UniTLB", UpTo(6)), (20, "MemBarr", UpTo(2)), (24, "WFIStall", UpTo(1))]),
    narrow(
        "ID_MMFR3_EL1",
        (1, 7),
        &[
            (0, "CMaintVA", UpTo(1)),
            (4, "CMaintSW", UpTo(1)),
            (8, "BPMaint", UpTo(2)),
            (12, "MaintBcst", UpTo(2)),
            (16, "PAN", UpTo(2)),
            (20, "CohWalk", UpTo(1)),
            (24, "CMemSz", UpTo(2)),
        ],
    ),
    narrow(
        "ID_ISAR0_EL1",
        (2, 0),
        &[
            (0, "Swap", UpTo(1)),
            (4, "BitCount", UpTo(1)),
            (8, "BitField", UpTo(1)),
            (12, "CmpBranch", UpTo(1)),
            (16, "Coproc", UpTo(4)),
            (20, "Debug", UpTo(1)),
            (24, "Divide", UpTo(2)),
        ],
    ),
    narrow(
        "ID_ISAR1_EL1",
        (2, 1),
        &[
            (0, "Endian", UpTo(1)),
            (4, "Except", UpTo(1)),
            (8, "Except_AR", UpTo(1)),
            (12, "Extend", UpTo(2)),
            (16, "IfThen", UpTo(1)),
            (20, "Immediate", UpTo(1)),
            (24, "Interwork", UpTo(3)),
            (28, "Jazelle", UpTo(1)),
        ],
    ),
    narrow(
        "ID_ISAR2_EL1",
        (2, 2),
        &[
            (0, "LoadStore", UpTo(2)),
            (4, "MemHint", UpTo(4)),
            (8, "MultiAccessInt", UpTo(2)),
            (12, "Mult", UpTo(2)),
            (16, "MultS", UpTo(3)),
            (20, "MultU", UpTo(2)),
            (24, "PSR_AR", UpTo(1)),
            (28, "Reversal", UpTo(2)),
        ],
    ),
    // Not: T32EE.
    narrow(
        "ID_ISAR3_EL1",
        (2, 3),
        &[
            (0, "Saturate", UpTo(1)),
            (4, "SIMD", UpTo(3)),
            (8, "SVC", UpTo(1)),
            (12, "SynchPrim", UpTo(2)),
            (16, "TabBranch", UpTo(1)),
            (20, "T32Copy", UpTo(1)),
            (24, "TrueNOP", UpTo(1)),
        ],
    ),
    // Not: SMC, which is for EL1.
    narrow(
        "ID_ISAR4_EL1",
        (2, 4),
        &[
            (0, "Unpriv", UpTo(2)),
            (4, "WithShifts", UpTo(4)),
            (8, "Writeback", UpTo(1)),
            (16, "Barrier", UpTo(1)),
            (20, "SynchPrim_frac", UpTo(3)),
            (24, "PSR_M", UpTo(1)),
            (28, "SWP_frac", UpTo(1)),
        ],
    ),
    narrow(
        "ID_ISAR5_EL1",
        (2, 5),
        &[
            (0, "SEVL", UpTo(1)),
            (4, "AES", UpTo(2)),
            (8, "SHA1", UpTo(1)),
            (12, "SHA2", UpTo(1)),
            (16, "CRC32", UpTo(1)),
            (24, "RDM", UpTo(1)),
            (28, "VCMA", UpTo(1)),
        ],
    ),
    narrow(
        "ID_MMFR4_EL1",
        (2, 6),
        &[
            (4, "AC2", UpTo(1)),
            (12, "CnP", UpTo(1)),
            (16, "HPDS", UpTo(2)),
            (20, "LSM", UpTo(1)),
            (24, "CCIDX", UpTo(1)),
        ],
    ),
    narrow(
        "ID_ISAR6_EL1",
        (2, 7),
        &[
            (0, "JSCVT", UpTo(1)),
            (4, "DP", UpTo(1)),
            (8, "FHM", UpTo(1)),
            (12, "SB", UpTo(1)),
            (16, "SPECRES", UpTo(2)),
            (20, "BF16", UpTo(1)),
            (24, "I8MM", UpTo(1)),
            (28, "CLRBHB", UpTo(1)),
        ],
    ),
    narrow(
        "MVFR0_EL1",
        (3, 0),
        &[
            (0, "SIMDReg", UpTo(2)),
            (4, "FPSP", UpTo(2)),
            (8, "FPDP", UpTo(2)),
            (12, "FPTrap", UpTo(1)),
            (16, "FPDivide", UpTo(1)),
            (20, "FPSqrt", UpTo(1)),
            (24, "FPShVec", UpTo(1)),
            (28, "FPRound", UpTo(1)),
        ],
    ),
    narrow(
        "MVFR1_EL1",
        (3, 1),
        &[
            (0, "FPFtZ", UpTo(1)),
            (4, "FPDNaN", UpTo(1)),
            (8, "SIMDLS", UpTo(1)),
            (12, "SIMDInt", UpTo(1)),
            (16, "SIMDSP", UpTo(1)),
            (20, "SIMDHP", UpTo(2)),
            (24, "FPHP", UpTo(3)),
            (28, "SIMDFMAC", UpTo(1)),
        ],
    ),
    narrow("MVFR2_EL1", (3, 2), &[(0, "SIMDMisc", UpTo(3)), (4, "FPMisc", UpTo(4))]),
    narrow("ID_PFR2_EL1", (3, 4), &[(0, "CSV3", UpTo(1)), (4, "SSBS", UpTo(1))]),
    // EL1 is in AArch64 only (HCR_EL2.RW). CSV2 above 1 has registers of its own (SCXTNUM). Not: EL2, EL3, RAS, SVE,
    // SEL2, MPAM, AMU, RME.
    wide(
        "ID_AA64PFR0_EL1",
        (4, 0),
        &[
            (0, "EL0", UpTo(2)),
            (4, "EL1", UpTo(1)),
            (16, "FP", Signed(1)),
            (20, "AdvSIMD", Signed(1)),
            (24, "GIC", UpTo(1)),
            (48, "DIT", UpTo(1)),
            (56, "CSV2", UpTo(1)),
            (60, "CSV3", UpTo(1)),
        ],
    ),
    // Not: MTE, RAS_frac, MPAM_frac, SME, RNDR_trap, CSV2_frac, NMI, GCS, THE, DF2, PFAR.
    wide("ID_AA64PFR1_EL1", (4, 1), &[(0, "BT", UpTo(1)), (4, "SSBS", UpTo(2))]),
    // DebugVer up to Armv8.8. There is no double lock: OSDLR_EL1 accepts writes and reads as zero. Not: TraceVer,
    // PMUVer, PMSVer, TraceFilt, TraceBuffer, MTPMU, BRBE.
    wide(
        "ID_AA64DFR0_EL1",
        (5, 0),
        &[
            (0, "DebugVer", UpTo(0xa)),
            (12, "BRPs", UpTo(0xf)),
            (20, "WRPs", UpTo(0xf)),
            (28, "CTX_CMPs", UpTo(0xf)),
            (36, "DoubleLock", Is(0xf)),
        ],
    ),
    // Not: TME.
    wide(
        "ID_AA64ISAR0_EL1",
        (6, 0),
        &[
            (4, "AES", UpTo(2)),
            (8, "SHA1", UpTo(1)),
            (12, "SHA2", UpTo(2)),
            (16, "CRC32", UpTo(1)),
            (20, "Atomic", UpTo(3)),
            (28, "RDM", UpTo(1)),
            (32, "SHA3", UpTo(1)),
            (36, "SM3", UpTo(1)),
            (40, "SM4", UpTo(1)),
            (44, "DP", UpTo(1)),
            (48, "FHM", UpTo(1)),
            (52, "TS", UpTo(2)),
            (56, "TLB", UpTo(2)),
            (60, "RNDR", UpTo(1)),
        ],
    ),
    // Pointer authentication codes are offered only if all pCPUs compute the same ones. Not: LS64, which needs
    // HCRX_EL2.EnALS and similar bits.
    wide(
        "ID_AA64ISAR1_EL1",
        (6, 1),
        &[
            (0, "DPB", UpTo(2)),
            (4, "APA", Same(5)),
            (8, "API", Same(5)),
            (12, "JSCVT", UpTo(1)),
            (16, "FCMA", UpTo(1)),
            (20, "LRCPC", UpTo(3)),
            (24, "GPA", Same(1)),
            (28, "GPI", Same(1)),
            (32, "FRINTTS", UpTo(1)),
            (36, "SB", UpTo(1)),
            (40, "SPECRES", UpTo(2)),
            (44, "BF16", UpTo(2)),
            (48, "DGH", UpTo(1)),
            (52, "I8MM", UpTo(1)),
            (56, "XS", UpTo(1)),
        ],
    ),
    // Not: MOPS. It needs HCRX_EL2.MSCEn, and two pCPUs may have different kinds of it during one copy.
    wide(
        "ID_AA64ISAR2_EL1",
        (6, 2),
        &[
            (0, "WFxT", UpTo(2)),
            (4, "RPRES", UpTo(1)),
            (8, "GPA3", Same(1)),
            (12, "APA3", Same(5)),
            (20, "BC", UpTo(1)),
            (24, "PAC_frac", Same(1)),
            (28, "CLRBHB", UpTo(1)),
            (48, "RPRFM", UpTo(1)),
            (52, "CSSC", UpTo(1)),
        ],
    ),
    // PARange as far as stage 2 translates. The guest has no stage 2 of its own, so no granule for it (TGran16_2 and
    // similar). Not: SNSMem, FGT.
    wide(
        "ID_AA64MMFR0_EL1",
        (7, 0),
        &[
            (0, "PARange", UpTo(PA_RANGE)),
            (4, "ASIDBits", UpTo(2)),
            (8, "BigEnd", UpTo(1)),
            (16, "BigEndEL0", UpTo(1)),
            (20, "TGran16", UpTo(2)),
            (24, "TGran64", Signed(0)),
            (28, "TGran4", Signed(1)),
            (32, "TGran16_2", Is(1)),
            (36, "TGran64_2", Is(1)),
            (40, "TGran4_2", Is(1)),
            (44, "ExS", UpTo(1)),
            (60, "ECV", UpTo(1)),
        ],
    ),
    // Not: VMIDBits, VH, LO, SpecSEI, XNX, TWED, HCX, TIDCP1, CMOW.
    wide(
        "ID_AA64MMFR1_EL1",
        (7, 1),
        &[
            (0, "HAFDBS", UpTo(2)),
            (12, "HPDS", UpTo(2)),
            (20, "PAN", UpTo(3)),
            (36, "ETS", UpTo(3)),
            (44, "AFP", UpTo(1)),
            (48, "nTLBPA", UpTo(1)),
            (60, "ECBHB", UpTo(1)),
        ],
    ),
    // Not: IESB, NV, FWB, EVT.
    wide(
        "ID_AA64MMFR2_EL1",
        (7, 2),
        &[
            (0, "CnP", UpTo(1)),
            (4, "UAO", UpTo(1)),
            (8, "LSM", UpTo(1)),
            (16, "VARange", UpTo(1)),
            (20, "CCIDX", UpTo(1)),
            (28, "ST", UpTo(1)),
            (32, "AT", UpTo(1)),
            (36, "IDS", UpTo(1)),
            (48, "TTL", UpTo(1)),
            (52, "BBM", UpTo(2)),
            (60, "E0PD", UpTo(1)),
        ],
    ),
];

impl Rule {
    /// The offered value for `value`.
    const fn offer(self, value: u8) -> u8 {
        match self {
            UpTo(most) | Same(most) => {
                if value < most {
                    value
                } else {
                    most
                }
            }
            Signed(most) => {
                if signed(value) < most {
                    value
                } else {
                    most as u8 & 0xf
                }
            }
            Is(value) => value,
        }
    }

    /// What two processors have in common.
    const fn common(self, a: u8, b: u8) -> u8 {
        match self {
            UpTo(_) => UpTo(a).offer(b),
            Signed(_) => Signed(signed(a)).offer(b),
            Same(_) => {
                if a == b {
                    a
                } else {
                    0
                }
            }
            Is(value) => value,
        }
    }

    /// Whether a guest that was told `told` runs as before where `here` is offered.
    const fn keeps(self, told: u8, here: u8) -> bool {
        match self {
            UpTo(_) => told <= here,
            Signed(_) => signed(told) <= signed(here),
            Same(_) => told == 0 || told == here,
            Is(value) => told == value,
        }
    }
}

/// Four bits as a signed number.
const fn signed(value: u8) -> i8 {
    ((value << 4) as i8) >> 4
}

/// CRm of ID registers: 1 to 7.
const CRM: usize = 7;
/// Number of possible ID registers: CRm from 1 to 7, op2 from 0 to 7.
pub const COUNT: usize = CRM * 8;

/// Index of a register, if it is an ID register.
const fn place(crm: u8, op2: u8) -> Option<usize> {
    if crm >= 1 && crm as usize <= CRM && op2 < 8 { Some((crm as usize - 1) * 8 + op2 as usize) } else { None }
}

/// A feature that a guest was told of, and that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lack {
    register: &'static str,
    field: &'static str,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.field, self.register)
    }
}

/// All ID registers as a guest reads them. Registers outside the list, and reserved ones, are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRegisters([u64; COUNT]);

impl IdRegisters {
    /// The registers for a processor. `read` returns its register by CRm and op2 (op0 is 3, op1 and CRn are 0).
    #[must_use]
    pub fn offered(read: impl Fn(u8, u8) -> u64) -> Self {
        let mut offered = Self([0; COUNT]);
        for register in REGISTERS {
            let value = read(register.crm, register.op2);
            let fields = register.fields.iter().map(|&(shift, _, rule)| (shift, rule.offer(nibble(value, shift))));
            offered.set(register, fields);
        }
        offered.without_aarch32()
    }

    /// The registers for two processors between which vCPUs move.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let mut common = Self([0; COUNT]);
        for register in REGISTERS {
            let (a, b) = (self.get(register.crm, register.op2), other.get(register.crm, register.op2));
            let merge = |&(shift, _, rule): &Field| (shift, rule.common(nibble(a, shift), nibble(b, shift)));
            common.set(register, register.fields.iter().map(merge));
        }
        common.without_aarch32()
    }

    /// The register with this encoding (op0 3, op1 0, CRn 0); zero for all others.
    #[must_use]
    #[inline]
    pub fn get(&self, crm: u8, op2: u8) -> u64 {
        place(crm, op2).and_then(|place| self.0.get(place)).copied().unwrap_or(0)
    }

    /// Whether keys and instructions for pointer authentication are offered (ID_AA64ISAR1_EL1, ID_AA64ISAR2_EL1).
    #[must_use]
    pub fn has_pointer_authentication(&self) -> bool {
        self.get(6, 1) & 0xff00_0ff0 != 0 || self.get(6, 2) & 0xff00 != 0
    }

    /// Whether EL0 may use AArch32 (ID_AA64PFR0_EL1.EL0).
    #[must_use]
    pub fn has_aarch32(&self) -> bool {
        const BOTH: u64 = 2;
        self.get(4, 0) & 0xf == BOTH
    }

    /// Whether the codes of signed pointers may be a processor's own (FEAT_PACIMP: ID_AA64ISAR1_EL1.API and GPI). Then
    /// two models compute different ones, although both have the same values here.
    #[must_use]
    pub fn has_makers_pointer_codes(&self) -> bool {
        self.get(6, 1) & 0xf000_0f00 != 0
    }

    /// The first feature that a guest with the registers `told` knows, and that is not offered by these. Such a guest
    /// cannot go on with these. Features of AArch32 come last: they follow from ID_AA64PFR0_EL1.EL0.
    #[must_use]
    pub fn lacks(&self, told: &Self) -> Option<Lack> {
        let about = |aarch32: bool| REGISTERS.iter().filter(move |register| register.is_aarch32 == aarch32);
        for register in about(false).chain(about(true)) {
            let (told, here) = (told.get(register.crm, register.op2), self.get(register.crm, register.op2));
            let is_lost = |&&(shift, _, rule): &&Field| !rule.keeps(nibble(told, shift), nibble(here, shift));
            if let Some((_, field, _)) = register.fields.iter().find(is_lost) {
                return Some(Lack { register: register.name, field });
            }
            let known = register.fields.iter().fold(0, |known, (shift, ..)| known | 0xf << shift);
            if told & !known != 0 {
                return Some(Lack { register: register.name, field: "an unknown feature" });
            }
        }
        let mut unknown = *told;
        REGISTERS.iter().for_each(|register| unknown.set(register, core::iter::empty()));
        (unknown.0 != [0; COUNT]).then_some(Lack { register: "a reserved register", field: "an unknown feature" })
    }

    /// All of them, by CRm from 1 to 7 and op2 from 0 to 7.
    #[must_use]
    pub const fn values(&self) -> &[u64; COUNT] {
        &self.0
    }

    /// Registers with these [values](Self::values). They may be none that a guest has: see [`Self::lacks`].
    #[must_use]
    pub const fn with_values(values: [u64; COUNT]) -> Self {
        Self(values)
    }

    fn set(&mut self, register: &Register, fields: impl Iterator<Item = (u32, u8)>) {
        let value = fields.fold(0, |value, (shift, field)| value | u64::from(field) << shift);
        if let Some(place) = place(register.crm, register.op2).and_then(|place| self.0.get_mut(place)) {
            *place = value;
        }
    }

    /// If EL0 has no AArch32 (ID_AA64PFR0_EL1.EL0), the values about AArch32 are unknown, and are cleared here.
    fn without_aarch32(mut self) -> Self {
        if !self.has_aarch32() {
            REGISTERS
                .iter()
                .filter(|register| register.is_aarch32)
                .for_each(|register| self.set(register, core::iter::empty()));
        }
        self
    }
}

/// The four-bit field at `shift`.
const fn nibble(value: u64, shift: u32) -> u8 {
    (value >> shift & 0xf) as u8
}

#[cfg(test)]
mod tests;
