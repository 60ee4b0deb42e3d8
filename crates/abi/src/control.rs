//! The control port: everything a person or a program sees of a running host.
//!
//! Messages travel as frames over a byte stream (a virtio console; on the other side a Unix socket):
//!
//! ```text
//! COBS( version: u8 | postcard message | CRC-32 of both, little endian )  0x00
//! ```
//!
//! COBS leaves no zero byte inside a frame, so after any damage the receiver finds the next frame at the next zero.
//! The tool sends [`Request`]s, the hypervisor answers each with one [`Message::Reply`] and sends other messages when
//! something happens. A frame that is too long, damaged, of another version or undecodable is refused
//! ([`Message::Refused`]) and changes nothing.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::counters::VcpuCounters;
use crate::dirty::{Comparison, DirtyInfo, Round};
use crate::layout::{Layout, Place};
use crate::payload::DirtyLogging;
use crate::trace::Events;

/// Version of the protocol, the first byte of each frame.
pub const VERSION: u8 = 6;
/// Longest encoded frame in bytes, terminator included.
pub const FRAME_LIMIT: usize = 8192;
/// Most bytes that one [`Message::Console`] or [`Command::Input`] carries.
pub const CONSOLE_CHUNK: usize = 2048;
/// Most vCPUs in one [`Answer::Stats`].
pub const STATS_CHUNK: usize = 12;
/// Most events in one [`Answer::Events`].
pub const EVENTS_CHUNK: usize = 200;
/// Most places in one [`Answer::Places`].
pub const PLACES_CHUNK: usize = 128;

const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
const CRC_BYTES: usize = 4;

/// What the tool asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the tool; comes back in the reply.
    pub id: u32,
    /// What to do.
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Who is there? Answered by [`Answer::Host`].
    Hello,
    /// All VMs. Answered by [`Answer::Vms`].
    List,
    /// End a VM at once, as if its power were cut. Answered by [`Answer::Done`].
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
    /// Bytes typed on a serial line of a VM. Answered by [`Answer::Accepted`].
    Input {
        /// Number of the VM.
        vm: u32,
        /// The serial line.
        line: Line,
        /// What was typed, at most [`CONSOLE_CHUNK`] bytes.
        bytes: Vec<u8>,
    },
    /// How a kind of the hypervisor's own blocks is laid out. Answered by [`Answer::Layout`].
    Layout {
        /// Number of the kind, from 0 on.
        kind: u32,
    },
    /// Where the blocks are: up to [`PLACES_CHUNK`] of them, from `first` on. Answered by [`Answer::Places`].
    Places {
        /// First place wanted.
        first: u32,
    },
    /// Stop a VM's vCPUs until [`Command::Resume`]. Answered by [`Answer::Done`] when the last of them has stopped.
    Pause {
        /// Number of the VM.
        vm: u32,
    },
    /// Let the vCPUs of a paused VM run again. Answered by [`Answer::Done`].
    Resume {
        /// Number of the VM.
        vm: u32,
    },
    /// Write to a VM's memory, as a device would. Answered by [`Answer::Done`].
    Write {
        /// Number of the VM.
        vm: u32,
        /// GPA of the first byte.
        gpa: u64,
        /// What to write, at most [`CONSOLE_CHUNK`] bytes.
        bytes: Vec<u8>,
    },
    /// Begin to log which pages of a VM are written. All of them count as written at first. Answered by [`Answer::Done`].
    DirtyStart {
        /// Number of the VM.
        vm: u32,
        /// How; the VM's own settings, without.
        how: Option<DirtyLogging>,
        /// Keep a copy of the VM's memory on the host, which each round brings up to date.
        mirror: bool,
    },
    /// Harvest once: which pages were written since they were last harvested, and copy them if there is a mirror. Answered by
    /// [`Answer::Round`] when it is done.
    DirtyRound {
        /// Number of the VM.
        vm: u32,
        /// Lose what was copied, as a broken connection would: it is dirty again, and the mirror has nonsense in its place.
        lose: bool,
    },
    /// How a VM's log stands. Answered by [`Answer::Dirty`].
    DirtyInfo {
        /// Number of the VM.
        vm: u32,
    },
    /// Compare a paused VM's memory with its mirror, page by page. Answered by [`Answer::Compared`].
    DirtyCompare {
        /// Number of the VM.
        vm: u32,
    },
    /// End the log. Large pages come back afterwards, by and by. Answered by [`Answer::Done`].
    DirtyStop {
        /// Number of the VM.
        vm: u32,
    },
    /// Begin to write down what happens on each pCPU; what was not read before is forgotten. Answered by [`Answer::Done`].
    TraceStart,
    /// The oldest events of a pCPU, which are forgotten now. Answered by [`Answer::Events`].
    TraceRead {
        /// Number of the pCPU.
        pcpu: u32,
    },
    /// Write nothing down any more. What was written can still be read. Answered by [`Answer::Done`].
    TraceStop,
    /// End all VMs and the machine.
    PowerOff,
}

/// A serial line of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Line {
    /// COM1: the guest kernel's console.
    Console,
    /// COM2: what our initrd says to the tool: output and status of commands.
    Agent,
}

/// What the hypervisor says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The hypervisor has just come up. (A tool that attaches later asks [`Command::Hello`].)
    Up(HostInfo),
    /// The answer to the request with this id.
    Reply {
        /// The request's id.
        id: u32,
        /// The answer, or why there is none.
        result: Result<Answer, Refusal>,
    },
    /// A guest wrote to a serial line.
    Console {
        /// Number of the VM.
        vm: u32,
        /// The serial line.
        line: Line,
        /// When the first of these bytes was written, in nanoseconds of the host since it came up.
        at_ns: u64,
        /// What was written, at most [`CONSOLE_CHUNK`] bytes.
        bytes: Vec<u8>,
    },
    /// A VM came or went.
    Vm {
        /// Number of the VM.
        vm: u32,
        /// When, in nanoseconds of the host since it came up.
        at_ns: u64,
        /// What happened.
        event: VmEvent,
    },
    /// A frame could not be used. Nothing was changed by it.
    Refused(FrameError),
    /// The last message: the machine ends now.
    Bye,
}

/// What can happen to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmEvent {
    /// Creation began: memory is taken and zeroed from here on.
    Creating,
    /// Memory is ready, the kernel is loaded, the first vCPU may run.
    Started,
    /// It cannot be created; other VMs go on.
    Failed(String),
    /// It ended and its memory was freed.
    Stopped {
        /// Why.
        reason: StopReason,
        /// One line for people: which vCPU, where, what it did.
        detail: String,
    },
}

/// Why a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// A vCPU met a fault while delivering a double fault.
    TripleFault,
    /// A vCPU reached a state that cannot be entered or emulated.
    Unsupported,
    /// Every vCPU halted with interrupts off: nothing can ever happen again.
    Halted,
    /// A [`Command::Stop`] or [`Command::PowerOff`].
    Commanded,
    /// The hardware could not correct an error that came while a vCPU ran.
    HardwareError,
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
        }
    }
}

/// Answers to commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Command::Hello`].
    Host(HostInfo),
    /// To [`Command::List`].
    Vms(Vec<VmInfo>),
    /// To [`Command::Stats`].
    Stats {
        /// Number of the VM.
        vm: u32,
        /// First vCPU below.
        first: u32,
        /// When, in nanoseconds of the host since it came up.
        at_ns: u64,
        /// Counters of the vCPUs from `first` on.
        vcpus: Vec<VcpuCounters>,
    },
    /// To [`Command::Input`]: how many of the bytes were taken; send the rest again later.
    Accepted(u32),
    /// To [`Command::Layout`].
    Layout(Layout),
    /// To [`Command::Places`]: fewer than [`PLACES_CHUNK`] are the last ones.
    Places(Vec<Place>),
    /// To [`Command::DirtyRound`].
    Round(Round),
    /// To [`Command::DirtyInfo`].
    Dirty(DirtyInfo),
    /// To [`Command::DirtyCompare`].
    Compared(Comparison),
    /// To [`Command::TraceRead`]: up to [`EVENTS_CHUNK`], none when all were read.
    Events(Events),
    /// Done, nothing to tell.
    Done,
}

/// Why a command was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no VM of that number.
    NoSuchVm,
    /// The VM has ended.
    NotRunning,
    /// The VM has no vCPU of that number.
    NoSuchVcpu,
    /// There are fewer kinds of blocks.
    NoSuchLayout,
    /// The VM has no memory there.
    NoMemoryThere,
    /// The VM's last command is not done yet.
    Busy,
    /// A log runs already, or large pages are still coming back after the last one.
    Logging,
    /// No log runs.
    NotLogging,
    /// The log has no mirror.
    NoMirror,
    /// The VM is not paused.
    NotPaused,
    /// The host has too little memory left.
    OutOfMemory,
    /// The machine cannot record writes.
    NoHardwareLog,
    /// There is no pCPU of that number.
    NoSuchPcpu,
}

/// The host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// Version of the hypervisor.
    pub version: String,
    /// Physical CPUs that run vCPUs.
    pub pcpus: u32,
    /// Memory in bytes that VMs could have when none ran.
    pub memory_bytes: u64,
    /// Ticks per second of the host's time stamp counter.
    pub tsc_hz: u64,
    /// The processor, as it names itself, and the virtualization features in use.
    pub processor: String,
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmInfo {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u32,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Whether it runs; otherwise why it does not.
    pub state: VmState,
}

/// State of a VM in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmState {
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
    /// Another version, given here.
    Version(u8),
    /// The checksum is right, and yet the message does not decode.
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
/// When the message cannot be encoded within [`FRAME_LIMIT`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut plain = Vec::with_capacity(64);
    plain.push(VERSION);
    let mut plain = postcard::to_extend(message, plain).map_err(|_| FrameError::Undecodable)?;
    plain.extend_from_slice(&CRC.checksum(&plain).to_le_bytes());

    let mut frame = cobs::encode_vec(&plain);
    frame.push(0);
    if frame.len() > FRAME_LIMIT {
        return Err(FrameError::TooLong);
    }
    Ok(frame)
}

/// Decodes one frame, without its terminator.
///
/// # Errors
/// A [`FrameError`] that says why the frame cannot be used.
pub fn decode<T: DeserializeOwned>(frame: &[u8]) -> Result<T, FrameError> {
    let plain = cobs::decode_vec(frame).map_err(|_| FrameError::Malformed)?;
    let Some((body, crc)) = plain.len().checked_sub(CRC_BYTES).map(|at| plain.split_at(at)) else {
        return Err(FrameError::Malformed);
    };
    if CRC.checksum(body).to_le_bytes() != crc {
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

/// Cuts a byte stream into frames.
///
/// Holds at most [`FRAME_LIMIT`] bytes, whatever arrives.
#[derive(Debug, Default)]
pub struct Receiver {
    partial: Vec<u8>,
    skipping: bool,
}

impl Receiver {
    /// Takes one byte; when it ends a frame, gives that frame's message or why it was refused.
    ///
    /// Empty frames (a zero byte after a zero byte) are how a sender clears the line; they give nothing.
    pub fn push<T: DeserializeOwned>(&mut self, byte: u8) -> Option<Result<T, FrameError>> {
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
        let message = decode(&self.partial);
        self.partial.clear();
        Some(message)
    }
}
