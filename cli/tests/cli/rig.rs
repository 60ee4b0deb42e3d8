//! A directory of assets that pass all checks, and a QEMU that is a shell script: it writes down its arguments, waits
//! for a status, and ends with it. The control port is played by a thread of the test, so that a test reads as a
//! conversation.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use abi::control::{
    About, Answer, HostInfo, Line, Message, Part, Receiver, Refusal, Request, Speculation, Stance, StopReason,
    VMS_CHUNK, VmEvent, VmInfo, VmState, encode,
};
use abi::counters::{ExitReason, VcpuCounters};
use abi::exit_code::{CLEAN, qemu_status};
use abi::layout::{Content, Layout, Place, Row, Whose};
use abi::payload::{File, Manifest, Payload, VmConfig};
use abi::resources::Resources;
use abi::trace::{Event, Events, RunEnd, What};

use crate::played_log::PlayedLog;

const QEMU: &str = r#"#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then
    cat "$here/version"
    exit
fi
cat "$here/complaint" >&2
echo $$ >"$here/pid"
printf '%s\n' "$@" >"$here/arguments.new"
mv "$here/arguments.new" "$here/arguments"
read -r status <"$here/end"
exit "$status"
"#;

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A second of the host's clock, in nanoseconds.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// Assets, and a QEMU.
pub(crate) struct Rig {
    directory: tempfile::TempDir,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("can be made");
        let rig = Self { directory };
        rig.write("hypervisor", b"an ELF that nobody runs");
        rig.write("vmlinuz-cloud", &kernel());
        rig.write("vmlinuz-full", &kernel());
        rig.write("initrd.cpio.gz", b"compressed");
        rig.write("version", b"QEMU emulator version 7.2.22 (a shell script)\n");
        rig.write("complaint", b"");
        let qemu = rig.write("qemu", QEMU.as_bytes());
        fs::set_permissions(qemu, fs::Permissions::from_mode(0o755)).expect("is ours");
        let made = Command::new("mkfifo").arg(rig.path("end")).status().expect("is installed");
        assert!(made.success());
        rig
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).expect("can be written");
        path
    }

    /// `dunlin` with these words, seeing nothing but this rig.
    pub(crate) fn dunlin(&self, words: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("dunlin"));
        command
            .args(words)
            .env("DUNLIN_ASSETS", self.directory.path())
            .env("XDG_RUNTIME_DIR", self.directory.path())
            .env("TMPDIR", self.directory.path())
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// `dunlin run` with this rig's QEMU.
    pub(crate) fn run(&self, words: &[&str]) -> Command {
        let qemu = self.path("qemu");
        let mut command = self.dunlin(&["run", "--qemu"]);
        command.arg(qemu).args(words);
        command
    }

    /// Plays the host of the next run.
    pub(crate) fn play(&self, script: impl FnOnce(&mut Host) + Send + 'static) -> JoinHandle<()> {
        let directory = self.directory.path().to_path_buf();
        thread::spawn(move || script(&mut Host::connect(directory)))
    }

    /// Waits until the control port is connected.
    pub(crate) fn wait_for_connection(&self) {
        wait_for(|| self.path("connected").exists().then_some(())).expect("is connected in the end");
    }

    /// Process id of the QEMU that was started.
    pub(crate) fn qemu_pid(&self) -> i32 {
        let pid = wait_for(|| fs::read_to_string(self.path("pid")).ok()?.trim().parse().ok());
        pid.expect("QEMU was started")
    }
}

/// The smallest file that is a bzImage: a boot sector, a setup header, a kernel of one sector.
pub(crate) fn kernel() -> Vec<u8> {
    let mut file = vec![0; 3 * 512];
    for (offset, bytes) in [
        (0x1f1, &[1][..]),                  // setup_sects
        (0x1f4, &[33, 0, 0, 0]),            // syssize, in 16 bytes
        (0x200, &[0xeb, 0x66]),             // jump over the header
        (0x202, b"HdrS"),                   // magic
        (0x206, &[0x0f, 0x02]),             // protocol 2.15
        (0x211, &[1]),                      // loadflags: loaded high
        (0x22c, &[0xff, 0xff, 0xff, 0x7f]), // initrd_addr_max
        (0x236, &[1, 0]),                   // xloadflags: 64-bit entry
        (0x238, &[0xff, 0x07, 0, 0]),       // cmdline_size
        (0x258, &[0, 0, 0, 1, 0, 0, 0, 0]), // pref_address: 16 MiB
        (0x260, &[0, 0, 0x40, 3]),          // init_size: 52 MiB
    ] {
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    file.resize(2 * 512 + 33 * 16, 0);
    file
}

/// What `look` finds, as soon as it does.
pub(crate) fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(found) = look() {
            return Some(found);
        }
        thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Whether a process exists and is no zombie.
pub(crate) fn is_alive(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !matches!(status.rsplit(") ").next().and_then(|rest| rest.chars().next()), None | Some('Z' | 'X'))
}

/// The hypervisor, played.
pub(crate) struct Host {
    directory: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) manifest: Manifest,
    pub(crate) payload: Vec<u8>,
    pub(crate) stream: UnixStream,
    receiver: Receiver,
    stopped: Vec<bool>,
    logs: Vec<PlayedLog>,
    /// When the last events were, while somebody traces.
    traced: Option<u64>,
    /// VMs that commands have created.
    pub(crate) guests: Vec<Guest>,
    upload: Option<Upload>,
    /// Why no VM can be created.
    pub(crate) not_created: Option<(About, String)>,
}

/// A VM that a command has created.
pub(crate) struct Guest {
    pub(crate) info: VmInfo,
}

struct Upload {
    config: VmConfig,
    kernel: Vec<u8>,
    initrd: Vec<u8>,
}

impl Host {
    fn connect(directory: PathBuf) -> Self {
        let arguments = wait_for(|| fs::read_to_string(directory.join("arguments")).ok()).expect("QEMU was started");
        let arguments: Vec<String> = arguments.lines().map(String::from).collect();
        let socket = arguments.iter().find_map(|word| word.strip_prefix("socket,id=control,path=")).expect("is there");
        let stream = UnixStream::connect(socket).expect("is listened on");
        fs::write(directory.join("connected"), "").expect("can be written");
        let payload = fs::read(after(&arguments, "-initrd")).expect("is there");
        let manifest = Payload::read(&payload).expect("is a payload").manifest;
        let stopped = vec![false; manifest.vms.len()];
        let logs = manifest.vms.iter().map(|vm| PlayedLog::new(vm.dirty, vm.memory_bytes)).collect();
        Self {
            directory,
            arguments,
            manifest,
            payload,
            stream,
            receiver: Receiver::default(),
            stopped,
            logs,
            traced: None,
            guests: Vec::new(),
            upload: None,
            not_created: None,
        }
    }

    pub(crate) fn say(&mut self, message: &Message) {
        self.stream.write_all(&encode(message).expect("fits")).expect("is read");
    }

    pub(crate) fn up(&mut self) {
        self.say(&Message::Up(info()));
    }

    pub(crate) fn event(&mut self, vm: u32, at_ns: u64, event: VmEvent) {
        self.say(&Message::Vm { vm, at_ns, event });
    }

    pub(crate) fn start(&mut self, vm: u32) {
        self.event(vm, SECOND, VmEvent::Creating);
        self.event(vm, SECOND * 3 / 2, VmEvent::Started);
    }

    pub(crate) fn line(&mut self, vm: u32, line: Line, bytes: &[u8]) {
        self.say(&Message::Console { vm, line, at_ns: 4 * SECOND, bytes: bytes.to_vec() });
    }

    /// Starts a VM and lets its agent say these bytes after its greeting.
    pub(crate) fn agent(&mut self, vm: u32, bytes: &[u8]) {
        self.start(vm);
        self.line(vm, Line::Agent, b"hello kernel=6.1.0-test cpus=4 uptime=2.25\n");
        self.line(vm, Line::Agent, bytes);
    }

    pub(crate) fn stop(&mut self, vm: u32, reason: StopReason, detail: &str) {
        if let Some(stopped) = self.stopped.get_mut(vm as usize) {
            *stopped = true;
        }
        self.event(vm, 6 * SECOND, VmEvent::Stopped { reason, detail: detail.to_string() });
    }

    /// The next request; none when the tool has hung up.
    pub(crate) fn next(&mut self) -> Option<Request> {
        let mut byte = [0];
        while self.stream.read(&mut byte).ok()? == 1 {
            if let Some(request) = self.receiver.push(byte[0]) {
                return Some(request.expect("the tool's frames are good"));
            }
        }
        None
    }

    /// Answers what is asked until the power goes off, then ends as the real one does.
    pub(crate) fn serve(&mut self) {
        while let Some(request) = self.next() {
            if request.command == abi::control::Command::PowerOff {
                self.say(&Message::Bye);
                return self.end(qemu_status(CLEAN));
            }
            self.answer(request);
        }
    }

    pub(crate) fn answer(&mut self, Request { id, command }: Request) {
        use abi::control::Command;
        if matches!(command, Command::TraceRead { pcpu } if pcpu > 1) {
            return self.say(&Message::Reply { id, result: Err(Refusal::NoSuchPcpu) });
        }
        if matches!(command, Command::Layout { kind } if kind > 0) {
            return self.say(&Message::Reply { id, result: Err(Refusal::NoSuchLayout) });
        }
        let result = Ok(match command {
            Command::Layout { .. } => Answer::Layout(layout()),
            Command::Places { first } => Answer::Places(places().into_iter().skip(first as usize).collect()),
            Command::Hello => Answer::Host(info()),
            Command::Speculation => Answer::Speculation(speculation()),
            Command::List { first } => {
                Answer::Vms(self.list().into_iter().filter(|vm| vm.number >= first).take(VMS_CHUNK).collect())
            }
            Command::Resources => Answer::Resources(Resources { vms: 7, tags: 15, ..Resources::default() }),
            Command::CreateBegin { .. }
            | Command::CreateData { .. }
            | Command::CreateFinish { .. }
            | Command::CreateAbort { .. }
            | Command::Start { .. }
            | Command::Destroy { .. } => return self.answer_about_guests(id, command),
            Command::Stats { vm, first } => {
                let vcpus = self.manifest.vms[vm as usize].vcpus - first;
                let vcpus = vec![counters(); (vcpus as usize).min(abi::control::STATS_CHUNK)];
                Answer::Stats { vm, first, at_ns: 5 * SECOND, vcpus }
            }
            Command::Stop { vm } => {
                self.stop(vm, StopReason::Commanded, "");
                Answer::Done
            }
            Command::Input { bytes, .. } => Answer::Accepted(u32::try_from(bytes.len()).expect("is short")),
            Command::TraceRead { .. } => Answer::Events(Events { lost: 0, events: self.events() }),
            Command::TraceStart => {
                self.traced = Some(0);
                Answer::Done
            }
            Command::TraceStop => {
                self.traced = None;
                Answer::Done
            }
            Command::PowerOff | Command::Write { .. } => Answer::Done,
            Command::Save { .. }
            | Command::SaveState { .. }
            | Command::SaveUsed { .. }
            | Command::SaveMemory { .. }
            | Command::SaveEnd { .. }
            | Command::RestoreBegin { .. }
            | Command::RestoreState { .. }
            | Command::RestoreMemory { .. }
            | Command::RestoreFinish { .. }
            | Command::RestoreAbort { .. } => panic!("no test saves or restores a VM of this host"),
            Command::Exhaust { .. } => Answer::Taken(0),
            Command::Pause { vm }
            | Command::Resume { vm }
            | Command::DirtyStart { vm, .. }
            | Command::DirtyRound { vm, .. }
            | Command::DirtyInfo { vm }
            | Command::DirtyCompare { vm }
            | Command::DirtyStop { vm } => {
                let result = self.logs[vm as usize].answer(&command);
                return self.say(&Message::Reply { id, result });
            }
        });
        self.say(&Message::Reply { id, result });
    }

    /// The same events each time, a little later: a vCPU comes, leaves its guest once, and goes.
    fn events(&mut self) -> Vec<Event> {
        let Some(at) = self.traced.as_mut() else { return Vec::new() };
        *at += 1000;
        let event = |after, what| Event { at: *at + after, what };
        vec![
            event(0, What::RunBegan { vm: 0, vcpu: 1 }),
            event(100, What::Exit { reason: ExitReason::Cpuid, ticks: 50 }),
            event(900, What::RunEnded(RunEnd::Blocked)),
        ]
    }

    fn list(&self) -> Vec<VmInfo> {
        let vms = (0..).zip(&self.manifest.vms).zip(&self.stopped);
        let vms = vms.map(|((number, vm), &stopped)| VmInfo {
            number,
            name: vm.name.clone(),
            vcpus: vm.vcpus,
            memory_bytes: vm.memory_bytes,
            state: if stopped { VmState::Stopped(StopReason::Commanded) } else { VmState::Running },
        });
        vms.chain(self.guests.iter().map(|guest| guest.info.clone())).collect()
    }

    /// Creates VMs as the real one does: one at a time, and none that has a name twice or lacks bytes.
    fn answer_about_guests(&mut self, id: u32, command: abi::control::Command) {
        use abi::control::Command;
        let result = match command {
            Command::CreateBegin { config } if self.list().iter().any(|vm| vm.name == config.name) => {
                Err(Refusal::NameTaken)
            }
            Command::CreateBegin { .. } if self.upload.is_some() => Err(Refusal::Busy),
            Command::CreateBegin { config } => {
                self.upload = Some(Upload { config, kernel: Vec::new(), initrd: Vec::new() });
                Ok(Answer::Upload(77))
            }
            Command::CreateData { upload: 77, part, offset, bytes } => {
                let upload = self.upload.as_mut().expect("one was begun");
                let file = if part == Part::Kernel { &mut upload.kernel } else { &mut upload.initrd };
                assert_eq!(offset, file.len() as u64, "in order");
                file.extend(bytes);
                Ok(Answer::Done)
            }
            Command::CreateFinish { upload: 77 } => {
                let upload = self.upload.take().expect("one was begun");
                let config = &upload.config;
                let bytes = |file: Option<&File>| file.and_then(File::blob).map_or(0, |blob| blob.bytes);
                assert_eq!(bytes(Some(&config.kernel)), upload.kernel.len() as u64, "all has come");
                assert_eq!(bytes(config.initrd.as_ref()), upload.initrd.len() as u64, "all has come");
                match &self.not_created {
                    Some((about, why)) => Ok(Answer::NotCreated { about: *about, why: why.clone() }),
                    None => {
                        let number = 10 + u32::try_from(self.guests.len()).expect("few");
                        let (name, vcpus, memory_bytes) = (config.name.clone(), config.vcpus, config.memory_bytes);
                        self.event(number, 7 * SECOND, VmEvent::Created { name: name.clone() });
                        let info = VmInfo { number, name, vcpus, memory_bytes, state: VmState::Created };
                        self.guests.push(Guest { info });
                        Ok(Answer::Created { vm: number })
                    }
                }
            }
            Command::Start { vm } => match self.guests.iter_mut().find(|guest| guest.info.number == vm) {
                Some(guest) => {
                    guest.info.state = VmState::Running;
                    self.event(vm, 8 * SECOND, VmEvent::Started);
                    Ok(Answer::Done)
                }
                None => Err(Refusal::AlreadyStarted),
            },
            Command::Destroy { vm } => {
                self.guests.retain(|guest| guest.info.number != vm);
                let (reason, detail) = (StopReason::Commanded, String::new());
                self.event(vm, 9 * SECOND, VmEvent::Stopped { reason, detail });
                self.event(vm, 9 * SECOND, VmEvent::Destroyed);
                Ok(Answer::Done)
            }
            other => panic!("{other:?}"),
        };
        self.say(&Message::Reply { id, result });
    }

    /// Lets QEMU end with `status`.
    pub(crate) fn end(&mut self, status: i32) {
        // Open for both, so that nobody waits should QEMU be gone.
        let mut end = fs::File::options().read(true).write(true).open(self.directory.join("end")).expect("is there");
        writeln!(end, "{status}").expect("has room");
        // The line stays in the FIFO only while it is open.
        let pid = fs::read_to_string(self.directory.join("pid")).expect("was written").trim().parse().expect("is one");
        wait_for(|| (!is_alive(pid)).then_some(()));
    }

    /// The hypervisor's log says this.
    pub(crate) fn log(&self, text: &str) {
        let path = self.arguments.iter().find_map(|word| word.strip_prefix("file:")).expect("is there");
        fs::write(Path::new(path), text).expect("can be written");
    }
}

/// The word after `option`.
pub(crate) fn after<'a>(arguments: &'a [String], option: &str) -> &'a str {
    let at = arguments.iter().position(|word| word == option).expect("is there");
    &arguments[at + 1]
}

fn info() -> HostInfo {
    HostInfo {
        version: "0.1.0".to_string(),
        arch: "x86_64".to_string(),
        pcpus: 2,
        memory_bytes: 600 << 20,
        clock_hz: SECOND,
        processor: "A processor, SVM, NPT".to_string(),
    }
}

fn speculation() -> Speculation {
    let held = Stance::Held("IBRS at exits".to_string());
    let weaknesses = vec![("spectre_v2".to_string(), held), ("mds".to_string(), Stance::NotAffected)];
    Speculation { verdict: "all known weaknesses of this processor are held".to_string(), weaknesses }
}

/// The only kind of block.
pub(crate) fn layout() -> Layout {
    let row = |offset, bytes, content, name: &str, kind: &str| Row {
        depth: 0,
        offset,
        bytes,
        content,
        name: name.to_string(),
        kind: kind.to_string(),
    };
    Layout {
        name: "Vcpu".to_string(),
        bytes: 256,
        align: 128,
        line: 128,
        rows: vec![
            row(0, 8, Content::Mailbox, "pending", "AtomicU64"),
            row(8, 120, Content::Gap, "", ""),
            row(128, 128, Content::Owner, "registers", "Owned<[u64; 16]>"),
        ],
    }
}

fn places() -> Vec<Place> {
    let place = |vcpu, hva| Place { whose: Whose::Vcpu(0, vcpu), what: "Vcpu".to_string(), hva, bytes: 256 };
    vec![place(0, 0x1000), place(1, 0x3080)]
}

/// What every vCPU has counted.
pub(crate) fn counters() -> VcpuCounters {
    let mut counters = VcpuCounters {
        entries: 1001,
        guest_ticks: 3 * SECOND,
        host_ticks: SECOND / 2,
        wait_ticks: SECOND / 2,
        ..VcpuCounters::default()
    };
    counters.exits[ExitReason::PortIo as usize] = 900;
    counters.exits[ExitReason::Halt as usize] = 100;
    counters
}
