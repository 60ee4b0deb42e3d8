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

/// One field: its lowest bit, and its rule.
type Field = (u32, Rule);

/// One ID register with op0 3, op1 0, CRn 0.
#[derive(Clone, Copy, Debug)]
struct Register {
    crm: u8,
    op2: u8,
    /// Describes AArch32, and has a meaning only if EL0 may use AArch32.
    is_aarch32: bool,
    fields: &'static [Field],
}

/// The registers in AArch64's own format.
const fn wide(crm: u8, op2: u8, fields: &'static [Field]) -> Register {
    Register { crm, op2, is_aarch32: false, fields }
}

/// Registers that describe AArch32.
const fn narrow(op2: (u8, u8), fields: &'static [Field]) -> Register {
    Register { crm: op2.0, op2: op2.1, is_aarch32: true, fields }
}

/// Maximum number of bits of a guest's physical address, and its encoding in ID_AA64MMFR0_EL1.PARange.
pub const GUEST_PHYSICAL_BITS: u32 = 40;
const PA_RANGE: u8 = 2;

/// The allow-list, in the order of the encodings.
const REGISTERS: &[Register] = &[
    // ID_PFR0_EL1: State0 (A32), State1 (T32), State2 (a trivial Jazelle), CSV2, DIT. Not: ThumbEE, AMU, RAS.
    narrow((1, 0), &[(0, UpTo(1)), (4, UpTo(3)), (8, UpTo(1)), (16, UpTo(1)), (24, UpTo(1))]),
    // ID_PFR1_EL1: GenTimer, GIC. The rest concerns EL1 in AArch32, which guests do not have (HCR_EL2.RW).
    narrow((1, 1), &[(16, UpTo(1)), (28, UpTo(1))]),
    // ID_MMFR0_EL1: VMSA, OuterShr, ShareLvl, AuxReg, InnerShr.
    narrow((1, 4), &[(0, UpTo(5)), (8, UpTo(1)), (12, UpTo(1)), (20, UpTo(2)), (28, UpTo(1))]),
    // ID_MMFR1_EL1: BPred.
    narrow((1, 5), &[(28, UpTo(4))]),
    // ID_MMFR2_EL1: UniTLB, MemBarr, WFIStall.
    narrow((1, 6), &[(16, UpTo(6)), (20, UpTo(2)), (24, UpTo(1))]),
    // ID_MMFR3_EL1: CMaintVA, CMaintSW, BPMaint, MaintBcst, PAN, CohWalk, CMemSz.
    narrow(
        (1, 7),
        &[(0, UpTo(1)), (4, UpTo(1)), (8, UpTo(2)), (12, UpTo(2)), (16, UpTo(2)), (20, UpTo(1)), (24, UpTo(2))],
    ),
    // ID_ISAR0_EL1: Swap, BitCount, BitField, CmpBranch, Coproc, Debug, Divide.
    narrow(
        (2, 0),
        &[(0, UpTo(1)), (4, UpTo(1)), (8, UpTo(1)), (12, UpTo(1)), (16, UpTo(4)), (20, UpTo(1)), (24, UpTo(2))],
    ),
    // ID_ISAR1_EL1: Endian, Except, Except_AR, Extend, IfThen, Immediate, Interwork, Jazelle.
    narrow(
        (2, 1),
        &[
            (0, UpTo(1)),
            (4, UpTo(1)),
            (8, UpTo(1)),
            (12, UpTo(2)),
            (16, UpTo(1)),
            (20, UpTo(1)),
            (24, UpTo(3)),
            (28, UpTo(1)),
        ],
    ),
    // ID_ISAR2_EL1: LoadStore, MemHint, MultiAccessInt, Mult, MultS, MultU, PSR_AR, Reversal.
    narrow(
        (2, 2),
        &[
            (0, UpTo(2)),
            (4, UpTo(4)),
            (8, UpTo(2)),
            (12, UpTo(2)),
            (16, UpTo(3)),
            (20, UpTo(2)),
            (24, UpTo(1)),
            (28, UpTo(2)),
        ],
    ),
    // ID_ISAR3_EL1: Saturate, SIMD, SVC, SynchPrim, TabBranch, T32Copy, TrueNOP. Not: T32EE.
    narrow(
        (2, 3),
        &[(0, UpTo(1)), (4, UpTo(3)), (8, UpTo(1)), (12, UpTo(2)), (16, UpTo(1)), (20, UpTo(1)), (24, UpTo(1))],
    ),
    // ID_ISAR4_EL1: Unpriv, WithShifts, Writeback, Barrier, SynchPrim_frac, PSR_M, SWP_frac. Not: SMC, which is for
    // EL1.
    narrow(
        (2, 4),
        &[(0, UpTo(2)), (4, UpTo(4)), (8, UpTo(1)), (16, UpTo(1)), (20, UpTo(3)), (24, UpTo(1)), (28, UpTo(1))],
    ),
    // ID_ISAR5_EL1: SEVL, AES, SHA1, SHA2, CRC32, RDM, VCMA.
    narrow(
        (2, 5),
        &[(0, UpTo(1)), (4, UpTo(2)), (8, UpTo(1)), (12, UpTo(1)), (16, UpTo(1)), (24, UpTo(1)), (28, UpTo(1))],
    ),
    // ID_MMFR4_EL1: AC2, CnP, HPDS, LSM, CCIDX.
    narrow((2, 6), &[(4, UpTo(1)), (12, UpTo(1)), (16, UpTo(2)), (20, UpTo(1)), (24, UpTo(1))]),
    // ID_ISAR6_EL1: JSCVT, DP, FHM, SB, SPECRES, BF16, I8MM, CLRBHB.
    narrow(
        (2, 7),
        &[
            (0, UpTo(1)),
            (4, UpTo(1)),
            (8, UpTo(1)),
            (12, UpTo(1)),
            (16, UpTo(2)),
            (20, UpTo(1)),
            (24, UpTo(1)),
            (28, UpTo(1)),
        ],
    ),
    // MVFR0_EL1: SIMDReg, FPSP, FPDP, FPTrap, FPDivide, FPSqrt, FPShVec, FPRound.
    narrow(
        (3, 0),
        &[
            (0, UpTo(2)),
            (4, UpTo(2)),
            (8, UpTo(2)),
            (12, UpTo(1)),
            (16, UpTo(1)),
            (20, UpTo(1)),
            (24, UpTo(1)),
            (28, UpTo(1)),
        ],
    ),
    // MVFR1_EL1: FPFtZ, FPDNaN, SIMDLS, SIMDInt, SIMDSP, SIMDHP, FPHP, SIMDFMAC.
    narrow(
        (3, 1),
        &[
            (0, UpTo(1)),
            (4, UpTo(1)),
            (8, UpTo(1)),
            (12, UpTo(1)),
            (16, UpTo(1)),
            (20, UpTo(2)),
            (24, UpTo(3)),
            (28, UpTo(1)),
        ],
    ),
    // MVFR2_EL1: SIMDMisc, FPMisc.
    narrow((3, 2), &[(0, UpTo(3)), (4, UpTo(4))]),
    // ID_PFR2_EL1: CSV3, SSBS.
    narrow((3, 4), &[(0, UpTo(1)), (4, UpTo(1))]),
    // ID_AA64PFR0_EL1: EL0, EL1 (in AArch64 only: HCR_EL2.RW), FP, AdvSIMD, GIC, DIT, CSV2, CSV3. CSV2 above 1 has
    // registers of its own (SCXTNUM). Not: EL2, EL3, RAS, SVE, SEL2, MPAM, AMU, RME.
    wide(
        4,
        0,
        &[
            (0, UpTo(2)),
            (4, UpTo(1)),
            (16, Signed(1)),
            (20, Signed(1)),
            (24, UpTo(1)),
            (48, UpTo(1)),
            (56, UpTo(1)),
            (60, UpTo(1)),
        ],
    ),
    // ID_AA64PFR1_EL1: BT, SSBS. Not: MTE, RAS_frac, MPAM_frac, SME, RNDR_trap, CSV2_frac, NMI, GCS, THE, DF2, PFAR.
    wide(4, 1, &[(0, UpTo(1)), (4, UpTo(2))]),
    // ID_AA64DFR0_EL1: DebugVer up to Armv8.8, BRPs, WRPs, CTX_CMPs. There is no double lock: OSDLR_EL1 accepts writes
    // and reads as zero. Not: TraceVer, PMUVer, PMSVer, TraceFilt, TraceBuffer, MTPMU, BRBE.
    wide(5, 0, &[(0, UpTo(0xa)), (12, UpTo(0xf)), (20, UpTo(0xf)), (28, UpTo(0xf)), (36, Is(0xf))]),
    // ID_AA64ISAR0_EL1: AES, SHA1, SHA2, CRC32, Atomic, RDM, SHA3, SM3, SM4, DP, FHM, TS, TLB, RNDR. Not: TME.
    wide(
        6,
        0,
        &[
            (4, UpTo(2)),
            (8, UpTo(1)),
            (12, UpTo(2)),
            (16, UpTo(1)),
            (20, UpTo(3)),
            (28, UpTo(1)),
            (32, UpTo(1)),
            (36, UpTo(1)),
            (40, UpTo(1)),
            (44, UpTo(1)),
            (48, UpTo(1)),
            (52, UpTo(2)),
            (56, UpTo(2)),
            (60, UpTo(1)),
        ],
    ),
    // ID_AA64ISAR1_EL1: DPB, APA, API, JSCVT, FCMA, LRCPC, GPA, GPI, FRINTTS, SB, SPECRES, BF16, DGH, I8MM, XS. Pointer
    // authentication codes are offered only if all pCPUs compute the same ones. Not: LS64, which needs HCRX_EL2.EnALS
    // and similar bits.
    wide(
        6,
        1,
        &[
            (0, UpTo(2)),
            (4, Same(5)),
            (8, Same(5)),
            (12, UpTo(1)),
            (16, UpTo(1)),
            (20, UpTo(3)),
            (24, Same(1)),
            (28, Same(1)),
            (32, UpTo(1)),
            (36, UpTo(1)),
            (40, UpTo(2)),
            (44, UpTo(2)),
            (48, UpTo(1)),
            (52, UpTo(1)),
            (56, UpTo(1)),
        ],
    ),
    // ID_AA64ISAR2_EL1: WFxT, RPRES, GPA3, APA3, BC, PAC_frac, CLRBHB, RPRFM, CSSC. Not: MOPS. It needs HCRX_EL2.MSCEn,
    // and two pCPUs may have different kinds of it during one copy.
    wide(
        6,
        2,
        &[
            (0, UpTo(2)),
            (4, UpTo(1)),
            (8, Same(1)),
            (12, Same(5)),
            (20, UpTo(1)),
            (24, Same(1)),
            (28, UpTo(1)),
            (48, UpTo(1)),
            (52, UpTo(1)),
        ],
    ),
    // ID_AA64MMFR0_EL1: PARange, as far as stage 2 translates; ASIDBits, BigEnd, BigEndEL0, TGran16, TGran64, TGran4,
    // ExS, ECV. The guest has no stage 2 of its own, so no granule for it (TGran16_2 and similar). Not: SNSMem, FGT.
    wide(
        7,
        0,
        &[
            (0, UpTo(PA_RANGE)),
            (4, UpTo(2)),
            (8, UpTo(1)),
            (16, UpTo(1)),
            (20, UpTo(2)),
            (24, Signed(0)),
            (28, Signed(1)),
            (32, Is(1)),
            (36, Is(1)),
            (40, Is(1)),
            (44, UpTo(1)),
            (60, UpTo(1)),
        ],
    ),
    // ID_AA64MMFR1_EL1: HAFDBS, HPDS, PAN, ETS, AFP, nTLBPA, ECBHB. Not: VMIDBits, VH, LO, SpecSEI, XNX, TWED, HCX,
    // TIDCP1, CMOW.
    wide(
        7,
        1,
        &[(0, UpTo(2)), (12, UpTo(2)), (20, UpTo(3)), (36, UpTo(3)), (44, UpTo(1)), (48, UpTo(1)), (60, UpTo(1))],
    ),
    // ID_AA64MMFR2_EL1: CnP, UAO, LSM, VARange, CCIDX, ST, AT, IDS, TTL, BBM, E0PD. Not: IESB, NV, FWB, EVT.
    wide(
        7,
        2,
        &[
            (0, UpTo(1)),
            (4, UpTo(1)),
            (8, UpTo(1)),
            (16, UpTo(1)),
            (20, UpTo(1)),
            (28, UpTo(1)),
            (32, UpTo(1)),
            (36, UpTo(1)),
            (48, UpTo(1)),
            (52, UpTo(2)),
            (60, UpTo(1)),
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
}

/// Four bits as a signed number.
const fn signed(value: u8) -> i8 {
    ((value << 4) as i8) >> 4
}

/// CRm of ID registers: 1 to 7.
const CRM: usize = 7;
/// Number of possible ID registers.
const COUNT: usize = CRM * 8;

/// Index of a register, if it is an ID register.
const fn place(crm: u8, op2: u8) -> Option<usize> {
    if crm >= 1 && crm as usize <= CRM && op2 < 8 { Some((crm as usize - 1) * 8 + op2 as usize) } else { None }
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
            let fields = register.fields.iter().map(|&(shift, rule)| (shift, rule.offer(nibble(value, shift))));
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
            let merge = |&(shift, rule): &Field| (shift, rule.common(nibble(a, shift), nibble(b, shift)));
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

    fn set(&mut self, register: &Register, fields: impl Iterator<Item = (u32, u8)>) {
        let value = fields.fold(0, |value, (shift, field)| value | u64::from(field) << shift);
        if let Some(place) = place(register.crm, register.op2).and_then(|place| self.0.get_mut(place)) {
            *place = value;
        }
    }

    /// If EL0 has no AArch32 (ID_AA64PFR0_EL1.EL0), the values about AArch32 are unknown, and are cleared here.
    fn without_aarch32(mut self) -> Self {
        const BOTH: u64 = 2;
        if self.get(4, 0) & 0xf != BOTH {
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
