//! The time-stamp counter of a VM whose parent writes it.
//!
//! All vCPUs of a VM read one counter: the host's and an offset. A parent restores a guest by writing the counter of
//! each vCPU, one after the other, and time passes in between. If each write counted, the counters would differ. So a
//! write that is within a second of what the counter is anyway means this counter, and only another one moves it, for
//! all vCPUs. Zero means nothing: monitors write it to each new vCPU. (Linux' KVM has the same rule,
//! `kvm_synchronize_tsc`.)

//!
//! While the parent has frozen its child's time, the counter stands still: what is written is compared with where it
//! stands, and it goes on from there.

/// The counter of a VM.
#[derive(Debug, Default)]
pub struct GuestTsc {
    offset: i64,
    /// The host's counter when the parent froze this one.
    frozen_at: Option<u64>,
}

impl GuestTsc {
    /// The host's counter.
    pub const fn new() -> Self {
        Self { offset: 0, frozen_at: None }
    }

    /// What all vCPUs add to the host's counter.
    pub const fn offset(&self) -> i64 {
        self.offset
    }

    /// The parent writes `value` when the host's counter is `now`, which counts `hz` per second. Returns what all vCPUs
    /// add to the host's counter from now on.
    pub fn write(&mut self, value: u64, now: u64, hz: u64) -> i64 {
        let difference = value.wrapping_sub(self.counter(now)).cast_signed();
        if value != 0 && difference.unsigned_abs() >= hz {
            self.offset = self.offset.wrapping_add(difference);
        }
        self.offset
    }

    /// The host's counter, or where it was when time was frozen.
    pub fn tick(&self, now: u64) -> u64 {
        self.frozen_at.unwrap_or(now)
    }

    /// The counter when the host's is `now`.
    pub fn counter(&self, now: u64) -> u64 {
        self.tick(now).wrapping_add_signed(self.offset)
    }

    /// Stops the counter.
    pub fn freeze(&mut self, now: u64) {
        self.frozen_at.get_or_insert(now);
    }

    /// Lets it go on. Returns the host's counter when it was stopped, if it was.
    pub fn thaw(&mut self, now: u64) -> Option<u64> {
        let stood_at = self.frozen_at.take()?;
        self.offset = self.offset.wrapping_sub(now.wrapping_sub(stood_at).cast_signed());
        Some(stood_at)
    }
}

#[cfg(test)]
mod tests {
    use super::GuestTsc;

    const HZ: u64 = 1_000_000_000;

    #[test]
    fn vcpus_that_are_restored_one_after_the_other_agree() {
        let mut tsc = GuestTsc::new();
        let offset = tsc.write(500 * HZ, 2 * HZ, HZ);
        assert_eq!((2 * HZ).wrapping_add_signed(offset), 500 * HZ);
        for vcpu in 1..64 {
            // Saved a little later, and written a little later.
            assert_eq!(tsc.write(500 * HZ + 30 * vcpu, 2 * HZ + HZ / 100 * vcpu, HZ), offset, "vCPU {vcpu}");
        }
    }

    #[test]
    fn new_vcpus_share_the_counter_that_runs() {
        let mut tsc = GuestTsc::new();
        assert_eq!(tsc.write(0, 77 * HZ, HZ), 0);
        let offset = tsc.write(9 * HZ, 100 * HZ, HZ);
        assert_eq!(tsc.write(0, 200 * HZ, HZ), offset);
    }

    #[test]
    fn counter_goes_back_for_a_guest_that_was_stopped_for_long_and_runs_on_for_another() {
        let mut tsc = GuestTsc::new();
        assert_eq!(tsc.write(10 * HZ, 10 * HZ + HZ / 2, HZ), 0);
        let offset = tsc.write(10 * HZ, 40 * HZ, HZ);
        assert_eq!((40 * HZ).wrapping_add_signed(offset), 10 * HZ);
    }

    #[test]
    fn counter_that_was_frozen_goes_on_where_it_stood() {
        let mut tsc = GuestTsc::new();
        let _offset = tsc.write(500 * HZ, 2 * HZ, HZ);
        tsc.freeze(5 * HZ);
        tsc.freeze(6 * HZ);
        assert_eq!([6 * HZ, 100 * HZ].map(|now| tsc.counter(now)), [503 * HZ; 2]);
        assert_eq!(tsc.thaw(100 * HZ), Some(5 * HZ));
        assert_eq!((tsc.counter(100 * HZ), tsc.counter(101 * HZ)), (503 * HZ, 504 * HZ));
        assert_eq!(tsc.thaw(102 * HZ), None);
    }

    #[test]
    fn vcpus_that_are_restored_slowly_agree_while_time_is_frozen() {
        let mut tsc = GuestTsc::new();
        tsc.freeze(HZ);
        let offset = tsc.write(700 * HZ, 3 * HZ, HZ);
        for vcpu in 1..64 {
            assert_eq!(tsc.write(700 * HZ, 3 * HZ + 5 * HZ * vcpu, HZ), offset, "vCPU {vcpu}");
        }
        assert_eq!(tsc.thaw(1_000 * HZ), Some(HZ));
        assert_eq!(tsc.counter(1_000 * HZ), 700 * HZ);
    }

    #[test]
    fn any_value_is_taken() {
        let mut tsc = GuestTsc::new();
        let offset = tsc.write(u64::MAX, 5, HZ);
        // That is one tick before zero, and so within a second of five.
        assert_eq!(offset, 0);
        let offset = tsc.write(1 << 63, 5, HZ);
        assert_eq!(5_u64.wrapping_add_signed(offset), 1 << 63);
    }
}
