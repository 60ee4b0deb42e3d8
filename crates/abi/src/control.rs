//! The control port: all communication of people and programs with a running host.
//!
//! Messages travel as frames over a byte stream (a virtio console; on the other side a Unix socket, or a file in a
//! parent VM):
//!
//! ```text
//! COBS( version: u8 | postcard message | CRC-32 of both, little endian )  0x00
//! ```
//!
//! COBS leaves no zero byte inside a frame, so after any damage the receiver finds the next frame at the next zero. The
//! tool sends [`Request`]s. The hypervisor answers each with one [`Message::Reply`], and sends other messages on
//! events. It refuses a frame that is too long, damaged, of another version or undecodable ([`Message::Refused`]); such
//! a frame changes nothing.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::counters::VcpuCounters;
use crate::dirty::{Comparison, DirtyInfo, Round};
use crate::layout::{Layout, Place};
use crate::payload::{DirtyLogging, VmConfig};
use crate::resources::Resources;
use crate::trace::Events;

/// Version of the protocol, the first byte of each frame.
pub const VERSION: u8 = 14;
/// Longest encoded frame in bytes, terminator included.
pub const FRAME_LIMIT: usize = 8192;
/// Maximum number of bytes in one [`Message::Console`] or [`Command::Input`].
pub const CONSOLE_CHUNK: usize = 2048;
/// Maximum number of vCPUs in one [`Answer::Stats`].
pub const STATS_CHUNK: usize = 8;
/// Maximum number of events in one [`Answer::Events`].
pub const EVENTS_CHUNK: usize = 200;
/// Maximum number of places in one [`Answer::Places`].
pub const PLACES_CHUNK: usize = 128;
/// Maximum number of VMs in one [`Answer::Vms`].
pub const VMS_CHUNK: usize = 48;
/// Maximum number of bytes in one [`Command::CreateData`].
pub const UPLOAD_CHUNK: usize = 7168;
/// Maximum number of bytes in one [`Answer::Bytes`] and one [`Command::RestoreMemory`].
pub const MEMORY_CHUNK: usize = 7168;
/// Number of bytes of memory that one [`Answer::Used`] is about: a bit for each page.
pub const USED_BYTES: u64 = 2 << 20;
/// Maximum number of bytes of text in one [`Answer::NotCreated`].
pub const WHY_LIMIT: usize = 1024;

const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
const CRC_BYTES: usize = 4;

/// A request of the tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the tool; repeated in the reply.
    pub id: u32,
    /// The command.
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Describe the host. Answered by [`Answer::Host`].
    Hello,
    /// What the host does against speculative execution. Answered by [`Answer::Speculation`].
    Speculation,
    /// Up to [`VMS_CHUNK`] VMs whose numbers are `first` or above, in ascending order. Answered by [`Answer::Vms`].
    List {
        /// Lowest number wanted.
        first: u32,
    },
    /// The host's free resources. Answered by [`Answer::Resources`].
    Resources,
    /// Begin to create a VM. The offsets of its files have no meaning; their lengths determine what is sent next. One
    /// VM is created at a time. Answered by [`Answer::Upload`].
    CreateBegin {
        /// What to create.
        config: VmConfig,
    },
    /// The next bytes of a file of the VM that is being created. Answered by [`Answer::Done`].
    CreateData {
        /// Number from [`Answer::Upload`].
        upload: u32,
        /// Which file.
        part: Part,
        /// The position in the file: the end of the data sent so far.
        offset: u64,
        /// At most [`UPLOAD_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// All bytes were sent: create the VM, which does not run yet. Answered by [`Answer::Created`] or
    /// [`Answer::NotCreated`] when that is done.
    CreateFinish {
        /// Number from [`Answer::Upload`].
        upload: u32,
    },
    /// Cancel the creation of the VM, and discard the data sent so far. Answered by [`Answer::Done`].
    CreateAbort {
        /// Number from [`Answer::Upload`].
        upload: u32,
    },
    /// Begin to save a VM: stop its vCPUs and its time, and take its state. One VM is saved at a time. The VM goes on
    /// if no command about this comes for half a minute. Answered by [`Answer::Saving`] or [`Answer::NotSaved`].
    Save {
        /// Number of the VM.
        vm: u32,
    },
    /// Bytes of the state of the VM that is being saved. Answered by [`Answer::Bytes`].
    SaveState {
        /// Number from [`Answer::Saving`].
        save: u32,
        /// First byte wanted.
        offset: u64,
    },
    /// The pages that are not all zero, of [`USED_BYTES`] of that VM's memory. Answered by [`Answer::Used`].
    SaveUsed {
        /// Number from [`Answer::Saving`].
        save: u32,
        /// GPA of the first page.
        gpa: u64,
    },
    /// Bytes of that VM's memory. Answered by [`Answer::Bytes`].
    SaveMemory {
        /// Number from [`Answer::Saving`].
        save: u32,
        /// GPA of the first byte.
        gpa: u64,
        /// Number of bytes, at most [`MEMORY_CHUNK`].
        bytes: u32,
    },
    /// End the save. Answered by [`Answer::Done`]: from the moment of [`Command::Save`] until then, the VM has made no
    /// step.
    SaveEnd {
        /// Number from [`Answer::Saving`].
        save: u32,
        /// The VM goes on. Otherwise it ends: it lives in its file.
        stay: bool,
    },
    /// Begin to restore a VM: take memory for it, and make its vCPUs. The lengths of its files mean nothing. One VM is
    /// restored at a time. Answered by [`Answer::Upload`] when that is done, or by [`Answer::NotCreated`].
    RestoreBegin {
        /// What to restore.
        config: VmConfig,
        /// Number of bytes of its state.
        state_bytes: u64,
    },
    /// The next bytes of the state of the VM that is being restored. Answered by [`Answer::Done`]; the last ones by
    /// [`Answer::NotCreated`] if the VM cannot run here.
    RestoreState {
        /// Number from [`Answer::Upload`].
        upload: u32,
        /// The position in the state: the end of the data sent so far.
        offset: u64,
        /// At most [`UPLOAD_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// A part of the memory of the VM that is being restored. Answered by [`Answer::Done`].
    RestoreMemory {
        /// Number from [`Answer::Upload`].
        upload: u32,
        /// GPA of the first byte.
        gpa: u64,
        /// At most [`MEMORY_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// All state and memory was sent: the VM goes on. Answered by [`Answer::Created`].
    RestoreFinish {
        /// Number from [`Answer::Upload`].
        upload: u32,
    },
    /// Discard the VM that is being restored. Answered by [`Answer::Done`].
    RestoreAbort {
        /// Number from [`Answer::Upload`].
        upload: u32,
    },
    /// Let a VM that was created run. Answered by [`Answer::Done`].
    Start {
        /// Number of the VM.
        vm: u32,
    },
    /// End a VM if it runs, and remove it. Answered by [`Answer::Done`] when all of its resources are free.
    Destroy {
        /// Number of the VM.
        vm: u32,
    },
    /// End a VM at once, like a power cut. Answered by [`Answer::Done`].
    Stop {
        /// Number of the VM.
        vm: u32,
    },
    /// Counters of up to [`STATS_CHUNK`] vCPUs from `first` on. Answered by [`Answer::Stats`].
    Stats {
        /// Number of the VM.
        vm: u32,
        /// First vCPU wanted.
        first: u32,
    },
    /// Input for a serial port of a VM. Answered by [`Answer::Accepted`].
    Input {
        /// Number of the VM.
        vm: u32,
        /// The serial port.
        line: Line,
        /// The input, at most [`CONSOLE_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Layout of one kind of the hypervisor's own blocks. Answered by [`Answer::Layout`].
    Layout {
        /// Number of the kind, from 0 on.
        kind: u32,
    },
    /// Addresses of the blocks: up to [`PLACES_CHUNK`] of them, from `first` on. Answered by [`Answer::Places`].
    Places {
        /// First place wanted.
        first: u32,
    },
    /// Stop a VM's vCPUs until [`Command::Resume`]. Answered by [`Answer::Done`] when all of them have stopped.
    Pause {
        /// Number of the VM.
        vm: u32,
    },
    /// Let the vCPUs of a paused VM run again. Answered by [`Answer::Done`].
    Resume {
        /// Number of the VM.
        vm: u32,
    },
    /// Write to a VM's memory, like a device. Answered by [`Answer::Done`].
    Write {
        /// Number of the VM.
        vm: u32,
        /// GPA of the first byte.
        gpa: u64,
        /// The data, at most [`CONSOLE_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Start a log of the pages that a VM writes. At first all pages count as written. Answered by [`Answer::Done`].
    DirtyStart {
        /// Number of the VM.
        vm: u32,
        /// The settings; `None` for those of the VM.
        how: Option<DirtyLogging>,
        /// Keep a copy of the VM's memory on the host, which each round updates.
        mirror: bool,
    },
    /// Harvest once: find the pages written since the last harvest, and copy them if there is a mirror. Answered by
    /// [`Answer::Round`] when it is done.
    DirtyRound {
        /// Number of the VM.
        vm: u32,
        /// Lose the copied pages, like a broken connection: they are dirty again, and the mirror holds garbage for
        /// them.
        lose: bool,
    },
    /// State of a VM's log. Answered by [`Answer::Dirty`].
    DirtyInfo {
        /// Number of the VM.
        vm: u32,
    },
    /// Compare a paused VM's memory with its mirror, page by page. Answered by [`Answer::Compared`].
    DirtyCompare {
        /// Number of the VM.
        vm: u32,
    },
    /// End the log. Split large pages are joined afterwards, in the background. Answered by [`Answer::Done`].
    DirtyStop {
        /// Number of the VM.
        vm: u32,
    },
    /// Start to record events on each pCPU; unread events of an earlier trace are dropped. Answered by
    /// [`Answer::Done`].
    TraceStart,
    /// The oldest events of a pCPU, which are then dropped. Answered by [`Answer::Events`].
    TraceRead {
        /// Number of the pCPU.
        pcpu: u32,
    },
    /// Stop recording. Recorded events can still be read. Answered by [`Answer::Done`].
    TraceStop,
    /// End all VMs and the machine.
    PowerOff,
    /// For tests: the next `first` allocations for VMs (memory, tables, tags) succeed, and the `count` allocations
    /// after them fail. Answered by [`Answer::Taken`]; refused unless the hypervisor was started for that.
    Exhaust {
        /// Number of allocations that succeed.
        first: u64,
        /// Number of allocations that fail.
        count: u64,
    },
}

impl Command {
    /// Its name in reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Speculation => "speculation",
            Self::List { .. } => "list",
            Self::Resources => "resources",
            Self::CreateBegin { .. } => "create-begin",
            Self::CreateData { .. } => "create-data",
            Self::CreateFinish { .. } => "create-finish",
            Self::CreateAbort { .. } => "create-abort",
            Self::Save { .. } => "save",
            Self::SaveState { .. } => "save-state",
            Self::SaveUsed { .. } => "save-used",
            Self::SaveMemory { .. } => "save-memory",
            Self::SaveEnd { .. } => "save-end",
            Self::RestoreBegin { .. } => "restore-begin",
            Self::RestoreState { .. } => "restore-state",
            Self::RestoreMemory { .. } => "restore-memory",
            Self::RestoreFinish { .. } => "restore-finish",
            Self::RestoreAbort { .. } => "restore-abort",
            Self::Start { .. } => "start",
            Self::Destroy { .. } => "destroy",
            Self::Stop { .. } => "stop",
            Self::Stats { .. } => "stats",
            Self::Input { .. } => "input",
            Self::Layout { .. } => "layout",
            Self::Places { .. } => "places",
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::Write { .. } => "write",
            Self::DirtyStart { .. } => "dirty-start",
            Self::DirtyRound { .. } => "dirty-round",
            Self::DirtyInfo { .. } => "dirty-info",
            Self::DirtyCompare { .. } => "dirty-compare",
            Self::DirtyStop { .. } => "dirty-stop",
            Self::TraceStart => "trace-start",
            Self::TraceRead { .. } => "trace-read",
            Self::TraceStop => "trace-stop",
            Self::PowerOff => "power-off",
            Self::Exhaust { .. } => "exhaust",
        }
    }
}

/// A file that a VM is created from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// The kernel.
    Kernel,
    /// The initial RAM disk.
    Initrd,
}

/// A serial port of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Line {
    /// COM1: the guest kernel's console.
    Console,
    /// COM2: output and status of commands, from our initrd to the tool.
    Agent,
}

/// A message of the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The hypervisor has just started. (A tool that connects later asks [`Command::Hello`].)
    Up(HostInfo),
    /// The answer to the request with this id.
    Reply {
        /// The request's id.
        id: u32,
        /// The answer, or the reason for the refusal.
        result: Result<Answer, Refusal>,
    },
    /// A guest's output on a serial port.
    Console {
        /// Number of the VM.
        vm: u32,
        /// The serial port.
        line: Line,
        /// When the guest wrote the first of these bytes, in nanoseconds since the host's start.
        at_ns: u64,
        /// The output, at most [`CONSOLE_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// A VM started or ended.
    Vm {
        /// Number of the VM.
        vm: u32,
        /// When, in nanoseconds since the host's start.
        at_ns: u64,
        /// The event.
        event: VmEvent,
    },
    /// A frame was refused. It changed nothing.
    Refused(FrameError),
    /// The last message: the machine ends now.
    Bye,
}

/// An event of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmEvent {
    /// Creation has begun: memory is allocated and zeroed.
    Creating,
    /// Memory is ready, the kernel is loaded, the first vCPU may run.
    Started,
    /// The VM cannot be created; other VMs continue.
    Failed(String),
    /// It ended and its memory was freed.
    Stopped {
        /// The reason.
        reason: StopReason,
        /// One line for the user: the vCPU, the address, and the action.
        detail: String,
    },
    /// A command has created it, and it does not run yet.
    Created {
        /// Its name.
        name: String,
    },
    /// The VM was removed: its number will never be used again.
    Destroyed,
}

/// Why a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// A vCPU had a fault during the delivery of a double fault.
    TripleFault,
    /// A vCPU reached a state that cannot be entered or emulated.
    Unsupported,
    /// Every vCPU halted with interrupts off, so nothing can wake them.
    Halted,
    /// A [`Command::Stop`] or [`Command::PowerOff`].
    Commanded,
    /// An uncorrectable hardware error occurred while a vCPU ran.
    HardwareError,
    /// It was saved to a file, and lives there.
    Saved,
}

impl StopReason {
    /// The reason in words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PowerOff => "power off",
            Self::Reset => "reset",
            Self::TripleFault => "triple fault",
            Self::Unsupported => "unsupported",
            Self::Halted => "halted for good",
            Self::Commanded => "stopped by command",
            Self::HardwareError => "hardware error",
            Self::Saved => "saved",
        }
    }
}

/// Answers to commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Command::Hello`].
    Host(HostInfo),
    /// To [`Command::Speculation`].
    Speculation(Speculation),
    /// To [`Command::List`]: fewer than [`VMS_CHUNK`] are the last ones.
    Vms(Vec<VmInfo>),
    /// To [`Command::Resources`].
    Resources(Resources),
    /// To [`Command::CreateBegin`]: names it in the commands that follow.
    Upload(u32),
    /// To [`Command::CreateFinish`].
    Created {
        /// Number of the new VM.
        vm: u32,
    },
    /// To [`Command::CreateFinish`]: there is no new VM.
    NotCreated {
        /// The part of the description that the host cannot provide.
        about: About,
        /// One line for people.
        why: String,
    },
    /// To [`Command::Save`].
    Saving(Box<Saving>),
    /// To [`Command::Save`]: the VM runs on.
    NotSaved {
        /// One line for people.
        why: String,
    },
    /// To [`Command::SaveState`] and [`Command::SaveMemory`].
    Bytes(#[serde(with = "serde_bytes")] Vec<u8>),
    /// To [`Command::SaveUsed`]: bit n of byte m is for page 8 m + n. Pages where the VM has no memory are zero.
    Used(#[serde(with = "serde_bytes")] Vec<u8>),
    /// To [`Command::Stats`].
    Stats {
        /// Number of the VM.
        vm: u32,
        /// First vCPU below.
        first: u32,
        /// When, in nanoseconds since the host's start.
        at_ns: u64,
        /// Counters of the vCPUs from `first` on.
        vcpus: Vec<VcpuCounters>,
    },
    /// To [`Command::Input`]: how many of the bytes were accepted; send the rest again later.
    Accepted(u32),
    /// To [`Command::Layout`].
    Layout(Layout),
    /// To [`Command::Places`]: fewer than [`PLACES_CHUNK`] means that these are the last.
    Places(Vec<Place>),
    /// To [`Command::DirtyRound`].
    Round(Round),
    /// To [`Command::DirtyInfo`].
    Dirty(DirtyInfo),
    /// To [`Command::DirtyCompare`].
    Compared(Comparison),
    /// To [`Command::TraceRead`]: up to [`EVENTS_CHUNK`]; none if all were read.
    Events(Events),
    /// Done, without data.
    Done,
    /// To [`Command::Exhaust`]: number of allocations since the last such command.
    Taken(u64),
}

/// Why the hypervisor refused a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no VM with that number.
    NoSuchVm,
    /// The VM has ended.
    NotRunning,
    /// The VM has no vCPU with that number.
    NoSuchVcpu,
    /// There is no kind of blocks with that number.
    NoSuchLayout,
    /// The VM has no memory there.
    NoMemoryThere,
    /// The VM's last command is not finished.
    Busy,
    /// A log is active, or large pages are still coming back after the last one.
    Logging,
    /// No log is active.
    NotLogging,
    /// The log has no mirror.
    NoMirror,
    /// The VM is not paused.
    NotPaused,
    /// The host has too little memory.
    OutOfMemory,
    /// The machine cannot record writes.
    NoHardwareLog,
    /// There is no pCPU with that number.
    NoSuchPcpu,
    /// The VM was created, and does not run yet.
    NotStarted,
    /// The VM runs, or has ended.
    AlreadyStarted,
    /// Another VM has that name.
    NameTaken,
    /// The host has as many VMs as it has room for.
    TooManyVms,
    /// There is no unfinished VM with this number, or the data does not continue the data sent before.
    NoSuchUpload,
    /// A requested value is impossible: a number of vCPUs, a size.
    Invalid,
    /// The VM is another VM's child, and its parent decides about it.
    Child,
    /// A program in a VM has asked to stop, pause or destroy that VM, or all VMs.
    Own,
    /// The VM owns devices, and nothing records what they write.
    OwnsDevices,
    /// No save with this number is under way, or the VM was told to go on before it stood still.
    NotSaving,
    /// The machine records writes, but keeps no list of them.
    NoPml,
}

/// The part of a VM's description that prevents its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum About {
    /// Its memory, or the tables for it.
    Memory,
    /// Its vCPUs.
    Vcpus,
    /// Its TLB tags.
    Tags,
    /// Its kernel, its initrd or their command line.
    Kernel,
    /// Its name.
    Name,
    /// The machine's devices that it shall have.
    Devices,
    /// Its share of the pCPUs.
    Share,
    /// Its state, if it is restored.
    State,
}

/// A VM that is being saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    /// Names this in the commands that follow.
    pub save: u32,
    /// What the VM was created from.
    pub config: VmConfig,
    /// Number of bytes of its state.
    pub state_bytes: u64,
    /// Its memory: GPA and length of each region.
    pub regions: Vec<(u64, u64)>,
}

/// The host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// Version of the hypervisor.
    pub version: String,
    /// Its architecture: "x86_64" or "aarch64".
    pub arch: String,
    /// Number of pCPUs that run vCPUs.
    pub pcpus: u32,
    /// Memory available for VMs at the start, in bytes.
    pub memory_bytes: u64,
    /// Ticks per second of the host's clock.
    pub clock_hz: u64,
    /// The processor's name, and the virtualization features in use.
    pub processor: String,
}

/// What a host does against speculative execution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speculation {
    /// Whether VMs of strangers may share the processor, or why nothing is done at all.
    pub verdict: String,
    /// The known weaknesses by name, and how the processor stands with each.
    pub weaknesses: Vec<(String, Stance)>,
}

/// How a processor stands with a weakness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stance {
    /// It does not have it.
    NotAffected,
    /// It has it, and this holds it.
    Held(String),
    /// It has it, and nothing holds it, for this reason.
    Vulnerable(String),
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmInfo {
    /// Its number, which no other VM of this host ever has.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Whether it runs, or why not.
    pub state: VmState,
}

/// State of a VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmState {
    /// It was created, and does not run yet.
    Created,
    /// Its vCPUs run or wait for interrupts.
    Running,
    /// It ended.
    Stopped(StopReason),
    /// It could not be created.
    Failed,
}

/// Why a frame was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FrameError {
    /// Longer than [`FRAME_LIMIT`]; everything up to the next zero byte was skipped.
    TooLong,
    /// Not COBS, or too short to hold version and checksum.
    Malformed,
    /// The checksum is wrong.
    Damaged,
    /// Another version, which is given here.
    Version(u8),
    /// The checksum is right, but the message does not decode.
    Undecodable,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(f, "frame longer than {FRAME_LIMIT} bytes"),
            Self::Malformed => write!(f, "not a frame"),
            Self::Damaged => write!(f, "frame damaged (checksum)"),
            Self::Version(version) => write!(f, "protocol version {version}, expected {VERSION}"),
            Self::Undecodable => write!(f, "message cannot be decoded"),
        }
    }
}

/// Encodes a message as one frame, terminator included.
///
/// # Errors
/// The message cannot be encoded, or exceeds [`FRAME_LIMIT`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    encode_in_steps(message, || {})
}

/// Bytes of a long message that are handled in one step.
const STEP: usize = 512;

/// The same in short steps. `in_between` is called between two of them.
///
/// # Errors
/// As [`encode`].
pub fn encode_in_steps<T: Serialize>(message: &T, mut in_between: impl FnMut()) -> Result<Vec<u8>, FrameError> {
    let mut plain = Vec::with_capacity(64);
    plain.push(VERSION);
    let mut plain = postcard::to_extend(message, plain).map_err(|_| FrameError::Undecodable)?;
    plain.extend_from_slice(&checksum(&plain, &mut in_between).to_le_bytes());

    let mut frame = alloc::vec![0; cobs::max_encoding_length(plain.len())];
    let mut encoder = cobs::CobsEncoder::new(&mut frame);
    for part in plain.chunks(STEP) {
        in_between();
        encoder.push(part).map_err(|_| FrameError::TooLong)?;
    }
    let length = encoder.finalize();
    frame.truncate(length);
    frame.push(0);
    if frame.len() > FRAME_LIMIT {
        return Err(FrameError::TooLong);
    }
    Ok(frame)
}

fn checksum(bytes: &[u8], in_between: &mut impl FnMut()) -> u32 {
    let mut digest = CRC.digest();
    for part in bytes.chunks(STEP) {
        in_between();
        digest.update(part);
    }
    digest.finalize()
}

/// Decodes one frame, without its terminator.
///
/// # Errors
/// A [`FrameError`] with the reason.
pub fn decode<T: DeserializeOwned>(frame: &[u8]) -> Result<T, FrameError> {
    decode_in_steps(frame, || {})
}

/// The same in short steps. `in_between` is called between two of them.
///
/// # Errors
/// As [`decode`].
pub fn decode_in_steps<T: DeserializeOwned>(frame: &[u8], mut in_between: impl FnMut()) -> Result<T, FrameError> {
    let mut plain = alloc::vec![0; frame.len()];
    let mut decoder = cobs::CobsDecoder::new(&mut plain);
    for part in frame.chunks(STEP) {
        in_between();
        if decoder.push(part).map_err(|_| FrameError::Malformed)?.is_some() {
            return Err(FrameError::Malformed);
        }
    }
    let length = decoder.feed(0).ok().flatten().ok_or(FrameError::Malformed)?;
    plain.truncate(length);
    let Some((body, crc)) = plain.len().checked_sub(CRC_BYTES).map(|at| plain.split_at(at)) else {
        return Err(FrameError::Malformed);
    };
    if checksum(body, &mut in_between).to_le_bytes() != crc {
        return Err(FrameError::Damaged);
    }
    match body.split_first() {
        None => Err(FrameError::Malformed),
        Some((&VERSION, message)) => match postcard::take_from_bytes(message) {
            Ok((message, [])) => Ok(message),
            _ => Err(FrameError::Undecodable),
        },
        Some((&version, _)) => Err(FrameError::Version(version)),
    }
}

/// Splits a byte stream into frames.
///
/// Holds at most [`FRAME_LIMIT`] bytes, whatever input arrives.
#[derive(Debug, Default)]
pub struct Receiver {
    partial: Vec<u8>,
    skipping: bool,
}

impl Receiver {
    /// Takes one byte. If it ends a frame, returns that frame's message or the reason for its refusal.
    ///
    /// A sender resynchronizes with an empty frame (a zero byte after a zero byte), which returns nothing.
    pub fn push<T: DeserializeOwned>(&mut self, byte: u8) -> Option<Result<T, FrameError>> {
        self.push_in_steps(byte, || {})
    }

    /// The same, with a message that is decoded in short steps. `in_between` is called between two of them.
    pub fn push_in_steps<T: DeserializeOwned>(
        &mut self,
        byte: u8,
        in_between: impl FnMut(),
    ) -> Option<Result<T, FrameError>> {
        if byte != 0 {
            if self.skipping {
                return None;
            }
            if self.partial.len() + 1 >= FRAME_LIMIT {
                self.partial.clear();
                self.skipping = true;
                return None;
            }
            self.partial.push(byte);
            return None;
        }

        if core::mem::take(&mut self.skipping) {
            return Some(Err(FrameError::TooLong));
        }
        if self.partial.is_empty() {
            return None;
        }
        let message = decode_in_steps(&self.partial, in_between);
        self.partial.clear();
        Some(message)
    }
}
