//! Counters of cached instructions, in the columns of the publication about bhyve's cache.

use serde_json::{Value, json};

use crate::quantity::{percent, show_count};
use crate::records::{Class, Figure};

/// Sums over all vCPUs of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) hits: u64,
    misses: u64,
    pub(super) insertions: u64,
    replaced: u64,
    code_writes: u64,
    table_writes: u64,
    walks: u64,
    pub(super) write_faults: u64,
    walks_done: u64,
    refused: u64,
}

impl Counts {
    /// From a VM's counters in JSON, if they are all there.
    pub(super) fn read(counters: &Value) -> Option<Self> {
        let counter = |name: &str| counters[name].as_u64();
        Some(Self {
            hits: counter("decode_hits")?,
            misses: counter("decode_misses")?,
            insertions: counter("decode_insertions")?,
            replaced: counter("decode_replaced")?,
            code_writes: counter("decode_evicted_by_code_writes")?,
            table_writes: counter("decode_evicted_by_table_writes")?,
            walks: counter("decode_evicted_by_walks")?,
            write_faults: counter("decode_write_faults")?,
            walks_done: counter("emulator_walks")?,
            refused: counter("emulations_refused")?,
        })
    }

    /// The increase since `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            hits: self.hits.saturating_sub(earlier.hits),
            misses: self.misses.saturating_sub(earlier.misses),
            insertions: self.insertions.saturating_sub(earlier.insertions),
            replaced: self.replaced.saturating_sub(earlier.replaced),
            code_writes: self.code_writes.saturating_sub(earlier.code_writes),
            table_writes: self.table_writes.saturating_sub(earlier.table_writes),
            walks: self.walks.saturating_sub(earlier.walks),
            write_faults: self.write_faults.saturating_sub(earlier.write_faults),
            walks_done: self.walks_done.saturating_sub(earlier.walks_done),
            refused: self.refused.saturating_sub(earlier.refused),
        }
    }

    /// Lookups, including those that a cache would have got if there were one.
    pub(super) fn lookups(self) -> u64 {
        self.hits.saturating_add(self.misses)
    }

    /// Entries that were dropped because they might have become wrong. Replaced entries do not count.
    pub(super) fn evictions(self) -> u64 {
        self.code_writes.saturating_add(self.table_writes).saturating_add(self.walks)
    }

    /// The columns of [`Self::row`].
    pub(super) fn columns() -> String {
        format!(
            "{:>10}{:>10}{:>8}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>12}",
            "lookups", "hits", "hits %", "inserted", "replaced", "code", "tables", "walks", "faults", "walks done"
        )
    }

    pub(super) fn row(self) -> String {
        let refused = match self.refused {
            0 => String::new(),
            count => format!("  {} REFUSED", show_count(count)),
        };
        format!(
            "{:>10}{:>10}{:>8.1}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>12}{refused}",
            show_count(self.lookups()),
            show_count(self.hits),
            percent(self.hits, self.lookups()),
            show_count(self.insertions),
            show_count(self.replaced),
            show_count(self.code_writes),
            show_count(self.table_writes),
            show_count(self.walks),
            show_count(self.write_faults),
            show_count(self.walks_done),
        )
    }

    /// The important ones, as figures.
    pub(super) fn figures(self) -> [Figure; 5] {
        let figure = |quantity: &str, count: u64| Figure::new(quantity, Class::Count, "in a run", [count as f64]);
        [
            figure("lookups", self.lookups()),
            Figure::new("hits", Class::Count, "% of lookups", [percent(self.hits, self.lookups())]),
            figure("evictions", self.evictions()),
            figure("write faults", self.write_faults),
            figure("walks done", self.walks_done),
        ]
    }

    pub(super) fn json(self) -> Value {
        json!({
            "lookups": self.lookups(), "hits": self.hits, "hits_percent": percent(self.hits, self.lookups()),
            "misses": self.misses, "insertions": self.insertions, "replaced": self.replaced,
            "evicted_by_code_writes": self.code_writes, "evicted_by_table_writes": self.table_writes,
            "evicted_by_walks": self.walks, "write_faults": self.write_faults,
            "walks_done": self.walks_done, "refused": self.refused,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const NAMES: [&str; 10] = [
        "decode_hits",
        "decode_misses",
        "decode_insertions",
        "decode_replaced",
        "decode_evicted_by_code_writes",
        "decode_evicted_by_table_writes",
        "decode_evicted_by_walks",
        "decode_write_faults",
        "emulator_walks",
        "emulations_refused",
    ];

    /// Counters with the values 1, 2, 3 and so on, times `factor`.
    pub(in crate::bench::decode) fn counters(factor: u64) -> Value {
        NAMES.iter().zip(1..).map(|(&name, value)| (name.to_string(), json!(factor * value))).collect()
    }

    #[test]
    fn counters_are_those_that_the_abi_names() {
        let known: Vec<_> = abi::counters::VcpuCounters::default().named().map(|(name, _)| name).collect();
        assert!(NAMES.iter().all(|name| known.contains(name)), "{known:?}");
    }

    #[test]
    fn counter_that_is_missing_is_not_taken_for_zero() {
        assert!(Counts::read(&counters(1)).is_some());
        for name in NAMES {
            let mut counters = counters(1);
            counters[name] = Value::Null;
            assert_eq!(Counts::read(&counters), None, "{name}");
        }
    }

    #[test]
    fn each_column_has_its_own_counter() {
        let counts = Counts::read(&counters(100)).expect("has all of them");
        let row = counts.row();
        let fields: Vec<_> = row.split_ascii_whitespace().collect();
        assert_eq!(fields[..9], ["300", "100", "33.3", "300", "400", "500", "600", "700", "800"]);
        assert_eq!(fields[9..], ["900", "1,000", "REFUSED"]);
        assert_eq!(counts.evictions(), 1800);
        let json = counts.json();
        assert_eq!((&json["lookups"], &json["evicted_by_walks"]), (&json!(300), &json!(700)));
    }

    #[test]
    fn differences_are_of_every_counter_and_never_below_nothing() {
        let [one, three] = [1, 3].map(|factor| Counts::read(&counters(factor)).expect("has all of them"));
        assert_eq!(three.since(one), Counts::read(&counters(2)).expect("has all of them"));
        assert_eq!(one.since(three), Counts::default());
    }

    #[test]
    fn nothing_looked_up_is_no_division_by_nothing() {
        assert!(Counts::default().row().contains(" 0.0 "));
    }
}
