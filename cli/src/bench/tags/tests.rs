//! What counters are taken for, and how it is written down.

use abi::payload::TagScheme;
use serde_json::json;

use super::{Case, Entries, columns, guests, loads, native, native_record};
use crate::config::Arch;

fn counters() -> serde_json::Value {
    json!({ "entries": 1000, "tag_assignments": 300, "tag_generations": 3, "tlb_flushes": 20, "tlb_flushes_all": 5,
            "migrations": 7, "exits_total": 999 })
}

fn entries() -> Entries {
    Entries::read(&counters()).expect("has all of them")
}

#[test]
fn shares_are_of_entries_and_a_flush_of_everything_is_not_one_of_the_own_tag() {
    assert_eq!(entries().flushes_own(), 15);
    assert_eq!(entries().shares(), [30.0, 0.3, 1.5, 0.5]);
}

#[test]
fn counters_that_are_missing_or_counted_nothing_are_not_taken_for_zero() {
    for name in ["entries", "tag_assignments", "tag_generations", "tlb_flushes", "tlb_flushes_all", "migrations"] {
        let mut counters = counters();
        counters[name] = json!(null);
        assert_eq!(Entries::read(&counters), None, "{name}");
    }
    let mut counters = counters();
    counters["entries"] = json!(0);
    assert_eq!(Entries::read(&counters), None);
    assert_eq!(Entries::read(&json!(null)), None);
}

#[test]
fn counters_that_were_read_while_they_changed_do_not_wrap() {
    let torn = Entries { flushes: 4, flushes_all: 5, ..entries() };
    assert_eq!(torn.flushes_own(), 0);
}

#[test]
fn every_case_chooses_its_scheme_by_keys_that_files_know() {
    let keys: Vec<_> = Case::all().into_iter().map(Case::keys).collect();
    assert_eq!(keys.len(), 11);
    assert_eq!(keys[0], "tags = \"flush-always\"\n");
    assert_eq!(keys[1], "tags = \"generation\"\ntag_limit = 63\n");
    assert_eq!(keys[10], "tags = \"epoch\"\ntag_limit = 1\n");
    for keys in keys {
        toml::from_str::<toml::Table>(&keys).expect("is TOML");
    }
}

#[test]
fn rows_have_a_field_below_each_column() {
    let case = Case { tags: TagScheme::FlushAlways, limit: None };
    let row = entries().row(case);
    assert_eq!(row.len(), columns().len());
    assert_eq!(
        row.split_ascii_whitespace().collect::<Vec<_>>(),
        ["flush-always", "-", "1,000", "30.0000", "0.3000", "1.5000", "0.5000", "20", "7"]
    );
}

#[test]
fn every_record_says_whether_it_was_emulated() {
    let case = Case { tags: TagScheme::Epoch, limit: Some(4) };
    let (loads, _) = loads(Arch::Aarch64);
    let record = entries().json(guests(Arch::Aarch64), &loads[0], case, true);
    assert_eq!(
        (&record["emulated"], &record["part"], &record["tag_limit"], &record["arch"]),
        (&json!(true), &json!("mixed"), &json!(4), &json!("aarch64"))
    );
    assert_eq!((&record["checks"], &record["flushes_own"]), (&json!(1000), &json!(15)));

    let figure = native::Figure { name: "check", cycles: 1.5, min: 1.0, max: 2.0, rounds: vec![1.0] };
    assert_eq!(native_record(figure)["emulated"], json!(false));
}
