//! `dunlin stats --host`: the host itself, and what it does against speculative execution.

use std::fmt::Write;

use abi::control::{Answer, Command, HostInfo, Speculation, Stance};
use serde_json::{Value, json};

use super::{printable, unexpected};
use crate::control::{Client, refusal};
use crate::failure::Failure;
use crate::quantity::show_size;

/// Asks the host, and prints what it says.
pub(super) fn show(client: &mut Client, host: &HostInfo, as_json: bool) -> Result<(), Failure> {
    let speculation = match client.ask(Command::Speculation)? {
        Ok(Answer::Speculation(speculation)) => speculation,
        other => return Err(unexpected(other.map_err(refusal))),
    };
    if as_json {
        println!("{}", json(host, &speculation));
    } else {
        print!("{}", text(host, &speculation));
    }
    Ok(())
}

fn json(host: &HostInfo, speculation: &Speculation) -> Value {
    let weaknesses: serde_json::Map<_, _> = speculation
        .weaknesses
        .iter()
        .map(|(name, stance)| {
            let (state, words) = words(stance);
            (name.clone(), json!({ "state": state, "by": words }))
        })
        .collect();
    json!({
        "version": host.version, "arch": host.arch, "pcpus": host.pcpus, "memory_bytes": host.memory_bytes,
        "clock_hz": host.clock_hz, "processor": host.processor,
        "speculation": { "verdict": speculation.verdict, "weaknesses": weaknesses },
    })
}

/// A stance for programs, and its reason.
fn words(stance: &Stance) -> (&'static str, Option<&str>) {
    match stance {
        Stance::NotAffected => ("not affected", None),
        Stance::Held(by) => ("held", Some(by)),
        Stance::Vulnerable(why) => ("vulnerable", Some(why)),
    }
}

fn text(host: &HostInfo, speculation: &Speculation) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "Dunlin {}, {}", printable(&host.version), printable(&host.arch));
    let _ = writeln!(text, "{}", printable(&host.processor));
    let _ = writeln!(text, "{} pCPUs run vCPUs, {} of memory for VMs", host.pcpus, show_size(host.memory_bytes));
    let _ = writeln!(text, "\nspeculation: {}", printable(&speculation.verdict));
    for (name, stance) in &speculation.weaknesses {
        let name = printable(name);
        let _ = match stance {
            Stance::NotAffected => writeln!(text, "  {name:<26}not affected"),
            Stance::Held(by) => writeln!(text, "  {name:<26}held by {}", printable(by)),
            Stance::Vulnerable(why) => writeln!(text, "  {name:<26}VULNERABLE: {}", printable(why)),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use abi::control::{HostInfo, Speculation, Stance};

    use super::{json, text};

    fn host() -> HostInfo {
        HostInfo {
            version: "0.1.0".to_string(),
            arch: "x86_64".to_string(),
            pcpus: 2,
            memory_bytes: 1 << 30,
            clock_hz: 1_000_000_000,
            processor: "a processor\u{1b}[2J".to_string(),
        }
    }

    fn speculation() -> Speculation {
        let stances = [
            ("spectre_v2", Stance::Held("IBRS at exits".to_string())),
            ("l1tf", Stance::NotAffected),
            ("mds", Stance::Vulnerable("the microcode is too old".to_string())),
        ];
        let weaknesses = stances.map(|(name, stance)| (name.to_string(), stance)).to_vec();
        Speculation { verdict: "some weaknesses are not held".to_string(), weaknesses }
    }

    #[test]
    fn table_has_a_line_for_each_weakness_and_no_control_characters() {
        let text = text(&host(), &speculation());
        assert!(text.contains("speculation: some weaknesses are not held\n"), "{text}");
        assert!(text.contains("  spectre_v2                held by IBRS at exits\n"), "{text}");
        assert!(text.contains("  l1tf                      not affected\n"), "{text}");
        assert!(text.contains("  mds                       VULNERABLE: the microcode is too old\n"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn json_names_the_state_and_what_holds_it() {
        let json = json(&host(), &speculation());
        let weaknesses = &json["speculation"]["weaknesses"];
        assert_eq!(weaknesses["spectre_v2"]["state"], "held");
        assert_eq!(weaknesses["spectre_v2"]["by"], "IBRS at exits");
        assert_eq!(weaknesses["l1tf"]["state"], "not affected");
        assert!(weaknesses["l1tf"]["by"].is_null());
        assert_eq!(json["pcpus"], 2);
    }
}
