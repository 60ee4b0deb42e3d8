//! A host with one VM that runs the measuring guest.

use serde_json::Value;

use super::soak::is_clean;
use super::{dunlin_run_vms, only_vm};
use crate::config::Arch;
use crate::failure::Failure;

/// The specification of the run.
#[derive(Clone, Debug)]
pub(super) struct MeasuringGuest<'a> {
    /// Architecture of the host.
    pub(super) arch: Arch,
    /// vCPUs of the VM.
    pub(super) vcpus: u32,
    /// pCPUs of the host.
    pub(super) pcpus: u32,
    /// More lines for the VM's table, such as `tags = "epoch"`.
    pub(super) keys: &'a str,
    /// The guest's command line.
    pub(super) cmdline: &'a str,
    /// When to give up, in seconds.
    pub(super) limit: u64,
    /// Whether time is counted in instructions, which makes every run the same.
    pub(super) exact: bool,
}

/// With these arguments QEMU's clocks count instructions, one per nanosecond, of all CPUs together.
const EXACT: [&str; 6] = ["-icount", "shift=0,sleep=off", "-seed", "7", "-rtc", "base=2026-01-01,clock=vm"];

/// The same as a list for QEMU.
pub(super) fn exact_arguments() -> Vec<String> {
    EXACT.map(str::to_string).to_vec()
}

impl MeasuringGuest<'_> {
    /// The run's JSON, if the guest finished and found nothing wrong.
    pub(super) fn run(&self) -> Result<Value, Failure> {
        let mut arguments = vec!["--accel=tcg".to_string(), format!("--time-limit={}s", self.limit)];
        if self.exact {
            arguments.extend(EXACT.map(|argument| format!("--qemu-arg={argument}")));
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let run = dunlin_run_vms(&self.toml(), &arguments)?;
        if is_clean(output(&run)) {
            return Ok(run);
        }
        Err(Failure::failed(format!("the measuring guest found something wrong:\n{}", output(&run))))
    }

    fn toml(&self) -> String {
        let Self { arch, vcpus, pcpus, keys, cmdline, .. } = self;
        let arch = arch.name();
        format!(
            "[host]\narch = \"{arch}\"\npcpus = {pcpus}\n[[vm]]\nname = \"measuring\"\nvcpus = {vcpus}\nmemory = \"64M\"\n\
             kernel = \"measuring-guest\"\ninitrd = \"none\"\ncmdline = \"{cmdline}\"\n{keys}\n"
        )
    }
}

/// The output of the only VM of a run.
pub(super) fn output(run: &Value) -> &str {
    only_vm(run)["output"].as_str().unwrap_or_default()
}
