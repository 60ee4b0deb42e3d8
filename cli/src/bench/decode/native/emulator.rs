//! The steps of an emulation under each setting, in the order in which the hypervisor takes them.

use std::sync::Arc;

use addr::Gpa;
use decode_cache::{
    ByBytes, Bytes, Decoded, Mode as ModeNumber, Place, Protect, Protection, Size, Unprotection, Vouching, WriteProtect,
};
use x86_emulate::{Cause, CpuState, Emulation, Fetched, Instruction, Memory, Mode, Outcome, Sites, Walks};

use super::machine::{DEVICE, Form, ROOT, Ram, Register, TABLES, Vcpu};
use crate::args::Setting;

/// As the caches keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known(pub(super) Instruction);

impl Decoded for Known {
    #[inline]
    fn length(&self) -> u8 {
        self.0.length
    }

    #[inline]
    fn pack(&self) -> [u64; 4] {
        self.0.pack()
    }

    #[inline]
    fn unpack(words: [u64; 4]) -> Option<Self> {
        Instruction::unpack(words).map(Self)
    }
}

/// There is no guest that could write, so nothing has to be done to keep it from doing so.
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

/// The caches' number for 64-bit mode.
pub(super) const BITS_64: ModeNumber = ModeNumber(Mode::Bits64 as u8);

/// What the vCPUs of a VM share.
pub(super) struct Vm {
    pub(super) ram: Ram,
    remembered: Option<WriteProtect<Known>>,
}

impl Vm {
    pub(super) fn new(setting: Setting) -> Self {
        let write_protect = |vouching| Some(WriteProtect::new(Size::default(), vouching));
        let remembered = match setting {
            Setting::Off | Setting::Bytes => None,
            Setting::WriteProtect => write_protect(Vouching::Walk),
            Setting::WriteProtectTables => write_protect(Vouching::Tables),
        };
        Self { ram: Ram::new(), remembered }
    }
}

/// A vCPU of a VM, and what it remembers.
pub(super) struct Emulator {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    walks: Walks<Ram>,
    known: Option<Box<KnownOf>>,
}

/// What a vCPU remembers with the setting `bytes`.
#[derive(Default)]
struct KnownOf {
    /// The places from which it reaches the device; none are kept when each access is to come as from a new place.
    sites: Option<Sites<Ram>>,
    bytes: ByBytes<Known>,
}

impl Emulator {
    pub(super) fn new(setting: Setting, vm: Arc<Vm>) -> Self {
        let walks = if setting == Setting::Off { Walks::forgetful() } else { Walks::new() };
        let mut emulator = Self::with_walks(setting, vm, walks);
        if let Some(known) = &mut emulator.known {
            known.sites = Some(Sites::new());
        }
        emulator
    }

    /// One that remembers walks or does not, whatever is usual with the setting, and no places.
    pub(super) fn with_walks(setting: Setting, vm: Arc<Vm>, walks: Walks<Ram>) -> Self {
        Self { vm, vcpu: Vcpu::new(), walks, known: (setting == Setting::Bytes).then(Box::default) }
    }

    /// Emulates one access to the device, and says whether the instruction was known.
    #[inline]
    pub(super) fn emulate(&mut self, form: Form) -> (Outcome, bool) {
        self.vcpu.cpu.rip = form.rip();
        let Self { vm, vcpu: Vcpu { cpu, device }, walks, known, .. } = self;
        let mut this = Emulation::new(cpu, &vm.ram, device, walks, Cause::Access(DEVICE));
        let done = match (known, &vm.remembered) {
            (Some(known), _) => by_bytes(&mut this, known),
            (None, Some(shared)) => by_place(&mut this, shared, vm),
            (None, None) => anew(&mut this).map(|(_, outcome)| (outcome, false)),
        };
        done.unwrap_or_else(|outcome| (outcome, false))
    }

    /// The vCPU, for a look at what was done.
    #[cfg(test)]
    pub(super) fn vcpu(&self) -> &Vcpu {
        &self.vcpu
    }
}

/// An instruction that is being emulated.
type This<'a> = Emulation<'a, CpuState, Ram, Register>;

/// How an emulation ended, and whether the instruction was known; or why it could not begin.
type Done = Result<(Outcome, bool), Outcome>;

/// Fetches, decodes, and carries out. Also says what was decoded.
fn anew(this: &mut This<'_>) -> Result<(Known, Outcome), Outcome> {
    let fetched = this.fetch()?;
    let instruction = this.decode(&fetched)?;
    Ok((Known(instruction), this.execute(&instruction)))
}

#[inline]
fn by_bytes(this: &mut This<'_>, known: &mut KnownOf) -> Done {
    let KnownOf { sites, bytes: cache } = known;
    if let Some(outcome) = sites.as_ref().and_then(|sites| this.repeat(sites)) {
        return Ok((outcome, true));
    }
    let fetched = this.fetch()?;
    let bytes = bytes_of(&fetched);
    if let Some(Known(instruction)) = cache.find(BITS_64, &bytes) {
        if let Some(sites) = sites {
            this.learn(sites, &fetched.window, instruction);
        }
        return Ok((this.execute(instruction), true));
    }
    let instruction = this.decode(&fetched)?;
    cache.insert(BITS_64, &bytes, Known(instruction));
    Ok((this.execute(&instruction), false))
}

#[inline]
fn by_place(this: &mut This<'_>, shared: &WriteProtect<Known>, vm: &Vm) -> Done {
    let (rip, gpa) = match shared.vouching() {
        Vouching::Walk => this.locate().map(|(linear, gpa)| (linear, Some(gpa)))?,
        Vouching::Tables => (this.linear_rip()?, None),
    };
    let place = Place { rip, space: ROOT, mode: BITS_64, gpa };
    if let Some(Known(instruction)) = shared.find(&place) {
        return Ok((this.execute(&instruction), true));
    }
    let fetched = this.fetch()?;
    let instruction = this.decode(&fetched)?;
    let outcome = this.execute(&instruction);
    let place = Place { gpa: Some(fetched.gpa), ..place };
    // Whatever keeps it from being remembered, it is decoded again the next time.
    let _ = shared.insert(&place, &bytes_of(&fetched), Known(instruction), &TABLES, &vm.ram, || true);
    Ok((outcome, false))
}

#[inline]
pub(super) fn bytes_of(fetched: &Fetched) -> Bytes {
    Bytes::from_zero_padded(fetched.window.words(), fetched.window.length())
}
