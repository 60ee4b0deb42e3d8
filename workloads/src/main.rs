//! Workloads for Linux guests that cause many remote TLB flushes.
//!
//! This static program runs inside an unmodified guest and needs nothing from Dunlin. The guest's kernel turns its
//! memory operations into TLB flushes on other CPUs, by IPI or by hypercall, as configured at boot.
//!
//! * [`storm`]: all threads map, protect, discard and unmap memory, and check for the effects of a missing flush.
//! * [`latency`]: the time of one call that must flush the TLBs of busy CPUs.
//! * [`compile`]: compiles C files, as many at a time as there are CPUs.
//! * [`cut_off`]: the native cost of flushing pages, compared with flushing everything.
//! * [`writer`]: writes to all of a large memory, and tells how fast.
//! * [`registers`]: values in registers and flags, which must stay.
//! * [`interrupts`]: how the kernel flushed, from its own counts.
//! * [`affinity`]: on which CPUs threads run.
//!
//! A run ends with one line of `key=value` on standard output; progress goes to standard error. The status is 0 on
//! success, 1 if an error was found, 2 for wrong arguments.

mod affinity;
mod compile;
mod cut_off;
mod interrupts;
mod latencies;
mod latency;
mod memory;
mod options;
mod registers;
mod stale;
mod storm;
mod writer;

use std::process::ExitCode;

use options::Options;

const HELP: &str = "\
dunlin-workloads storm   [--threads N] [--seconds S]               map, protect, discard, unmap; look for stale reads
dunlin-workloads latency [--threads N] [--calls K] [--pages P]     time mprotect of P pages while N-1 threads spin
dunlin-workloads cut-off [--rounds R]                              what flushing pages, or everything, costs here
dunlin-workloads writer  [--threads N] [--mib M] [--rate R] [--seconds S]   write M MiB again and again, R MiB a second
dunlin-workloads registers [--threads N] [--seconds S]             keep values in registers and flags; look for lost ones
dunlin-workloads compile [--jobs N] [--rounds R] [--files F]       compile C files (at most F), R times over

N is the number of online CPUs when left out; of a writer, 1.
";

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// All that was seen was right.
    Right,
    /// The line that was printed counts something that must not happen.
    Wrong,
}

/// Does the work and prints its line.
type Run = fn(&Options) -> anyhow::Result<Verdict>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("", [].as_slice()),
    };
    let (known, run): (&[&str], Run) = match command {
        "storm" => (&storm::OPTIONS, storm::run),
        "latency" => (&latency::OPTIONS, latency::run),
        "cut-off" => (&cut_off::OPTIONS, cut_off::run),
        "writer" => (&writer::OPTIONS, writer::run),
        "registers" => (&registers::OPTIONS, registers::run),
        "compile" => (&compile::OPTIONS, compile::run),
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    let options = match Options::parse(rest, known) {
        Ok(options) => options,
        Err(error) => {
            eprint!("dunlin-workloads {command}: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };

    match run(&options) {
        Ok(Verdict::Right) => ExitCode::SUCCESS,
        Ok(Verdict::Wrong) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dunlin-workloads {command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
