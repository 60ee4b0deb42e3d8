//! `cargo xtask bochs --compare`: what the measuring guest says on both processors, line by line, and the instructions
//! of an exit on each.
//!
//! Each run is made without the steps against speculative execution and with those that the processor would need.
//!
//! What time decides is left out of the lines: ticks, and how much was done in a second. All else must be equal, but
//! for what differs by vendor, which [`BY_VENDOR`] explains.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Records that are compared.
const KINDS: [&str; 5] = ["record", "result", "unsupported", "violation", "error"];
/// Values that time decides, by name. Ports that read as zero are some of clocks.
const TIMES: [&str; 13] = [
    "min",
    "max",
    "readings",
    "reads",
    "looks",
    "flushes",
    "fallbacks",
    "passes",
    "interrupts",
    "rounds",
    "patches",
    "zero",
    "busy_work",
];
/// The value that is an exit's instructions.
const FIGURE: &str = "ticks_per_iteration";

/// Experiments whose lines differ by vendor, and the reason.
const BY_VENDOR: &[(&str, &str)] =
    &[("msr-fuzz", "each vendor's processors have registers of their own, which kernels use without asking")];

/// The most that an exit for CPUID may take on either, without steps.
const CPUID_TARGET: f64 = 300.0;

/// A line of the guest.
#[derive(Clone, Debug, PartialEq)]
struct Line {
    experiment: String,
    /// Its words, without those that time decides.
    words: String,
    /// An exit's instructions.
    figure: Option<f64>,
}

/// What two processors said in the same run.
pub(super) struct Pair<'a> {
    pub(super) run: &'a str,
    /// The steps against speculation were on.
    pub(super) has_steps: bool,
    /// Experiments that one of them does not make.
    pub(super) left_out: &'a [&'a str],
    /// AMD's and Intel's.
    pub(super) serials: [&'a str; 2],
}

/// Shows the lines of all runs, and the instructions of exits. Returns what must not be as it is.
pub(super) fn show(pairs: &[Pair<'_>]) -> (String, Vec<String>) {
    let (mut text, mut complaints) = (String::new(), Vec::new());
    // By experiment, without steps and with them: AMD's and Intel's.
    let mut figures: BTreeMap<String, [Option<[f64; 2]>; 2]> = BTreeMap::new();
    let (mut equal, mut by_vendor) = (0, 0);
    let mut line = |words: String| {
        let _ = writeln!(text, "{words}");
    };
    line(format!("{:9} {:11} {:5} line", "", "run", "steps"));
    for pair in pairs {
        let of = format!("{:11} {:5}", pair.run, if pair.has_steps { "on" } else { "off" });
        for (amd, intel) in pair.lines() {
            let experiment = amd.as_ref().or(intel.as_ref()).map_or("", |line| line.experiment.as_str()).to_string();
            let words = |side: &Option<Line>| side.as_ref().map_or("(nothing)", |line| line.words.as_str()).to_string();
            if let (Some(Line { figure: Some(amd), .. }), Some(Line { figure: Some(intel), .. })) = (&amd, &intel) {
                figures.entry(experiment.clone()).or_default()[usize::from(pair.has_steps)] = Some([*amd, *intel]);
            }
            let (amd, intel) = (words(&amd), words(&intel));
            if amd == intel {
                equal += 1;
                line(format!("{:9} {of} {amd}", "equal"));
                continue;
            }
            let why = BY_VENDOR.iter().find(|(name, _)| *name == experiment);
            line(format!("{:9} {of} {amd}", if why.is_some() { "by vendor" } else { "DIFFERS" }));
            line(format!("{:27} {intel}", ""));
            match why {
                Some((_, why)) => {
                    by_vendor += 1;
                    line(format!("{:27} ({why})", ""));
                }
                None => complaints.push(format!("{}: \"{amd}\" on AMD's is \"{intel}\" on Intel's", pair.run)),
            }
        }
    }
    line(format!("\n{equal} lines are equal, {by_vendor} differ by vendor, {} differ", complaints.len()));

    line(format!("\n{:18} {:>8} {:>8} {:>12} {:>12}", "instructions of", "SVM", "VT-x", "SVM, steps", "VT-x, steps"));
    for (experiment, [without, with]) in &figures {
        let shown = |figures: &Option<[f64; 2]>| figures.map(|both| both.map(|one| format!("{one:.0}")));
        let [amd, intel] = shown(without).unwrap_or_default();
        let [guarded_amd, guarded_intel] = shown(with).unwrap_or_default();
        line(format!("{experiment:18} {amd:>8} {intel:>8} {guarded_amd:>12} {guarded_intel:>12}"));
    }
    if let Some([Some(both), _]) = figures.get("cpuid")
        && both.iter().any(|figure| *figure > CPUID_TARGET)
    {
        complaints.push(format!("an exit for CPUID takes {both:?} instructions, at most {CPUID_TARGET} are wanted"));
    }
    (text, complaints)
}

impl Pair<'_> {
    /// The lines of both, side by side: the first of an experiment beside its first, and so on.
    fn lines(&self) -> Vec<(Option<Line>, Option<Line>)> {
        let [amd, intel] = self.serials.map(|serial| {
            let lines = serial.lines().filter_map(parse);
            lines.filter(|line| !self.left_out.contains(&line.experiment.as_str())).collect::<Vec<_>>()
        });
        let mut experiments: Vec<&str> = Vec::new();
        for line in amd.iter().chain(&intel) {
            if !experiments.contains(&line.experiment.as_str()) {
                experiments.push(&line.experiment);
            }
        }
        let mut both = Vec::new();
        for experiment in experiments {
            let of = |lines: &[Line]| -> Vec<Line> {
                lines.iter().filter(|line| line.experiment == experiment).cloned().collect()
            };
            let (mut amd, mut intel) = (of(&amd).into_iter(), of(&intel).into_iter());
            loop {
                match (amd.next(), intel.next()) {
                    (None, None) => break,
                    pair => both.push(pair),
                }
            }
        }
        both
    }
}

/// A line of the serial port, if it is one of an experiment.
fn parse(line: &str) -> Option<Line> {
    let start = KINDS.iter().filter_map(|kind| line.find(&format!("{kind} experiment="))).min()?;
    let words = words(line[start..].trim_end());
    let value = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let experiment = value("experiment")?.to_string();
    let figure = value(FIGURE).and_then(|figure| figure.parse().ok());
    let kept: Vec<&str> = words.iter().copied().filter(|word| !is_time(word)).collect();
    Some(Line { experiment, words: kept.join(" "), figure })
}

/// Whether time decides about a word.
fn is_time(word: &str) -> bool {
    let Some((name, _)) = word.split_once('=') else { return false };
    ["ticks", "seconds", "khz", "_us", "_ns"].iter().any(|part| name.contains(part)) || TIMES.contains(&name)
}

/// The words of a record. Text with spaces is in double quotes.
fn words(line: &str) -> Vec<&str> {
    let mut is_quoted = false;
    line.split(|letter| {
        is_quoted ^= letter == '"';
        letter == ' ' && !is_quoted
    })
    .filter(|word| !word.is_empty())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::{Pair, show};

    const AMD: &str = "[ 0.1] cpu0 info\n\
        record experiment=cpuid iterations=200 ticks_per_iteration=193.0 min=193.0 max=194.0 batches=9\r\n\
        result experiment=cpuid failures=0 microseconds=12\r\n\
        record experiment=msr-fuzz readable=7\r\n\
        record experiment=timer-storm passes=3\r\n\
        unsupported experiment=x why=\"a b\"\r\n";

    fn compare(intel: &str) -> (String, Vec<String>) {
        show(&[Pair { run: "exits", has_steps: false, left_out: &["timer-storm"], serials: [AMD, intel] }])
    }

    #[test]
    fn lines_that_differ_in_time_alone_are_equal() {
        let intel = AMD.replace("193.0", "270.0").replace("microseconds=12", "microseconds=99").replace("passes", "x");
        let (text, complaints) = compare(&intel);
        assert_eq!(complaints, [""; 0], "{text}");
        assert!(text.contains("4 lines are equal, 0 differ by vendor, 0 differ"), "{text}");
        assert!(text.contains("cpuid                   193      270"), "{text}");
    }

    #[test]
    fn line_that_differs_or_is_missing_is_told_and_reasons_of_vendors_are_given() {
        let intel =
            AMD.replace("failures=0", "failures=1").replace("readable=7", "readable=8").replace("x why", "y why");
        let (text, complaints) = compare(&intel);
        assert_eq!(complaints.len(), 3, "{text}");
        assert!(text.contains("1 lines are equal, 1 differ by vendor, 3 differ"), "{text}");
    }

    #[test]
    fn exit_that_takes_too_long_is_told() {
        let (_, complaints) = compare(&AMD.replace("193.0", "301.0"));
        assert_eq!(complaints.len(), 1);
    }
}
