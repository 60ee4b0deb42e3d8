//! Conclusions from the figures: next to KVM's, as an estimate for hardware, and against the targets.

use serde_json::{Value, json};

use abi::payload::RemoteFlush;

use super::cost::Exits;
use super::latency::{Row, micros};
use crate::args::Targets;
use crate::records::Content;

/// KVM of Linux 6.1 with its Hyper-V flush hypercall, on the same emulated machine with two cores: one page by
/// mprotect, all other threads busy; the measuring program ran in a Linux guest, not in ours. Nanoseconds.
struct Kvm {
    vcpus: u32,
    mean: u64,
    p50: u64,
    p99: u64,
    host: &'static str,
}

const KVM: [Kvm; 4] = [
    Kvm { vcpus: 2, mean: 158_000, p50: 133_000, p99: 573_000, host: "quiet" },
    Kvm { vcpus: 2, mean: 1_700_000, p50: 77_000, p99: 12_100_000, host: "busy" },
    Kvm { vcpus: 4, mean: 3_200_000, p50: 81_000, p99: 23_900_000, host: "busy" },
    Kvm { vcpus: 8, mean: 6_000_000, p50: 122_000, p99: 48_500_000, host: "busy" },
];

/// FreeBSD's guest in Azure, by IPI and by hypercall: vCPUs, processor, microseconds.
const FREEBSD: [(u32, &str, f64, f64); 3] =
    [(48, "Xeon", 27.0, 14.7), (48, "EPYC", 40.1, 25.0), (16, "Xeon", 12.0, 7.7)];

/// Ours in KVM's situation: two pCPUs, one page, busy targets.
fn like_kvm(rows: &[Row], vcpus: u32) -> Option<&Row> {
    busy_page(rows).find(|row| (row.point.vcpus, row.point.pcpus(), row.approach) == (vcpus, 2, RemoteFlush::Hypercall))
}

fn busy_page(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| row.pages == "1" && row.targets == Targets::Busy)
}

/// KVM's figures, next to ours.
pub(super) fn print_kvm(rows: &[Row]) {
    if !KVM.iter().any(|kvm| like_kvm(rows, kvm.vcpus).is_some()) {
        return;
    }
    println!("\nNext to KVM's Hyper-V flush (Linux 6.1, its own guest; 1 page, busy targets, 2 pCPUs), µs as seen:");
    println!("{:>5} {:>26} {:>35}", "", "Dunlin", "KVM");
    println!("{:>5} {:>8} {:>8} {:>8}  {:>8} {:>8} {:>8}", "vCPUs", "mean", "p50", "p99", "mean", "p50", "p99");
    for kvm in &KVM {
        let Some(row) = like_kvm(rows, kvm.vcpus) else { continue };
        println!(
            "{:>5} {:>8} {:>8} {:>8}  {:>8} {:>8} {:>8}  on a {} computer; ours: others used {}",
            kvm.vcpus,
            micros(row.seen.mean),
            micros(row.seen.p50),
            row.p99().map_or("-".to_string(), micros),
            micros(kvm.mean),
            micros(kvm.p50),
            micros(kvm.p99),
            kvm.host,
            row.others.map_or("?".to_string(), |share| format!("{:.0} %", 100.0 * share)),
        );
    }
}

/// KVM's figures at this size, for a line below ours by the same kind of program.
pub(super) fn print_kvm_for(vcpus: u32) {
    for kvm in KVM.iter().filter(|kvm| kvm.vcpus == vcpus) {
        println!(
            "         KVM's Hyper-V flush, the same on a {} computer: mean {}, p50 {}, p99 {} µs",
            kvm.host,
            micros(kvm.mean),
            micros(kvm.p50),
            micros(kvm.p99)
        );
    }
}

/// Exits of all CPUs, multiplied by the cost of an exit on real hardware.
pub(super) fn print_paper(exits: &[Exits], exit_ns: u32) {
    let pairs: Vec<_> = paired(exits).filter(|(ipi, _)| ipi.point.overcommit == 1).collect();
    if pairs.is_empty() {
        return;
    }
    let cost = |exits: f64| exits * f64::from(exit_ns) / 1e3;
    println!("\nEstimate: time in exits = exits per shootdown x {exit_ns} ns (--exit-ns), summed over all CPUs:");
    for (ipi, hypercall) in pairs {
        println!(
            "{:>5} vCPUs   IPI {:6.1} x {exit_ns} ns = {:6.1} µs   hypercall {:6.1} x {exit_ns} ns = {:6.1} µs   {:.2}x",
            ipi.point.vcpus,
            ipi.all,
            cost(ipi.all),
            hypercall.all,
            cost(hypercall.all),
            ipi.all / hypercall.all
        );
    }
    for (vcpus, processor, ipi, hypercall) in FREEBSD {
        println!(
            "{vcpus:>5} vCPUs   IPI {ipi:.1} µs -> hypercall {hypercall:.1} µs: {:.2}x   measured by FreeBSD in Azure, {processor}: \
             latency of one shootdown",
            ipi / hypercall
        );
    }
    println!(
        "  (Exits on different CPUs overlap, so the sum is CPU time that the VM loses, and only an upper bound of the latency.)"
    );
}

fn paired(exits: &[Exits]) -> impl Iterator<Item = (&Exits, &Exits)> {
    let of = |approach| exits.iter().filter(move |row| row.approach == approach);
    of(RemoteFlush::Ipi)
        .filter_map(move |ipi| Some((ipi, of(RemoteFlush::Hypercall).find(|other| other.point == ipi.point)?)))
        .filter(|(_, hypercall)| hypercall.all > 0.0)
}

/// Something that was promised.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    what: &'static str,
    /// The worst figure.
    figures: String,
    pub(super) met: bool,
}

impl Target {
    pub(super) fn print(&self) {
        println!("  {:6} {}: {}", if self.met { "met" } else { "MISSED" }, self.what, self.figures);
    }

    pub(super) fn record(&self) -> Content {
        Content::Promise { what: self.what.to_string(), figures: self.figures.clone(), met: Some(self.met) }
    }

    pub(super) fn json(&self) -> Value {
        json!({ "bench": "tlb", "part": "target", "what": self.what, "met": self.met, "figures": self.figures })
    }
}

/// The promises about which something was measured.
pub(super) fn targets(rows: &[Row], exits: &[Exits]) -> Vec<Target> {
    [overcommitted(rows), steady(rows), fewer_exits(exits), one_to_one(rows), ahead_of_kvm(rows)]
        .into_iter()
        .flatten()
        .collect()
}

/// A target that the smallest of the candidates must reach: at least `enough`.
fn least(what: &'static str, enough: f64, candidates: impl Iterator<Item = (f64, String)>) -> Option<Target> {
    let (figure, at) = candidates.min_by(|(one, _), (other, _)| one.total_cmp(other))?;
    Some(Target { what, figures: format!("{figure:.2}x, {at}"), met: figure >= enough })
}

fn by_ipi<'a>(rows: &'a [Row], hypercall: &Row) -> Option<&'a Row> {
    let same =
        |row: &&Row| (row.point, row.targets, &row.pages) == (hypercall.point, hypercall.targets, &hypercall.pages);
    rows.iter().filter(same).find(|row| row.approach == RemoteFlush::Ipi)
}

fn by_hypercall(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| row.approach == RemoteFlush::Hypercall)
}

fn place(row: &Row) -> String {
    format!("{} vCPUs on {} pCPUs, {} page(s), {}", row.point.vcpus, row.point.pcpus(), row.pages, row.targets.name())
}

/// IPI over hypercall, in the mean.
fn gain(rows: &[Row], row: &Row) -> Option<(f64, String)> {
    let ipi = by_ipi(rows, row)?;
    let figures = format!("{} against {} µs, {}", micros(ipi.seen.mean), micros(row.seen.mean), place(row));
    Some((ipi.seen.mean as f64 / row.seen.mean.max(1) as f64, figures))
}

fn overcommitted(rows: &[Row]) -> Option<Target> {
    let busy = by_hypercall(rows).filter(|row| row.point.overcommit == 4 && row.targets == Targets::Busy);
    let what = "mean at 4x overcommit, busy targets: hypercall at least 20x ahead of IPI, least";
    least(what, 20.0, busy.filter_map(|row| gain(rows, row)))
}

/// Net p99 at 4x overcommit compared with p99 at 1:1. The 1:1 case is the largest VM whose pCPUs all have a core.
fn steady(rows: &[Row]) -> Option<Target> {
    let busy = || by_hypercall(rows).filter(|row| row.targets == Targets::Busy);
    let one_to_one = |pages: &str| {
        let real = busy().filter(|row| row.point.overcommit == 1 && !row.point.is_cramped() && row.pages == pages);
        real.max_by_key(|row| row.point.vcpus)
    };
    let candidates = busy().filter(|row| row.point.overcommit == 4).filter_map(|row| {
        let reference = one_to_one(&row.pages)?;
        let (net, own) = (row.net_p99()?, reference.p99()?);
        let figures = format!("net p99 {} µs, {}; {} µs, {}", micros(net), place(row), micros(own), place(reference));
        Some((own as f64 / net.max(1) as f64, figures))
    });
    least("net p99 at 4x overcommit: at most twice the p99 at 1:1 (0.5x), least", 0.5, candidates)
}

fn fewer_exits(exits: &[Exits]) -> Option<Target> {
    let candidates = paired(exits).filter(|(ipi, _)| ipi.point.vcpus >= 8).map(|(ipi, hypercall)| {
        let Exits { point, .. } = ipi;
        let figures =
            format!("{:.1} against {:.1}, {} vCPUs on {} pCPUs", ipi.all, hypercall.all, point.vcpus, point.pcpus());
        (ipi.all / hypercall.all, figures)
    });
    least("exits from 8 vCPUs on: hypercall at most half of IPI (2x), least", 2.0, candidates)
}

fn one_to_one(rows: &[Row]) -> Option<Target> {
    let candidates = by_hypercall(rows).filter(|row| row.point.overcommit == 1 && row.point.vcpus >= 4);
    least(
        "mean at 1:1 from 4 vCPUs on: hypercall not slower than IPI, least",
        1.0,
        candidates.filter_map(|row| gain(rows, row)),
    )
}

fn ahead_of_kvm(rows: &[Row]) -> Option<Target> {
    let candidates = KVM.iter().filter_map(|kvm| {
        let row = like_kvm(rows, kvm.vcpus)?;
        let times = |theirs: u64, ours: u64| theirs as f64 / ours.max(1) as f64;
        let p99 = row.p99()?;
        let (figure, what, theirs, ours) = if times(kvm.mean, row.seen.mean) <= times(kvm.p99, p99) {
            (times(kvm.mean, row.seen.mean), "mean", kvm.mean, row.seen.mean)
        } else {
            (times(kvm.p99, p99), "p99", kvm.p99, p99)
        };
        let figures = format!(
            "{what} {} against KVM's {} µs on a {} computer, {} vCPUs",
            micros(ours),
            micros(theirs),
            kvm.host,
            kvm.vcpus
        );
        Some((figure, figures))
    });
    least("2 pCPUs: ahead of KVM's Hyper-V flush in mean and p99, least", 1.0, candidates)
}

#[cfg(test)]
mod tests {
    use super::super::cost::tests::exits_row;
    use super::super::latency::tests::{HYPERCALL, IPI, row};
    use super::*;

    fn met(target: Option<Target>) -> Option<bool> {
        target.map(|target| target.met)
    }

    #[test]
    fn gain_at_fourfold_overcommit_is_judged_by_the_worst_extent() {
        let good = [row(IPI, 8, 4), row(HYPERCALL, 8, 4)];
        assert_eq!(met(overcommitted(&good)), Some(true));
        let mut rows = good.to_vec();
        let slow = HYPERCALL.replace("pages=1", "pages=8").replace("mean_ns=109895", "mean_ns=13790397");
        rows.extend([row(&IPI.replace("pages=1", "pages=8"), 8, 4), row(&slow, 8, 4)]);
        let target = overcommitted(&rows).expect("was measured");
        assert!(
            !target.met && target.figures.starts_with("1.00x") && target.figures.contains("8 page(s)"),
            "{target:?}"
        );
        assert_eq!(overcommitted(&[row(IPI, 8, 2), row(HYPERCALL, 8, 2)]), None);
    }

    #[test]
    fn steadiness_needs_net_times_and_a_true_one_to_one() {
        let net = "p999_ns=5184035 net_mean_ns=1 net_p50_ns=1 net_p99_ns=10264655 net_p999_ns=1 net_max_ns=1";
        let overcommitted = HYPERCALL.replace("p999_ns=5184035", net);
        // One pCPU always has a core.
        let reference = row(HYPERCALL, 1, 1);
        assert_eq!(met(steady(&[row(&overcommitted, 8, 4), reference.clone()])), Some(false));
        let better = overcommitted.replace("net_p99_ns=10264655", "net_p99_ns=10264653");
        assert_eq!(met(steady(&[row(&better, 8, 4), reference.clone()])), Some(true));
        assert_eq!(steady(&[row(HYPERCALL, 8, 4), reference]), None);
        assert_eq!(steady(&[row(&overcommitted, 8, 4), row(HYPERCALL, 512, 1)]), None);
    }

    #[test]
    fn exits_count_from_eight_vcpus_on() {
        let rows = |vcpus, ipi, hypercall| {
            [exits_row(vcpus, RemoteFlush::Ipi, ipi), exits_row(vcpus, RemoteFlush::Hypercall, hypercall)]
        };
        assert_eq!(met(fewer_exits(&rows(8, 16.0, 8.0))), Some(true));
        assert_eq!(met(fewer_exits(&rows(8, 15.9, 8.0))), Some(false));
        assert_eq!(fewer_exits(&rows(4, 1.0, 8.0)), None);
        assert_eq!(fewer_exits(&rows(8, 16.0, 0.0)), None);
    }

    #[test]
    fn kvm_is_met_at_two_pcpus_in_mean_and_p99() {
        assert_eq!(met(ahead_of_kvm(&[row(HYPERCALL, 8, 4)])), Some(true));
        let slow = HYPERCALL.replace(" p99_ns=5132327", " p99_ns=48500001");
        let target = ahead_of_kvm(&[row(&slow, 8, 4)]).expect("was measured");
        assert!(!target.met && target.figures.contains("p99 48500 against"), "{target:?}");
        assert_eq!(ahead_of_kvm(&[row(HYPERCALL, 8, 2), row(IPI, 8, 4)]), None);
        let of_few = HYPERCALL.replace("count=2000", "count=99");
        assert_eq!(ahead_of_kvm(&[row(&of_few, 8, 4)]), None);
    }

    #[test]
    fn nothing_measured_promises_nothing() {
        assert!(targets(&[], &[]).is_empty());
    }
}
