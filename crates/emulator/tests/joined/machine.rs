//! A small machine: memory with two address spaces, whose pages can be made read-only for the guest; a device; vCPUs
//! that emulate.

use std::cell::{Cell, RefCell};

use addr::Gpa;
use decode_cache::{DropCause, Protect, Protection, Size, Unprotection, Vouching, WriteProtect};
use emulator::{Count, Decoded, Emulator, Event, ExitInfo, InstructionCaches};
use x86_emulate::{Cause, CpuState, Device, Memory, Mode, Outcome, Segment, SegmentRegister, Walks, Width};

pub(crate) const PAGE: u64 = 0x1000;
const WORDS: usize = 512;
const PAGES: usize = 12;

/// The roots of both address spaces. The three tables below a root are the pages behind it.
pub(crate) const ROOTS: [u64; 2] = [PAGE, 5 * PAGE];
/// Two pages of code, and one of data. The first address space maps them where they are; the second exchanges the pages
/// of code.
pub(crate) const CODE: u64 = 9 * PAGE;
pub(crate) const DATA: u64 = 11 * PAGE;
/// Where the device's page is mapped, and where it is.
pub(crate) const DEVICE_LINEAR: u64 = 0x10_0000;
pub(crate) const DEVICE: Gpa = Gpa(0xfee0_0000);

/// Present, writable, accessed, dirty.
pub(crate) const RIGHTS: u64 = 0x63;

/// What is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    Off,
    Bytes,
    Place(Vouching),
}

pub(crate) const SETTINGS: [Setting; 4] =
    [Setting::Off, Setting::Bytes, Setting::Place(Vouching::Walk), Setting::Place(Vouching::Tables)];

/// A mistake of whoever owns the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    /// The guest's writes to read-only pages are not told.
    Untold,
    /// Pages are said to be read-only and are not.
    Unprotected,
    /// The hypervisor's own writes are not told.
    HostUntold,
}

/// The memory of a VM, and what the VM remembers.
pub(crate) struct Vm {
    words: Vec<Cell<u64>>,
    /// Stage 2: whether the guest may write to a page.
    writable: Vec<Cell<bool>>,
    /// Words that were loaded so far.
    pub(crate) loads: Cell<u64>,
    /// Whether pages can be made read-only.
    pub(crate) protects: Cell<bool>,
    pub(crate) shared: Option<WriteProtect<Decoded>>,
    mistake: Mistake,
}

impl Vm {
    pub(crate) fn new(setting: Setting) -> Self {
        Self::with(setting, Size { slots: 64, pages: 16 }, Mistake::None)
    }

    pub(crate) fn with(setting: Setting, size: Size, mistake: Mistake) -> Self {
        let shared = match setting {
            Setting::Off | Setting::Bytes => None,
            Setting::Place(vouching) => Some(WriteProtect::new(size, vouching)),
        };
        let vm = Self {
            words: (0..PAGES * WORDS).map(|_| Cell::new(0)).collect(),
            writable: (0..PAGES).map(|_| Cell::new(true)).collect(),
            loads: Cell::new(0),
            protects: Cell::new(true),
            shared,
            mistake,
        };
        for (space, root) in ROOTS.into_iter().enumerate() {
            for table in 0..3 {
                vm.guest_write(root + PAGE * table, &((root + PAGE * (table + 1)) | RIGHTS).to_le_bytes());
            }
            for page in 0..2 {
                vm.map(space, CODE + PAGE * page, (CODE + PAGE * (page ^ space as u64)) | RIGHTS);
            }
            vm.map(space, DATA, DATA | RIGHTS);
            vm.map(space, DEVICE_LINEAR, DEVICE.0 | RIGHTS);
        }
        vm
    }

    /// The guest changes the entry of a page in one of its address spaces.
    pub(crate) fn map(&self, space: usize, linear: u64, entry: u64) {
        self.guest_write(ROOTS[space] + 3 * PAGE + 8 * (linear / PAGE), &entry.to_le_bytes());
    }

    /// The guest writes, byte by byte: where stage 2 does not let it, the fault is handled first.
    pub(crate) fn guest_write(&self, gpa: u64, bytes: &[u8]) {
        for (gpa, byte) in (gpa..).zip(bytes) {
            let page = &self.writable[(gpa / PAGE) as usize];
            if !page.get() {
                match &self.shared {
                    Some(shared) if self.mistake != Mistake::Untold => {
                        shared.written(Gpa(gpa), DropCause::Write, self).expect("the page is one of the cache's");
                        assert!(page.get(), "the fault is handled");
                    }
                    _ => page.set(true),
                }
            }
            self.put(Gpa(gpa), &[*byte]).expect("the guest has this memory");
        }
    }

    pub(crate) fn is_writable(&self, gpa: u64) -> bool {
        self.writable[(gpa / PAGE) as usize].get()
    }

    /// All that is in memory.
    pub(crate) fn contents(&self) -> Vec<u64> {
        self.words.iter().map(Cell::get).collect()
    }

    fn word(&self, gpa: Gpa) -> Option<&Cell<u64>> {
        self.words.get(usize::try_from(gpa.0 / 8).ok()?)
    }

    fn put(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        for (gpa, byte) in (gpa.0..).zip(bytes) {
            let word = self.word(Gpa(gpa))?;
            let mut all = word.get().to_le_bytes();
            all[(gpa % 8) as usize] = *byte;
            word.set(u64::from_le_bytes(all));
        }
        Some(())
    }

    /// A write by the hypervisor.
    fn as_host<R>(&self, gpa: Gpa, write: impl FnOnce() -> R) -> R {
        match &self.shared {
            Some(shared) if self.mistake != Mistake::HostUntold => shared.write_as_host(gpa, self, write).0,
            _ => write(),
        }
    }
}

impl Memory for Vm {
    type Word = usize;

    fn find(&self, gpa: Gpa) -> Option<usize> {
        usize::try_from(gpa.0 / 8).ok().filter(|word| *word < self.words.len())
    }

    fn load(&self, word: usize, ahead: usize) -> u64 {
        self.loads.set(self.loads.get() + 1);
        self.words[word + ahead].get()
    }

    fn compare_exchange(&self, word: usize, current: u64, new: u64) -> bool {
        let is_current = self.words[word].get() == current;
        if is_current {
            self.as_host(Gpa(8 * word as u64), || self.words[word].set(new));
        }
        is_current
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        for (gpa, byte) in (gpa.0..).zip(bytes) {
            *byte = self.word(Gpa(gpa))?.get().to_le_bytes()[(gpa % 8) as usize];
        }
        Some(())
    }

    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        self.as_host(gpa, || self.put(gpa, bytes))
    }
}

impl Protect for Vm {
    fn protect(&self, page: Gpa) -> Protection {
        let Some(writable) = self.writable.get((page.0 / PAGE) as usize).filter(|_| self.protects.get()) else {
            return Protection::Refused;
        };
        let was = if self.mistake == Mistake::Unprotected { writable.get() } else { writable.replace(false) };
        if was { Protection::Owed } else { Protection::Already }
    }

    /// The vCPUs of this machine keep no rights.
    fn flush(&self) {}

    fn unprotect(&self, page: Gpa) -> Unprotection {
        self.writable[(page.0 / PAGE) as usize].set(true);
        Unprotection::Done
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        Memory::read(self, gpa, bytes).is_some()
    }
}

/// An access to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read(Gpa, Width),
    Write(Gpa, Width, u64),
}

/// A device that notes how it is accessed, and answers each read otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Register {
    pub(crate) accesses: Vec<Access>,
}

impl Device for Register {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        self.accesses.push(Access::Read(gpa, width));
        width.truncate((self.accesses.len() as u64).wrapping_mul(0x0101_0101_0101_0101) ^ gpa.0)
    }

    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        self.accesses.push(Access::Write(gpa, width, value));
    }

    fn read_port(&mut self, _: u16, width: Width) -> u64 {
        width.truncate(u64::MAX)
    }

    fn write_port(&mut self, _: u16, _: Width, _: u64) {}
}

/// The events of one emulation, in their order, each as often as it happened.
#[derive(Default)]
pub(crate) struct Events(RefCell<Vec<Event>>);

impl Count for &Events {
    fn add(self, event: Event, times: u64) {
        self.0.borrow_mut().extend((0..times).map(|_| event));
    }
}

/// The state of a vCPU in 64-bit mode, in the first address space. RDI points to the device.
pub(crate) fn cpu() -> CpuState {
    const PAGING: u64 = 1 << 31;
    const PAE: u64 = 1 << 5;
    let mut cpu = CpuState::flat(Mode::Bits64, CODE);
    cpu.cr0 |= PAGING;
    cpu.cr4 |= PAE;
    cpu.cr3 = ROOTS[0];
    cpu.gprs[RDI] = DEVICE_LINEAR;
    cpu
}

pub(crate) const RAX: usize = 0;
pub(crate) const RDI: usize = 7;

/// Switches between 64-bit mode and compatibility mode, which differ in the code segment.
pub(crate) fn set_mode(cpu: &mut CpuState, is_64_bit: bool) {
    let attributes = &mut cpu.segments[Segment::Cs as usize].attributes;
    *attributes &= !(SegmentRegister::LONG | SegmentRegister::BIG);
    *attributes |= if is_64_bit { SegmentRegister::LONG } else { SegmentRegister::BIG };
}

/// A vCPU, with what it remembers.
pub(crate) struct Vcpu {
    pub(crate) cpu: CpuState,
    pub(crate) device: Register,
    emulator: Emulator<Vm, Box<InstructionCaches<Vm>>>,
}

impl Vcpu {
    pub(crate) fn new(setting: Setting) -> Self {
        let walks = if setting == Setting::Off { Walks::forgetful() } else { Walks::new() };
        let caches = (setting == Setting::Bytes).then(Box::default);
        Self { cpu: cpu(), device: Register::default(), emulator: Emulator::new(walks, caches) }
    }

    /// Emulates the instruction at `rip`, of which the hardware has saved these bytes.
    pub(crate) fn emulate(&mut self, vm: &Vm, rip: u64, bytes: &[u8]) -> (Outcome, Vec<Event>) {
        let events = Events::default();
        let Self { cpu, device, emulator } = self;
        cpu.rip = rip;
        let exit = ExitInfo { cause: Cause::Access(DEVICE), bytes };
        let outcome = emulator.emulate(cpu, vm, device, exit, || vm.shared.as_ref(), &events);
        if emulator.has_pending_insert() {
            let shared = vm.shared.as_ref().expect("who learns for the VM has a VM that remembers");
            emulator.insert_pending(cpu, vm, shared, vm, &events);
            assert!(!emulator.has_pending_insert());
        }
        (outcome, events.0.into_inner())
    }
}
