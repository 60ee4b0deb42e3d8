//! Which instructions drop which cached translations (SDM vol. 3C, 29.4.3).

/// What has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All translations of all guests.
    All,
    /// Those of a vCPU: its page tables or its stage 2 have changed.
    Vcpu {
        /// Its VPID.
        vpid: u32,
        /// The pointer to its stage 2.
        eptp: u64,
    },
    /// Those of a vCPU for an address: its page tables have changed.
    Address {
        /// Its VPID.
        vpid: u32,
        /// The GVA.
        gva: u64,
    },
}

/// An instruction, with the type in its register operand and the descriptor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// INVVPID.
    Invvpid(u64, [u64; 2]),
    /// INVEPT.
    Invept(u64, [u64; 2]),
}

const ADDRESS: u64 = 0;
const SINGLE: u64 = 1;
const ALL: u64 = 2;

impl Scope {
    /// The instructions, which may come in any order. INVVPID alone would leave guest-physical mappings, and INVEPT
    /// alone would do: it drops what was made with these tables, of any VPID. Both is what the manual recommends
    /// (29.4.3.4), so that nothing depends on how a processor has tagged its entries.
    #[must_use]
    #[inline]
    pub const fn instructions(self) -> [Option<Instruction>; 2] {
        match self {
            Self::All => [Some(Instruction::Invvpid(ALL, [0; 2])), Some(Instruction::Invept(ALL, [0; 2]))],
            Self::Vcpu { vpid, eptp } => {
                let vpid = vpid as u64;
                [Some(Instruction::Invvpid(SINGLE, [vpid, 0])), Some(Instruction::Invept(SINGLE, [eptp, 0]))]
            }
            Self::Address { vpid, gva } => [Some(Instruction::Invvpid(ADDRESS, [vpid as u64, gva])), None],
        }
    }
}
