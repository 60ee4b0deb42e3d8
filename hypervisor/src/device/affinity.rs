//! A vCPU's number and its affinity, as in MPIDR, the GIC and PSCI.
//!
//! An affinity has levels of eight bits each. The lowest level counts only to sixteen: an inter-processor interrupt
//! names its targets in one cluster of sixteen by a mask (GIC, ICC_SGI1R_EL1.TargetList).
//!
//! ```text
//!  39   32 31  24 23    16 15     8 7      0
//! +-------+------+--------+--------+--------+
//! | Aff3=0|   0  | n >> 12| n >> 4 | n & 15 |      of vCPU n
//! +-------+------+--------+--------+--------+
//! ```

/// Affinity of vCPU `number`, in the bits where MPIDR has it.
#[must_use]
pub const fn affinity(number: u32) -> u64 {
    ((number & 0xff000) << 4 | (number & 0xff0) << 4 | number & 0xf) as u64
}

/// The vCPU among `vcpus` with this affinity. Bits outside an affinity must be zero.
#[must_use]
pub fn vcpu_at(affinity: u64, vcpus: u32) -> Option<u32> {
    let affinity = u32::try_from(affinity).ok()?;
    if affinity & !0x00ff_ff0f != 0 {
        return None;
    }
    let number = affinity >> 4 & 0xff000 | affinity >> 4 & 0xff0 | affinity & 0xf;
    (number < vcpus).then_some(number)
}

#[cfg(test)]
mod tests;
