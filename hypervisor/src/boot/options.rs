//! The words of the hypervisor's own command line: `name=value`, or a name alone.
//!
//! An unknown word is an error that stops the start. Otherwise the user would find out late that it had no effect.

use core::fmt;

use mitigations::Weakness;

/// An option: its name, and its values.
struct OptionSpec {
    name: &'static str,
    takes: Takes,
}

enum Takes {
    Nothing,
    OneOf(&'static [&'static str]),
    /// Any value; other code checks it.
    Anything,
}

/// The options of both architectures.
const KNOWN: &[OptionSpec] = &[
    OptionSpec { name: "log", takes: Takes::OneOf(&["off", "error", "warn", "info", "debug", "trace"]) },
    // Parsed by [`super::console`], which reports errors on all consoles that it finds.
    OptionSpec { name: "console", takes: Takes::Anything },
    OptionSpec { name: "panic", takes: Takes::OneOf(&["halt", "reset"]) },
    OptionSpec { name: "mitigations", takes: Takes::OneOf(&["auto", "off"]) },
    OptionSpec { name: "smt", takes: Takes::OneOf(&["on", "off", "core"]) },
    OptionSpec { name: "when-idle", takes: Takes::OneOf(&["poweroff", "stay"]) },
    OptionSpec {
        name: "selftest",
        takes: Takes::OneOf(&[
            "panic",
            "nested",
            "overflow",
            "null",
            "tsc-skew",
            "slow-log",
            "svm-locked",
            "exhaustion",
            "iommu",
            "spec-ctrl",
            "all-steps",
        ]),
    },
    OptionSpec { name: "check", takes: Takes::Nothing },
    OptionSpec { name: "bounds", takes: Takes::Nothing },
    // GRUB's `linux` puts the file's name there.
    OptionSpec { name: "BOOT_IMAGE", takes: Takes::Anything },
    // And QEMU's firmware the initrd's.
    OptionSpec { name: "initrd", takes: Takes::Anything },
];

/// Each weakness of processors is an option, too: nothing is done against it.
const OF_WEAKNESSES: Takes = Takes::OneOf(&["off"]);

/// All options.
fn known() -> impl Iterator<Item = (&'static str, &'static Takes)> {
    let weaknesses = Weakness::ALL.into_iter().map(|weakness| (weakness.name(), &OF_WEAKNESSES));
    KNOWN.iter().map(|known| (known.name, &known.takes)).chain(weaknesses)
}

/// An invalid word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake<'a> {
    /// Nothing is called so.
    Unknown { word: &'a str, nearest: &'static str },
    /// The option has no such value.
    Value { name: &'a str, value: &'a str, known: &'static [&'static str] },
    /// The option needs a value.
    NoValue { name: &'a str, known: &'static [&'static str] },
    /// The option takes no value.
    NeedlessValue { name: &'a str },
}

impl fmt::Display for Mistake<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { word, nearest } => write!(f, "unknown option \"{word}\": did you mean {nearest}?")?,
            Self::Value { name, value, .. } => write!(f, "unknown value \"{value}\" of {name}=")?,
            Self::NoValue { name, .. } => write!(f, "the option {name} needs a value")?,
            Self::NeedlessValue { name } => write!(f, "the option {name} takes no value")?,
        }
        if let Self::Value { known, .. } | Self::NoValue { known, .. } = self {
            f.write_str(", one of")?;
            for (at, value) in known.iter().enumerate() {
                write!(f, "{} {value}", if at == 0 { ":" } else { "," })?;
            }
        }
        Ok(())
    }
}

/// The mistakes of a command line, in its order. Needs the heap.
pub(super) fn mistakes(command_line: &str) -> impl Iterator<Item = Mistake<'_>> {
    command_line.split_ascii_whitespace().filter_map(|word| {
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let Some((_, takes)) = known().find(|&(known, _)| known == name) else {
            let nearest =
                known().map(|(known, _)| known).min_by_key(|known| textdistance::str::levenshtein(known, name));
            return Some(Mistake::Unknown { word, nearest: nearest.unwrap_or_default() });
        };
        match (takes, value) {
            (Takes::Anything, _) | (Takes::Nothing, None) => None,
            (Takes::OneOf(known), Some(value)) if known.contains(&value) => None,
            (Takes::OneOf(known), Some(value)) => Some(Mistake::Value { name, value, known }),
            (Takes::OneOf(known), None) => Some(Mistake::NoValue { name, known }),
            (Takes::Nothing, Some(_)) => Some(Mistake::NeedlessValue { name }),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{Mistake, Takes, known, mistakes};

    #[test]
    fn every_known_option_with_every_known_value_is_accepted() {
        for (name, takes) in known() {
            match takes {
                Takes::Nothing => assert_eq!(mistakes(name).next(), None),
                Takes::OneOf(values) => {
                    values.iter().for_each(|value| assert_eq!(mistakes(&format!(" {name}={value}\t")).next(), None));
                }
                Takes::Anything => assert_eq!(mistakes(&format!("{name}=/boot/dunlin")).next(), None),
            }
        }
        assert_eq!(mistakes("").next(), None);
    }

    #[test]
    fn each_word_that_means_nothing_is_told_with_what_would_be_right() {
        let said = |text: &str| mistakes(text).map(|mistake| mistake.to_string()).collect::<Vec<_>>();
        assert_eq!(
            said("log=info lgo=debug selftst"),
            ["unknown option \"lgo=debug\": did you mean log?", "unknown option \"selftst\": did you mean selftest?"]
        );
        assert_eq!(said("panic=stop"), ["unknown value \"stop\" of panic=, one of: halt, reset"]);
        assert_eq!(said("panic"), ["the option panic needs a value, one of: halt, reset"]);
        assert_eq!(said("check=all"), ["the option check takes no value"]);
        assert_eq!(
            said("retbleed=on retblede=off"),
            [
                "unknown value \"on\" of retbleed=, one of: off",
                "unknown option \"retblede=off\": did you mean retbleed?"
            ]
        );
        assert!(matches!(mistakes("=").next(), Some(Mistake::Unknown { word: "=", .. })));
    }
}
