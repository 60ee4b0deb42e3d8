//! Inter-processor interrupts: writes of ICC_SGI1R_EL1 (IHI 0069 12.2.18).
//!
//! ```text
//!  63   56 55   48 47  44 43 41 40  39   32 31 28 27  24 23   16 15            0
//! +-------+-------+------+-----+---+-------+-----+------+-------+---------------+
//! |   0   | Aff3  |  RS  |  0  |IRM| Aff2  |  0  |INTID | Aff1  |  target list  |
//! +-------+-------+------+-----+---+-------+-----+------+-------+---------------+
//! ```

use super::bits;
use crate::device::affinity::vcpu_at;

/// An inter-processor interrupt on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sgi {
    /// Number, below 16.
    pub intid: u32,
    target: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    AllButSelf,
    /// Members of a cluster of sixteen: affinity of the first, and a bit for each.
    Cluster {
        affinity: u64,
        members: u16,
    },
}

impl Sgi {
    /// Decodes a value written to ICC_SGI1R_EL1. RS, which selects another sixteen of a cluster, is not offered
    /// (GICD_TYPER.RSS) and ignored.
    #[must_use]
    pub fn decode(value: u64) -> Self {
        let [low, second, aff1, intid, aff2, routing, aff3, _] = value.to_le_bytes();
        let target = if routing & 1 != 0 {
            Target::AllButSelf
        } else {
            let affinity = u64::from(aff3) << 32 | u64::from(aff2) << 16 | u64::from(aff1) << 8;
            Target::Cluster { affinity, members: u16::from_le_bytes([low, second]) }
        };
        Self { intid: u32::from(intid & 0xf), target }
    }

    /// The target vCPUs among `vcpus`, for an SGI from `sender`, which may be one of them. Targets that do not exist
    /// are left out.
    pub fn targets(self, sender: u32, vcpus: u32) -> impl Iterator<Item = u32> {
        let (first, last, members) = match self.target {
            Target::AllButSelf => (0, vcpus, u16::MAX),
            Target::Cluster { affinity, members } => match vcpu_at(affinity, vcpus) {
                Some(first) => (first, first, members),
                None => (0, 0, 0),
            },
        };
        let all = (first..last).filter(move |&vcpu| vcpu != sender);
        let cluster = if first == last { members } else { 0 };
        all.chain(bits(cluster.into()).map(move |member| first + member).filter(move |&vcpu| vcpu < vcpus))
    }
}
