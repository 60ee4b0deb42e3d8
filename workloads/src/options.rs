//! Options of a workload: `--name number`, and nothing else.

use std::collections::BTreeMap;
use std::fmt;

use crate::affinity::cpus;

/// The options that were given.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    given: BTreeMap<&'static str, u32>,
}

/// An error in the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BadOption {
    Unknown(String),
    NoNumber { name: &'static str, value: Option<String> },
}

impl fmt::Display for BadOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(word) => write!(f, "no option `{word}`"),
            Self::NoNumber { name, value: Some(value) } => write!(f, "{name} takes a number from 1, not `{value}`"),
            Self::NoNumber { name, value: None } => write!(f, "{name} takes a number from 1"),
        }
    }
}

impl Options {
    /// Parses `words`: pairs of a name in `known` and a number. Numbers start at 1; the last one of a name counts.
    pub(crate) fn parse(words: &[String], known: &[&'static str]) -> Result<Self, BadOption> {
        let mut options = Self::default();
        for pair in words.chunks(2) {
            let Some(name) = known.iter().find(|name| **name == pair[0]) else {
                return Err(BadOption::Unknown(pair[0].clone()));
            };
            let value = pair.get(1);
            match value.and_then(|value| value.parse().ok()) {
                Some(number) if number > 0 => options.given.insert(name, number),
                _ => return Err(BadOption::NoNumber { name, value: value.cloned() }),
            };
        }
        Ok(options)
    }

    /// The number given for `name`, or `otherwise`.
    pub(crate) fn number(&self, name: &str, otherwise: u32) -> u32 {
        self.given.get(name).copied().unwrap_or(otherwise)
    }

    /// The number for `name`, or the number of CPUs that this program may use.
    pub(crate) fn number_or_cpus(&self, name: &str) -> u32 {
        self.number(name, u32::try_from(cpus().len()).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 2] = ["--threads", "--seconds"];

    fn parse(line: &str) -> Result<Options, BadOption> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words, &KNOWN)
    }

    #[test]
    fn what_is_given_counts_and_the_rest_is_as_usual() {
        let options = parse("--threads 3 --threads 4").expect("is right");
        assert_eq!(options.number("--threads", 1), 4);
        assert_eq!(options.number("--seconds", 10), 10);
        assert!(!cpus().is_empty());
    }

    #[test]
    fn what_is_not_a_known_name_and_a_number_from_one_is_refused() {
        assert_eq!(parse("--jobs 3"), Err(BadOption::Unknown("--jobs".into())));
        for value in ["0", "-1", "x", "99999999999"] {
            let refused = BadOption::NoNumber { name: "--threads", value: Some(value.into()) };
            assert_eq!(parse(&format!("--threads {value}")), Err(refused));
        }
        assert_eq!(parse("--seconds"), Err(BadOption::NoNumber { name: "--seconds", value: None }));
    }
}
