//! The duration of shootdowns: records of the measuring guest, as rows of a table.

use serde_json::{Value, json};

use abi::payload::RemoteFlush;

use super::APPROACHES;
use super::matrix::Point;
use crate::args::{Targets, TlbArgs};
use crate::bench::circumstances::Watch;
use crate::bench::guest::{MeasuringGuest, output};
use crate::bench::record::Record;
use crate::config::Arch;
use crate::failure::Failure;
use crate::records::{Class, Figure};

/// The distribution of measured times, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) mean: u64,
    pub(super) p50: u64,
    pub(super) p99: u64,
    pub(super) p999: u64,
    pub(super) max: u64,
}

/// One approach at one size.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) point: Point,
    pub(super) targets: Targets,
    /// Number of pages, or `whole`.
    pub(super) pages: String,
    pub(super) approach: RemoteFlush,
    /// Shootdowns.
    pub(super) count: u64,
    /// As the caller's clock has it.
    pub(super) seen: Times,
    /// The same without the time in which the caller's vCPU was off its pCPU.
    pub(super) net: Option<Times>,
    /// Work that busy targets did at the same time.
    work: u64,
    /// Hypercalls that failed, after which the guest took to IPIs.
    fallbacks: u64,
    /// Share of the computer that others used.
    pub(super) others: Option<f64>,
}

impl Row {
    fn of(record: &Record, point: Point, others: Option<f64>) -> Option<Self> {
        Some(Self {
            point,
            targets: [Targets::Busy, Targets::Idle].into_iter().find(|it| record.text("targets") == Some(it.name()))?,
            pages: record.text("pages")?.to_string(),
            approach: APPROACHES.into_iter().find(|it| record.text("approach") == Some(it.name()))?,
            count: record.number("count")?,
            seen: times(record, "")?,
            net: times(record, "net_"),
            work: record.number("busy_work").unwrap_or(0),
            fallbacks: record.number("fallbacks").unwrap_or(0),
            others,
        })
    }

    /// The 99th percentile, if there are at least 100 values.
    pub(super) fn p99(&self) -> Option<u64> {
        (self.count >= 100).then_some(self.seen.p99)
    }

    /// The same of the net times.
    pub(super) fn net_p99(&self) -> Option<u64> {
        self.net.filter(|_| self.count >= 100).map(|net| net.p99)
    }

    fn settings(&self, figure: Figure) -> Figure {
        let figure = figure.at("vcpus", self.point.vcpus).at("pcpus", self.point.pcpus());
        let figure = figure.at("overcommit", self.point.overcommit).at("cramped", self.point.is_cramped());
        figure.at("targets", self.targets.name()).at("pages", self.pages.as_str())
    }

    pub(super) fn json(&self) -> Value {
        let times = |times: &Times| {
            json!({ "mean_ns": times.mean, "p50_ns": times.p50, "p99_ns": times.p99, "p999_ns": times.p999,
                "max_ns": times.max })
        };
        json!({ "bench": "tlb", "part": "latency", "vcpus": self.point.vcpus, "pcpus": self.point.pcpus(),
            "overcommit": self.point.overcommit, "cramped": self.point.is_cramped(), "targets": self.targets.name(),
            "pages": self.pages, "approach": self.approach.name(), "count": self.count, "seen": times(&self.seen),
            "net": self.net.as_ref().map(times), "busy_work": self.work, "fallbacks": self.fallbacks,
            "others_share": self.others })
    }
}

/// Rows of one size as figures, with the ratio of IPI to hypercall.
pub(super) fn figures(rows: &[Row]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for row in rows {
        let mut add = |quantity: &str, ns: Option<u64>| {
            let Some(ns) = ns else { return };
            let figure = Figure::new(quantity, Class::Time, "ns", [ns as f64]).observations(row.count);
            figures.push(row.settings(figure).at("approach", row.approach.name()).others(row.others));
        };
        add("latency mean", Some(row.seen.mean));
        add("latency p50", Some(row.seen.p50));
        add("latency p99", row.p99());
        add("latency net of the caller's own absence, p50", row.net.map(|net| net.p50));
        add("latency net of the caller's own absence, p99", row.net_p99());

        let ipi = rows.iter().find(|ipi| ipi.approach == RemoteFlush::Ipi && ipi.pages == row.pages);
        let Some(ipi) = ipi.filter(|_| row.approach == RemoteFlush::Hypercall) else { continue };
        for (quantity, long, short) in [
            ("latency mean, IPI to hypercall", ipi.seen.mean, row.seen.mean),
            ("latency p50, IPI to hypercall", ipi.seen.p50, row.seen.p50),
        ] {
            let figure = Figure::new(quantity, Class::Ratio, "ratio", [long as f64 / short.max(1) as f64]);
            figures.push(row.settings(figure).others(row.others));
        }
    }
    figures
}

fn times(record: &Record, prefix: &str) -> Option<Times> {
    let field = |name: &str| record.number(&format!("{prefix}{name}_ns"));
    Some(Times {
        mean: field("mean")?,
        p50: field("p50")?,
        p99: field("p99")?,
        p999: field("p999")?,
        max: field("max")?,
    })
}

/// Both approaches and all extents at one size, alternated by the guest within one run. With the run's JSON.
pub(super) fn measure(args: &TlbArgs, point: Point, targets: Targets) -> Result<(Vec<Row>, Value), Failure> {
    // Four extents fit into one command line of the guest.
    let mut rows = Vec::new();
    let mut last = Value::Null;
    for pages in args.pages.chunks(4) {
        let list = pages.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let series = 2 * pages.len() as u64;
        // Beyond 64 vCPUs a set that names each of them takes the other form of the call; "all" would not.
        let form = if point.vcpus > 64 { " form=mask" } else { "" };
        let watch = Watch::start();
        last = MeasuringGuest {
            arch: Arch::X86_64,
            vcpus: point.vcpus,
            pcpus: point.pcpus(),
            keys: "",
            cmdline: &format!(
                "experiments=shootdown approach=ipi,hypercall pages={list} targets={} iterations={} seconds={}{form}",
                targets.name(),
                args.iterations,
                args.seconds
            ),
            // The last shootdown of a series may take long after its time is over.
            limit: series * u64::from(args.seconds) * 2 + 180,
            exact: false,
        }
        .run()?;
        let others = watch.others();
        let records = Record::all(output(&last), "record");
        let found: Vec<Row> = records.filter_map(|record| Row::of(&record, point, others)).collect();
        if found.len() as u64 != series {
            return Err(Failure::failed(format!("the measuring guest has too few figures:\n{}", output(&last))));
        }
        rows.extend(found);
    }
    Ok((rows, last))
}

/// The head of the table.
pub(super) fn print_head() {
    println!("{:47} {:^35} {:^35} {:^13}", "", "as seen, µs", "net, µs", "IPI/HC");
    println!(
        "{:>5} {:>5}  {:>4} {:4} {:>5} {:9} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6}",
        "vCPUs",
        "pCPUs",
        "over",
        "",
        "pages",
        "by",
        "count",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "mean",
        "p99",
        "others"
    );
}

/// The rows of one size.
pub(super) fn print(rows: &[Row]) {
    for row in rows {
        println!("{}", line(row, rows));
    }
}

fn line(row: &Row, rows: &[Row]) -> String {
    let other = rows.iter().find(|other| other.approach != row.approach && other.pages == row.pages);
    let (mut mean, mut p99) = (String::new(), String::new());
    if let (RemoteFlush::Hypercall, Some(ipi)) = (row.approach, other) {
        mean = times_as_long(Some(ipi.seen.mean), Some(row.seen.mean));
        p99 = times_as_long(ipi.p99(), row.p99());
    }
    let fallbacks = match row.fallbacks {
        0 => String::new(),
        count => format!("  {count} hypercalls FAILED"),
    };
    format!(
        "{:>5} {:>5}{:1} {:>3}x {:4} {:>5} {:9} {:>6} {} {} {mean:>6} {p99:>6} {:>6}{fallbacks}",
        row.point.vcpus,
        row.point.pcpus(),
        if row.point.is_cramped() { "*" } else { "" },
        row.point.overcommit,
        row.targets.name(),
        row.pages,
        row.approach.name(),
        row.count,
        columns(Some(row.seen), row.count),
        columns(row.net, row.count),
        row.others.map_or(String::new(), |share| format!("{:.0}%", 100.0 * share)),
    )
}

/// Four columns; a percentile of fewer measurements than it is one of is a dash.
fn columns(times: Option<Times>, count: u64) -> String {
    let column = |value: fn(&Times) -> u64, least: u64| {
        let value = times.as_ref().map(value).filter(|_| count >= least);
        format!("{:>8}", value.map_or("-".to_string(), micros))
    };
    [
        column(|times| times.mean, 1),
        column(|times| times.p50, 2),
        column(|times| times.p99, 100),
        column(|times| times.p999, 1000),
    ]
    .join(" ")
}

/// Nanoseconds as microseconds, with about three digits.
pub(super) fn micros(ns: u64) -> String {
    let value = ns as f64 / 1e3;
    match ns {
        0..10_000 => format!("{value:.2}"),
        10_000..100_000 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn times_as_long(long: Option<u64>, short: Option<u64>) -> String {
    match (long, short) {
        (Some(long), Some(short)) if short > 0 => {
            let ratio = long as f64 / short as f64;
            if ratio < 10.0 { format!("{ratio:.2}x") } else { format!("{ratio:.0}x") }
        }
        _ => "-".to_string(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench::tlb) const IPI: &str = "record experiment=shootdown approach=ipi pages=1 targets=busy cpus=8 \
        count=217 mean_ns=13790397 p50_ns=14024884 p99_ns=19994353 p999_ns=20069997 max_ns=20069997 net_mean_ns=119260 \
        net_p50_ns=44046 net_p99_ns=545245 net_p999_ns=13641745 net_max_ns=13641745 busy_work=110796274 \
        milliseconds=3000 fallbacks=0";
    pub(in crate::bench::tlb) const HYPERCALL: &str = "record experiment=shootdown approach=hypercall pages=1 \
        targets=busy cpus=8 count=2000 mean_ns=109895 p50_ns=35721 p99_ns=5132327 p999_ns=5184035 max_ns=5184035 \
        busy_work=3530568 milliseconds=74 fallbacks=0";

    pub(in crate::bench::tlb) fn row(line: &str, vcpus: u32, overcommit: u32) -> Row {
        let record = Record::parse(line).expect("is a record");
        Row::of(&record, Point { vcpus, overcommit }, Some(0.5)).expect("is whole")
    }

    #[test]
    fn row_is_read_from_a_record_with_or_without_net_times() {
        let ipi = row(IPI, 8, 4);
        assert_eq!((ipi.approach, ipi.targets, ipi.pages.as_str()), (RemoteFlush::Ipi, Targets::Busy, "1"));
        assert_eq!((ipi.seen.mean, ipi.seen.p999), (13_790_397, 20_069_997));
        assert_eq!(ipi.net.map(|net| (net.p50, net.p99)), Some((44_046, 545_245)));
        assert_eq!(row(HYPERCALL, 8, 4).net, None);
    }

    #[test]
    fn record_that_lacks_a_figure_is_no_row() {
        for key in ["mean_ns", "p999_ns", "count", "pages", "approach", "targets"] {
            let line = IPI.replace(&format!(" {key}="), " other=");
            let record = Record::parse(&line).expect("is a record");
            assert_eq!(Row::of(&record, Point { vcpus: 8, overcommit: 4 }, None), None, "{key}");
        }
    }

    #[test]
    fn table_has_ratios_and_no_percentiles_of_too_few() {
        let rows = [row(IPI, 8, 4), row(HYPERCALL, 8, 4)];
        let ipi: Vec<_> = line(&rows[0], &rows).split_ascii_whitespace().map(str::to_string).collect();
        // 217 measurements have a p99, and no p99.9.
        assert_eq!(&ipi[..7], ["8", "2", "4x", "busy", "1", "ipi", "217"]);
        assert_eq!(&ipi[7..15], ["13790", "14025", "19994", "-", "119", "44.0", "545", "-"]);
        let hypercall = line(&rows[1], &rows);
        assert!(
            hypercall.contains(" 125x") && hypercall.contains(" 3.90x") && hypercall.ends_with("50%"),
            "{hypercall}"
        );
        let few = Row { count: 99, ..rows[0].clone() };
        assert_eq!((few.p99(), few.net_p99()), (None, None));
    }

    #[test]
    fn json_has_what_the_row_has() {
        let json = row(IPI, 8, 4).json();
        assert_eq!((&json["pcpus"], &json["seen"]["p99_ns"]), (&json!(2), &json!(19_994_353)));
        assert_eq!((&json["net"]["mean_ns"], &json["approach"]), (&json!(119_260), &json!("ipi")));
        assert_eq!(row(HYPERCALL, 8, 4).json()["net"], Value::Null);
    }

    #[test]
    fn digits_are_as_many_as_mean_something() {
        assert_eq!([999, 12_345, 123_456, 0].map(micros), ["1.00", "12.3", "123", "0.00"]);
    }
}
