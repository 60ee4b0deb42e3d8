//! Connects the crate `emulator` to a vCPU's registers, its VM's memory, and its counters.

#![expect(unsafe_code, reason = "reads the guest's protection-key rights, which stay in the register")]

use core::arch::asm;

use abi::payload::DecodeCache;
use addr::Gpa;
use emulator::{Count, Event, InstructionCaches};
use x86_emulate::{Cpu, Segment, SegmentRegister, Vendor, Walks};

use super::cpuid;
use super::state::{Gprs, State as _, gpr};
use crate::arch::block::Block;
use crate::arch::guest_ram::words::Word;
use crate::arch::x86_64::backend::{self, Backend, Chosen};
use crate::arch::x86_64::host::processor::has_protection_keys;
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::run::Running;
use crate::vm::memory::Memory;
use crate::vm::rivals::write_protect::Protected;

pub(crate) use emulator::Decoded;

/// The registers of a vCPU outside its guest.
///
/// The back end may keep RAX and RSP. They are copied to their places among the others until [`Registers::put_back`].
pub(super) struct Registers<'a> {
    gprs: &'a mut Gprs,
    hardware: &'a mut <Chosen as Backend>::State,
}

impl<'a> Registers<'a> {
    #[inline]
    pub(super) fn of(gprs: &'a mut Gprs, hardware: &'a mut <Chosen as Backend>::State) -> Self {
        gprs[gpr::RAX] = hardware.rax();
        gprs[gpr::RSP] = hardware.rsp();
        Self { gprs, hardware }
    }

    /// RAX and RSP go back to where the hardware has them.
    #[inline]
    pub(super) fn put_back(self) {
        self.hardware.set_rax(self.gprs[gpr::RAX]);
        self.hardware.set_rsp(self.gprs[gpr::RSP]);
    }
}

impl Cpu for Registers<'_> {
    #[inline]
    fn gprs(&self) -> &[u64; 16] {
        self.gprs
    }
    #[inline]
    fn gprs_mut(&mut self) -> &mut [u64; 16] {
        self.gprs
    }
    #[inline]
    fn rip(&self) -> u64 {
        self.hardware.rip()
    }
    #[inline]
    fn set_rip(&mut self, rip: u64) {
        self.hardware.set_rip(rip);
    }
    #[inline]
    fn rflags(&self) -> u64 {
        self.hardware.rflags()
    }
    #[inline]
    fn set_rflags(&mut self, rflags: u64) {
        self.hardware.set_rflags(rflags);
    }
    #[inline]
    fn segment(&self, segment: Segment) -> SegmentRegister {
        self.hardware.segment(segment)
    }
    #[inline]
    fn cpl(&self) -> u8 {
        self.hardware.cpl()
    }
    #[inline]
    fn cr0(&self) -> u64 {
        self.hardware.control().cr0
    }
    #[inline]
    fn cr3(&self) -> u64 {
        self.hardware.cr3()
    }
    #[inline]
    fn cr4(&self) -> u64 {
        self.hardware.control().cr4
    }
    #[inline]
    fn efer(&self) -> u64 {
        self.hardware.control().efer
    }
    #[cold]
    fn pkru(&self) -> u32 {
        if !has_protection_keys() {
            return 0;
        }
        let value: u32;
        // SAFETY: RDPKRU reads a register and needs ECX = 0 and CR4.PKE set, which `fpu::enable` has done (APM vol. 3,
        // RDPKRU).
        unsafe {
            asm!("rdpkru", in("ecx") 0, out("eax") value, out("edx") _, options(nomem, nostack, preserves_flags))
        };
        value
    }
    fn physical_bits(&self) -> u8 {
        cpuid::physical_address_bits()
    }
    #[inline]
    fn vendor(&self) -> Vendor {
        backend::vendor()
    }
}

impl x86_emulate::Memory for Memory {
    type Word = Word;

    fn find(&self, gpa: Gpa) -> Option<Word> {
        self.find_word(gpa)
    }

    #[inline]
    fn load(&self, word: Word, ahead: usize) -> u64 {
        Self::load(self, word, ahead)
    }

    #[inline(always)]
    fn have_values(&self, words: impl Iterator<Item = (Word, u64)>) -> bool {
        Self::have_values(self, words)
    }

    #[inline(always)]
    fn is_current(&self, found: Option<Word>) -> bool {
        self.has_word(found)
    }

    fn compare_exchange(&self, word: Word, current: u64, new: u64) -> bool {
        Self::compare_exchange(self, word, current, new)
    }

    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        Self::read(self, gpa, bytes).then_some(())
    }

    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Option<()> {
        Self::write(self, gpa, bytes).then_some(())
    }
}

/// A vCPU's emulator. The pCPU that runs the vCPU writes its caches, so they have pages of their own.
pub(in crate::arch::x86_64) type Emulator = emulator::Emulator<Memory, Block<InstructionCaches<Memory>>>;

/// The emulator of vCPU `index`.
pub(in crate::arch::x86_64) fn new(index: u32, cache: DecodeCache) -> Emulator {
    let walks = if cache == DecodeCache::Off { Walks::forgetful() } else { Walks::new() };
    let caches = (cache == DecodeCache::Bytes).then(|| Block::new(index as usize, InstructionCaches::new()));
    Emulator::new(walks, caches)
}

/// The pages of the vCPU's own caches, if it has any.
pub(in crate::arch::x86_64) fn own_pages(emulator: &Emulator) -> Option<OwnPages> {
    let caches = emulator.caches()?;
    Some(OwnPages { what: "decoded instructions", hva: caches.hva(), bytes: size_of::<InstructionCaches<Memory>>() })
}

/// Caches the last executed instruction for the whole VM. Not during the emulation, because this may wait for other
/// vCPUs.
#[cold]
pub(super) fn insert_pending(run: &mut Running<'_>) {
    let memory = &run.vm.memory;
    let Some(shared) = memory.decoded() else { return };
    let protected = Protected { memory, vcpus: run.vm.vcpus() };
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    arch.emulator.insert_pending(&registers, memory, shared, &protected, run.tally);
}

impl Count for Tally<'_> {
    #[inline]
    fn add(self, event: Event, times: u64) {
        match event {
            Event::Repeated | Event::Found => Tally::add(self, |count| &count.decode_hits, times),
            Event::Missed => Tally::add(self, |count| &count.decode_misses, times),
            Event::Inserted => Tally::add(self, |count| &count.decode_insertions, times),
            Event::Replaced => Tally::add(self, |count| &count.decode_replaced, times),
            Event::Walked => Tally::add(self, |count| &count.emulator_walks, times),
        }
    }
}
