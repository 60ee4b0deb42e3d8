//! `dunlin bench all`: runs all experiments in order, and writes a page of their results.
//!
//! Each step is its own process (`dunlin bench ... --record`), so a crash in one step loses only that step. A step
//! writes its results as soon as it has them; the tool shows its standard error next to the bar. A line at the end of
//! each step marks it as done, for `--resume`.

mod child;
mod estimate;
mod steps;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::{AllArgs, ReportArgs};
use crate::failure::{FAILED, Failure};
use crate::records::{Content, Ground, Log, read};
use crate::report;
use child::Child;
use estimate::{Estimate, in_words};
pub(crate) use steps::{EXPERIMENTS, Form, Step, steps};

/// A status after a signal is the signal's number plus this.
const SIGNALLED: u8 = 128;

pub(super) fn run(args: &AllArgs) -> Result<u8, Failure> {
    let form = if args.full { Form::Full } else { Form::Short };
    let steps = steps(form, &args.only)?;
    if args.list {
        list(&steps, form);
        return Ok(0);
    }
    let path = output(args)?;
    let done = done(args, form)?;
    let (skipped, to_do): (Vec<Step>, Vec<Step>) =
        steps.into_iter().partition(|step| done.iter().any(|name| name == step.name));
    for step in &skipped {
        eprintln!("{}: is in {} already", step.name, path.display());
    }

    let signal = catch_signals()?;
    let log = Log::open("all", Some(&path))?;
    let mut show = Show::new(&to_do, form);
    let mut failed = Vec::new();
    for step in &to_do {
        let outcome = measure(step, form, &path, &signal, &mut show)?;
        if let Outcome::Interrupted(signal) = outcome {
            show.end();
            eprintln!(
                "Interrupted. The results so far are in {0}; to continue:\n  {1}",
                path.display(),
                resume(args, &path)
            );
            return Ok(SIGNALLED.saturating_add(signal));
        }
        if outcome == Outcome::Incomplete {
            failed.push(step.name);
        }
        let seconds = show.step_is_done();
        let (step, form) = (step.name.to_string(), form.name().to_string());
        let complete = outcome == Outcome::Complete;
        log.write(Ground::Emulated, None, Content::Step { step, form, seconds, complete });
    }
    show.end();

    conclude(args, &path, &failed)?;
    Ok(if failed.is_empty() && log.is_whole() { 0 } else { FAILED })
}

fn list(steps: &[Step], form: Form) {
    for step in steps {
        let (times, words) = (step.times(form), step.command(form).join(" "));
        let times = if times > 1 { format!("{times} times ") } else { String::new() };
        println!("{:18}{:50}{times}dunlin bench {words}", step.name, step.what);
    }
    let seconds = steps.iter().map(|step| step.seconds(form)).sum();
    println!("About {} on two cores.", in_words(seconds));
}

/// The file of the results. One that is there must have been named by `--resume`.
fn output(args: &AllArgs) -> Result<PathBuf, Failure> {
    if let Some(path) = &args.resume {
        return Ok(path.clone());
    }
    let wanted = args.output.clone().unwrap_or_else(|| PathBuf::from("."));
    if wanted.is_dir() {
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(':', "-");
        return Ok(wanted.join(format!("dunlin-bench-{date}.jsonl")));
    }
    if wanted.exists() {
        let shown = wanted.display();
        return Err(Failure::bad_input(format!("{shown}: is there already"))
            .help(format!("'--resume {shown}' measures what it lacks; '-o' names another file")));
    }
    Ok(wanted)
}

/// The steps that are complete in the file that is resumed.
fn done(args: &AllArgs, form: Form) -> Result<Vec<String>, Failure> {
    let Some(path) = &args.resume else { return Ok(Vec::new()) };
    let records = read(path)?;
    for bad in &records.bad {
        eprintln!("{bad}");
    }
    if let Some(other) = records.records.iter().find(|it| it.circumstances.commit != env!("DUNLIN_COMMIT")) {
        let (theirs, ours) = (&other.circumstances.commit, env!("DUNLIN_COMMIT"));
        eprintln!("{}: has results of commit {theirs}, and gets some of {ours}; the report shows both", path.display());
    }
    let complete = records.records.into_iter().filter_map(|record| match record.content {
        Content::Step { step, form: of, complete: true, .. } if of == form.name() => Some(step),
        _ => None,
    });
    Ok(complete.collect())
}

/// The command to continue after an interruption. It has the path with which the tool was called, because `make bench`
/// does not put the tool into PATH.
fn resume(args: &AllArgs, path: &Path) -> String {
    let full = if args.full { " --full" } else { "" };
    let only = if args.only.is_empty() { String::new() } else { format!(" --only {}", args.only.join(",")) };
    let tool = std::env::args().next().unwrap_or_else(|| "dunlin".to_string());
    format!("{tool} bench all --resume {}{full}{only}", path.display())
}

/// The received signal, or zero.
fn catch_signals() -> Result<Arc<AtomicUsize>, Failure> {
    let caught = Arc::new(AtomicUsize::new(0));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let number = usize::try_from(signal).unwrap_or(1);
        signal_hook::flag::register_usize(signal, Arc::clone(&caught), number)
            .map_err(|error| Failure::failed(format!("cannot catch signals: {error}")))?;
    }
    Ok(caught)
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Complete,
    /// Something failed; the file has the other results.
    Incomplete,
    /// This computer lacks a requirement, which the file names.
    Unmeasured,
    /// By this signal, to us.
    Interrupted(u8),
}

/// Runs the commands of a step.
fn measure(step: &Step, form: Form, path: &Path, signal: &AtomicUsize, show: &mut Show) -> Result<Outcome, Failure> {
    let before = failures(path)?;
    show.step_begins(step);
    if let Some(why) = step.lacks(form) {
        let log = Log::open(experiment(step, form), Some(path))?;
        let (what, first) = (step.what.to_string(), why.lines().next().unwrap_or_default());
        show.say(&format!("{}: not measured: {first}", step.name));
        log.write(Ground::Emulated, None, Content::Unmeasured { what, why });
        return Ok(Outcome::Unmeasured);
    }
    for _ in 0..step.times(form) {
        let mut child = Child::start(step.command(form), path)?;
        while !child.has_ended()? {
            show.picture(child.says());
            let caught = signal.load(Ordering::SeqCst);
            if caught != 0 {
                child.interrupt();
                return Ok(Outcome::Interrupted(u8::try_from(caught).unwrap_or(0)));
            }
        }
        // A failed step has recorded its failure in the file. If it could not, the tool writes the line.
        if let Some(why) = child.died().filter(|_| failures(path).is_ok_and(|now| now == before)) {
            let log = Log::open(experiment(step, form), Some(path))?;
            log.failure(step.what, &why);
            show.say(&format!("{}: {why}", step.name));
        }
    }
    Ok(if failures(path)? > before { Outcome::Incomplete } else { Outcome::Complete })
}

/// The experiment that a step is of, as its records have it.
fn experiment(step: &Step, form: Form) -> &'static str {
    step.command(form).first().copied().unwrap_or(step.name)
}

/// Number of failures in a file.
fn failures(path: &Path) -> Result<usize, Failure> {
    let records = read(path)?;
    Ok(records.records.iter().filter(|record| matches!(record.content, Content::Failure { .. })).count())
}

/// Writes the page, and prints where the results are.
fn conclude(args: &AllArgs, path: &Path, failed: &[&str]) -> Result<(), Failure> {
    let page = path.with_extension("html");
    report::run(&ReportArgs { results: vec![path.to_path_buf()], output: page.clone() })?;
    println!("Results: {}", path.display());
    println!("Report:  {}", page.display());
    for name in failed {
        println!("{name}: something failed; see the report");
    }
    if !failed.is_empty() {
        println!("To repeat the failed steps: {}", resume(args, path));
    }
    Ok(())
}

/// The bar, or lines where there is no terminal.
struct Show {
    estimate: Estimate,
    bar: Option<ProgressBar>,
    steps: usize,
    at: usize,
    began: Instant,
    what: &'static str,
}

/// Parts of the bar.
const PARTS: u64 = 1000;

impl Show {
    fn new(steps: &[Step], form: Form) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(PARTS);
            if let Ok(style) = ProgressStyle::with_template("{bar:24} {percent:>3} %  {prefix}\n  {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        let estimate = Estimate::new(steps.iter().map(|step| step.seconds(form)).collect());
        Self { estimate, bar, steps: steps.len(), at: 0, began: Instant::now(), what: "" }
    }

    fn step_begins(&mut self, step: &Step) {
        self.at += 1;
        self.began = Instant::now();
        self.what = step.what;
        if self.bar.is_none() {
            let left = in_words(self.estimate.remaining(0.0));
            eprintln!("{} of {}: {}; about {left} left", self.at, self.steps, step.what);
        }
    }

    fn picture(&self, says: Option<String>) {
        let Some(bar) = &self.bar else { return };
        let elapsed = self.began.elapsed().as_secs_f64();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share is between 0 and 1")]
        bar.set_position((self.estimate.share(elapsed) * PARTS as f64) as u64);
        let left = in_words(self.estimate.remaining(elapsed));
        bar.set_prefix(format!("{} of {}: {}; about {left} left", self.at, self.steps, self.what));
        if let Some(says) = says {
            bar.set_message(says);
        }
    }

    /// Prints a permanent line above the bar.
    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// How long the step took.
    fn step_is_done(&mut self) -> f64 {
        let seconds = self.began.elapsed().as_secs_f64();
        self.estimate.done(seconds);
        (seconds * 10.0).round() / 10.0
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
