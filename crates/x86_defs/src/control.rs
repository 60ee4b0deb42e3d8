//! Rules for writes of CR0, CR4 and EFER, and the instructions that write CR0 and CR4 (APM vol. 2, 3.1 and 14.6.2).
//!
//! VMRUN fails if the guest's control registers contradict each other (APM vol. 2, 15.5.1). A processor that runs the
//! guest natively raises #GP at the write instead. The functions of [`State`] decide about a write like that processor,
//! for the features in the guest's CPUID. A feature that CPUID hides is a reserved bit.
//!
//! A real processor checks for contradictions before the intercept (APM vol. 2, table 15-7). It does not know what a
//! hypervisor hides, and emulators check little. So these functions check every write completely.

use crate::cpuid::Registers;
use crate::registers::{cr0, cr4, efer};

/// The guest's registers in these rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// CR0.
    pub cr0: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
}

/// The write raises #GP(0), and nothing changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Bits of CR4 and EFER that a guest may set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    cr4: u64,
    efer: u64,
}

/// CPUID leaves with features that have a bit in CR4 or EFER, as the guest sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaves {
    /// Leaf 1.
    pub leaf_1: Registers,
    /// Leaf 7, subleaf 0.
    pub leaf_7: Registers,
    /// Leaf 8000_0001.
    pub leaf_8000_0001: Registers,
    /// Leaf 8000_0008.
    pub leaf_8000_0008: Registers,
    /// Leaf 8000_0021.
    pub leaf_8000_0021: Registers,
}

/// The existing bits of CR0. Writes to others below bit 32 have no effect (APM vol. 2, 3.1.1).
const CR0_DEFINED: u64 =
    cr0::PE | cr0::MP | cr0::EM | cr0::TS | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::NW | cr0::CD | cr0::PG;

/// EFER's bits that read as zero and accept any write (APM vol. 2, figure 3-9).
const EFER_READ_AS_ZERO: u64 = 0xfe;

impl Offered {
    /// The bits that these leaves offer (APM vol. 2, 3.1.3 and 3.1.7; APM vol. 3, appendix E).
    ///
    /// No leaf here offers SVM: EFER.SVME belongs to the host.
    #[must_use]
    pub fn by(leaves: &Leaves) -> Self {
        let Leaves { leaf_1, leaf_7, leaf_8000_0001, leaf_8000_0008, leaf_8000_0021 } = *leaves;
        let has = |register: u32, bit: u32| register >> bit & 1 != 0;
        let sum =
            |features: &[(bool, u64)]| features.iter().filter(|(there, _)| *there).fold(0, |sum, (_, bit)| sum | bit);
        Self {
            cr4: sum(&[
                (has(leaf_1.edx, 1), cr4::VME | cr4::PVI),
                (has(leaf_1.edx, 4), cr4::TSD),
                (has(leaf_1.edx, 2), cr4::DE),
                (has(leaf_1.edx, 3), cr4::PSE),
                (has(leaf_1.edx, 6), cr4::PAE),
                // The host handles machine checks, whatever the guest enables.
                (true, cr4::MCE),
                (has(leaf_1.edx, 13), cr4::PGE),
                (true, cr4::PCE),
                (has(leaf_1.edx, 24), cr4::OSFXSR),
                (has(leaf_1.edx, 25), cr4::OSXMMEXCPT),
                (has(leaf_7.ecx, 2), cr4::UMIP),
                (has(leaf_7.ecx, 16), cr4::LA57),
                (has(leaf_7.ebx, 0), cr4::FSGSBASE),
                (has(leaf_1.ecx, 17), cr4::PCIDE),
                (has(leaf_1.ecx, 26), cr4::OSXSAVE),
                (has(leaf_7.ebx, 7), cr4::SMEP),
                (has(leaf_7.ebx, 20), cr4::SMAP),
                (has(leaf_7.ecx, 3), cr4::PKE),
                (has(leaf_7.ecx, 7), cr4::CET),
            ]),
            efer: sum(&[
                (has(leaf_8000_0001.edx, 11), efer::SCE),
                (has(leaf_8000_0001.edx, 29), efer::LME),
                (has(leaf_8000_0001.edx, 20), efer::NXE),
                (has(leaf_8000_0001.edx, 25), efer::FFXSR),
                (has(leaf_8000_0001.ecx, 17), efer::TCE),
                (has(leaf_8000_0008.ebx, 8), efer::MCOMMIT),
                (has(leaf_8000_0008.ebx, 13), efer::INTWB),
                (has(leaf_8000_0021.eax, 7), efer::UAIE),
                (has(leaf_8000_0021.eax, 8), efer::AIBRSE),
            ]),
        }
    }
}

impl State {
    /// With PAE paging and not in long mode: the address of the first table. Intel's processors keep its four entries
    /// in registers (SDM vol. 3A, 4.4.1). CR3's lower five bits are no part of it.
    #[must_use]
    pub const fn directory(self, cr3: u64) -> Option<u64> {
        let is_pae = self.cr0 & cr0::PG != 0 && self.cr4 & cr4::PAE != 0 && self.efer & efer::LMA == 0;
        if is_pae { Some(cr3 & 0xffff_ffe0) } else { None }
    }

    /// The state after a write of CR0. `in_long_code` is CS.L.
    ///
    /// # Errors
    /// APM vol. 2, 3.1.1 and table 14-5. Paging cannot be turned off in 64-bit mode: 14.7 requires compatibility mode
    /// first and does not say what happens otherwise; Intel's manual has #GP there.
    pub const fn write_cr0(self, value: u64, in_long_code: bool) -> Result<Self, Refused> {
        let Self { cr4, mut efer, .. } = self;
        if value >> 32 != 0 || value & (cr0::PG | cr0::PE) == cr0::PG || value & (cr0::NW | cr0::CD) == cr0::NW {
            return Err(Refused);
        }
        let changes_paging = (value ^ self.cr0) & cr0::PG != 0;
        if changes_paging && efer & efer::LME != 0 {
            if in_long_code || (value & cr0::PG != 0 && cr4 & cr4::PAE == 0) {
                return Err(Refused);
            }
            efer = if value & cr0::PG != 0 { efer | efer::LMA } else { efer & !efer::LMA };
        }
        Ok(Self { cr0: value & CR0_DEFINED | cr0::ET, cr4, efer })
    }

    /// The state after a write of CR4.
    ///
    /// # Errors
    /// A bit that is not offered, or PAE cleared in long mode (APM vol. 2, 3.1.3 and table 14-5).
    pub const fn write_cr4(self, value: u64, offered: &Offered) -> Result<Self, Refused> {
        let leaves_pae = value & cr4::PAE == 0 && self.efer & efer::LMA != 0;
        // LA57 cannot change in long mode, and PCIDE can be set only there (APM vol. 2, 3.1.3): add these rules before
        // offering them.
        if value & !offered.cr4 != 0 || leaves_pae { Err(Refused) } else { Ok(Self { cr4: value, ..self }) }
    }

    /// The state after a write of EFER. SVME does not change, and LMA follows LME and paging.
    ///
    /// # Errors
    /// A bit that is not offered, or LME changed while paging is on (APM vol. 2, 3.1.7 and table 14-5).
    pub const fn write_efer(self, value: u64, offered: &Offered) -> Result<Self, Refused> {
        let value = value & !EFER_READ_AS_ZERO;
        let changed = value ^ self.efer;
        if value & !(offered.efer | efer::LMA) != 0 || (changed & efer::LME != 0 && self.cr0 & cr0::PG != 0) {
            return Err(Refused);
        }
        Ok(Self { efer: self.efer & !offered.efer | value & offered.efer, ..self })
    }

    /// The state after somebody outside of the guest has set CR0.
    ///
    /// It sets CR0, CR4 and EFER one after the other, in any order. So each value is checked by itself, and VMRUN
    /// checks what they are together (APM vol. 2, 15.5.1). LMA always follows from LME and paging.
    ///
    /// # Errors
    /// The upper half is not zero.
    pub const fn set_cr0(self, value: u64) -> Result<Self, Refused> {
        if value >> 32 != 0 { Err(Refused) } else { Ok(Self { cr0: value & CR0_DEFINED | cr0::ET, ..self }.with_lma()) }
    }

    /// The same for CR4.
    ///
    /// # Errors
    /// A bit that is not offered.
    pub const fn set_cr4(self, value: u64, offered: &Offered) -> Result<Self, Refused> {
        if value & !offered.cr4 != 0 { Err(Refused) } else { Ok(Self { cr4: value, ..self }) }
    }

    /// The same for EFER. LMA in `value` has no effect.
    ///
    /// # Errors
    /// A bit that is not offered.
    pub const fn set_efer(self, value: u64, offered: &Offered) -> Result<Self, Refused> {
        if value & !(offered.efer | efer::LMA | EFER_READ_AS_ZERO) != 0 {
            return Err(Refused);
        }
        Ok(Self { efer: self.efer & !offered.efer | value & offered.efer, ..self }.with_lma())
    }

    const fn with_lma(self) -> Self {
        let is_long = self.efer & efer::LME != 0 && self.cr0 & cr0::PG != 0;
        Self { efer: if is_long { self.efer | efer::LMA } else { self.efer & !efer::LMA }, ..self }
    }

    /// Whether translations cached in this state may be wrong in `next` (APM vol. 2, 5.5.2), so that all of the guest's
    /// entries must be flushed, global ones included.
    ///
    /// The manual's list has paging, PAE, PSE and PGE. Here WP, SMEP, SMAP, protection keys and NXE are added: a
    /// processor may cache more than the manual says, and these change once per boot.
    #[must_use]
    pub const fn makes_stale(self, next: Self) -> bool {
        const CR0: u64 = cr0::PG | cr0::WP | cr0::CD | cr0::NW;
        const CR4: u64 =
            cr4::PSE | cr4::PAE | cr4::PGE | cr4::LA57 | cr4::PCIDE | cr4::SMEP | cr4::SMAP | cr4::PKE | cr4::CET;
        const EFER: u64 = efer::LMA | efer::NXE;
        (self.cr0 ^ next.cr0) & CR0 != 0 || (self.cr4 ^ next.cr4) & CR4 != 0 || (self.efer ^ next.efer) & EFER != 0
    }
}

/// CR0 after LMSW of `word`: it can set but not clear PE, and copies MP, EM and TS (APM vol. 3, LMSW).
#[must_use]
pub const fn with_status_word(cr0: u64, word: u64) -> u64 {
    const COPIED: u64 = cr0::MP | cr0::EM | cr0::TS;
    cr0 & !COPIED | word & (COPIED | cr0::PE)
}

/// An instruction that writes a control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// MOV to a control register from a general register.
    Move {
        /// Number of the control register.
        control: u8,
        /// Number of the general register.
        from: u8,
        /// Length of the instruction.
        length: u8,
    },
    /// LMSW from a general register.
    StatusWord {
        /// Number of the general register.
        from: u8,
        /// Length of the instruction.
        length: u8,
    },
    /// LMSW from memory.
    StatusWordInMemory {
        /// Position of the opcode's two bytes. MOVZX (0F B7) in their place loads the operand with the same bytes.
        opcode: u8,
    },
}

/// The number of the general register from EXITINFO1, for an intercepted MOV to a control register on a processor with
/// decode assists (APM vol. 2, 15.8.1). `None` without decode assists, and for LMSW.
#[must_use]
pub const fn assisted(exit_info_1: u64) -> Option<u8> {
    const IS_MOVE: u64 = 1 << 63;
    if exit_info_1 & IS_MOVE != 0 { Some((exit_info_1 & 0xf) as u8) } else { None }
}

/// Decodes the instruction at the start of `bytes`; `None` if it is none of these.
#[must_use]
pub fn decode(bytes: &[u8], is_64_bit: bool) -> Option<Write> {
    const LOCK: u8 = 0xf0;
    const TWO_BYTES: u8 = 0x0f;
    const MOVE_TO_CONTROL: u8 = 0x22;
    const GROUP_7: u8 = 0x01;
    const LOAD_STATUS_WORD: u8 = 6;

    let (mut at, mut locked, mut rex) = (0, false, 0);
    loop {
        match *bytes.get(at)? {
            // A REX prefix counts only directly before the opcode (APM vol. 3, 1.2.7).
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf2 | 0xf3 => rex = 0,
            LOCK => (locked, rex) = (true, 0),
            prefix @ 0x40..=0x4f if is_64_bit => rex = prefix,
            _ => break,
        }
        at += 1;
    }
    let [TWO_BYTES, opcode, modrm] = *bytes.get(at..at + 3)? else { return None };
    let from = modrm & 7 | (rex & 1) << 3;
    let field = modrm >> 3 & 7;
    let length = u8::try_from(at + 3).ok()?;
    match opcode {
        // The operands are registers, whatever ModRM.mod is. Without REX.R, LOCK selects CR8 (APM vol. 3, MOV CRn).
        MOVE_TO_CONTROL => {
            let upper = if rex >> 2 & 1 != 0 || locked { 8 } else { 0 };
            Some(Write::Move { control: field | upper, from, length })
        }
        GROUP_7 if field == LOAD_STATUS_WORD && modrm >> 6 == 3 => Some(Write::StatusWord { from, length }),
        GROUP_7 if field == LOAD_STATUS_WORD => Some(Write::StatusWordInMemory { opcode: u8::try_from(at).ok()? }),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
