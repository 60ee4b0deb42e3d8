//! `check` on the command line: prints which requirements of VMs this machine meets, and how to fix the rest. It starts
//! no VM and changes nothing on the machine.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use abi::payload::Payload;

use crate::arch::{Arch, Machine};
use crate::boot::Boot;
use crate::{cpu, frames};

/// VMs of less memory are of no use.
const LEAST_MEMORY: u64 = 128 << 20;

/// One checked item.
pub(crate) struct Finding {
    /// Its subject: a few words.
    pub(crate) about: &'static str,
    /// How it is here.
    pub(crate) found: String,
    pub(crate) verdict: Verdict,
}

/// The effect of a finding on VMs.
pub(crate) enum Verdict {
    /// In order, or only information.
    Good,
    /// VMs run, but something is worse than it could be.
    Worse(String),
    /// No VM can run. This would help.
    Missing(String),
}

impl Finding {
    pub(crate) fn good(about: &'static str, found: String) -> Self {
        Self { about, found, verdict: Verdict::Good }
    }
}

/// Logs a line for each checked item, and at the end whether VMs can run here. The exit status tells the same.
pub(crate) fn run(boot: &Boot) -> ! {
    log::info!("check: the requirements of VMs on this machine; no VM is started, and nothing is changed");
    let mut findings = Machine::findings();
    findings.extend([pcpus(), memory(), payload(boot)]);
    let mut missing = 0;
    for Finding { about, found, verdict } in findings {
        match verdict {
            Verdict::Good => log::info!("check: {about:<16} ok       {found}"),
            Verdict::Worse(why) => log::warn!("check: {about:<16} ok, but  {found}: {why}"),
            Verdict::Missing(remedy) => {
                missing += 1;
                log::error!("check: {about:<16} missing  {found}: {remedy}");
            }
        }
    }
    if missing == 0 {
        log::info!("check: VMs can run on this machine");
        Machine::end_check(abi::exit_code::CLEAN)
    }
    log::error!("check: VMs cannot run on this machine as it is: {missing} requirements are missing");
    Machine::end_check(abi::exit_code::REFUSED)
}

fn pcpus() -> Finding {
    let online = (0..cpu::count()).count();
    Finding::good("processors", format!("{online} started"))
}

fn memory() -> Finding {
    let (free, total) = (frames::free_bytes(), frames::total_bytes());
    let found = format!("{} of {} MiB are free for VMs", free >> 20, total >> 20);
    let verdict = if free >= LEAST_MEMORY {
        Verdict::Good
    } else {
        Verdict::Missing(format!(
            "VMs need {} MiB: take a smaller payload, or a machine with more memory",
            LEAST_MEMORY >> 20
        ))
    };
    Finding { about: "memory", found, verdict }
}

/// The VMs that would be started.
fn payload(boot: &Boot) -> Finding {
    let about = "payload";
    let read = boot.payload.map(Payload::read);
    match read {
        Some(Ok(payload)) => {
            let names: Vec<&str> = payload.manifest.vms.iter().map(|vm| vm.name.as_str()).collect();
            let bytes: u64 = payload.manifest.vms.iter().map(|vm| vm.memory_bytes).sum();
            let found = format!("{} with {} MiB of memory", names.join(", "), bytes >> 20);
            let verdict = if bytes <= frames::free_bytes() {
                Verdict::Good
            } else {
                Verdict::Worse(String::from("less is free, and not all of them will start"))
            };
            Finding { about, found, verdict }
        }
        Some(Err(error)) => {
            let remedy = String::from("write the image again");
            Finding { about, found: format!("{error}"), verdict: Verdict::Missing(remedy) }
        }
        None => {
            let verdict = Verdict::Worse(String::from("without the module `payload` no VM is started"));
            Finding { about, found: String::from("none"), verdict }
        }
    }
}
