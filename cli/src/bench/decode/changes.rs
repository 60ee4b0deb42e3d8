//! A guest that changes its code or its page tables while it accesses a device: insertions and dropped entries.

use abi::payload::DecodeCache;
use serde_json::{Value, json};

use super::counts::Counts;
use super::verdict;
use super::{Report, keys};
use crate::args::DecodeArgs;
use crate::bench::guest::MeasuringGuest;
use crate::bench::target::Target;
use crate::bench::{only_vm, progress};
use crate::config::Arch;
use crate::failure::Failure;

const VCPUS: u32 = 2;
const PCPUS: u32 = 2;

/// A change by the guest.
struct Change {
    /// Its name in records.
    name: &'static str,
    /// A description.
    what: &'static str,
    /// Words of the measuring guest's command line.
    cmdline: &'static str,
}

const CHANGES: [Change; 4] = [
    Change {
        name: "none",
        what: "nothing changes: both vCPUs read from 64 places",
        cmdline: "experiments=decode-loop device=version rips=64 forms=many vcpus=all iterations=2000",
    },
    Change {
        name: "code",
        what: "the instruction itself is written anew after each access",
        cmdline: "experiments=decode-smc write=instruction every=1 iterations=2000",
    },
    Change {
        name: "beside",
        what: "data on the page of the instruction is written after each access",
        cmdline: "experiments=decode-smc write=beside every=1 iterations=2000",
    },
    Change {
        name: "tables",
        what: "another vCPU changes the page tables on the way to the code",
        cmdline: "experiments=decode-churn iterations=2000",
    },
];

/// Shows the counters. Returns whether `bytes` had to drop an entry.
pub(super) fn run(args: &DecodeArgs, report: &mut Report<'_>) -> Option<Target> {
    report.say(&format!(
        "\nA guest that changes its code and its page tables, {VCPUS} vCPUs on {PCPUS} pCPUs (counts of whole runs)"
    ));
    let mut with_bytes = Vec::new();
    for change in &CHANGES {
        report.say(&format!("\n{}\n{:22}{}", change.what, "", Counts::columns()));
        for setting in args.settings() {
            let what = format!("{}, {}", change.what, setting.name());
            progress(&what);
            let Some(counts) = report.of(&what, count(change, setting)) else { continue };
            report.say(&format!("{:22}{}", setting.name(), counts.row()));
            report.json(json!({ "part": "changes", "change": change.name, "decode_cache": setting.name(),
                "vcpus": VCPUS, "pcpus": PCPUS, "counts": counts.json() }));
            for figure in counts.figures() {
                let figure = figure.at("change", change.name).at("decode_cache", setting.name());
                report.emulated(figure.at("vcpus", VCPUS).at("pcpus", PCPUS));
            }
            if setting == DecodeCache::Bytes {
                with_bytes.push((change.name, counts));
            }
        }
    }
    verdict::nothing_forgotten(
        "code and tables that change: bytes forgets nothing and watches nothing, most",
        &with_bytes,
    )
}

fn count(change: &Change, setting: DecodeCache) -> Result<(Counts, Value), Failure> {
    let run = MeasuringGuest {
        arch: Arch::X86_64,
        vcpus: VCPUS,
        pcpus: PCPUS,
        keys: &keys(setting),
        cmdline: change.cmdline,
        limit: 120,
        exact: false,
    }
    .run()?;
    let counts = Counts::read(&only_vm(&run)["counters"])
        .ok_or_else(|| Failure::failed(format!("emulated instructions were not counted: {}", only_vm(&run))))?;
    Ok((counts, run))
}
