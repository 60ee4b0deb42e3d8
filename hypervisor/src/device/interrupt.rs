//! Interrupt messages between APICs.
//!
//! Local APICs (an IPI) and I/O APICs (a device's pin) use the same messages: a vector, an action, and a target. Sender
//! and receiver never call each other. The owner of the VM's vCPUs resolves a [`Target`] to vCPUs and gives each of
//! them the vector.
//!
//! A target is already decoded. The same 32 bits mean different things when written by an xAPIC (8-bit destination,
//! broadcast 0xff) and by an x2APIC (32-bit destination, broadcast 0xffff_ffff). Only the sender can decode them;
//! [`Target`] holds their meaning.

/// One interrupt message on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Interrupt vector; for [`Kind::Startup`] the page number of the first instruction; otherwise meaningless.
    pub vector: u8,
    /// The receiver's action.
    pub kind: Kind,
    /// The receivers.
    pub target: Target,
    /// Level-triggered: the receiver must report its EOI to the I/O APIC. Never set for IPIs.
    pub level: bool,
}

impl Message {
    /// The message that a device sends by writing `data` to `address` (MSI; APM vol. 2, 16.6.3). `None` if that is no
    /// message for local APICs, or one that our guests do not have. It is an edge: devices that hold a line have pins.
    #[must_use]
    pub fn from_device(address: u64, data: u32) -> Option<Self> {
        const AREA: u64 = 0xfee;
        const LOGICAL: u64 = 1 << 2;
        /// Vectors below are the processor's own.
        const FIRST_VECTOR: u8 = 16;

        let [vector, mode, ..] = data.to_le_bytes();
        let kind = match Kind::from_delivery_mode(mode.into())? {
            kind @ Kind::Nmi => kind,
            kind if kind.has_vector() && vector >= FIRST_VECTOR => kind,
            _ => return None,
        };
        let [_, low, high, ..] = address.to_le_bytes();
        let target = Target::from_xapic(low >> 4 | high << 4, address & LOGICAL != 0);
        (address >> 20 == AREA).then_some(Self { vector, kind, target, level: false })
    }
}

/// Delivery mode of a message (APM vol. 2, 16.5). Guests send no SMI and no external (8259) interrupt: they are dropped
/// where they are sent. A parent's virtual machine monitor sends external ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The vector is requested at each target.
    Fixed,
    /// The vector is requested at one of the targets.
    LowestPriority,
    /// Non-maskable interrupt.
    Nmi,
    /// INIT: the target is reset and waits for [`Kind::Startup`].
    Init,
    /// Startup: a target that waits after INIT begins in real mode at `vector << 12`.
    Startup,
    /// From an interrupt controller beside the local APICs, with its vector.
    External,
    /// None waits there any more.
    NoExternal,
    /// At a pin of the local APIC. The vector is that of the interrupt controller that may be there.
    Pin(Pin),
}

/// A pin of a local APIC, for what the local vector table says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// LINT0.
    Lint0,
    /// LINT1.
    Lint1,
}

impl Kind {
    /// Decodes the three-bit delivery mode field; `None` for modes that our guests do not have.
    pub(super) const fn from_delivery_mode(mode: u32) -> Option<Self> {
        match mode & 7 {
            0 => Some(Self::Fixed),
            1 => Some(Self::LowestPriority),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            6 => Some(Self::Startup),
            _ => None,
        }
    }

    /// Whether the message requests a vector at its target's local APIC.
    pub(super) const fn has_vector(self) -> bool {
        matches!(self, Self::Fixed | Self::LowestPriority)
    }
}

/// The receivers of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The sender.
    SelfOnly,
    /// All APICs.
    AllIncludingSelf,
    /// All APICs but the sender's.
    AllButSelf,
    /// The APIC with this id. Broadcast ids have become [`Target::AllIncludingSelf`].
    Physical(u32),
    /// Every APIC whose [`LogicalId`] matches this eight-bit destination (APM vol. 2, 16.6.1).
    Logical(u8),
    /// x2APIC logical mode: up to sixteen APICs of one cluster, see [`cluster_members`].
    Cluster {
        /// Upper bits of the APIC ids.
        cluster: u16,
        /// Bit n selects the APIC with id `cluster * 16 + n`.
        members: u16,
    },
}

impl Target {
    /// Reads a destination as an xAPIC or I/O APIC writes it. 0xff is everyone in both modes.
    pub(super) const fn from_xapic(destination: u8, logical: bool) -> Self {
        match (destination, logical) {
            (0xff, _) => Self::AllIncludingSelf,
            (id, false) => Self::Physical(id as u32),
            (mask, true) => Self::Logical(mask),
        }
    }

    /// Reads a destination as a parent gives it for its child: of 8 bits, or of 32.
    #[must_use]
    pub const fn asserted(destination: u32, logical: bool) -> Self {
        match (destination, logical) {
            (0xff | u32::MAX, _) => Self::AllIncludingSelf,
            (id, false) => Self::Physical(id),
            (mask @ 0..=0xff, true) => Self::Logical(mask.to_le_bytes()[0]),
            (mask, true) => Self::from_x2apic(mask, true),
        }
    }

    /// Reads a destination as an x2APIC writes it. 0xffff_ffff is everyone in both modes.
    pub(super) const fn from_x2apic(destination: u32, logical: bool) -> Self {
        match (destination, logical) {
            (u32::MAX, _) => Self::AllIncludingSelf,
            (id, false) => Self::Physical(id),
            (mask, true) => {
                let [members_low, members_high, cluster_low, cluster_high] = mask.to_le_bytes();
                Self::Cluster {
                    cluster: u16::from_le_bytes([cluster_low, cluster_high]),
                    members: u16::from_le_bytes([members_low, members_high]),
                }
            }
        }
    }
}

/// The APIC ids that a [`Target::Cluster`] names, in ascending order. They need not exist.
pub fn cluster_members(cluster: u16, members: u16) -> impl Iterator<Item = u32> {
    let first = u32::from(cluster) << 4;
    (0..16).filter(move |bit| members >> bit & 1 != 0).map(move |bit| first | bit)
}

/// The eight-bit logical destinations of an APIC: its logical id, and the model that the guest chose for it (APM vol.
/// 2, 16.6.1).
///
/// Senders run on other pCPUs than the APIC's owner, so this is small enough to publish in an atomic
/// ([`LogicalId::to_bits`]) whenever it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalId {
    id: u8,
    model: u8,
}

const FLAT_MODEL: u8 = 0xf;
const CLUSTER_MODEL: u8 = 0;

impl LogicalId {
    /// Matches no destination: an APIC that is off.
    pub const NONE: Self = Self { id: 0, model: FLAT_MODEL };

    /// From the upper bytes of the logical and format registers of an xAPIC.
    pub(super) const fn from_xapic(logical_destination: u32, destination_format: u32) -> Self {
        Self { id: logical_destination.to_be_bytes()[0], model: destination_format.to_be_bytes()[0] >> 4 }
    }

    /// An x2APIC hears an eight-bit destination (from an I/O APIC) as members 0 to 7 of cluster 0.
    pub(super) const fn from_x2apic(id: u32) -> Self {
        Self { id: if id < 8 { 1 << id } else { 0 }, model: FLAT_MODEL }
    }

    /// Whether a message for [`Target::Logical`] `destination` is meant for this APIC.
    #[must_use]
    pub const fn matches(self, destination: u8) -> bool {
        let id = self.id;
        match self.model {
            FLAT_MODEL => destination & id != 0,
            CLUSTER_MODEL => {
                let same_cluster = destination >> 4 == id >> 4 || destination >> 4 == 0xf;
                same_cluster && destination & id & 0xf != 0
            }
            _ => false,
        }
    }

    /// For publishing in an atomic.
    #[must_use]
    pub const fn to_bits(self) -> u16 {
        u16::from_le_bytes([self.id, self.model])
    }

    /// Reverses [`LogicalId::to_bits`].
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        let [id, model] = bits.to_le_bytes();
        Self { id, model }
    }
}
