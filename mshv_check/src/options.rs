//! The command line: a check, and numbers.

use std::fmt;

/// All checks, from the simplest on.
pub(crate) const CHECKS: [&str; 12] =
    ["open", "life", "vp", "run", "interrupts", "cost", "signal", "memory", "hyperv", "kill", "input", "fuzz"];
/// Only for kernels that show statistics, so `all` does not include it.
pub(crate) const STATS: &str = "stats";
/// It takes 200 MiB of memory, and so none of `all`.
pub(crate) const LARGEST: &str = "largest";
/// Only for kernels that merge pages and swap to zram, and so none of `all`.
pub(crate) const RECLAIM: &str = "reclaim";
/// What `kill` starts and kills.
pub(crate) const VICTIM: &str = "victim";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) check: &'static str,
    pub(crate) json: bool,
    pub(crate) seed: u64,
    pub(crate) time_limit: u64,
    /// Number of rounds, invalidations or calls. Without it, each check uses its default.
    count: Option<u64>,
    pub(crate) vps: u32,
    /// Each call from this number on is shown before it is made.
    pub(crate) trace: Option<u64>,
}

/// An error in the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BadOption {
    NoCheck(Option<String>),
    Unknown(String),
    NoNumber(String),
}

impl fmt::Display for BadOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCheck(Some(word)) => write!(f, "no check `{word}`"),
            Self::NoCheck(None) => write!(f, "which check?"),
            Self::Unknown(word) => write!(f, "no option `{word}`"),
            Self::NoNumber(name) => write!(f, "{name} takes a number from 1"),
        }
    }
}

impl Options {
    pub(crate) fn parse(words: &[String]) -> Result<Self, BadOption> {
        let (first, rest) = words.split_first().ok_or(BadOption::NoCheck(None))?;
        let known = CHECKS.into_iter().chain(["all", LARGEST, RECLAIM, STATS, VICTIM]).find(|name| name == first);
        let check = known.ok_or_else(|| BadOption::NoCheck(Some(first.clone())))?;
        let mut options = Self { check, json: false, seed: 1, time_limit: 3600, count: None, vps: 2, trace: None };
        let mut rest = rest.iter();
        while let Some(word) = rest.next() {
            if word == "--json" {
                options.json = true;
                continue;
            }
            let known = ["--rounds", "--invalidations", "--calls", "--seed", "--time-limit", "--vps", "--trace"];
            if !known.contains(&word.as_str()) {
                return Err(BadOption::Unknown(word.clone()));
            }
            let number = rest.next().and_then(|text| text.parse::<u64>().ok()).filter(|number| *number > 0);
            let number = number.ok_or_else(|| BadOption::NoNumber(word.clone()))?;
            match word.as_str() {
                "--seed" => options.seed = number,
                "--time-limit" => options.time_limit = number,
                "--trace" => options.trace = Some(number),
                "--vps" => {
                    options.vps = u32::try_from(number).map_err(|_| BadOption::NoNumber(word.clone()))?;
                }
                _ => options.count = Some(number),
            }
        }
        Ok(options)
    }

    /// How often: as given, else as usual.
    pub(crate) fn count(&self, usual: u64) -> u64 {
        self.count.unwrap_or(usual)
    }

    /// The same number, for a short run of this check.
    pub(crate) fn small(&self, check: &'static str) -> Self {
        let count = match check {
            "life" | "signal" => 50,
            "kill" => 10,
            "cost" | "memory" | "hyperv" => 500,
            "fuzz" => 5000,
            _ => 1,
        };
        Self { check, count: Some(self.count(count)), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, BadOption> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn number_that_is_given_counts_and_otherwise_the_usual_one() {
        let options = parse("life --rounds 7 --json --seed 3").expect("is right");
        assert_eq!((options.check, options.count(1000), options.json, options.seed), ("life", 7, true, 3));
        assert_eq!(parse("life").expect("is right").count(1000), 1000);
        assert_eq!(parse("all").expect("is right").small("kill").count(500), 10);
    }

    #[test]
    fn words_that_mean_nothing_are_refused() {
        assert_eq!(parse(""), Err(BadOption::NoCheck(None)));
        assert_eq!(parse("live"), Err(BadOption::NoCheck(Some("live".into()))));
        assert_eq!(parse("life --often 3"), Err(BadOption::Unknown("--often".into())));
        for line in ["life --rounds", "life --rounds x", "life --rounds 0"] {
            assert_eq!(parse(line), Err(BadOption::NoNumber("--rounds".into())));
        }
    }
}
