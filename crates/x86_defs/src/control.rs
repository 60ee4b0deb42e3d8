//! What may be written to CR0, CR4 and EFER, and the instructions that write CR0 and CR4 (APM vol. 2, 3.1 and 14.6.2).
//!
//! VMRUN refuses a guest whose control registers contradict each other, and ends it (APM vol. 2, 15.5.1). A processor that
//! runs the guest natively raises #GP at the write instead. The functions of [`State`] decide a write as that processor
//! does, for the features that the guest's CPUID shows. A feature that CPUID hides is a reserved bit.
//!
//! A real processor refuses contradictions before it looks at the intercept (APM vol. 2, table 15-7). It knows nothing of
//! what a hypervisor hides, and emulators check little, so every write is judged here as if nobody had looked before.

use crate::cpuid::Registers;
use crate::registers::{cr0, cr4, efer};

/// The guest's registers that these rules are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// CR0.
    pub cr0: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
}

/// The write is refused with #GP(0), and nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Bits of CR4 and EFER that a guest may set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    cr4: u64,
    efer: u64,
}

/// CPUID leaves that name features with a bit in CR4 or EFER, as the guest sees them.
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

/// CR0's bits that exist. Writes to the others below bit 32 have no effect (APM vol. 2, 3.1.1).
const CR0_DEFINED: u64 =
    cr0::PE | cr0::MP | cr0::EM | cr0::TS | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::NW | cr0::CD | cr0::PG;

/// EFER's bits that read as zero and take any write (APM vol. 2, figure 3-9).
const EFER_READ_AS_ZERO: u64 = 0xfe;

impl Offered {
    /// What these leaves offer (APM vol. 2, 3.1.3 and 3.1.7; APM vol. 3, appendix E).
    ///
    /// SVM is offered by no leaf here: EFER.SVME is the host's.
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
                // Machine checks are the host's business, whatever a guest prepares for.
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
    /// The state after CR0 is written. `in_long_code` says whether CS.L is set.
    ///
    /// # Errors
    /// APM vol. 2, 3.1.1 and table 14-5. Paging is not turned off from 64-bit mode: 14.7 wants compatibility mode first and
    /// leaves open what happens otherwise; Intel's manual has #GP there.
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

    /// The state after CR4 is written.
    ///
    /// # Errors
    /// A bit that is not offered, or PAE cleared in long mode (APM vol. 2, 3.1.3 and table 14-5).
    pub const fn write_cr4(self, value: u64, offered: &Offered) -> Result<Self, Refused> {
        let leaves_pae = value & cr4::PAE == 0 && self.efer & efer::LMA != 0;
        // LA57 cannot change in long mode, and PCIDE can be set there only (APM vol. 2, 3.1.3): whoever offers them
        // has to add these rules.
        if value & !offered.cr4 != 0 || leaves_pae { Err(Refused) } else { Ok(Self { cr4: value, ..self }) }
    }

    /// The state after EFER is written. SVME stays what it is, and LMA follows LME and paging.
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

    /// Whether translations that were cached under this state may be wrong under `next` (APM vol. 2, 5.5.2), so that all of
    /// the guest's are dropped, global ones included.
    ///
    /// The manual's list has paging, PAE, PSE and PGE. WP, the supervisor's and keys' protections and NXE are added: what a
    /// processor keeps beside a translation is its own affair, and these change once in a boot.
    #[must_use]
    pub const fn makes_stale(self, next: Self) -> bool {
        const CR0: u64 = cr0::PG | cr0::WP | cr0::CD | cr0::NW;
        const CR4: u64 =
            cr4::PSE | cr4::PAE | cr4::PGE | cr4::LA57 | cr4::PCIDE | cr4::SMEP | cr4::SMAP | cr4::PKE | cr4::CET;
        const EFER: u64 = efer::LMA | efer::NXE;
        (self.cr0 ^ next.cr0) & CR0 != 0 || (self.cr4 ^ next.cr4) & CR4 != 0 || (self.efer ^ next.efer) & EFER != 0
    }
}

/// CR0 after LMSW loads `word`: PE can be set but not cleared, MP, EM and TS are copied (APM vol. 3, LMSW).
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
        /// Bytes of the instruction.
        length: u8,
    },
    /// LMSW from a general register.
    StatusWord {
        /// Number of the general register.
        from: u8,
        /// Bytes of the instruction.
        length: u8,
    },
    /// LMSW from memory.
    StatusWordInMemory {
        /// Where the opcode's two bytes are. With MOVZX in their place (0F B7), the same bytes load the operand.
        opcode: u8,
    },
}

/// What EXITINFO1 says of an intercepted MOV to a control register where the processor has decode assists: the number of the
/// general register (APM vol. 2, 15.8.1). `None` without them, and for LMSW.
#[must_use]
pub const fn assisted(exit_info_1: u64) -> Option<u8> {
    const IS_MOVE: u64 = 1 << 63;
    if exit_info_1 & IS_MOVE != 0 { Some((exit_info_1 & 0xf) as u8) } else { None }
}

/// Finds out what the instruction that begins with `bytes` writes; `None` if it is none of these.
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
            // A REX prefix counts only just before the opcode (APM vol. 3, 1.2.7).
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
        // The operands are registers, whatever ModRM.mod says. LOCK names CR8 where there is no REX.R (APM vol. 3, MOV CRn).
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
