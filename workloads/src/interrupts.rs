//! How the kernel flushed remote TLBs, from its own counts in `/proc/interrupts`.
//!
//! A flush by IPI counts on each interrupted CPU, in the line `TLB`; a flush by hypercall counts nowhere. So a `TLB`
//! line that does not change while memory is unmapped proves that the kernel uses the hypercall.

use std::fmt;
use std::fs;

use anyhow::{Context, Result};

const PATH: &str = "/proc/interrupts";
/// The lines to show: function calls and flushes by IPI, rescheduling, and a hypervisor's interrupts.
const SHOWN: [&str; 6] = ["CAL", "TLB", "RES", "HYP", "HRE", "HVS"];

/// `/proc/interrupts` at one moment, summed over the CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interrupts {
    /// Flushes that were asked for by IPI, counted where they were done.
    tlb: u64,
    /// Function calls by IPI. Linux flushes by such calls, so they include those of the first line.
    cal: u64,
}

impl Interrupts {
    /// Reads the counts, and shows the lines on standard error under the name of `moment`.
    pub(crate) fn show(moment: &str) -> Result<Self> {
        let text = fs::read_to_string(PATH).with_context(|| format!("cannot read {PATH}"))?;
        for line in text.lines().filter(|line| SHOWN.iter().any(|name| named(line, name).is_some())) {
            eprintln!("{moment}: {}", line.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let sum = |name| text.lines().find_map(|line| named(line, name)).map_or(0, sum_of_leading_numbers);
        Self { tlb: sum("TLB"), cal: sum("CAL") }
    }
}

/// The part of a result line that is about flushes: counts before and after the work.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) before: Interrupts,
    pub(crate) after: Interrupts,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { before, after } = self;
        write!(f, "tlb_before={} tlb_after={} ", before.tlb, after.tlb)?;
        write!(f, "cal_before={} cal_after={}", before.cal, after.cal)
    }
}

/// The rest of the line after `name`, if the line has this name.
fn named<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.trim_start().strip_prefix(name)?.strip_prefix(':')
}

fn sum_of_leading_numbers(line: &str) -> u64 {
    line.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_summed_over_the_cpus_and_missing_ones_are_zero() {
        let text = "           CPU0       CPU1\n  0:         36          0   IO-APIC   2-edge      timer\n\
                    CAL:        530        240   Function call interrupts\n\
                    TLB:         20         11   TLB shootdowns\nERR:          0\n";
        assert_eq!(Interrupts::parse(text), Interrupts { tlb: 31, cal: 770 });
        assert_eq!(Interrupts::parse("ERR: 0\n"), Interrupts::default());
    }
}
