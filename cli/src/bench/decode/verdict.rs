//! The targets, and published figures of other systems.

use abi::payload::DecodeCache;

use super::counts::Counts;
use super::loops::{Case, Figures};

use crate::bench::target::Target;

/// bhyve's cache of 2015: ticks of a read of the local APIC's ID without and with it, and the reduction in per cent.
pub(super) const BHYVE_TICKS: [u32; 2] = [10_500, 6_700];
const BHYVE_GAIN_PERCENT: f64 = 36.0;

/// Instructions of one access under KVM of Linux 6.1 on the same emulated machine (its own guest, the same way of
/// counting), by device register.
const KVM: [(&str, u64); 3] = [("version", 3_758), ("eoi", 3_659), ("tpr", 81_574)];

/// Maximum number of instructions of an access with `bytes`; a target for the registers that KVM was measured with.
const MOST_INSTRUCTIONS: f64 = 600.0;

/// KVM's instructions for an access to this register.
pub(super) fn kvm(device: &str) -> Option<u64> {
    KVM.iter().find(|(name, _)| *name == device).map(|&(_, instructions)| instructions)
}

/// The promises about instructions of an access. `ticks` are shown where they were published.
pub(super) fn of_loops(figures: &Figures, ticks: &Figures) -> Vec<Target> {
    [published_gain(figures, ticks), ahead_of_write_protect(figures), short_round_trips(figures)]
        .into_iter()
        .flatten()
        .collect()
}

/// The reduction from `long` to `short`, in per cent.
pub(super) fn gain_percent(long: f64, short: f64) -> f64 {
    if long > 0.0 { 100.0 * (long - short) / long } else { 0.0 }
}

/// The published case: a loop around one read of the local APIC's ID. It is judged by exact instructions. Ticks of an
/// emulated machine mostly measure the exit itself; they are shown next to the instructions.
fn published_gain(figures: &Figures, ticks: &Figures) -> Option<Target> {
    let pair = |figures: &Figures| {
        let of = |setting| figures.get(Case::LAPIC_ID, setting);
        of(DecodeCache::Off).zip(of(DecodeCache::WriteProtect))
    };
    let (off, cached) = pair(figures)?;
    let gain = gain_percent(off, cached);
    let in_ticks = pair(ticks).map_or(String::new(), |(off, cached)| {
        format!("; {:.1} % of ticks ({off:.0} and {cached:.0})", gain_percent(off, cached))
    });
    Some(Target::new(
        "LAPIC ID read: write-protect takes at least 36 % fewer instructions than off",
        format!("{gain:.1} % of instructions ({off:.0} and {cached:.0}){in_ticks}"),
        gain >= BHYVE_GAIN_PERCENT,
    ))
}

fn ahead_of_write_protect(figures: &Figures) -> Option<Target> {
    let candidates = figures.cases().filter_map(|case| {
        let (bytes, other) = (figures.get(case, DecodeCache::Bytes)?, figures.get(case, DecodeCache::WriteProtect)?);
        Some((bytes / other, format!("{bytes:.0} and {other:.0} instructions, {case}")))
    });
    let (ratio, worst) = candidates.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    let what = "loops: bytes is ahead of write-protect, least";
    Some(Target::new(what, worst, ratio < 1.0))
}

fn short_round_trips(figures: &Figures) -> Option<Target> {
    let promised = figures.cases().filter(|case| case.is_single() && kvm(case.device).is_some());
    let candidates = promised.filter_map(|case| Some((figures.get(case, DecodeCache::Bytes)?, case)));
    let (most, case) = candidates.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    Some(Target::new(
        "version, EOI and TPR with bytes: at most 600 instructions, most",
        format!("{most:.0}, {case}"),
        most <= MOST_INSTRUCTIONS,
    ))
}

/// With `bytes`, no change by a guest can make an entry wrong, so no entry may be dropped. `runs` are the runs with
/// this setting, with a description.
pub(super) fn nothing_forgotten(what: &'static str, runs: &[(&str, Counts)]) -> Option<Target> {
    let disturbed = |counts: Counts| counts.evictions().saturating_add(counts.write_faults);
    let (worst, counts) = runs.iter().max_by_key(|(_, counts)| disturbed(*counts))?;
    // A guest that emulated nothing shows nothing.
    let idle = runs.iter().find(|(_, counts)| counts.lookups() == 0);
    let figures = match idle {
        Some((name, _)) => format!("nothing was looked up, {name}"),
        None => format!("{} evictions, {} write faults, {worst}", counts.evictions(), counts.write_faults),
    };
    Some(Target::new(what, figures, idle.is_none() && disturbed(*counts) == 0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::counts::tests::counters;
    use super::*;

    fn figures(values: &[(Case, DecodeCache, f64)]) -> Figures {
        let mut figures = Figures::default();
        for &(case, setting, value) in values {
            figures.add(case, setting, value);
        }
        figures
    }

    fn met(target: Option<Target>) -> Option<bool> {
        target.and_then(|target| target.met)
    }

    #[test]
    fn gain_is_that_of_the_published_loop() {
        let gain = |off, cached| {
            let case = Case::LAPIC_ID;
            let figures = figures(&[(case, DecodeCache::Off, off), (case, DecodeCache::WriteProtect, cached)]);
            met(published_gain(&figures, &Figures::default()))
        };
        assert_eq!([gain(1000.0, 640.0), gain(1000.0, 641.0)], [Some(true), Some(false)]);
        assert_eq!(published_gain(&figures(&[(Case::LAPIC_ID, DecodeCache::Off, 1.0)]), &Figures::default()), None);
    }

    #[test]
    fn gain_in_ticks_is_told_and_does_not_decide() {
        let pair = |off, cached| {
            figures(&[(Case::LAPIC_ID, DecodeCache::Off, off), (Case::LAPIC_ID, DecodeCache::WriteProtect, cached)])
        };
        let target = published_gain(&pair(1000.0, 500.0), &pair(100.0, 90.0)).expect("was measured");
        assert!(target.met == Some(true) && target.to_string().ends_with("; 10.0 % of ticks (100 and 90)"), "{target}");
    }

    #[test]
    fn bytes_must_be_ahead_in_every_loop() {
        let many = Case::many(64);
        let mut all = figures(&[
            (Case::LAPIC_ID, DecodeCache::Bytes, 400.0),
            (Case::LAPIC_ID, DecodeCache::WriteProtect, 500.0),
            (many, DecodeCache::Bytes, 499.0),
            (many, DecodeCache::WriteProtect, 500.0),
        ]);
        assert_eq!(met(ahead_of_write_protect(&all)), Some(true));
        // The median of both equals the value that it must exceed.
        all.add(many, DecodeCache::Bytes, 501.0);
        let target = ahead_of_write_protect(&all).expect("was measured");
        assert!(target.is_missed() && target.to_string().contains("64 RIPs"), "{target}");
    }

    #[test]
    fn round_trips_are_judged_by_the_longest_of_the_promised() {
        let bytes = |case, value| (case, DecodeCache::Bytes, value);
        let (version, tpr) = (Case::single("version"), Case::single("tpr"));
        assert_eq!(met(short_round_trips(&figures(&[bytes(version, 600.0), bytes(tpr, 599.0)]))), Some(true));
        assert_eq!(met(short_round_trips(&figures(&[bytes(version, 601.0), bytes(tpr, 599.0)]))), Some(false));
        // Nothing was promised of the I/O APIC, or of loops over many places.
        assert_eq!(short_round_trips(&figures(&[bytes(Case::single("ioapic"), 900.0)])), None);
        assert_eq!(short_round_trips(&figures(&[bytes(Case::many(512), 900.0)])), None);
    }

    #[test]
    fn one_eviction_or_write_fault_is_one_too_many() {
        let quiet = |changes: &[(&str, u64)]| {
            let mut counters = counters(0);
            counters["decode_hits"] = json!(5);
            for &(name, count) in changes {
                counters[name] = json!(count);
            }
            Counts::read(&counters).expect("has all of them")
        };
        let judge = |counts| met(nothing_forgotten("x", &[("quiet", quiet(&[])), ("that", counts)]));
        assert_eq!(judge(quiet(&[("decode_replaced", 9)])), Some(true));
        for name in ["decode_write_faults", "decode_evicted_by_walks", "decode_evicted_by_code_writes"] {
            assert_eq!(judge(quiet(&[(name, 1)])), Some(false), "{name}");
        }
        assert_eq!(judge(Counts::default()), Some(false), "a run without a lookup shows nothing");
        assert_eq!(nothing_forgotten("x", &[]), None);
    }
}
