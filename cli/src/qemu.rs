//! The machine that the hypervisor runs on: QEMU, its command line, its process.
//!
//! QEMU must not outlive the tool. A dropped [`Process`] kills it, which covers errors and caught signals. For the rest
//! (`kill -9`, a panic) the tool starts QEMU through a second copy of itself ([`become_qemu`]). That copy first asks
//! the kernel for a signal at its parent's death.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::config::{Accel, Arch, Placed};
use crate::failure::Failure;
use crate::host::Files;
use crate::quantity::MIB;

/// First argument of the copy of this program that becomes QEMU.
pub(crate) const BECOME: &str = "__become-qemu";
/// The oldest QEMU whose emulation of SVM works.
const OLDEST: (u32, u32) = (7, 2);

/// The program, and how to install it.
const fn program_of(arch: Arch) -> (&'static str, &'static str) {
    match arch {
        Arch::X86_64 => (
            "qemu-system-x86_64",
            "install it: 'apt install qemu-system-x86' (Debian, Ubuntu), 'dnf install qemu-system-x86-core' (Fedora), \
             'brew install qemu'; or name another with --qemu",
        ),
        Arch::Aarch64 => (
            "qemu-system-aarch64",
            "install it: 'apt install qemu-system-arm' (Debian, Ubuntu), 'dnf install qemu-system-aarch64-core' (Fedora), \
             'brew install qemu'; or name another with --qemu",
        ),
    }
}

/// A QEMU that is there and new enough.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    program: PathBuf,
    /// Its version, as it writes it.
    pub(crate) version: String,
    /// Its first two numbers.
    pub(crate) number: (u32, u32),
}

impl Qemu {
    /// Looks for QEMU and asks for its version.
    pub(crate) fn find(arch: Arch, named: Option<&Placed<PathBuf>>) -> Result<Self, Failure> {
        let (usual, install) = program_of(arch);
        let program = named.map_or_else(|| PathBuf::from(usual), |placed| placed.value.clone());
        let bad = |what: String| match named {
            Some(Placed { place, .. }) => place.bad(what),
            None => Failure::bad_input(what),
        };

        let shown = program.display();
        let output = Command::new(&program).arg("--version").stdin(Stdio::null()).output().map_err(|error| {
            let why = match error.kind() {
                std::io::ErrorKind::NotFound => "is not there".to_string(),
                _ => format!("cannot be run: {error}"),
            };
            bad(format!("QEMU: '{shown}' {why}")).help(install)
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let Some((version, number)) = parse_version(&text) else {
            return Err(bad(format!("QEMU: '{shown}' prints no version; is it QEMU?")).help(install));
        };
        if number < OLDEST {
            let what = format!("QEMU: '{shown}' is version {version}; at least {}.{} is needed", OLDEST.0, OLDEST.1);
            return Err(bad(what).help(install));
        }
        Ok(Self { program, version, number })
    }
}

fn parse_version(text: &str) -> Option<(String, (u32, u32))> {
    let version = text.lines().next()?.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    let number = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some((version.to_string(), number))
}

/// How QEMU runs the host, decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acceleration {
    /// Emulation, and why not KVM. With one thread for all CPUs, or with one for each.
    Tcg { why: &'static str, single: bool },
    /// KVM with nested SVM.
    Kvm,
}

impl Acceleration {
    /// Decides; KVM is an error only when it was asked for by name.
    pub(crate) fn choose(arch: Arch, wanted: &Placed<Accel>) -> Result<Self, Failure> {
        let obstacle = match arch {
            Arch::X86_64 => obstacle_to_kvm(),
            Arch::Aarch64 => Some("KVM has no EL2 for guests"),
        };
        match (wanted.value, obstacle) {
            (Accel::Tcg | Accel::TcgSingle, _) => {
                Ok(Self::Tcg { why: "as requested", single: wanted.value == Accel::TcgSingle })
            }
            (Accel::Auto | Accel::Kvm, None) => Ok(Self::Kvm),
            (Accel::Auto, Some(why)) => Ok(Self::Tcg { why, single: false }),
            (Accel::Kvm, Some(why)) => Err(wanted
                .place
                .bad(format!("KVM cannot be used: {why}"))
                .help("\"auto\" and \"tcg\" emulate instead: counts are real, times are not")),
        }
    }

    /// `tcg` or `kvm`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcg { .. } => "tcg",
            Self::Kvm => "kvm",
        }
    }
}

/// The reason why KVM with nested SVM is not available, if there is one.
fn obstacle_to_kvm() -> Option<&'static str> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_svm =
        cpu.lines().any(|line| line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "svm"));
    if !has_svm {
        return Some("no AMD SVM");
    }
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Some("/dev/kvm cannot be opened");
    }
    let nested = std::fs::read_to_string("/sys/module/kvm_amd/parameters/nested").unwrap_or_default();
    if !matches!(nested.trim(), "1" | "Y") {
        return Some("kvm_amd does not nest (nested=0)");
    }
    None
}

/// What loads the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loader<'a> {
    /// QEMU itself.
    Qemu,
    /// GRUB, from an image as a CD. BIOS or UEFI starts it; UEFI keeps its settings in `variables`.
    Grub { image: &'a Path, variables: Option<&'a Path> },
}

/// UEFI for QEMU's PC, and its variables as they are at first; from which package.
pub(crate) const UEFI: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];
pub(crate) const UEFI_INSTALL: &str = "install it: 'apt install ovmf' (Debian, Ubuntu)";

/// The parts of QEMU's command line that differ from run to run.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    /// Its architecture.
    pub(crate) arch: Arch,
    /// How to run it.
    pub(crate) acceleration: Acceleration,
    /// Physical CPUs.
    pub(crate) pcpus: u32,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// What loads the hypervisor.
    pub(crate) loader: Loader<'a>,
    /// The hypervisor.
    pub(crate) hypervisor: &'a Path,
    /// The payload, the hypervisor's log, and the Unix socket on which we wait for the control port.
    pub(crate) files: &'a Files,
    /// More arguments, as they are.
    pub(crate) more: &'a [String],
}

impl Machine<'_> {
    /// QEMU's arguments.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = Vec::new();
        let mut add = |words: &[&OsStr]| line.extend(words.iter().map(OsString::from));
        // `-icount` excludes a thread per CPU, and QEMU requires that option to say so.
        let icount = self.more.iter().any(|argument| argument.contains("icount"));
        let accel = match self.acceleration {
            Acceleration::Tcg { single, .. } if single || icount => "tcg,thread=single",
            Acceleration::Tcg { .. } => "tcg,thread=multi",
            Acceleration::Kvm => "kvm",
        };
        let pcpus = (self.pcpus + self.housekeepers(icount)).to_string();
        let memory = format!("{}M", self.memory.div_ceil(MIB));
        for (option, value) in
            [("-accel", accel), ("-smp", &pcpus), ("-m", &memory), ("-display", "none"), ("-monitor", "none")]
        {
            add(&[option.as_ref(), value.as_ref()]);
        }
        for (option, value) in self.board() {
            add(&[option.as_ref(), value.as_ref()]);
        }
        if icount && self.arch == Arch::X86_64 {
            // QEMU 10.0 and 11.1 end with `Bad icount read` if the guest uses an x2APIC with `-icount`. QEMU 7.2 does
            // not.
            add(&["-global".as_ref(), "max-x86_64-cpu.x2apic=off".as_ref()]);
        }
        // Port 1, not port 0: the latter is a `virtconsole`, which drops bytes when we do not read at once.
        add(&["-device".as_ref(), "virtserialport,nr=1,chardev=control".as_ref()]);
        add(&["-nodefaults".as_ref(), "-no-user-config".as_ref(), "-no-reboot".as_ref()]);
        add(&["-serial".as_ref(), &joined("file:", &self.files.log)]);
        add(&["-chardev".as_ref(), &joined("socket,id=control,path=", &self.files.control)]);
        match self.loader {
            Loader::Qemu => {
                add(&["-append".as_ref(), "log=info".as_ref()]);
                add(&["-kernel".as_ref(), self.hypervisor.as_os_str()]);
                add(&["-initrd".as_ref(), self.files.payload.as_os_str()]);
            }
            Loader::Grub { image, variables } => {
                add(&["-drive".as_ref(), &joined("if=ide,media=cdrom,readonly=on,file=", image)]);
                if let Some(variables) = variables {
                    let code = Path::new(UEFI[0]);
                    add(&["-drive".as_ref(), &joined("if=pflash,format=raw,readonly=on,file=", code)]);
                    add(&["-drive".as_ref(), &joined("if=pflash,format=raw,file=", variables)]);
                }
            }
        }
        line.extend(self.more.iter().map(OsString::from));
        line
    }

    /// The board, its CPUs, and the devices that the hypervisor needs.
    fn board(&self) -> &'static [(&'static str, &'static str)] {
        match (self.arch, self.acceleration) {
            (Arch::X86_64, Acceleration::Tcg { .. }) => &[
                ("-machine", "q35"),
                ("-cpu", "max"),
                ("-device", "isa-debug-exit,iobase=0xf4,iosize=4"),
                ("-device", "virtio-serial-pci,max_ports=2"),
            ],
            (Arch::X86_64, Acceleration::Kvm) => &[
                ("-machine", "q35"),
                ("-cpu", "host"),
                ("-device", "isa-debug-exit,iobase=0xf4,iosize=4"),
                ("-device", "virtio-serial-pci,max_ports=2"),
            ],
            (Arch::Aarch64, _) => &[
                ("-machine", "virt,virtualization=on,gic-version=3"),
                // As the architecture has it, pointer authentication is a cipher, which is slow to emulate.
                ("-cpu", "max,pauth-impdef=on"),
                ("-global", "virtio-mmio.force-legacy=false"),
                ("-device", "virtio-serial-device,max_ports=2"),
            ],
        }
    }

    /// Number of CPUs besides those that run vCPUs. In QEMU's emulation of x86 the hypervisor runs no vCPU on the first
    /// CPU if there are others (`spares_first_cpu` in its source explains this), so the host gets one more.
    fn housekeepers(&self, icount: bool) -> u32 {
        let emulated = self.arch == Arch::X86_64 && matches!(self.acceleration, Acceleration::Tcg { .. });
        u32::from(emulated && !(icount && self.pcpus == 1))
    }
}

/// The CPU model that these arguments ask for. QEMU takes the last of several.
pub(crate) fn cpu_model(arguments: &[OsString]) -> String {
    let at = arguments.iter().rposition(|argument| argument == "-cpu");
    at.and_then(|at| arguments.get(at + 1)).map_or(String::new(), |model| model.to_string_lossy().into_owned())
}

fn joined(option: &str, path: &Path) -> OsString {
    let mut joined = OsString::from(option);
    // In the value of an option, a doubled comma stands for a comma.
    joined.push(path.to_string_lossy().replace(',', ",,"));
    joined
}

/// A command line that a shell reads back as it was.
pub(crate) fn quoted(qemu: &Qemu, arguments: &[OsString]) -> String {
    let words = std::iter::once(qemu.program.as_os_str()).chain(arguments.iter().map(OsString::as_os_str));
    let quote = |word: &OsStr| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    words.map(quote).collect::<Vec<_>>().join(" ")
}

/// A running QEMU; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts QEMU; its output goes to `messages`. Call this from the main thread: the kernel sends the parent's death
    /// signal at the death of the thread.
    pub(crate) fn start(qemu: &Qemu, arguments: &[OsString], messages: &Path) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::failed(format!("QEMU cannot be started: {error}"));
        let output = File::create(messages).map_err(failed)?;
        let child = ends_with_us(qemu.program.as_os_str(), Signal::KILL)
            .map_err(failed)?
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(failed)?)
            .stderr(output)
            // Ctrl-C on the terminal is for us alone; we end QEMU when we are done.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Self { child, ended: None })
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Waits for its end, but not for longer than `patience`.
    pub(crate) fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        while self.ended().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.ended
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        if self.ended().is_none() {
            // This fails only if the process has already ended.
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A command that starts this program, which gets this signal when we end, however we end. Spawn it from the main
/// thread: the kernel sends the parent's death signal at the death of the thread.
pub(crate) fn ends_with_us(program: &OsStr, by: Signal) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(BECOME).args([std::process::id().to_string(), by.as_raw().to_string()]).arg(program);
    Ok(command)
}

/// Turns this process into QEMU, or into this program once more, with a signal at the death of the parent. Returns only
/// if that fails.
pub(crate) fn become_qemu(mut arguments: impl Iterator<Item = OsString>) -> Failure {
    let parent = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).and_then(Pid::from_raw);
    let signal = arguments.next().and_then(|number| number.to_str()?.parse().ok()).and_then(Signal::from_named_raw);
    let Some(program) = arguments.next() else { return Failure::failed("no program to become") };
    if let Err(error) = set_parent_process_death_signal(signal.or(Some(Signal::KILL))) {
        return Failure::failed(format!("no signal at the parent's death: {error}"));
    }
    // The parent may have died before the signal was asked for.
    if getppid() != parent {
        return Failure::failed("the parent is gone");
    }
    let error = Command::new(&program).args(arguments).exec();
    Failure::failed(format!("'{}' cannot be run: {error}", Path::new(&program).display()))
}

/// The host in words, for the first line of progress.
pub(crate) fn introduce(qemu: &Qemu, acceleration: Acceleration) -> String {
    match acceleration {
        Acceleration::Kvm => format!("QEMU {}, KVM with nested SVM", qemu.version),
        Acceleration::Tcg { why, .. } => {
            format!("QEMU {}, {why} -> software emulation (counts are real, times are not)", qemu.version)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright";
        assert_eq!(parse_version(debian), Some(("7.2.22".to_string(), (7, 2))));
        assert_eq!(parse_version("QEMU emulator version 10.0.0"), Some(("10.0.0".to_string(), (10, 0))));
        assert_eq!(parse_version("qemu"), None);
        assert_eq!(parse_version(""), None);
        assert_eq!(parse_version("version x.y"), None);
    }

    #[test]
    fn each_architecture_gets_its_board_and_what_is_added_comes_last() {
        let arguments_by = |single, arch, more: &str| {
            let machine = Machine {
                arch,
                acceleration: Acceleration::Tcg { why: "asked for", single },
                pcpus: 2,
                memory: 64 * MIB,
                loader: Loader::Qemu,
                hypervisor: Path::new("h"),
                files: &Files::new("dunlin-test-").expect("a directory can be made"),
                more: &more.split(' ').map(str::to_string).collect::<Vec<_>>(),
            };
            let words: Vec<_> = machine.arguments().iter().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        };
        let arguments = |arch, more: &str| arguments_by(false, arch, more);
        let pc = arguments(Arch::X86_64, "-cpu EPYC");
        assert!(pc.contains("-machine q35") && pc.contains("-smp 3") && pc.contains("isa-debug-exit"), "{pc}");
        assert!(!pc.contains("x2apic") && pc.contains("-accel tcg,thread=multi"), "{pc}");
        let one_thread = arguments_by(true, Arch::X86_64, "-cpu EPYC");
        assert!(one_thread.contains("-accel tcg,thread=single") && one_thread.contains("-smp 3"), "{one_thread}");
        let counting = arguments(Arch::X86_64, "-icount shift=0,sleep=off");
        assert!(counting.contains("-global max-x86_64-cpu.x2apic=off"), "{counting}");
        let virt = arguments(Arch::Aarch64, "-cpu cortex-a57");
        assert!(virt.contains("-machine virt,virtualization=on,gic-version=3"), "{virt}");
        assert!(virt.contains("-smp 2") && !virt.contains("isa-"), "{virt}");
        assert!(virt.ends_with("-cpu cortex-a57"), "QEMU takes the last of several: {virt}");
        assert_eq!(cpu_model(&virt.split(' ').map(OsString::from).collect::<Vec<_>>()), "cortex-a57");
        assert_eq!(cpu_model(&["-cpu".into()]), "");
    }

    #[test]
    fn command_line_survives_a_shell() {
        let qemu = Qemu { program: "/opt/my qemu".into(), version: String::new(), number: (7, 2) };
        let line = quoted(&qemu, &["-append".into(), "it's".into(), "a,b=c".into(), "".into()]);
        assert_eq!(line, r"'/opt/my qemu' -append 'it'\''s' a,b=c ''");
    }

    #[test]
    fn comma_in_a_path_stays_part_of_it() {
        assert_eq!(joined("file:", Path::new("/tmp/a,b")), "file:/tmp/a,,b");
    }
}
