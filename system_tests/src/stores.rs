//! Finds every store of the hypervisor between two entries of a guest, on the released binary.
//!
//! QEMU executes one instruction at a time and logs the registers before each ([`Tracer`]). From the registers and the
//! instruction, which is read from the hypervisor's file, follow the target and size of each store ([`exits`]). The
//! host's own description of its blocks gives the owner of the target ([`Map`]).

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use abi::layout::{Content, Layout, Place, Whose};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, OpAccess, Register};

use crate::monitor::Monitor;

/// A QEMU that can be made to log instructions.
pub struct Tracer {
    monitor: Monitor,
    log: PathBuf,
}

impl Tracer {
    /// Arguments for QEMU so that [`Tracer::attach`] finds it. It logs only code within `text`.
    #[must_use]
    pub fn qemu_arguments(folder: &Path, text: &Range<u64>) -> Vec<String> {
        let [name, monitor] = Monitor::qemu_arguments(folder);
        let filter = format!("{:#x}..{:#x}", text.start, text.end - 1);
        let log = folder.join("instructions").display().to_string();
        [[name.as_str(), &monitor], ["-dfilter", &filter], ["-D", &log]]
            .into_iter()
            .flatten()
            .map(|argument| format!("--qemu-arg={argument}"))
            .collect()
    }

    /// Connects to the QEMU with these arguments, once it has started.
    ///
    /// # Panics
    /// It does not start within 30 s.
    #[must_use]
    pub fn attach(folder: &Path) -> Self {
        Self { monitor: Monitor::attach(folder), log: folder.join("instructions") }
    }

    /// Logs what is executed in the next `time`.
    pub fn trace(&mut self, time: Duration) -> String {
        self.monitor.say("stop");
        let before = fs::metadata(&self.log).map_or(0, |file| file.len());
        // QEMU 8.1 gave it another name.
        for command in ["singlestep on", "one-insn-per-tb on", "log cpu,nochain", "cont"] {
            self.monitor.say(command);
        }
        std::thread::sleep(time);
        for command in ["stop", "log none", "singlestep off", "one-insn-per-tb off", "cont"] {
            self.monitor.say(command);
        }
        let mut log = Vec::new();
        if let Ok(mut file) = fs::File::open(&self.log) {
            let _ = file.seek(SeekFrom::Start(before));
            let _ = file.read_to_end(&mut log);
        }
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Ends QEMU.
    pub fn quit(self) {
        self.monitor.quit();
    }
}

/// The instructions of the hypervisor.
pub struct Text {
    start: u64,
    bytes: Vec<u8>,
}

impl Text {
    /// The executable segment of the ELF file's upper half.
    ///
    /// # Panics
    /// When the file is not as the linker script has it.
    #[must_use]
    pub fn of(hypervisor: &Path) -> Self {
        let file = fs::read(hypervisor).expect("the hypervisor was built");
        let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u16::from_le_bytes(file[at..at + 2].try_into().expect("two bytes"));
        let native = |number: u64| usize::try_from(number).expect("within the file");
        // ELF64: program headers from e_phoff on, e_phnum of e_phentsize bytes each.
        let headers = (0..usize::from(half(56))).map(|n| native(word(32)) + n * usize::from(half(54)));
        let is_text = |at: &usize| word(*at) & 0xffff_ffff == 1 && word(*at) >> 32 & 1 == 1 && word(at + 16) >> 63 == 1;
        let at = headers.into_iter().find(is_text).expect("the hypervisor has a text segment");
        let (offset, bytes) = (native(word(at + 8)), native(word(at + 32)));
        Self { start: word(at + 16), bytes: file[offset..offset + bytes].to_vec() }
    }

    /// Its addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes.len() as u64
    }

    /// Where these bytes are.
    #[must_use]
    pub fn places_of(&self, bytes: &[u8]) -> Vec<u64> {
        let offsets = self.bytes.windows(bytes.len()).enumerate().filter(|(_, window)| *window == bytes);
        offsets.map(|(offset, _)| self.start + offset as u64).collect()
    }

    /// The instruction at an address.
    #[must_use]
    pub fn at(&self, rip: u64) -> Option<Instruction> {
        let offset = usize::try_from(rip.checked_sub(self.start)?).ok()?;
        let mut decoder = Decoder::with_ip(64, self.bytes.get(offset..)?, rip, DecoderOptions::NONE);
        Some(decoder.decode())
    }
}

/// A write to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// The instruction.
    pub rip: u64,
    /// Host virtual address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A pCPU's stores from one entry of a guest to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The pCPU.
    pub cpu: Whose,
    /// Whether the host took an interrupt in between.
    pub interrupted: bool,
    /// Instructions, all of them the hypervisor's.
    pub instructions: u64,
    /// In order.
    pub stores: Vec<Store>,
}

/// Registers before an instruction.
#[derive(Clone, Default, PartialEq, Eq)]
struct Registers {
    general: [u64; 16],
    rip: u64,
    fs: u64,
    gs: u64,
}

/// General registers in QEMU's log: four per line, in this order, each 21 characters after the one before.
const GENERAL: [(&str, [Register; 4]); 4] = [
    ("RAX=", [Register::RAX, Register::RBX, Register::RCX, Register::RDX]),
    ("RSI=", [Register::RSI, Register::RDI, Register::RBP, Register::RSP]),
    ("R8 =", [Register::R8, Register::R9, Register::R10, Register::R11]),
    ("R12=", [Register::R12, Register::R13, Register::R14, Register::R15]),
];
const COLUMN: usize = 21;

impl Registers {
    /// Reads a line of QEMU's log. Returns whether it was the last needed line of a dump.
    fn read(&mut self, line: &str) -> bool {
        let hex = |at: usize| line.get(at..at + 16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let Some(name) = line.get(..4) else { return false };
        if let Some((_, four)) = GENERAL.iter().find(|(first, _)| *first == name) {
            for (column, register) in four.iter().enumerate() {
                self.general[register.number()] = hex(COLUMN * column + 4).unwrap_or_default();
            }
        }
        match name {
            "RIP=" => self.rip = hex(4).unwrap_or_default(),
            // After the selector, the base.
            "FS =" => self.fs = hex(9).unwrap_or_default(),
            "GS =" => self.gs = hex(9).unwrap_or_default(),
            _ => {}
        }
        name == "GS ="
    }

    fn value(&self, register: Register) -> Option<u64> {
        match register {
            Register::FS => Some(self.fs),
            Register::GS => Some(self.gs),
            Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
            _ => {
                let mask = u64::MAX >> (64 - 8 * register.size().min(8));
                register.is_gpr().then(|| self.general[register.full_register().number()] & mask)
            }
        }
    }
}

/// The logged exits, from entry to entry, of the pCPUs whose blocks are in `map`. Incomplete ones are left out.
///
/// # Panics
/// Code outside the text was executed.
#[must_use]
pub fn exits(log: &str, text: &Text, map: &Map) -> Vec<Exit> {
    let mut factory = InstructionInfoFactory::new();
    let mut registers = Registers::default();
    let mut done = Vec::new();
    // By pCPU, which GS identifies. VMLOAD loads the guest's GS before the entry, and the host's after the exit. In
    // between only VMRUN and VMSAVE write, to the pages with the guest's state and the host's.
    let mut running: BTreeMap<Whose, Exit> = BTreeMap::new();
    let mut before: BTreeMap<u64, Registers> = BTreeMap::new();
    for line in log.lines() {
        if !registers.read(line) || !text.range().contains(&registers.rip) {
            continue;
        }
        // QEMU may log an instruction, be asked to stop before it is done, and log it again.
        if before.insert(registers.gs, registers.clone()).is_some_and(|before| before == registers) {
            continue;
        }
        let instruction = text.at(registers.rip).expect("what runs is in the text");
        let Some(cpu @ Whose::Pcpu(_)) = map.owner(registers.gs) else { continue };
        if instruction.code() == Code::Vmloadq {
            done.extend(running.insert(cpu, Exit { cpu, interrupted: false, instructions: 0, stores: Vec::new() }));
            continue;
        }
        let Some(exit) = running.get_mut(&cpu) else { continue };
        exit.instructions += 1;
        exit.interrupted |= instruction.code() == Code::Stgi;
        for memory in factory.info(&instruction).used_memory() {
            let writes = matches!(
                memory.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            );
            if !writes {
                continue;
            }
            let address = memory.virtual_address(0, |register, _, _| registers.value(register));
            let address = address.expect("general registers and segments make an address");
            exit.stores.push(Store { rip: registers.rip, address, bytes: memory.memory_size().size() as u64 });
        }
    }
    done
}

/// The host's description of its memory.
pub struct Map {
    layouts: Vec<Layout>,
    places: Vec<Place>,
}

/// Where a store went.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Owner of that memory; `None` if the host has not named it.
    pub whose: Option<Whose>,
    /// The struct or the pages, and the field; the address if there is no owner.
    pub what: String,
    /// The writer, from the layout; a vCPU's own pages are the owner's.
    pub class: Option<Content>,
}

impl Map {
    /// From the host's answers.
    #[must_use]
    pub fn new(layouts: Vec<Layout>, places: Vec<Place>) -> Self {
        Self { layouts, places }
    }

    /// Owner of the block at this address.
    #[must_use]
    pub fn owner(&self, address: u64) -> Option<Whose> {
        self.place(address).map(|place| place.whose)
    }

    fn place(&self, address: u64) -> Option<&Place> {
        self.places.iter().find(|place| (place.hva..place.hva + u64::from(place.bytes)).contains(&address))
    }

    /// The target at this address.
    #[must_use]
    pub fn target(&self, address: u64) -> Target {
        let Some(place) = self.place(address) else {
            return Target { whose: None, what: format!("{address:#x}"), class: None };
        };
        let whose = Some(place.whose);
        let Some(layout) = self.layouts.iter().find(|layout| layout.name == place.what) else {
            return Target { whose, what: place.what.clone(), class: Some(Content::Owner) };
        };
        let offset = address - place.hva;
        let rows = layout.rows.iter().filter(|row| row.content != Content::Nested);
        let row = rows.into_iter().find(|row| (row.offset.into()..u64::from(row.offset + row.bytes)).contains(&offset));
        let (name, class) = row.map_or(("", None), |row| (row.name.as_str(), Some(row.content)));
        Target { whose, what: format!("{}.{name}", layout.name), class }
    }
}
