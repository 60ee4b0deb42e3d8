//! The reference TSC page: time without an exit (TLFS, "Partition Reference Time Enlightenment").
//!
//! The guest reads the sequence, computes `((tsc * scale) >> 64) + offset` in units of 100 ns, and repeats if the
//! sequence has changed meanwhile. Sequence 0 tells it to read [`crate::msr::TIME_REF_COUNT`] instead. So a writer
//! writes 0 there first, then scale and offset, then a new sequence ([`ReferenceTsc::next_sequence`]). Two writers must
//! take turns.

/// Units of reference time in a second: 100 ns each.
pub const UNITS_PER_SECOND: u64 = 10_000_000;
/// The sequence of a page that must not be used.
pub const SEQUENCE_INVALID: u32 = 0;

/// Offset of the sequence in the page, in bytes; 32 bits, and 32 reserved behind it.
pub const SEQUENCE_OFFSET: usize = 0;
/// Offset of the scale in the page, in bytes; 64 bits.
pub const SCALE_OFFSET: usize = 8;
/// Offset of the offset in the page, in bytes; 64 bits, signed.
pub const OFFSET_OFFSET: usize = 16;
/// Used bytes of the page; the rest is reserved.
pub const ENCODED_BYTES: usize = 24;

/// Content of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReferenceTsc {
    /// Changes with every change of the rest; [`SEQUENCE_INVALID`] invalidates the page.
    pub sequence: u32,
    /// Reference units per TSC tick, as a fraction of 2^64.
    pub scale: u64,
    /// Reference time at TSC 0, in units of 100 ns.
    pub offset: i64,
}

impl ReferenceTsc {
    /// A page that the guest must not use.
    pub const INVALID: Self = Self { sequence: SEQUENCE_INVALID, scale: 0, offset: 0 };

    /// Reference time at `tsc` as a guest computes it, in units of 100 ns.
    #[must_use]
    pub fn time(&self, tsc: u64) -> u64 {
        time(tsc, self.scale, self.offset)
    }

    /// The sequence after this one: never 0, and never all ones, which had a meaning in early versions of the TLFS.
    #[must_use]
    pub const fn next_sequence(&self) -> u32 {
        match self.sequence.wrapping_add(1) {
            0 | u32::MAX => 1,
            next => next,
        }
    }

    /// The beginning of the page.
    #[must_use]
    pub fn encode(&self) -> [u8; ENCODED_BYTES] {
        let mut bytes = [0; ENCODED_BYTES];
        bytes[SEQUENCE_OFFSET..SEQUENCE_OFFSET + 4].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[SCALE_OFFSET..SCALE_OFFSET + 8].copy_from_slice(&self.scale.to_le_bytes());
        bytes[OFFSET_OFFSET..OFFSET_OFFSET + 8].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }
}

/// Reference units per tick of a TSC of `clock_hz`, as a fraction of 2^64. `None` for a TSC of 10 MHz or slower, where
/// the fraction would be 1 or more.
#[must_use]
pub const fn scale_for(clock_hz: u64) -> Option<u64> {
    if clock_hz <= UNITS_PER_SECOND {
        return None;
    }
    let scale = ((UNITS_PER_SECOND as u128) << 64) / clock_hz as u128;
    #[expect(clippy::cast_possible_truncation, reason = "the divisor exceeds 10^7, so the quotient is below 2^64")]
    let scale = scale as u64;
    Some(scale)
}

/// Reference time at `tsc`, in units of 100 ns. Wraps around like the guest's own arithmetic.
#[must_use]
pub const fn time(tsc: u64, scale: u64, offset: i64) -> u64 {
    // The upper half of a product of two 64-bit numbers.
    let ticks = ((tsc as u128 * scale as u128) >> 64) as u64;
    ticks.wrapping_add_signed(offset)
}

/// The first TSC value at which the reference time is `time`, in units of 100 ns, or later. For a time before TSC 0 it
/// is 0. For a time that the TSC never reaches it is the largest value.
#[must_use]
pub const fn tsc_at(time: u64, scale: u64, offset: i64) -> u64 {
    let units = time as i128 - offset as i128;
    if units <= 0 {
        return 0;
    }
    // The integer part of the TSC times a scale below one always fits into 64 bits.
    if scale == 0 || units > u64::MAX as i128 {
        return u64::MAX;
    }
    let tsc = ((units as u128) << 64).div_ceil(scale as u128);
    if tsc > u64::MAX as u128 {
        return u64::MAX;
    }
    #[expect(clippy::cast_possible_truncation, reason = "it was compared with the largest")]
    let tsc = tsc as u64;
    tsc
}

/// The offset that makes the time `now` (in units of 100 ns) at `tsc`.
#[must_use]
pub const fn offset_for(tsc: u64, scale: u64, now: u64) -> i64 {
    now.wrapping_sub(time(tsc, scale, 0)).cast_signed()
}
