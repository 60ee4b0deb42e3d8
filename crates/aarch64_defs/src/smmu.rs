//! Arm's IOMMU, the SMMUv3 (Arm IHI 0070), as far as devices get the stage-2 tables of a VM.
//!
//! A device's access has a *StreamID*. The stream table has an entry for each ([`Entry`]). Software tells the SMMU what
//! it has changed by commands in a queue in memory ([`Command`]), and the SMMU reports what it has refused by events in
//! another one ([`Event`]).

use core::fmt;

use addr::Hpa;

/// Bytes of the registers that are used: two pages of 64 KiB.
pub const BYTES: u64 = 0x2_0000;

/// Registers (6.3).
pub mod register {
    /// SMMU_IDR0.
    pub const IDR0: u64 = 0x0;
    /// SMMU_IDR1.
    pub const IDR1: u64 = 0x4;
    /// SMMU_IDR5.
    pub const IDR5: u64 = 0x14;
    /// SMMU_CR0: what is enabled. It has changed once [`CR0ACK`] says the same.
    pub const CR0: u64 = 0x20;
    /// SMMU_CR0ACK.
    pub const CR0ACK: u64 = 0x24;
    /// SMMU_CR1: how tables and queues are read.
    pub const CR1: u64 = 0x28;
    /// SMMU_CR2.
    pub const CR2: u64 = 0x2c;
    /// SMMU_GBPA: what happens to accesses while the SMMU is off.
    pub const GBPA: u64 = 0x44;
    /// SMMU_IRQ_CTRL.
    pub const IRQ_CTRL: u64 = 0x50;
    /// SMMU_STRTAB_BASE.
    pub const STRTAB_BASE: u64 = 0x80;
    /// SMMU_STRTAB_BASE_CFG.
    pub const STRTAB_BASE_CFG: u64 = 0x88;
    /// SMMU_CMDQ_BASE.
    pub const CMDQ_BASE: u64 = 0x90;
    /// SMMU_CMDQ_PROD.
    pub const CMDQ_PROD: u64 = 0x98;
    /// SMMU_CMDQ_CONS.
    pub const CMDQ_CONS: u64 = 0x9c;
    /// SMMU_EVENTQ_BASE.
    pub const EVENTQ_BASE: u64 = 0xa0;
    /// SMMU_EVENTQ_PROD, in the second page.
    pub const EVENTQ_PROD: u64 = 0x1_00a8;
    /// SMMU_EVENTQ_CONS, in the second page.
    pub const EVENTQ_CONS: u64 = 0x1_00ac;

    /// CR0: accesses go through the stream table.
    pub const CR0_SMMUEN: u32 = 1 << 0;
    /// CR0: events are written.
    pub const CR0_EVENTQEN: u32 = 1 << 2;
    /// CR0: commands are read.
    pub const CR0_CMDQEN: u32 = 1 << 3;
    /// CR1: tables and queues are in write-back, inner-shareable memory.
    pub const CR1_CACHED: u32 = 0b11_01_01_11_01_01;
    /// CR2.PTM: broadcasts of processors' TLB maintenance do not concern the SMMU. Its VMIDs are others.
    pub const CR2_PRIVATE: u32 = 1 << 2;
    /// CR2.RECINVSID: accesses with an invalid StreamID are reported.
    pub const CR2_RECORD_INVALID: u32 = 1 << 1;
    /// GBPA: accesses are refused.
    pub const GBPA_ABORT: u32 = 1 << 20;
    /// GBPA: the register is being written.
    pub const GBPA_UPDATE: u32 = 1 << 31;
    /// STRTAB_BASE and the queues' bases: reads may allocate in caches.
    pub const ALLOCATE: u64 = 1 << 62;
    /// EVENTQ_PROD: events were lost. The same bit of EVENTQ_CONS says that software knows.
    pub const EVENTQ_OVERFLOW: u32 = 1 << 31;
    /// CMDQ_CONS: a command was wrong.
    pub const CMDQ_ERROR: u32 = 0x7f << 24;
}

/// What an SMMU can do: IDR0, IDR1 and IDR5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// SMMU_IDR0.
    pub idr0: u32,
    /// SMMU_IDR1.
    pub idr1: u32,
    /// SMMU_IDR5.
    pub idr5: u32,
}

/// Why an SMMU cannot guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unable {
    /// No stage 2.
    Stage2,
    /// No tables as processors have them in AArch64, or no pages of 4 KiB.
    Format,
    /// It does not read through the processors' caches.
    Coherence,
    /// No stream table of two levels, or none that software makes.
    Streams,
    /// Its queues are fixed.
    Queues,
}

impl fmt::Display for Unable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stage2 => "has no stage 2 (on QEMU: version 9.1 has)",
            Self::Format => "does not walk tables of AArch64 with pages of 4 KiB",
            Self::Coherence => "does not read through the processors' caches",
            Self::Streams => "has no stream table of two levels that software makes",
            Self::Queues => "has queues at fixed places",
        })
    }
}

impl Abilities {
    /// Whether it can do what is needed.
    ///
    /// # Errors
    /// What it cannot do.
    pub const fn check(self) -> Result<(), Unable> {
        const STAGE_2: u32 = 1 << 0;
        const COHERENT: u32 = 1 << 4;
        const PAGES_4K: u32 = 1 << 4;
        if self.idr0 & STAGE_2 == 0 {
            Err(Unable::Stage2)
        } else if self.idr0 >> 2 & 0b10 == 0 || self.idr5 & PAGES_4K == 0 {
            Err(Unable::Format)
        } else if self.idr0 & COHERENT == 0 {
            Err(Unable::Coherence)
        } else if self.idr0 >> 27 & 0b11 != 1 || self.idr1 & 1 << 30 != 0 || self.stream_bits() <= SPLIT {
            Err(Unable::Streams)
        } else if self.idr1 & 1 << 29 != 0 {
            Err(Unable::Queues)
        } else {
            Ok(())
        }
    }

    /// Bits of a StreamID that are looked at: 16 are those of a PCI function.
    #[must_use]
    pub const fn stream_bits(self) -> u32 {
        let bits = self.idr1 & 0x3f;
        if bits < 16 { bits } else { 16 }
    }

    /// Bits of an address that it puts out.
    #[must_use]
    pub const fn output_bits(self) -> u32 {
        match self.idr5 & 7 {
            0 => 32,
            1 => 36,
            2 => 40,
            3 => 42,
            4 => 44,
            5 => 48,
            _ => 52,
        }
    }

    /// Log2 of the commands in a queue of at most so many bits.
    #[must_use]
    pub const fn command_bits(self, most: u32) -> u32 {
        let bits = self.idr1 >> 21 & 0x1f;
        if bits < most { bits } else { most }
    }

    /// Log2 of the events in a queue of at most so many bits.
    #[must_use]
    pub const fn event_bits(self, most: u32) -> u32 {
        let bits = self.idr1 >> 16 & 0x1f;
        if bits < most { bits } else { most }
    }
}

/// Bits of a StreamID that choose an entry in the second level of the stream table.
pub const SPLIT: u32 = 8;

/// SMMU_STRTAB_BASE_CFG for a table of two levels and StreamIDs of so many bits.
#[must_use]
pub const fn stream_table(bits: u32) -> u32 {
    const TWO_LEVELS: u32 = 1 << 16;
    TWO_LEVELS | SPLIT << 6 | bits
}

/// An entry of the first level: all entries of a table of the second one are there.
#[must_use]
pub const fn first_level(second: Hpa) -> u64 {
    second.0 & 0x000f_ffff_ffff_ffc0 | (SPLIT as u64 + 1)
}

/// SMMU_STRTAB_BASE, SMMU_CMDQ_BASE or SMMU_EVENTQ_BASE: an address, and for a queue log2 of its entries.
#[must_use]
pub const fn base(at: Hpa, bits: u32) -> u64 {
    register::ALLOCATE | at.0 & 0x000f_ffff_ffff_ffe0 | bits as u64
}

/// An entry of the stream table (5.2): what a device's accesses go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub [u64; 8]);

/// The tables of a VM, as an entry names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage2 {
    /// The VMID, which is the SMMU's own.
    pub vmid: u16,
    /// The root.
    pub root: Hpa,
    /// VTCR_EL2.T0SZ: how many bits less than 64 the addresses have that are translated.
    pub t0sz: u64,
    /// VTCR_EL2.SL0: the level of the root.
    pub sl0: u64,
    /// Bits of the addresses that come out.
    pub output_bits: u32,
}

impl Entry {
    /// Bytes of an entry.
    pub const BYTES: usize = 64;
    /// No access passes, and each is reported.
    pub const NOTHING: Self = Self([0; 8]);

    /// Accesses go through the tables of a VM. A refused one is reported, and never waits.
    #[must_use]
    pub const fn stage2(of: Stage2) -> Self {
        const VALID: u64 = 1;
        const STAGE_2_ALONE: u64 = 0b110 << 1;
        const SHARED_AS_IT_COMES: u64 = 1 << 44;
        /// S2IR0, S2OR0: write-back. S2SH0: inner shareable.
        const WALKS: u64 = 1 << 40 | 1 << 42 | 3 << 44;
        const AARCH64: u64 = 1 << 51;
        const NO_ACCESS_FLAG: u64 = 1 << 53;
        const RECORD: u64 = 1 << 58;
        let size = match of.output_bits {
            ..36 => 0,
            36..40 => 1,
            40..42 => 2,
            42..44 => 3,
            44..48 => 4,
            48..52 => 5,
            _ => 6,
        };
        let third = of.vmid as u64
            | (of.t0sz & 0x3f) << 32
            | (of.sl0 & 3) << 38
            | WALKS
            | size << 48
            | AARCH64
            | NO_ACCESS_FLAG
            | RECORD;
        let root = of.root.0 & 0x000f_ffff_ffff_fff0;
        Self([VALID | STAGE_2_ALONE, SHARED_AS_IT_COMES, third, root, 0, 0, 0, 0])
    }
}

/// A command (4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// CMD_CFGI_ALL: all of the stream table has changed.
    AllEntries,
    /// CMD_TLBI_S12_VMALL: nothing of this VMID is kept.
    ForgetVm(u16),
    /// CMD_TLBI_NSNH_ALL: nothing at all is kept.
    ForgetAll,
    /// CMD_SYNC: earlier commands are complete, and accesses from before them.
    Sync,
}

impl Command {
    /// Bytes of a command.
    pub const BYTES: usize = 16;

    /// The command in memory, in words of little endian.
    #[must_use]
    pub const fn words(self) -> [u64; 2] {
        match self {
            Self::AllEntries => [0x04, 31],
            Self::ForgetVm(vmid) => [0x28 | (vmid as u64) << 32, 0],
            Self::ForgetAll => [0x30, 0],
            Self::Sync => [0x46, 0],
        }
    }

    /// The same, as bytes.
    #[must_use]
    pub fn bytes(self) -> [u8; Self::BYTES] {
        let [first, second] = self.words().map(u64::to_le_bytes);
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&first);
        bytes[8..].copy_from_slice(&second);
        bytes
    }
}

/// The place in a queue of 2^`bits` entries, with a bit above it that changes at each round (3.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Place and round.
    pub value: u32,
    /// Log2 of the entries.
    pub bits: u32,
}

impl Place {
    /// The number of the entry.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.value & ((1 << self.bits) - 1)
    }

    /// The place behind this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self { value: (self.value + 1) & ((2 << self.bits) - 1), ..self }
    }

    /// Whether a register with other bits above is at this place.
    #[must_use]
    pub const fn is(self, register: u32) -> bool {
        (self.value ^ register) & ((2 << self.bits) - 1) == 0
    }
}

/// An event (7.3): an access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub [u64; 4]);

impl Event {
    /// Bytes of an event.
    pub const BYTES: usize = 32;

    /// Whose access it was.
    #[must_use]
    pub const fn stream(&self) -> u32 {
        (self.0[0] >> 32) as u32
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const READ: u64 = 1 << 35;
        let [first, second, address, _] = self.0;
        let access = if second & READ != 0 { "read" } else { "write" };
        match first & 0xff {
            0x02 => f.write_str("an access, which was refused: there is no such stream"),
            0x04 => f.write_str("an access, which was refused: nobody owns the device"),
            0x10 => write!(f, "{access} at {address:#x}, which was refused: nothing is there"),
            0x11 => write!(f, "{access} at {address:#x}, which was refused: the address is too large"),
            0x12 => write!(f, "{access} at {address:#x}, which was refused: access flag"),
            0x13 => write!(f, "{access} at {address:#x}, which was refused: no such right"),
            other => write!(f, "event {other:#x} (words {:#x?})", self.0),
        }
    }
}

#[cfg(test)]
mod tests;
