//! `dunlin bench`: measurements that any user can repeat with one command.
//!
//! Each is a series of runs of this program (`dunlin run --json`) or of QEMU, and a table of their results.
//! docs/measuring.md explains the meaning of each figure, and its limits. Emulated times are compared only with times
//! of the same series, taken in turn.

mod all;
mod boot;
mod bounds;
mod budget;
mod circumstances;
mod compare;
mod cycle;
mod decode;
mod dirty;
mod exits;
mod guest;
mod layout;
mod machine;
mod moves;
mod pair;
mod parent;
mod plain;
mod record;
mod report;
mod soak;
mod storms;
mod tags;
mod target;
mod tlb;

pub(crate) use all::{EXPERIMENTS, Form, steps};
pub(crate) use exits::kvm_instructions;
pub(crate) use moves::{WORST_WANTED, quantities as move_quantities};

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

use crate::args::{BenchArgs, BootArgs, BudgetArgs, ExitsArgs, Measurement};
use crate::failure::{FAILED, Failure};
use crate::records::Log;
use crate::stats::printable;

/// Runs the benchmark that `args` name; without one, all that take a few minutes at most.
pub(crate) fn run(args: &BenchArgs) -> Result<u8, Failure> {
    let measure = |name: &'static str, run: &dyn Fn(&Log) -> Result<u8, Failure>| recorded(args, name, run);
    match &args.what {
        Some(Measurement::Exits(exits)) => measure("exits", &|log| exits::run(exits, log)),
        Some(Measurement::Boot(boot)) => measure("boot", &|log| boot::run(boot, log)),
        Some(Measurement::Budget(budget)) => measure("budget", &|log| budget::run(budget, log)),
        Some(Measurement::Soak(soak)) => measure("soak", &|log| soak::run(soak, log)),
        Some(Measurement::Tags(tags)) => measure("tags", &|log| tags::run(tags, log)),
        Some(Measurement::Tlb(tlb)) => measure("tlb", &|log| tlb::run(tlb, log)),
        Some(Measurement::Decode(decode)) => measure("decode", &|log| decode::run(decode, log)),
        Some(Measurement::Layout(layout)) => measure("layout", &|log| layout::run(layout, log)),
        Some(Measurement::Dirty(dirty)) => measure("dirty", &|log| dirty::run(dirty, log)),
        Some(Measurement::Storms(storms)) => measure("storms", &|log| storms::run(storms, log)),
        Some(Measurement::Bounds(bounds)) => measure("bounds", &|log| bounds::run(bounds, log)),
        Some(Measurement::Parent(parent)) => measure("parent", &|log| parent::run(parent, log)),
        Some(Measurement::Machine(machine)) => measure("machine", &|log| machine::run(machine, log)),
        Some(Measurement::Move(moves)) => measure("move", &|log| moves::run(moves, log)),
        Some(Measurement::All(_) | Measurement::Compare(_)) if args.record.is_some() => {
            Err(Failure::bad_input("option '--record' is for single experiments").help("'dunlin bench all -o FILE'"))
        }
        Some(Measurement::All(all)) => all::run(all),
        Some(Measurement::Compare(compare)) => compare::run(compare),
        None => {
            println!("Instructions per exit (dunlin bench exits)\n");
            let exits = measure("exits", &|log| exits::run(&ExitsArgs::default(), log))?;
            println!("\nExits of a boot (dunlin bench budget)\n");
            let budget = measure("budget", &|log| budget::run(&BudgetArgs::default(), log))?;
            println!("\nBoot, in turn with QEMU alone (dunlin bench boot)\n");
            let boot = measure("boot", &|log| boot::run(&BootArgs { pairs: 3, ..BootArgs::default() }, log))?;
            Ok(exits.max(budget).max(boot))
        }
    }
}

/// Measures with a log of the records that are wanted. A measurement that was given up is a record, too.
fn recorded(
    args: &BenchArgs,
    experiment: &'static str,
    run: &dyn Fn(&Log) -> Result<u8, Failure>,
) -> Result<u8, Failure> {
    let log = Log::open(experiment, args.record.as_deref())?;
    let result = run(&log);
    if let Err(failure) = &result {
        log.failure("the rest of it", &failure.to_string());
    }
    Ok(if log.is_whole() { result? } else { result?.max(FAILED) })
}

/// Prints the current long step on standard error.
fn progress(what: &str) {
    eprintln!("  {what}");
}

/// Runs `dunlin run --json` with these arguments and returns its JSON. Prints the progress messages of a measuring
/// guest.
fn dunlin_run(arguments: &[&str]) -> Result<Value, Failure> {
    dunlin_run_beside(arguments, |_, _| ()).map(|(run, ())| run)
}

/// As [`dunlin_run`]. Meanwhile `beside` runs in another thread, with the number of the process. It has to return soon
/// after the flag is set, which says that the process has ended.
fn dunlin_run_beside<T: Send>(
    arguments: &[&str],
    beside: impl FnOnce(u32, &AtomicBool) -> T + Send,
) -> Result<(Value, T), Failure> {
    let cannot = |error: std::io::Error| Failure::failed(format!("cannot start a run: {error}"));
    let mut child = Command::new(std::env::current_exe().map_err(cannot)?)
        .args(["run", "--json"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    let said = child.stderr.take().map(|stderr| thread::spawn(move || pass_on_progress(BufReader::new(stderr))));
    let (pid, has_ended) = (child.id(), AtomicBool::new(false));
    let mut json = Vec::new();
    let (status, beside) = thread::scope(|scope| {
        let beside = scope.spawn(|| beside(pid, &has_ended));
        let read = child.stdout.take().map_or(Ok(0), |mut stdout| stdout.read_to_end(&mut json));
        let status = read.and_then(|_| child.wait());
        has_ended.store(true, Ordering::Relaxed);
        (status, beside.join())
    });
    let status = status.map_err(cannot)?;
    let said = said.and_then(|said| said.join().ok()).unwrap_or_default();

    let failed = |why: &str| {
        let said = said.trim_end();
        Failure::failed(format!("dunlin run {}: {why}\n{said}", arguments.join(" ")))
    };
    if !status.success() {
        return Err(failed(&status.to_string()));
    }
    let run = serde_json::from_slice(&json).map_err(|error| failed(&error.to_string()))?;
    Ok((run, beside.map_err(|_| failed("what ran beside it has panicked"))?))
}

/// Reads everything, prints progress records as they arrive, and returns the rest.
fn pass_on_progress(reader: impl std::io::BufRead) -> String {
    let mut rest = String::new();
    for line in reader.split(b'\n').map_while(Result::ok) {
        let line = printable(String::from_utf8_lossy(&line).trim_end());
        if line.starts_with("progress ") {
            progress(&line);
        } else {
            rest.push_str(&line);
            rest.push('\n');
        }
    }
    rest
}

/// As [`dunlin_run`], for the VMs that `toml` describes.
fn dunlin_run_vms(toml: &str, arguments: &[&str]) -> Result<Value, Failure> {
    dunlin_run_vms_beside(toml, arguments, |_, _| ()).map(|(run, ())| run)
}

/// As [`dunlin_run_beside`], for the VMs that `toml` describes.
fn dunlin_run_vms_beside<T: Send>(
    toml: &str,
    arguments: &[&str],
    beside: impl FnOnce(u32, &AtomicBool) -> T + Send,
) -> Result<(Value, T), Failure> {
    let cannot = |error: std::io::Error| Failure::failed(format!("a temporary file: {error}"));
    let mut file = tempfile::Builder::new().prefix("dunlin-bench-").suffix(".toml").tempfile().map_err(cannot)?;
    file.write_all(toml.as_bytes()).map_err(cannot)?;
    let path = file.path().to_string_lossy().into_owned();
    let mut all = vec![path.as_str()];
    all.extend(arguments);
    dunlin_run_beside(&all, beside)
}

/// The only VM of a run.
fn only_vm(run: &Value) -> &Value {
    &run["vms"][0]
}

/// Median, minimum and maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    /// The middle one, or the mean of the middle two.
    pub(crate) median: f64,
    /// The minimum.
    pub(crate) least: f64,
    /// The greatest.
    pub(crate) greatest: f64,
}

impl Spread {
    /// The spread of these values. `None` if there are none.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&least, &greatest) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Some(Self { median, least, greatest })
    }

    /// A lower bound for the median of all values, of which these are a sample: the median is below it in 2.5 % of
    /// cases. The bound is the sample's value of a certain rank, which follows from a binomial distribution.
    pub(crate) fn median_at_least(values: &[f64]) -> Option<f64> {
        const MISTAKEN: f64 = 0.025;
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        // Each value is below the true median with probability 1/2, so the number of such values has a binomial
        // distribution.
        let count = sorted.len() as f64;
        let mut exactly = 0.5_f64.powf(count);
        let mut at_most = exactly;
        let mut below = 0;
        while below + 1 < sorted.len() && at_most <= MISTAKEN {
            below += 1;
            exactly *= (count - below as f64 + 1.0) / below as f64;
            at_most += exactly;
        }
        sorted.get(below.saturating_sub(1)).copied()
    }

    fn json(self) -> Value {
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        json!({ "median": rounded(self.median), "min": rounded(self.least), "max": rounded(self.greatest) })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2}-{:.2})", self.median, self.least, self.greatest)
    }
}

/// Seconds since `start`.
fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::{Spread, pass_on_progress};

    #[test]
    fn true_median_is_hardly_ever_below_the_bound() {
        // Order statistics of the binomial distribution with 1/2: of 25 the 8th is the last that will do, of 13 the
        // 3rd.
        for (count, place) in [(25, 8), (13, 3), (6, 1), (1, 1)] {
            let values: Vec<f64> = (1..=count).rev().map(f64::from).collect();
            assert_eq!(Spread::median_at_least(&values), Some(f64::from(place)), "of {count}");
        }
        assert_eq!(Spread::median_at_least(&[]), None);
    }

    #[test]
    fn median_of_an_even_number_lies_between_the_middle_two() {
        let spread = Spread::of(&[4.0, 1.0, 3.0, 2.0]).expect("has values");
        assert_eq!(spread, Spread { median: 2.5, least: 1.0, greatest: 4.0 });
    }

    #[test]
    fn progress_of_a_guest_is_not_kept_for_a_report() {
        let said = "  0.1 s  host\nprogress a=1\r\nrecord b=2\r\n";
        assert_eq!(pass_on_progress(said.as_bytes()), "  0.1 s  host\nrecord b=2\n");
    }

    #[test]
    fn nothing_has_no_median() {
        assert_eq!(Spread::of(&[]), None);
    }
}
