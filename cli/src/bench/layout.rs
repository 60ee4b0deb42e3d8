//! The cost of false sharing between two vCPUs: data that is packed without a plan, compared with data laid out by
//! writer.
//!
//! In the native part, two threads on two cores act as two vCPUs ([`neighbours`]; [`structures`] has their data). The
//! word that says where a vCPU is lies next to its mailbox or apart from it ([`presence`]). [`distance`] varies the
//! distance of two words. On the emulated host, [`counters`] shows that counters are exact although only their owners
//! write them.

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

/// The message if the two threads did not have two cores.
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
