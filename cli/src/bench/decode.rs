//! Emulated accesses, by what the hypervisor caches of their instructions (`decode_cache` of a VM).
//!
//! There are three parts. Loops of the measuring guest ([`loops`]) give the instructions of one access, which are
//! exact, and ticks. [`changes`] counts what happens to the cache when the guest changes its code and its page tables.
//! [`native`] measures the emulator's own code. [`debian`] measures an unmodified kernel instead; [`verdict`] has the
//! conclusions.

mod changes;
mod counts;
mod debian;
mod loops;
mod native;
mod verdict;

use abi::payload::DecodeCache;

use super::report::Report;
use crate::args::DecodeArgs;
use crate::failure::Failure;
use crate::records::Log;

pub(super) fn run(args: &DecodeArgs, log: &Log) -> Result<u8, Failure> {
    let mut report = Report::new("decode", args.json, log);
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

    let status = report.judge(&targets);
    if !args.native {
        report.say("\nEmulated (TCG): instructions and counts are real; compare times within this run only.");
    }
    Ok(status)
}

/// The keys of a VM with a memory-mapped local APIC and this setting.
fn keys(setting: DecodeCache) -> String {
    format!("apic = \"xapic\"\ndecode_cache = \"{}\"\n", setting.name())
}

/// The settings in the order of this round, counted from 1. Each round begins with another setting, so that none is
/// always first.
fn rotated(settings: &[DecodeCache], round: u32) -> Vec<DecodeCache> {
    let mut settings = settings.to_vec();
    if !settings.is_empty() {
        let first = (round as usize - 1) % settings.len();
        settings.rotate_left(first);
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::SETTINGS;

    #[test]
    fn each_round_begins_with_another_setting_and_has_all_of_them() {
        let of = |round| rotated(&[DecodeCache::Off, DecodeCache::WriteProtect, DecodeCache::Bytes], round);
        assert_eq!(of(1), [DecodeCache::Off, DecodeCache::WriteProtect, DecodeCache::Bytes]);
        assert_eq!(of(2), [DecodeCache::WriteProtect, DecodeCache::Bytes, DecodeCache::Off]);
        assert_eq!(of(4), of(1));
        assert!(rotated(&[], 1).is_empty());
    }

    #[test]
    fn keys_choose_memory_mapped_registers_and_the_setting() {
        for setting in SETTINGS {
            let keys: toml::Table = toml::from_str(&keys(setting)).expect("is TOML");
            assert_eq!((keys["apic"].as_str(), keys["decode_cache"].as_str()), (Some("xapic"), Some(setting.name())));
        }
    }
}
