//! State of a vCPU, packed as it comes to mind and laid out by who writes it: what it costs two vCPUs to be neighbours.
//!
//! Natively, two threads play two vCPUs on two cores ([`neighbours`], what they write is in [`structures`]), and the
//! word that says where a vCPU is lies beside its mailbox or away from it ([`presence`]); two words are moved apart
//! ([`distance`]). On the emulated host, counts are shown to be exact although nobody but each owner writes them
//! ([`counters`]).

mod counters;
mod distance;
mod neighbours;
mod presence;
mod structures;

use super::pair::Calibration;
use super::report::Report;
use super::target::Target;
use crate::args::LayoutBenchArgs;
use crate::bench::progress;
use crate::failure::Failure;
use crate::records::Log;

/// What is said where two threads had no two cores.
const NOT_FREE: &str = "two cores were not free for long enough; try again when the computer has less to do";

pub(super) fn run(args: &LayoutBenchArgs, log: &Log) -> Result<u8, Failure> {
    let mut report = Report::new("layout", args.json, log);
    let mut targets = Vec::new();
    if !args.emulated {
        targets.extend(measure_natively(args, &report));
    }
    if !args.native {
        targets.extend(counters::run(args.arch, &mut report));
    }
    Ok(report.judge(&targets))
}

fn measure_natively(args: &LayoutBenchArgs, report: &Report<'_>) -> Vec<Target> {
    progress("are there two cores, and are they free?");
    let calibration = Calibration::patient();
    report.say(&format!("Two cores: {calibration}"));
    report.json(calibration.json());
    if !calibration.are_free() {
        report.say(&format!("Not judged: {NOT_FREE}."));
        eprintln!("{NOT_FREE}");
        report.unmeasured("packed and laid out, natively", NOT_FREE);
        return neighbours::targets(&neighbours::Results::default());
    }

    let results = neighbours::run(args, report);
    if args.wants("distance") {
        distance::run(report);
    }
    if args.wants("presence") {
        presence::run(report);
    }
    neighbours::targets(&results)
}
