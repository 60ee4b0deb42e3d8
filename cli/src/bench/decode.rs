//! Emulated accesses, by what is remembered of their instructions (`decode_cache` of a VM).
//!
//! Three views. Loops of the measuring guest ([`loops`]): instructions of one access, which are exact, and ticks. What
//! happens to what is remembered when the guest changes its code and its page tables ([`changes`]): counts. And the
//! emulator's own code, natively ([`native`]). [`debian`] measures an unmodified kernel instead, [`verdict`] says what it all
//! comes to.

mod changes;
mod counts;
mod debian;
mod loops;
mod native;
mod verdict;

use serde_json::{Value, json};

use super::circumstances::machine;
use crate::args::{DecodeArgs, Setting};
use crate::failure::Failure;

pub(super) fn run(args: &DecodeArgs) -> Result<u8, Failure> {
    let mut report = Report::new(args.json);
    let mut targets = Vec::new();
    if args.debian {
        targets.extend(debian::run(args, &mut report));
    } else {
        if !args.native {
            loops::run(args, &mut report, &mut targets);
            targets.extend(changes::run(args, &mut report));
        }
        targets.extend(native::run(&mut report));
    }

    if !targets.is_empty() {
        report.say("\nTargets:");
    }
    for target in &targets {
        report.say(&target.to_string());
        report.json(target.json());
    }
    if !args.native {
        report.say("\nEmulated (TCG): instructions and counts are real; compare times within this run only.");
    }
    Ok(u8::from(report.failed || targets.iter().any(|target| !target.met)))
}

/// The keys of a VM whose local APIC is memory, with this setting.
fn keys(setting: Setting) -> String {
    format!("apic = \"xapic\"\ndecode_cache = \"{}\"\n", setting.name())
}

/// The settings in the order of this round, counted from 1: each round begins with another one, so that none is always
/// the first.
fn rotated(settings: &[Setting], round: u32) -> Vec<Setting> {
    let mut settings = settings.to_vec();
    if !settings.is_empty() {
        let first = (round as usize - 1) % settings.len();
        settings.rotate_left(first);
    }
    settings
}

/// Where results go, and whether all was well.
struct Report {
    json: bool,
    machine: Value,
    failed: bool,
}

impl Report {
    fn new(json: bool) -> Self {
        // Until a run has said more.
        Self { json, machine: machine(&Value::Null), failed: false }
    }

    /// Text for people.
    fn say(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    /// What was measured, if it was; else it says why not, and the rest goes on.
    fn of<T>(&mut self, what: &str, measured: Result<(T, Value), Failure>) -> Option<T> {
        match measured {
            Ok((figures, run)) => {
                self.machine = machine(&run);
                Some(figures)
            }
            Err(failure) => {
                self.failed = true;
                self.say(&format!("{what}: FAILED, see standard error"));
                self.json(json!({ "part": "failure", "what": what, "why": failure.to_string() }));
                eprintln!("{what}: {failure}");
                None
            }
        }
    }

    /// One line of JSON, if that is wanted: the figures, and what they were measured with.
    fn json(&self, mut figures: Value) {
        if !self.json {
            return;
        }
        if let Some(object) = figures.as_object_mut() {
            object.insert("bench".to_string(), json!("decode"));
            object.entry("emulated").or_insert(json!(true));
            object.insert("machine".to_string(), self.machine.clone());
            object.insert("commit".to_string(), json!(env!("DUNLIN_COMMIT")));
        }
        println!("{figures}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_begins_with_another_setting_and_has_all_of_them() {
        let of = |round| rotated(&[Setting::Off, Setting::WriteProtect, Setting::Bytes], round);
        assert_eq!(of(1), [Setting::Off, Setting::WriteProtect, Setting::Bytes]);
        assert_eq!(of(2), [Setting::WriteProtect, Setting::Bytes, Setting::Off]);
        assert_eq!(of(4), of(1));
        assert!(rotated(&[], 1).is_empty());
    }

    #[test]
    fn keys_choose_memory_mapped_registers_and_the_setting() {
        for setting in Setting::ALL {
            let keys: toml::Table = toml::from_str(&keys(setting)).expect("is TOML");
            assert_eq!((keys["apic"].as_str(), keys["decode_cache"].as_str()), (Some("xapic"), Some(setting.name())));
        }
    }
}
