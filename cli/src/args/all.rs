//! `dunlin bench all` and `dunlin bench compare`: their options.

use std::path::PathBuf;

use clap::Args as ClapArgs;

pub(super) const ALL_HELP: &str = "\
Runs all experiments in a short form (about 15 minutes on two cores), and writes a page with the
results next to published results of other systems (see `dunlin report`).

Each result is a line of JSON in the file of -o, written as soon as it is known. A failure is a line
too. Ctrl-C ends the current experiment, keeps all results, and prints how to continue.

The exit status is 0 if everything was measured, even if targets were missed; 1 if something failed;
130 after Ctrl-C.

Examples:
  dunlin bench all                                  results and page in the current directory
  dunlin bench all -o results.jsonl --only exits,tags
  dunlin bench all --resume results.jsonl           only the missing results
  dunlin bench all --full -o /srv/bench/            about an hour";

pub(super) const COMPARE_HELP: &str = "\
Prints the median, minimum and maximum of each figure that both files have, and a verdict.

  exact counts            equal, or the difference; up to 1 % counts as equal
  counts, ratios, cycles  different if the medians are further apart than the samples within either
                          file. With three samples they must be three times as far apart, with four
                          1.5 times, because so few samples show only a part of their spread. There
                          is no verdict for fewer than three runs, or if other processes used more
                          than a quarter of the computer
  times of an emulator    shown without a verdict: they can be compared only within one run

The exit status is 0 if no figure is different, 1 if some are, 2 for invalid input.";

/// `dunlin bench all`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct AllArgs {
    /// File for the results, or a directory for a new file with the date in its name [default: .]
    #[arg(short, long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) output: Option<PathBuf>,
    /// Measure what is missing in this file, and append it
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// More sizes, settings and rounds, and Debian's kernel under load: about an hour
    #[arg(long)]
    pub(crate) full: bool,
    /// Run only these steps; --list shows their names
    #[arg(long, value_name = "STEP,..", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// List the steps with their commands, but do not run them
    #[arg(long)]
    pub(crate) list: bool,
}

/// `dunlin bench compare`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct CompareArgs {
    /// File with the old results
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// File with the new results
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// Also show figures without a verdict
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print JSON, one line for each figure
    #[arg(long)]
    pub(crate) json: bool,
}
