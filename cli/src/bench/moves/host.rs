//! Two hosts whose network cards are joined, and what they say, with the time at which it is heard.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::assets::Assets;
use crate::bench::parent::Host;
use crate::bench::plain::Plain;
use crate::config::{Initrd, Kernel, Place};
use crate::failure::Failure;
use crate::qemu;
use crate::stats::printable;

/// A line that a host has printed.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) at: Instant,
    pub(super) text: String,
}

/// What both hosts have printed.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) source: Vec<Line>,
    pub(super) target: Vec<Line>,
}

/// A pair of hosts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) host: Host,
    /// Of each host.
    pub(super) memory_mib: u32,
    /// Until the source counts as hung.
    pub(super) limit: Duration,
}

/// CPUs of a host.
const CPUS: u32 = 2;
/// After the source has ended, the target has so long for the rest.
const TARGET: Duration = Duration::from_secs(240);
/// Bytes in a packet, at most: each costs an emulated card a lot.
const MTU: u32 = 61_440;
/// The emulator copies a byte at a time for `rep movsb`, which processors do faster than anything else. Without these
/// features Linux copies by words, and the emulated hosts are more like real ones.
pub(super) const MODEL: &str = "max,-erms,-fsrm";
/// A host's clocks count its instructions, one in 8 ns, so other load on this computer takes no time of a guest. A host
/// that has nothing to do waits.
const CLOCK: [&str; 2] = ["-icount", "shift=3"];

/// Looks for the files of the hosts with Dunlin. Without one, a host that starts says so on its standard error, and the
/// move looks like one that has failed.
pub(super) fn must_have_files() -> Result<(), Failure> {
    let assets = Assets::locate();
    assets.kernel(&Kernel::Parent, &Place::Option("--kernel"))?;
    assets.initrd(&Initrd::Parent, &Place::Option("--initrd"))?;
    of_kvm(&assets).map(|_| ())
}

/// Kernel and initrds of the hosts with KVM.
fn of_kvm(assets: &Assets) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let kernel = assets.kernel(&Kernel::File(assets.for_kvm("vmlinuz-newest")?), &Place::Option("--kernel"))?;
    let mut initrd = assets.initrd(&Initrd::Parent, &Place::Option("--initrd"))?;
    initrd.push(assets.for_kvm("kvm.cpio")?);
    Ok((kernel, initrd))
}

impl Pair {
    /// Runs a script on each of two hosts until both have ended.
    ///
    /// # Errors
    /// One has not started, or not ended in time.
    pub(super) fn run(self, source: &str, target: &str) -> Result<Said, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("two hosts with {}: {error}", self.host.name()));
        let folder = tempfile::tempdir().map_err(cannot)?;
        let wire = folder.path().join("wire");
        let plug = |role: &str| format!("stream,id=wire,{role}addr.type=unix,addr.path={}", wire.display());
        let first = self.start(&folder.path().join("target"), target, &plug("server=on,"))?;
        let until = Instant::now() + Duration::from_secs(10);
        while !wire.exists() && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
        let second = self.start(&folder.path().join("source"), source, &plug(""))?;
        let source = second.wait(self.limit);
        let limit = if source.has_ended { TARGET } else { Duration::ZERO };
        let target = first.wait(limit);
        if source.has_ended && target.has_ended {
            return Ok(Said { source: source.said, target: target.said });
        }
        let late = if source.has_ended {
            format!("its target, {} s after the source has ended", TARGET.as_secs())
        } else {
            format!("its source, after {} s", self.limit.as_secs())
        };
        let heard = [("source", &source.said), ("target", &target.said)].map(|(role, said)| {
            let errors = std::fs::read_to_string(folder.path().join(role).join("errors")).unwrap_or_default();
            format!("{}\n{}", last(role, said), printable(errors.trim_end()))
        });
        let heard = heard.join("\n");
        Err(Failure::failed(format!("the move is not done: {late}\n{heard}")))
    }

    fn start(self, folder: &Path, script: &str, plug: &str) -> Result<Running, Failure> {
        let cannot = |error: std::io::Error| Failure::failed(format!("a host with {}: {error}", self.host.name()));
        std::fs::create_dir(folder).map_err(cannot)?;
        let card = format!("virtio-net-pci,netdev=wire,host_mtu={MTU},romfile=");
        let devices = ["-netdev", plug, "-device", &card, "-cpu", MODEL, CLOCK[0], CLOCK[1]];
        let mut command = match self.host {
            Host::Dunlin => self.dunlin(folder, script, &devices).map_err(cannot)?,
            Host::Kvm => self.kvm(folder, script, &devices)?,
        };
        let errors = std::fs::File::create(folder.join("errors")).map_err(cannot)?;
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).spawn().map_err(cannot)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&has_ended);
        let said = child.stdout.take().map(|stdout| thread::spawn(move || lines(stdout, &told)));
        Ok(Running { child: Some(child), has_ended, said })
    }

    fn dunlin(self, folder: &Path, script: &str, devices: &[&str]) -> std::io::Result<Command> {
        let vms = folder.join("vms.toml");
        let mut file = std::fs::File::create(&vms)?;
        write!(
            file,
            "[host]\npcpus = {CPUS}\n[[vm]]\nname = \"parent\"\nrole = \"parent\"\ndevices = \"all\"\nvcpus = {CPUS}\n\
             memory = \"{}M\"\nkernel = \"parent\"\ninitrd = \"parent\"\n",
            self.memory_mib
        )?;
        let mut command = qemu::ends_with_us(std::env::current_exe()?.as_os_str(), Signal::TERM)?;
        // A little longer than we wait: then we say why.
        command.args(["run", "--accel=tcg"]).arg(format!("--time-limit={}s", self.limit.as_secs() + 120));
        command.args(devices.iter().map(|word| format!("--qemu-arg={word}")));
        command.arg(vms).args(["--exec", script]);
        Ok(command)
    }

    fn kvm(self, folder: &Path, script: &str, devices: &[&str]) -> Result<Command, Failure> {
        let (kernel, initrd) = of_kvm(&Assets::locate())?;
        // QEMU 10 and 11 end with `Bad icount read` if an x2APIC is used with these clocks.
        let own = ["-accel", "tcg,thread=single", "-global", "max-x86_64-cpu.x2apic=off"];
        let more: Vec<String> = own.into_iter().chain(devices.iter().copied()).map(str::to_string).collect();
        let plain = Plain {
            name: self.host.name(),
            kernel: &kernel,
            initrd: &initrd,
            cmdline: "console=ttyS0 quiet panic=-1 mitigations=off",
            cpus: CPUS,
            memory: &format!("{}M", self.memory_mib + 76),
            limit: self.limit.as_secs(),
            more: &more,
        };
        plain.piped(folder, script)
    }
}

/// A host that does not outlive this value.
struct Running {
    child: Option<Child>,
    /// Its script has, if not the host itself.
    has_ended: Arc<AtomicBool>,
    said: Option<JoinHandle<Vec<Line>>>,
}

/// A host that has ended, or was ended.
struct Ended {
    /// Its script had, in time.
    has_ended: bool,
    said: Vec<Line>,
}

impl Running {
    /// Waits until it has ended, for so long, and ends it.
    fn wait(mut self, limit: Duration) -> Ended {
        const LOOK: Duration = Duration::from_millis(100);
        let until = Instant::now() + limit;
        let mut has_ended = false;
        if let Some(child) = &mut self.child {
            loop {
                has_ended =
                    self.has_ended.load(Ordering::Relaxed) || child.try_wait().is_ok_and(|status| status.is_some());
                if has_ended || Instant::now() >= until {
                    break;
                }
                thread::sleep(LOOK);
            }
        }
        self.end();
        let said = self.said.take().and_then(|said| said.join().ok()).unwrap_or_default();
        Ended { has_ended, said }
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // `dunlin run` ends its QEMU when it is asked to.
            let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
            if let Some(pid) = pid.filter(|_| child.try_wait().is_ok_and(|status| status.is_none())) {
                let _ = rustix::process::kill_process(pid, Signal::TERM);
            }
            let _ = child.wait();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// The last lines of a host, and how many of speeds there were.
pub(super) fn last(role: &str, said: &[Line]) -> String {
    const LAST: usize = 16;
    let (speeds, others): (Vec<_>, Vec<_>) =
        said.iter().map(|line| line.text.as_str()).partition(|text| text.starts_with("writer "));
    let shown = &others[others.len().saturating_sub(LAST)..];
    let begin = format!("the {role} said last, besides {} lines of speeds:", speeds.len());
    [begin.as_str()].into_iter().chain(shown.iter().copied()).collect::<Vec<_>>().join("\n")
}

/// The last line of a script.
const END: &str = "event end";

fn lines(stdout: impl Read, has_ended: &AtomicBool) -> Vec<Line> {
    let lines = BufReader::new(stdout).split(b'\n').map_while(Result::ok);
    let heard =
        lines.map(|line| Line { at: Instant::now(), text: printable(String::from_utf8_lossy(&line).trim_end()) });
    heard
        .inspect(|line| {
            has_ended.fetch_or(line.text == END, Ordering::Relaxed);
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_said_last_is_told_without_its_speeds() {
        let texts = (0..20).map(|number| format!("step {number}")).chain(["writer windows=1 wrong=0".to_string()]);
        let said: Vec<Line> = texts.map(|text| Line { at: Instant::now(), text }).collect();
        let told = last("source", &said);
        assert!(told.starts_with("the source said last, besides 1 lines of speeds:\nstep 4\n"), "{told}");
        assert!(told.ends_with("\nstep 19"), "{told}");
        assert_eq!(last("target", &[]), "the target said last, besides 0 lines of speeds:");
    }
}
