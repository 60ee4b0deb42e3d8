//! The emulator of the hypervisor, in a small VM, with each setting.

use std::cell::Cell;
use std::sync::Arc;

use abi::payload::DecodeCache;
use addr::Gpa;
use decode_cache::{Protect, Protection, Size, Unprotection, Vouching, WriteProtect};
use emulator::{Count, Decoded, Event, ExitInfo, InstructionCaches};
use x86_emulate::{Cause, Memory, Outcome, Walks};

use super::machine::{DEVICE, Ram, Vcpu};

/// No guest runs, so protection has nothing to do.
impl Protect for Ram {
    fn protect(&self, _: Gpa) -> Protection {
        Protection::Already
    }

    fn flush(&self) {}

    fn unprotect(&self, _: Gpa) -> Unprotection {
        Unprotection::Done
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> bool {
        Memory::read(self, gpa, bytes).is_some()
    }
}

/// Data that the vCPUs of a VM share.
pub(super) struct Vm {
    pub(super) ram: Ram,
    remembered: Option<WriteProtect<Decoded>>,
}

impl Vm {
    pub(super) fn new(setting: DecodeCache) -> Self {
        let write_protect = |vouching| Some(WriteProtect::new(Size::default(), vouching));
        let remembered = match setting {
            DecodeCache::Off | DecodeCache::Bytes => None,
            DecodeCache::WriteProtect => write_protect(Vouching::Walk),
            DecodeCache::WriteProtectTables => write_protect(Vouching::Tables),
        };
        Self { ram: Ram::new(), remembered }
    }
}

/// The counters of a vCPU, which its own thread alone writes.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) repeated: Cell<u64>,
    pub(super) found: Cell<u64>,
    missed: Cell<u64>,
    inserted: Cell<u64>,
    replaced: Cell<u64>,
    walked: Cell<u64>,
}

impl Count for &Counters {
    #[inline]
    fn add(self, event: Event, times: u64) {
        let counter = match event {
            Event::Repeated => &self.repeated,
            Event::Found => &self.found,
            Event::Missed => &self.missed,
            Event::Inserted => &self.inserted,
            Event::Replaced => &self.replaced,
            Event::Walked => &self.walked,
        };
        counter.set(counter.get() + times);
    }
}

/// A vCPU of a VM, with its caches.
pub(super) struct Emulator {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    emulator: emulator::Emulator<Ram, Box<InstructionCaches<Ram>>>,
    counters: Counters,
}

impl Emulator {
    pub(super) fn new(setting: DecodeCache, vm: Arc<Vm>) -> Self {
        let walks = if setting == DecodeCache::Off { Walks::forgetful() } else { Walks::new() };
        Self::with_walks(setting, vm, walks)
    }

    /// With this cache of walks, whatever the setting normally has.
    pub(super) fn with_walks(setting: DecodeCache, vm: Arc<Vm>, walks: Walks<Ram>) -> Self {
        let caches = (setting == DecodeCache::Bytes).then(Box::default);
        let emulator = emulator::Emulator::new(walks, caches);
        Self { vm, vcpu: Vcpu::new(), emulator, counters: Counters::default() }
    }

    /// Emulates one access to the device by the instruction at `rip`.
    #[inline]
    pub(super) fn emulate(&mut self, rip: u64) -> Outcome {
        let Self { vm, vcpu: Vcpu { cpu, device }, emulator, counters } = self;
        let Vm { ram, remembered } = &**vm;
        cpu.rip = rip;
        let exit = ExitInfo { cause: Cause::Access(DEVICE), bytes: &[] };
        let outcome = emulator.emulate(cpu, ram, device, exit, || remembered.as_ref(), &*counters);
        if let (true, Some(shared)) = (emulator.has_pending_insert(), remembered) {
            emulator.insert_pending(cpu, ram, shared, ram, &*counters);
        }
        outcome
    }

    /// The vCPU, to check the results.
    #[cfg(test)]
    pub(super) fn vcpu(&self) -> &Vcpu {
        &self.vcpu
    }

    /// The counters so far.
    #[cfg(test)]
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }
}
