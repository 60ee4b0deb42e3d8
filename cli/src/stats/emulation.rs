//! One line on emulated accesses: how many, how often their instruction was cached, and what the cache dropped and why.

use std::fmt;

use abi::counters::{ExitReason, VcpuCounters};

use crate::quantity::{percent, show_count};

/// What of some counters tells of emulation. As text it is one line; parts that counted nothing are left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Emulation<'a>(&'a VcpuCounters);

impl<'a> Emulation<'a> {
    /// `None` if nothing was emulated.
    pub(crate) fn of(counters: &'a VcpuCounters) -> Option<Self> {
        let it = Self(counters);
        let any = [it.accesses(), it.looked_up(), counters.emulations_refused, counters.decode_write_faults];
        any.into_iter().any(|count| count > 0).then_some(it)
    }

    fn accesses(self) -> u64 {
        self.0.exits_for(ExitReason::Mmio)
    }

    fn looked_up(self) -> u64 {
        self.0.decode_hits.saturating_add(self.0.decode_misses)
    }
}

impl fmt::Display for Emulation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters = self.0;
        write!(f, "emulation: {} accesses", show_count(self.accesses()))?;
        if self.looked_up() > 0 {
            write!(f, ", hits {:.1} %", percent(counters.decode_hits, self.looked_up()))?;
        }
        if counters.decode_insertions > 0 {
            write!(f, ", {} insertions", show_count(counters.decode_insertions))?;
        }
        let evictions = [
            ("code writes", counters.decode_evicted_by_code_writes),
            ("table writes", counters.decode_evicted_by_table_writes),
            ("walks", counters.decode_evicted_by_walks),
            ("replaced", counters.decode_replaced),
        ];
        let evictions: Vec<_> = evictions
            .into_iter()
            .filter(|&(_, count)| count > 0)
            .map(|(why, count)| format!("{why} {}", show_count(count)))
            .collect();
        if !evictions.is_empty() {
            write!(f, ", evictions ({})", evictions.join(", "))?;
        }
        if counters.decode_write_faults > 0 {
            write!(f, ", {} write faults", show_count(counters.decode_write_faults))?;
        }
        if counters.emulator_walks > 0 {
            write!(f, "; {} walks", show_count(counters.emulator_walks))?;
        }
        if counters.emulations_refused > 0 {
            write!(f, "; {} refused", show_count(counters.emulations_refused))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(mmio: u64) -> VcpuCounters {
        let mut counters = VcpuCounters::default();
        counters.exits[ExitReason::Mmio as usize] = mmio;
        counters
    }

    fn line(counters: &VcpuCounters) -> String {
        Emulation::of(counters).expect("has something to tell").to_string()
    }

    #[test]
    fn guest_that_touched_no_device_has_no_line() {
        assert!(Emulation::of(&VcpuCounters { entries: 7, ..counters(0) }).is_none());
    }

    #[test]
    fn only_what_was_counted_is_told() {
        assert_eq!(line(&counters(1234)), "emulation: 1,234 accesses");
        let bytes = VcpuCounters { decode_hits: 197, decode_misses: 3, decode_insertions: 3, ..counters(200) };
        assert_eq!(
            line(&VcpuCounters { emulator_walks: 1234, ..bytes }),
            "emulation: 200 accesses, hits 98.5 %, 3 insertions; 1,234 walks"
        );
        assert_eq!(line(&VcpuCounters { emulations_refused: 2, ..counters(0) }), "emulation: 0 accesses; 2 refused");
    }

    #[test]
    fn evictions_are_told_by_their_cause() {
        let counters = VcpuCounters {
            decode_hits: 1,
            decode_misses: 1,
            decode_evicted_by_code_writes: 4,
            decode_evicted_by_table_writes: 5,
            decode_evicted_by_walks: 6,
            decode_replaced: 7,
            decode_write_faults: 8,
            ..counters(2)
        };
        assert_eq!(
            line(&counters),
            "emulation: 2 accesses, hits 50.0 %, evictions (code writes 4, table writes 5, walks 6, replaced 7), \
             8 write faults"
        );
    }

    #[test]
    fn nonsense_from_a_host_saturates() {
        let counters = VcpuCounters { decode_hits: u64::MAX, decode_misses: u64::MAX, ..counters(1) };
        assert!(line(&counters).contains("hits 100.0 %"));
    }
}
