//! The rig of the system tests: runs `dunlin` as a user would, and reads what comes out.
//!
//! The tests need the built tool, hypervisor, kernels and initrd (`make build`), and QEMU. They say so when something is
//! missing. Each run has a time limit; none asserts how long something takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// How a run of `dunlin` ended.
#[derive(Debug)]
pub struct Run {
    /// Exit status.
    pub status: i32,
    /// What it wrote to standard output.
    pub stdout: String,
    /// Progress and complaints.
    pub stderr: String,
}

impl Run {
    /// The JSON object that `--json` prints.
    ///
    /// # Panics
    /// When there is none: the run is shown.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON ({error}) in {self:#?}"))
    }

    /// The run, if it ended with this status.
    ///
    /// # Panics
    /// When it did not: the run is shown.
    #[must_use]
    pub fn expect_status(self, status: i32) -> Self {
        assert!(self.status == status, "expected status {status}: {self:#?}");
        self
    }
}

/// Runs `dunlin run` with these arguments, for at most `seconds`.
#[must_use]
pub fn dunlin_run(seconds: u32, arguments: &[&str]) -> Run {
    let mut command = Command::new(tool());
    command.args(["run", "--time-limit", &format!("{seconds}s")]).args(arguments);
    finished(&mut command)
}

/// Runs `dunlin run` on a host of 2 pCPUs with the VMs that `toml` describes, and `more` arguments.
#[must_use]
pub fn dunlin_run_vms(seconds: u32, toml: &str, more: &[&str]) -> Run {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("vms.toml");
    fs::write(&file, format!("[host]\npcpus = 2\n\n{toml}")).expect("a file can be written there");
    let file = file.to_string_lossy().into_owned();
    let mut arguments = vec![file.as_str()];
    arguments.extend(more);
    dunlin_run(seconds, &arguments)
}

/// Describes a VM that runs experiments of the measuring guest.
#[must_use]
pub fn measuring_vm(name: &str, vcpus: u32, cmdline: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nvcpus = {vcpus}\nmemory = \"64M\"\nkernel = \"measuring-guest\"\ninitrd = \"none\"\n\
         cmdline = \"{cmdline}\"\n"
    )
}

/// Describes a Debian VM, which runs the tool's fixed script.
#[must_use]
pub fn debian_vm(name: &str, vcpus: u32) -> String {
    format!("[[vm]]\nname = \"{name}\"\nvcpus = {vcpus}\nmemory = \"400M\"\nkernel = \"debian-cloud\"\n")
}

/// The VM of this name in the JSON of a run.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn vm<'a>(json: &'a Value, name: &str) -> &'a Value {
    let vms = json["vms"].as_array().map_or(&[][..], Vec::as_slice);
    vms.iter().find(|vm| vm["name"] == name).unwrap_or_else(|| panic!("no VM \"{name}\" in {json:#}"))
}

/// Starts the hypervisor in QEMU without the tool, with these arguments besides the machine.
///
/// Gives QEMU's status and the hypervisor's log.
#[must_use]
pub fn bare_hypervisor(arguments: &[&str]) -> Run {
    let hypervisor = assets().join("hypervisor");
    assert!(hypervisor.is_file(), "{} is missing: run `make build` first", hypervisor.display());
    // A guest of QEMU that hangs must not hang the tests.
    let mut command = Command::new("timeout");
    command
        .args(["60", "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-m", "256M"])
        .args(["-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-kernel"])
        .arg(hypervisor)
        .args(arguments);
    finished(&mut command)
}

fn finished(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } =
        command.stdin(std::process::Stdio::null()).output().unwrap_or_else(|error| {
            panic!("{} cannot be started: {error}; run `make build` first", command.get_program().display())
        });
    Run {
        status: status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// The tool: `$DUNLIN`, else where `make build` leaves it.
fn tool() -> PathBuf {
    std::env::var_os("DUNLIN").map_or_else(|| target().join("release/dunlin"), PathBuf::from)
}

fn assets() -> PathBuf {
    std::env::var_os("DUNLIN_ASSETS").map_or_else(|| target().join("dunlin"), PathBuf::from)
}

fn target() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from)
}
