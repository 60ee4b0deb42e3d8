//! A host that runs `parent-bench` once: Dunlin with a parent VM, or Debian's kernel with KVM.

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};
use std::thread;

use serde_json::Value;

use crate::assets::Assets;
use crate::bench::guest::exact_arguments;
use crate::bench::plain::Plain;
use crate::bench::record::Record;
use crate::bench::{only_vm, progress};
use crate::config::{Initrd, Kernel, Place};
use crate::failure::Failure;
use crate::stats::printable;

/// What runs QEMU's guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Host {
    Dunlin,
    Kvm,
}

/// How a host runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Its CPUs, and for Dunlin also the vCPUs of the parent.
    pub(super) cpus: u32,
    /// Whether QEMU's clocks count instructions.
    pub(super) exact: bool,
    /// Seconds until it counts as hung.
    pub(super) limit: u64,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The lines of `parent-bench`.
    pub(super) output: String,
    /// Exits of the guest to QEMU until it was stopped, of Dunlin.
    pub(super) vmm_exits: Option<u64>,
    /// The JSON of the run, of Dunlin.
    pub(super) run: Value,
}

impl Outcome {
    /// The figures of this name.
    pub(super) fn measured<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Record> + 'a {
        Record::all(&self.output, "measured").filter(move |record| record.text("name") == Some(name))
    }
}

impl Host {
    pub(in crate::bench) const fn name(self) -> &'static str {
        match self {
            Self::Dunlin => "Dunlin",
            Self::Kvm => "KVM",
        }
    }

    /// Starts the host, lets it run `script`, and ends it.
    pub(super) fn run(self, script: &str, way: Way) -> Result<Outcome, Failure> {
        let outcome = match self {
            Self::Dunlin => on_dunlin(script, way)?,
            Self::Kvm => on_kvm(script, way)?,
        };
        if Record::all(&outcome.output, "measured").next().is_none() {
            let said = printable(outcome.output.trim_end());
            return Err(Failure::failed(format!("{script} on {}: no figure in what it said:\n{said}", self.name())));
        }
        Ok(outcome)
    }
}

fn on_dunlin(script: &str, way: Way) -> Result<Outcome, Failure> {
    let cannot = |error: std::io::Error| Failure::failed(format!("cannot start a run: {error}"));
    let mut file = tempfile::Builder::new().prefix("dunlin-bench-").suffix(".toml").tempfile().map_err(cannot)?;
    write!(
        file,
        "[host]\npcpus = {0}\n[[vm]]\nname = \"parent\"\nrole = \"parent\"\nvcpus = {0}\nmemory = \"1G\"\n\
         kernel = \"parent\"\ninitrd = \"parent\"\n",
        way.cpus
    )
    .map_err(cannot)?;
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    command.args(["run", "--json", "--accel=tcg"]).arg(format!("--time-limit={}s", way.limit));
    if way.exact {
        command.args(exact_arguments().iter().map(|argument| format!("--qemu-arg={argument}")));
    }
    command.arg(file.path()).args(["--exec", script]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(cannot)?;
    let pid = child.id();
    let told = child.stderr.take().map(|stderr| thread::spawn(move || listen(BufReader::new(stderr), pid)));
    let mut json = Vec::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_end(&mut json).map_err(cannot)?;
    }
    let status = child.wait().map_err(cannot)?;
    let (said, vmm_exits) = told.and_then(|told| told.join().ok()).unwrap_or_default();
    let run: Value = serde_json::from_slice(&json).unwrap_or_default();
    if !status.success() {
        return Err(Failure::failed(format!("{script} on Dunlin: {status}\n{}", said.trim_end())));
    }
    Ok(Outcome { output: only_vm(&run)["output"].as_str().unwrap_or_default().to_string(), vmm_exits, run })
}

/// Reads what a run says. When its guest is stopped, asks the run's host for the guest's counters.
fn listen(reader: impl std::io::BufRead, pid: u32) -> (String, Option<u64>) {
    let (mut said, mut exits) = (String::new(), None);
    for line in reader.split(b'\n').map_while(Result::ok) {
        let line = printable(String::from_utf8_lossy(&line).trim_end());
        if line.starts_with("progress stopped") {
            exits = vmm_exits(pid);
        } else {
            said.push_str(&line);
            said.push('\n');
        }
    }
    (said, exits)
}

/// Exits to the VMM of all children of a running host.
fn vmm_exits(pid: u32) -> Option<u64> {
    let stats = Command::new(std::env::current_exe().ok()?)
        .args(["stats", "--json", "--host", &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let stats: Value = serde_json::from_slice(&stats.stdout).ok()?;
    sum_of_children(&stats)
}

/// The same from the JSON of `dunlin stats`. A child's name is its parent's, a slash, and a number.
fn sum_of_children(stats: &Value) -> Option<u64> {
    let of_child = |vm: &&Value| vm["name"].as_str().is_some_and(|name| name.contains('/'));
    let exits: Vec<u64> =
        stats.as_array()?.iter().filter(of_child).filter_map(|vm| vm["total"]["vmm_exits"].as_u64()).collect();
    (!exits.is_empty()).then(|| exits.iter().sum())
}

fn on_kvm(script: &str, way: Way) -> Result<Outcome, Failure> {
    let assets = Assets::locate();
    let kernel = assets.kernel(&Kernel::File(assets.for_kvm("vmlinuz-newest")?), &Place::Option("--kernel"))?;
    let mut initrd = assets.initrd(&Initrd::Parent, &Place::Option("--initrd"))?;
    initrd.push(assets.for_kvm("kvm.cpio")?);
    // As the machine that Dunlin runs on, and the parent's kernel, which has no mitigations either.
    let accel = if way.exact { "tcg,thread=single" } else { "tcg,thread=multi" };
    let mut more = vec!["-accel".to_string(), accel.to_string()];
    if way.exact {
        more.extend(exact_arguments());
        more.extend(["-global", "max-x86_64-cpu.x2apic=off"].map(str::to_string));
    }
    let plain = Plain {
        name: Host::Kvm.name(),
        kernel: &kernel,
        initrd: &initrd,
        cmdline: "console=ttyS0 quiet panic=-1 mitigations=off",
        cpus: way.cpus,
        memory: "1100M",
        limit: way.limit,
        more: &more,
    };
    Ok(Outcome { output: plain.run(script)?.output, vmm_exits: None, run: Value::Null })
}

/// Says what runs next.
pub(super) fn tell(turn: &str, host: Host, what: &str) {
    progress(&format!("{turn}{}: {what}", host.name()));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn exits_are_those_of_children_alone() {
        let stats = json!([{ "name": "parent", "total": { "vmm_exits": 7 } },
            { "name": "parent/100", "total": { "vmm_exits": 40 } }, { "name": "parent/101", "total": { "vmm_exits": 2 } }]);
        assert_eq!(sum_of_children(&stats), Some(42));
        assert_eq!(sum_of_children(&json!([{ "name": "parent", "total": { "vmm_exits": 7 } }])), None);
    }

    #[test]
    fn figures_are_read_by_name() {
        let output =
            "warning: x\nmeasured name=boot centiseconds=42\nmeasured name=exits reason=\"2\" count=5\n".into();
        let outcome = Outcome { output, vmm_exits: None, run: Value::Null };
        let boots: Vec<u64> = outcome.measured("boot").filter_map(|boot| boot.number("centiseconds")).collect();
        assert_eq!(boots, [42]);
    }
}
