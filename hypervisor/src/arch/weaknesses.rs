//! How the machine stands with the known weaknesses of speculative execution: for the log, and for the control port.

use alloc::string::String;
use alloc::vec::Vec;

use abi::control::{Speculation, Stance};
use log::info;
use mitigations::{Ignored, Plan, State, Weakness};
use spin::Once;

use crate::boot::Boot;
use crate::sync::per_host;

/// Why nothing is done on an emulated processor.
pub(super) const EMULATED: &str = "the processor is emulated, nothing is done (mitigations=auto does it all the same)";

per_host! {
    /// What was told at the start.
    static TOLD: Once<Speculation> = Once::new();
}

/// Weaknesses that the hypervisor's options turn the steps off for.
pub(super) fn ignored(boot: &Boot) -> Ignored {
    Ignored::by(|weakness| boot.option(weakness.name()) == Some("off"))
}

/// The machine does what the plan says.
pub(super) fn tell<S: Default>(plan: &Plan<S>) {
    let weaknesses: Vec<_> = Weakness::ALL
        .into_iter()
        .map(|weakness| {
            let stance = match plan.state(weakness) {
                State::NotAffected => Stance::NotAffected,
                State::Held(by) => Stance::Held(String::from(by)),
                State::Vulnerable(why) => Stance::Vulnerable(String::from(why)),
            };
            (String::from(weakness.name()), stance)
        })
        .collect();
    for (name, stance) in &weaknesses {
        match stance {
            Stance::NotAffected => {}
            Stance::Held(by) => info!("speculation: {name}: held by {by}"),
            Stance::Vulnerable(why) => info!("speculation: {name}: VULNERABLE, {why}"),
        }
    }
    say(plan.verdict(), weaknesses);
}

/// Nothing was looked at, for this reason.
pub(super) fn tell_nothing(why: &str) {
    say(why, Vec::new());
}

fn say(verdict: &str, weaknesses: Vec<(String, Stance)>) {
    info!("speculation: {verdict}");
    TOLD.call_once(|| Speculation { verdict: String::from(verdict), weaknesses });
}

/// What was told.
pub(crate) fn told() -> Speculation {
    TOLD.get().cloned().unwrap_or_default()
}
