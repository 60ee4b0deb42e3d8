//! One line on stage-2 faults that memory and dirty logs cause: pages mapped on the first access, logged writes,
//! flushes, and the time that vCPUs waited.

use std::fmt;

use abi::counters::VcpuCounters;

use crate::quantity::{percent, show_count};

/// What of some counters tells of faults on memory. As text it is one line; parts that counted nothing are left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults<'a>(&'a VcpuCounters);

impl<'a> Faults<'a> {
    /// `None` if there was none.
    pub(crate) fn of(counters: &'a VcpuCounters) -> Option<Self> {
        let any = [
            counters.pages_populated,
            counters.dirty_faults,
            counters.dirty_splits,
            counters.stage2_local_flushes,
            counters.stage2_broadcasts,
            counters.stage2_stall_ticks,
        ];
        any.into_iter().any(|count| count > 0).then_some(Self(counters))
    }

    /// For how much of their time the vCPUs were held up, in per cent.
    pub(crate) fn stall_percent(self) -> f64 {
        let VcpuCounters { guest_ticks, host_ticks, wait_ticks, stage2_stall_ticks, .. } = *self.0;
        percent(stage2_stall_ticks, guest_ticks.saturating_add(host_ticks).saturating_add(wait_ticks))
    }
}

impl fmt::Display for Faults<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters = self.0;
        let parts = [
            (counters.pages_populated, "pages populated"),
            (counters.dirty_faults, "writes recorded by a fault"),
            (counters.dirty_splits, "large pages split"),
            (counters.stage2_local_flushes, "local flushes"),
            (counters.stage2_broadcasts, "broadcasts"),
        ];
        f.write_str("memory: ")?;
        for (count, what) in parts.into_iter().filter(|&(count, _)| count > 0) {
            write!(f, "{} {what}, ", show_count(count))?;
        }
        write!(f, "stopped for {:.2} % of the time", self.stall_percent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fault_is_no_line() {
        assert!(Faults::of(&VcpuCounters { entries: 5, guest_ticks: 7, ..VcpuCounters::default() }).is_none());
    }

    #[test]
    fn line_has_what_was_counted_and_nothing_else() {
        let counters = VcpuCounters {
            pages_populated: 1234,
            dirty_faults: 56,
            stage2_stall_ticks: 5,
            guest_ticks: 800,
            host_ticks: 150,
            wait_ticks: 50,
            ..VcpuCounters::default()
        };
        let text = Faults::of(&counters).expect("there were some").to_string();
        let populated = show_count(1234);
        assert_eq!(
            text,
            format!(
                "memory: {populated} pages populated, 56 writes recorded by a fault, stopped for 0.50 % of the time"
            )
        );
    }

    #[test]
    fn vcpus_without_time_were_not_held_up() {
        let counters = VcpuCounters { stage2_stall_ticks: 5, ..VcpuCounters::default() };
        assert_eq!(Faults::of(&counters).expect("there were some").stall_percent(), 0.0);
    }
}
