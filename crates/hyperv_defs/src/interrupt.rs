//! Calls that send interrupts to a partition, and calls about ports, by which one partition notifies another.
//!
//! A *port* is where a partition receives; a *connection* lets another partition send to it. Of the four kinds of
//! ports, parents use one: a *doorbell*. A write of the child to a GPA then does not exit to the parent, but puts the
//! port's number into the parent's event ring.

use addr::Gpa;

use crate::hypercall::Status;
use crate::partition::{PartitionId, word_at};
use crate::vp::VP_INDEX_ANY;
use crate::wire::{U16, U32, U64, wire};

wire! {
    /// Input of HvCallAssertVirtualInterrupt (Linux' `hv_input_assert_virtual_interrupt`).
    pub struct AssertInput: 32 {
        /// The partition.
        pub partition: U64,
        /// [`InterruptKind`].
        pub kind: U32,
        /// Bit 0: level. Bit 1: logical destination.
        pub flags: U32,
        /// APIC id, or logical destination.
        pub destination: U64,
        /// The vector.
        pub vector: U32,
        /// The virtual trust level.
        pub vtl: u8,
        /// Not looked at.
        pub reserved: [u8; 3],
    }

    /// Input of HvCallCreatePort (Linux' `hv_input_create_port`).
    pub struct CreatePortInput: 56 {
        /// Who receives.
        pub port_partition: U64,
        /// Number of the port.
        pub port: U32,
        /// The virtual trust level that receives.
        pub port_vtl: u8,
        /// The lowest virtual trust level that sends.
        pub min_connection_vtl: u8,
        /// Not looked at.
        pub padding: U16,
        /// Who sends.
        pub connection_partition: U64,
        /// Its kind. 4 is a doorbell.
        pub kind: U32,
        /// Not looked at.
        pub kind_padding: U32,
        /// The SINT that is raised.
        pub sint: U32,
        /// The VP that receives, or [`VP_INDEX_ANY`].
        pub vp: U32,
        /// Not looked at.
        pub reserved: U64,
        /// Not looked at.
        pub proximity: U64,
    }

    /// Input of HvCallConnectPort (Linux' `hv_input_connect_port`).
    pub struct ConnectPortInput: 72 {
        /// Who sends.
        pub connection_partition: U64,
        /// Number of the connection.
        pub connection: U32,
        /// The virtual trust level that sends.
        pub connection_vtl: u8,
        /// Not looked at.
        pub padding: [u8; 3],
        /// Who receives.
        pub port_partition: U64,
        /// Number of the port.
        pub port: U32,
        /// Not looked at.
        pub reserved: U32,
        /// Its kind, as at the port.
        pub kind: U32,
        /// Not looked at.
        pub kind_padding: U32,
        /// Where the doorbell is.
        pub gpa: U64,
        /// What must be written there.
        pub value: U64,
        /// Bytes of the write in bits 2:0 ([`Doorbell::bytes`]). Bit 31: any value.
        pub flags: U64,
        /// Not looked at.
        pub proximity: U64,
    }
}

/// How an interrupt is delivered (Linux' `hv_interrupt_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum InterruptKind {
    /// To the destination.
    Fixed = 0,
    /// To one of the destinations.
    LowestPriority = 1,
    /// SMI.
    Smi = 2,
    /// Remote read.
    RemoteRead = 3,
    /// NMI.
    Nmi = 4,
    /// INIT.
    Init = 5,
    /// SIPI.
    Sipi = 6,
    /// From an external interrupt controller, with its vector.
    ExtInt = 7,
    /// At the pin LINT0.
    Lint0 = 8,
    /// At the pin LINT1.
    Lint1 = 9,
}

impl InterruptKind {
    const ALL: [Self; 10] = [
        Self::Fixed,
        Self::LowestPriority,
        Self::Smi,
        Self::RemoteRead,
        Self::Nmi,
        Self::Init,
        Self::Sipi,
        Self::ExtInt,
        Self::Lint0,
        Self::Lint1,
    ];
}

/// HvCallAssertVirtualInterrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssertInterrupt {
    /// In whom.
    pub partition: PartitionId,
    /// How.
    pub kind: InterruptKind,
    /// It is level-triggered.
    pub is_level: bool,
    /// The destination is a logical one.
    pub is_logical: bool,
    /// The destination. In physical mode, ones in all 8 or all 32 bits mean all vCPUs.
    pub destination: u32,
    /// The vector.
    pub vector: u8,
}

/// Number of a SINT is below.
const SINTS: u32 = 16;
/// Numbers of ports and connections have 24 bits.
const PORT_BITS: u32 = 24;
const DOORBELL: u32 = 4;

/// Names a port, or a connection, of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// Whose.
    pub partition: PartitionId,
    /// Its number, of 24 bits. Zero is none.
    pub number: u32,
}

/// HvCallCreatePort, of a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatePort {
    /// Who receives.
    pub port: Port,
    /// Who sends.
    pub sender: PartitionId,
    /// The SINT that is raised.
    pub sint: u8,
    /// The VP that receives. `None`: any.
    pub vp: Option<u32>,
}

/// HvCallConnectPort, to a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectPort {
    /// Who sends.
    pub connection: Port,
    /// Who receives.
    pub port: Port,
    /// What rings.
    pub doorbell: Doorbell,
}

/// Which write rings (Linux' `HV_DOORBELL_FLAG_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Doorbell {
    /// Where.
    pub gpa: Gpa,
    /// How many bytes. `None`: any number.
    pub bytes: Option<u8>,
    /// Of which value. `None`: any.
    pub value: Option<u64>,
}

impl Doorbell {
    const ANY_VALUE: u64 = 1 << 31;

    fn parse(gpa: u64, value: u64, flags: u64) -> Result<Self, Status> {
        let bytes = match flags & !Self::ANY_VALUE {
            0 => None,
            1 => Some(1),
            2 => Some(2),
            3 => Some(4),
            4 => Some(8),
            _ => return Err(Status::InvalidParameter),
        };
        let value = (flags & Self::ANY_VALUE == 0).then_some(value);
        Ok(Self { gpa: Gpa(gpa), bytes, value })
    }

    /// Whether this write rings. `value` is zero above its `bytes`.
    #[must_use]
    pub fn rings(&self, gpa: Gpa, bytes: u8, value: u64) -> bool {
        self.gpa == gpa && self.bytes.is_none_or(|wanted| wanted == bytes) && self.value.is_none_or(|it| it == value)
    }
}

impl AssertInterrupt {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        const LEVEL: u32 = 1 << 0;
        const LOGICAL: u32 = 1 << 1;

        let input = AssertInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let kind = InterruptKind::ALL.into_iter().find(|kind| *kind as u32 == input.kind.get());
        let flags = input.flags.get();
        let (Some(kind), Ok(destination), Ok(vector), 0) = (
            kind,
            u32::try_from(input.destination.get()),
            u8::try_from(input.vector.get()),
            flags & !(LEVEL | LOGICAL) | u32::from(input.vtl),
        ) else {
            return Err(Status::InvalidParameter);
        };
        Ok(Self {
            partition: PartitionId(input.partition.get()),
            kind,
            is_level: flags & LEVEL != 0,
            is_logical: flags & LOGICAL != 0,
            destination,
            vector,
        })
    }
}

impl Port {
    /// `wrong`: the status for an invalid number.
    fn parse(partition: u64, number: u32, wrong: Status) -> Result<Self, Status> {
        if number == 0 || number >> PORT_BITS != 0 {
            return Err(wrong);
        }
        Ok(Self { partition: PartitionId(partition), number })
    }

    /// Input of HvCallDeletePort.
    pub(crate) fn parse_delete(input: &[u8]) -> Result<Self, Status> {
        let (partition, [number, _]) = (word_at(input, 0)?, halves(word_at(input, 8)?));
        Self::parse(partition, number, Status::InvalidPortId)
    }

    /// Input of HvCallDisconnectPort. Bit 0 of the upper half is set for a doorbell.
    pub(crate) fn parse_disconnect(input: &[u8]) -> Result<Self, Status> {
        let (partition, [number, flags]) = (word_at(input, 0)?, halves(word_at(input, 8)?));
        if flags != 1 {
            return Err(Status::InvalidParameter);
        }
        Self::parse(partition, number, Status::InvalidConnectionId)
    }
}

impl CreatePort {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = CreatePortInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let sint = u8::try_from(input.sint.get()).ok().filter(|sint| u32::from(*sint) < SINTS);
        let (DOORBELL, 0, 0, Some(sint)) = (input.kind.get(), input.port_vtl, input.min_connection_vtl, sint) else {
            return Err(Status::InvalidParameter);
        };
        let vp = Some(input.vp.get()).filter(|vp| *vp != VP_INDEX_ANY);
        let port = Port::parse(input.port_partition.get(), input.port.get(), Status::InvalidPortId)?;
        Ok(Self { port, sender: PartitionId(input.connection_partition.get()), sint, vp })
    }
}

impl ConnectPort {
    pub(crate) fn parse(input: &[u8]) -> Result<Self, Status> {
        let input = ConnectPortInput::from_bytes(input).ok_or(Status::InvalidHypercallInput)?;
        let (DOORBELL, 0) = (input.kind.get(), input.connection_vtl) else {
            return Err(Status::InvalidParameter);
        };
        let sender = input.connection_partition.get();
        Ok(Self {
            connection: Port::parse(sender, input.connection.get(), Status::InvalidConnectionId)?,
            port: Port::parse(input.port_partition.get(), input.port.get(), Status::InvalidPortId)?,
            doorbell: Doorbell::parse(input.gpa.get(), input.value.get(), input.flags.get())?,
        })
    }
}

/// Input of HvCallNotifyPortRingEmpty: the SINT whose event ring is empty.
pub(crate) fn parse_ring(input: &[u8]) -> Result<u8, Status> {
    let [sint, _] = halves(word_at(input, 0)?);
    u8::try_from(sint).ok().filter(|sint| u32::from(*sint) < SINTS).ok_or(Status::InvalidParameter)
}

/// Lower and upper half.
#[expect(clippy::cast_possible_truncation, reason = "the halves are cut out on purpose")]
const fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}
