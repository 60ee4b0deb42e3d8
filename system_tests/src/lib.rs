//! The rig of the system tests: runs `dunlin` like a user, and reads its output.
//!
//! The tests need the built tool, hypervisor, kernels and initrd (`make build`), and QEMU. They print what is missing.
//! Each run has a time limit; no test asserts a duration.
//!
//! Tests for every machine are written once, with the machine as parameter: see [`each_machine`].

pub mod boot_loader;
pub mod line;
pub mod machine;
pub mod monitor;
pub mod port;
pub mod qemu;
pub mod stores;

pub use machine::Machine;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// How a run of `dunlin` ended.
#[derive(Debug)]
pub struct Run {
    /// Exit status.
    pub status: i32,
    /// Its standard output.
    pub stdout: String,
    /// Progress and complaints.
    pub stderr: String,
}

impl Run {
    /// The JSON object of `--json`.
    ///
    /// # Panics
    /// There is none; the panic shows the run.
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

/// Runs `dunlin` with these arguments, in the folder of the workspace.
#[must_use]
pub fn dunlin(arguments: &[&str]) -> Run {
    finished(Command::new(tool()).args(arguments).current_dir(workspace()))
}

/// Runs `dunlin run` with these arguments, for at most `seconds`.
#[must_use]
pub fn dunlin_run(seconds: u32, arguments: &[&str]) -> Run {
    let mut command = Command::new(tool());
    command.args(["run", "--time-limit", &format!("{seconds}s")]).args(arguments);
    finished(&mut command)
}

/// As [`Machine::run_vms`], on x86-64.
#[must_use]
pub fn dunlin_run_vms(seconds: u32, toml: &str, more: &[&str]) -> Run {
    Machine::X86_64.run_vms(seconds, toml, more)
}

fn run_vms(arch: &str, seconds: u32, toml: &str, more: &[&str]) -> Run {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("vms.toml");
    let accel = if moves_registers(arch, toml) { "accel = \"tcg-single\"\n" } else { "" };
    let host = format!("[host]\narch = \"{arch}\"\npcpus = 2\n{accel}\n");
    fs::write(&file, host + toml).expect("a file can be written there");
    let file = file.to_string_lossy().into_owned();
    let mut arguments = vec![file.as_str()];
    arguments.extend(more);
    dunlin_run(seconds, &arguments)
}

/// Whether a VM of these moves the registers of its devices. QEMU 7.2 crashes now and then if another thread uses other
/// registers meanwhile, so one thread runs all CPUs.
fn moves_registers(arch: &str, toml: &str) -> bool {
    arch == Machine::X86_64.name() && toml.contains("devices = ")
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
/// There is none.
#[must_use]
pub fn vm<'a>(json: &'a Value, name: &str) -> &'a Value {
    let vms = json["vms"].as_array().map_or(&[][..], Vec::as_slice);
    vms.iter().find(|vm| vm["name"] == name).unwrap_or_else(|| panic!("no VM \"{name}\" in {json:#}"))
}

/// Names of the files for standard output and standard error.
const OUTPUT: &str = "output";
const COMPLAINTS: &str = "complaints";

/// A running host, for at most `seconds`, with everything needed to observe it.
pub struct Host {
    child: Child,
    folder: TempDir,
}

impl Host {
    /// Starts `dunlin run` on a host of `pcpus` with the VMs of `toml`. `more` makes further arguments, given a folder
    /// that lives as long as the host.
    ///
    /// # Panics
    /// It cannot be started.
    #[must_use]
    pub fn start(seconds: u32, pcpus: u32, toml: &str, more: impl FnOnce(&Path) -> Vec<String>) -> Self {
        Self::start_on(Machine::X86_64, seconds, pcpus, toml, more)
    }

    /// As [`Self::start`], on this machine.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start_on(
        machine: Machine,
        seconds: u32,
        pcpus: u32,
        toml: &str,
        more: impl FnOnce(&Path) -> Vec<String>,
    ) -> Self {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let file = folder.path().join("vms.toml");
        let host = format!("[host]\narch = \"{}\"\npcpus = {pcpus}\n\n", machine.name());
        fs::write(&file, host + toml).expect("a file can be written there");
        let accel = if moves_registers(machine.name(), toml) { "--accel=tcg-single" } else { "--accel=tcg" };
        let mut command = Command::new(tool());
        command
            .args(["run", "--json", accel, "--time-limit", &format!("{seconds}s")])
            .args(more(folder.path()))
            .arg(file);
        // Files take all output without a reader.
        let [stdout, stderr] = [OUTPUT, COMPLAINTS]
            .map(|name| File::create(folder.path().join(name)).expect("a file can be written there"));
        let child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
        Self {
            child: child.unwrap_or_else(|error| panic!("dunlin cannot be started: {error}; run `make build` first")),
            folder,
        }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The output of `dunlin COMMAND --json` for it, as soon as it answers.
    ///
    /// # Panics
    /// It does not answer within 30 s.
    #[must_use]
    pub fn ask(&self, command: &str) -> Value {
        let pid = self.child.id().to_string();
        until(command, || {
            let run = finished(Command::new(tool()).args([command, "--json", "--host", &pid]));
            (run.status == 0).then(|| run.json())
        })
    }

    /// Process id of the tool.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard error so far: progress, and the guests' output.
    #[must_use]
    pub fn said(&self) -> String {
        let bytes = fs::read(self.folder.path().join(COMPLAINTS)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for its end, and returns its output.
    ///
    /// # Panics
    /// The output cannot be read.
    #[must_use]
    pub fn finish(mut self) -> Run {
        let status = self.child.wait().ok().and_then(|status| status.code()).unwrap_or(-1);
        let [stdout, stderr] = [OUTPUT, COMPLAINTS].map(|name| {
            let bytes = fs::read(self.folder.path().join(name)).expect("was written");
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Run { status, stdout, stderr }
    }

    /// Waits for its end.
    pub fn wait(mut self) {
        let _ = self.child.wait();
    }

    /// Kills it.
    pub fn end(self) {
        let pid = self.child.id().to_string();
        let _ = finished(Command::new("kill").args(["-TERM", &pid]));
        self.wait();
    }
}

impl Drop for Host {
    /// A test that fails leaves no host behind.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = finished(Command::new("kill").args(["-TERM", &self.child.id().to_string()]));
            let _ = self.child.wait();
        }
    }
}

/// Tries until there is a result, for at most 30 s.
///
/// # Panics
/// There is no result by then.
pub fn until<T>(what: &str, attempt: impl FnMut() -> Option<T>) -> T {
    within(Duration::from_secs(30), attempt).unwrap_or_else(|| panic!("{what}: nothing within half a minute"))
}

/// Tries until there is a result, for at most `limit`.
pub fn within<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        let result = attempt();
        if result.is_some() || began.elapsed() >= limit {
            return result;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a program to its end.
///
/// # Panics
/// When it cannot be started.
#[must_use]
pub fn finished(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap_or_else(|error| {
        panic!("{} cannot be started: {error}; run `make build` first", command.get_program().display())
    });
    Run {
        status: status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// The tool: `$DUNLIN`, else where `make build` leaves it.
#[must_use]
pub fn tool() -> PathBuf {
    std::env::var_os("DUNLIN").map_or_else(|| target().join("release/dunlin"), PathBuf::from)
}

/// Where hypervisor, kernels and initrds are: `$DUNLIN_ASSETS`, else where `make build` leaves them.
#[must_use]
pub fn assets() -> PathBuf {
    std::env::var_os("DUNLIN_ASSETS").map_or_else(|| target().join("dunlin"), PathBuf::from)
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The folder that the sources are in.
#[must_use]
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}
