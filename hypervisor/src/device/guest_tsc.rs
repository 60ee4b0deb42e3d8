//! The time-stamp counter of a VM whose parent writes it.
//!
//! All vCPUs of a VM read one counter: the host's and an offset. A parent restores a guest by writing the counter of
//! each vCPU, one after the other, and time passes in between. If each write counted, the counters would differ. So a
//! write that is within a second of what the counter is anyway means this counter, and only another one moves it, for
//! all vCPUs. Zero means nothing: monitors write it to each new vCPU. (Linux' KVM has the same rule,
//! `kvm_synchronize_tsc`.)

/// The counter of a VM.
#[derive(Debug, Default)]
pub struct GuestTsc {
    offset: i64,
}

impl GuestTsc {
    /// The host's counter.
    pub const fn new() -> Self {
        Self { offset: 0 }
    }

    /// What all vCPUs add to the host's counter.
    pub const fn offset(&self) -> i64 {
        self.offset
    }

    /// The parent writes `value` when the host's counter is `now`, which counts `hz` per second. Returns what all vCPUs
    /// add to the host's counter from now on.
    pub fn write(&mut self, value: u64, now: u64, hz: u64) -> i64 {
        let difference = value.wrapping_sub(now.wrapping_add_signed(self.offset)).cast_signed();
        if value != 0 && difference.unsigned_abs() >= hz {
            self.offset = self.offset.wrapping_add(difference);
        }
        self.offset
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
    fn any_value_is_taken() {
        let mut tsc = GuestTsc::new();
        let offset = tsc.write(u64::MAX, 5, HZ);
        // That is one tick before zero, and so within a second of five.
        assert_eq!(offset, 0);
        let offset = tsc.write(1 << 63, 5, HZ);
        assert_eq!(5_u64.wrapping_add_signed(offset), 1 << 63);
    }
}
