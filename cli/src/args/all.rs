//! `dunlin bench all` and `dunlin bench compare`: their options.

use std::path::PathBuf;

use clap::Args as ClapArgs;

pub(super) const ALL_HELP: &str = "\
Runs the experiments one after the other, in a short form of about a quarter of an hour on two cores,
and writes a page with all results beside those of others (dunlin report).

Each result is a line of JSON in the file of -o, written as soon as it is known. Ctrl-C ends the
experiment that runs, keeps what is there, and says how to go on. What fails is a line too.

The status is 0 when everything was measured, whether or not targets were met; 1 when something
failed; 130 after Ctrl-C.

Examples:
  dunlin bench all                                  results and page in the current directory
  dunlin bench all -o results.jsonl --only exits,tags
  dunlin bench all --resume results.jsonl           what is missing there
  dunlin bench all --full -o /srv/bench/            about an hour";

pub(super) const COMPARE_HELP: &str = "\
For each figure that both files have: median, least and greatest of both, and a verdict.

  exact counts            the same, or by how much they differ; up to 1 % is no difference
  counts, ratios, cycles  a verdict only where the medians are further apart than the samples of
                          either file are among themselves (than three times that where there are
                          three, 1.5 times where there are four: so few show a part of their
                          spread), both are of at least three runs, and others used no more than a
                          quarter of the computer
  times of an emulator    shown, and never judged: they mean something within one run only

The status is 0 when no verdict is a difference, 1 when some are, 2 for bad input.";

/// `dunlin bench all`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct AllArgs {
    /// Where results go; a new file with the date in its name, if it is a directory [default: .]
    #[arg(short, long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) output: Option<PathBuf>,
    /// Measure what is missing in this file, and add it there
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// More sizes, settings and rounds, and Debian's kernel under load: about an hour
    #[arg(long)]
    pub(crate) full: bool,
    /// Only these steps; --list shows their names
    #[arg(long, value_name = "STEP,..", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Show what would be measured, and how
    #[arg(long)]
    pub(crate) list: bool,
}

/// `dunlin bench compare`.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct CompareArgs {
    /// Results before
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// Results after
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// Show figures without a verdict, too
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print JSON, one line for each figure
    #[arg(long)]
    pub(crate) json: bool,
}
